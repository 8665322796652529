"""Runs that follow each other, as a person sees them: how many and how long before the first, what is left after each.

How long is known from runs of the same config that were made before, else from the first one's own first steps, in a
race from its end.
"""

import itertools
import statistics
import time
from collections.abc import Iterable, Sequence
from typing import Self

from bench.base.paths import results_root
from bench.base.text_table import counted
from bench.base.units import format_about_s
from bench.launch.console import Bars, say
from bench.record import index

NUM_EARLIER = 5  # the latest runs of a config, whose median is taken


def earlier_s(tracks: Iterable[str], config_ids: Iterable[str]) -> dict[str, float]:
    """{config_id: seconds that its latest complete runs took, start to end}, for those that have some."""
    wanted, folders = set(config_ids), [results_root() / track for track in tracks]
    rows = [row for _, row in index.read_rows(folder for folder in folders if folder.is_dir())]
    walls_s_of: dict[str, list[float]] = {}
    for row in sorted(rows, key=lambda row: row["started_at"] or "", reverse=True):
        if row["config_id"] in wanted and row["wall_s"] is not None:
            walls_s_of.setdefault(str(row["config_id"]), []).append(row["wall_s"])
    return {config_id: statistics.median(walls_s[:NUM_EARLIER]) for config_id, walls_s in walls_s_of.items()}


def in_budget(num_fitting: int | None, num_left: int, budget_s: float | None) -> str:
    """How many runs of those left a budget is foreseen to be enough for, behind a plan; "" for None: unknown."""
    if num_fitting is None or budget_s is None:
        return ""
    all_of = "all" if num_fitting >= num_left else f"{num_fitting} of {num_left}"
    return f"; {all_of} fit in the budget, {format_about_s(budget_s).removeprefix('about ')}"


class Series:
    """A context around several runs, with their live bars.

    kinds: one a run, in order: alike where runs take equally long; known_s: {kind: seconds a run}, as far as known
    before; num_done: runs of a race that is resumed; live: whether bars are drawn; budget_s: no run is to end later
    than that after the first began, None: no limit; fewest: after so many runs it may end early.
    """

    def __init__(
        self,
        kinds: Sequence[str],
        known_s: dict[str, float],
        num_done: int = 0,
        live: bool = True,
        budget_s: float | None = None,
        fewest: int | None = None,
    ):
        self._kinds, self._known_s = list(kinds), known_s
        self._paced_s: dict[str, float] = {}  # {kind: seconds of a run}, by the pace of the one that is running
        self._spent_s: dict[str, list[float]] = {}  # {kind: seconds of each run of this series}
        self._num_done, self._budget_s, self._fewest = num_done, budget_s, fewest
        self._began_s: float | None = None  # the running one
        self._opened_s, self._has_foretold = time.monotonic(), False
        self.bars = Bars(live)

    def __enter__(self) -> Self:
        self._opened_s = time.monotonic()
        num_left, left_s = len(self._kinds) - self._num_done, self.left_s()
        least = num_left if self._fewest is None else max(1, self._fewest - self._num_done)
        how_many, for_all = (f"{least} to ", " for all of them") if least < num_left else ("", "")
        about = format_about_s(left_s)
        how_long = f"{about}{for_all}" if about else "the duration is known after the first"
        say("plan", f"{how_many}{counted(num_left, 'run')}, {how_long}{self._in_budget()}")
        self.bars.__enter__()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.bars.__exit__(*exc_info)

    def begin(self, label: str = "") -> None:
        """The next run begins.  label: what it is; without them no line says that it begins."""
        self._began_s = time.monotonic()
        if label:
            say("run", f"{self.position}: {label}{self._to_go()}{'' if self._has_foretold else self._in_budget()}")
        self.tick()

    def tick(self) -> None:
        """Bring the bar of the series up to date."""
        self.bars.draw("runs", self._num_done, len(self._kinds), f"{self.position}{self._to_go()}")

    def paced(self, run_s: float | None) -> None:
        """What the running one will take by its own first steps, None before those; says so where nothing was known."""
        is_news = self.left_s() is None
        if run_s is None or self._kinds[self._num_done] in self._known_s:
            return
        self._paced_s[self._kinds[self._num_done]] = run_s
        if is_news:
            each, left = format_about_s(run_s), format_about_s(self.left_s())
            say("plan", f"{each} a run by its first steps, {left} to go for all of them{self._in_budget()}")

    def end(self, is_done: bool = True) -> str:
        """The run has ended.  Returns how long the rest takes, ", about 3 min to go", as far as that is known.

        is_done=False: it comes again.
        """
        if is_done and self._began_s is not None:
            self._spent_s.setdefault(self._kinds[self._num_done], []).append(time.monotonic() - self._began_s)
        self._num_done, self._began_s = self._num_done + is_done, None
        return self._to_go()

    @property
    def position(self) -> str:
        """Position of the run that is running or comes next: 3 of 12."""
        return f"{min(self._num_done + 1, len(self._kinds))} of {len(self._kinds)}"

    def left_s(self) -> float | None:
        """Seconds to the end, by this series' own runs where it has some of a kind; None: nothing is known."""
        known_s = self._seconds_by_kind()
        if not known_s:
            return None
        other_s = statistics.mean(known_s.values())
        left_s = [known_s.get(kind, other_s) for kind in self._kinds[self._num_done :]]
        if self._began_s is not None:
            left_s[0] = max(0.0, left_s[0] - (time.monotonic() - self._began_s))
        return sum(left_s)

    def num_fitting(self) -> int | None:
        """How many of the runs to go end within the budget, the running one among them, by what is known of each kind.

        By the mean of the others where nothing is known of a kind; None: there is no budget, or nothing is known.
        """
        known_s = self._seconds_by_kind()
        if self._budget_s is None or not known_s:
            return None
        other_s = statistics.mean(known_s.values())
        spent_s = (time.monotonic() if self._began_s is None else self._began_s) - self._opened_s
        later_s = itertools.accumulate(known_s.get(kind, other_s) for kind in self._kinds[self._num_done :])
        return sum(spent_s + one_s <= self._budget_s for one_s in later_s)

    def fits(self) -> bool:
        """Whether the next run ends within the budget; True where nothing is known of any."""
        return self._budget_s is None or self.num_fitting() != 0

    def _in_budget(self) -> str:
        forecast = in_budget(self.num_fitting(), len(self._kinds) - self._num_done, self._budget_s)
        self._has_foretold = self._has_foretold or bool(forecast)
        return forecast

    def _seconds_by_kind(self) -> dict[str, float]:
        spent_s = {kind: statistics.mean(seconds) for kind, seconds in self._spent_s.items()}
        return self._paced_s | self._known_s | spent_s

    def _to_go(self) -> str:
        left_s = self.left_s()
        return "" if left_s is None or self._num_done == len(self._kinds) else f", {format_about_s(left_s)} to go"
