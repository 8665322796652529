"""Trains runs to compare them: speedrun.race()."""

import shlex
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.api import comparing, plotting
from bench.api.answers import Answer
from bench.base.paths import results_root
from bench.config import overrides
from bench.launch import console
from bench.plans.race import plan, planning, runner
from bench.record import race_folder
from bench.report import race_page, verdicts
from bench.web.document import Document

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Race(Answer):
    """A race and its folder; speedrun.load(race.id) loads its runs.  against: as in Comparison; {} without a verdict.

    status: complete, stopped_early, abandoned or interrupted.
    """

    def __init__(self, folder: Path, race: race_folder.Race) -> None:
        self.folder = folder
        self.status = str(race["status"])
        self.against = dict(race_folder.verdicts_of(race))
        super().__init__(race_page.document_of(race), race)

    @property
    def id(self) -> str:
        return self.folder.name

    @property
    def verdict(self) -> str | None:
        """The verdict as in Comparison; None without one.  Raises ValueError for more than two arms."""
        return str(comparing.only(self.against)["verdict"]) if self.against else None

    def plot(self) -> "Figure":
        """Plot the changes with their 95 % intervals, and the arms' curves.  Needs matplotlib."""
        panels = verdicts.panels(self.against, [*self._data["arms"]]) if self.against else ()
        return plotting.figure(self._page().charts, panels)

    def _page(self) -> Document:
        return race_page.document(self.folder) if self.status != "interrupted" else self._document


def race(*settings: str, quiet: bool = False, anyway: bool = False, **arms_and_plan: Any) -> Race:
    """Plan, train and judge a race, with the arms interleaved: ./run.sh race.

    settings: settings of every arm, "goal.num_steps=100".  Arms are keywords that begin with a capital, A="",
    B="optim=muon optim.lr=0.01" or B={"optim": "muon", "optim.lr": 0.01}, in which None is null; the others belong to
    the plan: n=5, looks=[3, 5], alpha, margin (in the unit of the goal's metric), seed, name, on, compilations.
    quiet: print nothing.  anyway: race even on a busy machine.  No numbers are printed until the race has ended.
    An interrupt ends it with the status "interrupted", and ./run.sh race --resume continues it.
    Raises ValueError if the arms or the plan cannot be raced, or in a thread, which gets no signals.
    """
    if threading.current_thread() is not threading.main_thread():
        raise ValueError("race: no interrupt would reach its runs from a thread: call it in the main thread")
    arguments = []
    for name, value in arms_and_plan.items():
        if isinstance(value, Mapping):
            value = shlex.join(f"{key}={overrides.literal(setting)}" for key, setting in value.items())
        parts = value if isinstance(value, (list, tuple)) else [value]
        arguments.append(f"{name}={','.join(map(str, parts))}")
    results = results_root().absolute()
    with console.output(quiet):
        folder = planning.begin(plan.parse_request([*settings, *arguments]), results, anyway)
        return Race(folder, runner.go(folder, results, anyway=anyway, is_new=True))
