"""Shows a series of runs: how many there are and how long they take, and after each run what is left.

The duration is known from earlier runs of the same config, otherwise once the first run has ended.
"""

import contextlib
import itertools
import statistics
import time
from collections.abc import Iterable, Sequence
from typing import Self

from bench.base.paths import results_root
from bench.base.text_table import counted
from bench.base.units import format_about_s
from bench.launch.console import Bars, say
from bench.record import run_folder

NUM_EARLIER = 5  # number of a config's latest runs whose median counts


def earlier_s(tracks: Iterable[str], config_ids: Iterable[str]) -> dict[str, float]:
    """Returns {config_id: median wall seconds of its latest complete runs}, for those that have some."""
    walls_s_of: dict[str, list[float]] = {config_id: [] for config_id in config_ids}
    folders = [folder for track in tracks for folder in (results_root() / track).glob("*-s*")]
    for folder in sorted(folders, key=lambda folder: folder.name, reverse=True):  # a name begins with the time
        walls_s = walls_s_of.get(folder.name.rpartition("-s")[0][-8:])
        if walls_s is not None and len(walls_s) < NUM_EARLIER:  # no other run is read: there may be ten thousand
            with contextlib.suppress(ValueError, KeyError, TypeError):  # a damaged record, an imported log
                run = run_folder.read(folder)
                walls_s += [float(run["measured"]["wall_s"])] if run["status"] == "complete" else []
    return {config_id: statistics.median(walls_s) for config_id, walls_s in walls_s_of.items() if walls_s}


class Series:
    """Context around several runs, with their live bars.

    kinds: one per run, in order, the same for runs that take equally long; known_s: {kind: seconds per run}, as far as
    known before; num_done: runs that a resumed race has already; live: whether bars are drawn; budget_s: no run is to
    end later than this after the series began, None: no limit; fewest: number of runs after which it may end early;
    at_once: number of runs side by side, for which end() gets the seconds and begin() is not called.
    """

    def __init__(
        self,
        kinds: Sequence[str],
        known_s: dict[str, float],
        num_done: int = 0,
        live: bool = True,
        budget_s: float | None = None,
        fewest: int | None = None,
        at_once: int = 1,
    ):
        self._kinds, self._known_s = list(kinds), known_s
        self._spent_s: dict[str, list[float]] = {}  # {kind: seconds of each run of this series}
        self._num_done, self._budget_s, self._fewest = num_done, budget_s, fewest
        self._at_once = at_once
        self._began_s: float | None = None  # the current run
        self._opened_s, self._is_budget_shown = time.monotonic(), False
        self.bars = Bars(live)

    def __enter__(self) -> Self:
        self._opened_s = time.monotonic()
        say("plan", self.forecast())
        self.bars.__enter__()
        return self

    def forecast(self) -> str:
        """Returns text: how many runs are left, how long they take, and how many of them fit in the budget."""
        num_left, about = len(self._kinds) - self._num_done, format_about_s(self.left_s())
        least = num_left if self._fewest is None else max(1, self._fewest - self._num_done)
        how_many, for_all = (f"{least} to ", " for all of them") if least < num_left else ("", "")
        how_many += counted(num_left, "run") + f", {self._at_once} at a time" * (self._at_once > 1)
        how_long = f"{about}{for_all}" if about else "the first run shows how long they take"
        return f"{how_many}, {how_long}{self._in_budget()}"

    def __exit__(self, *exc_info: object) -> None:
        self.bars.__exit__(*exc_info)

    def begin(self, label: str = "") -> None:
        """Begins the next run.  label: describes it; without a label no line is printed."""
        self._began_s = time.monotonic()
        if label:
            say("run", f"{self.position}: {label}{self._to_go()}{'' if self._is_budget_shown else self._in_budget()}")
        self.tick()

    def tick(self) -> None:
        """Updates the bar of the series."""
        self.bars.draw("runs", self._num_done, len(self._kinds), f"{self.position}{self._to_go()}")

    def end(self, is_done: bool = True, spent_s: float | None = None) -> str:
        """Ends a run.  Returns how long the rest takes, such as ", about 3 min to go", or "" if that is not known.

        is_done: False if the run will be repeated; spent_s: its duration, None: since begin().
        """
        if spent_s is None and self._began_s is not None:
            spent_s = time.monotonic() - self._began_s
        if is_done and spent_s is not None:
            self._spent_s.setdefault(self._kinds[self._num_done], []).append(spent_s)
        self._num_done, self._began_s = self._num_done + is_done, None
        return self._to_go()

    @property
    def position(self) -> str:
        """Position of the run that is running or comes next: 3 of 12."""
        return f"{min(self._num_done + 1, len(self._kinds))} of {len(self._kinds)}"

    def left_s(self) -> float | None:
        """Returns the expected seconds to the end, by this series' own runs of a kind if any, or None if unknown."""
        if (left_s := self._seconds_of_each()) and self._began_s is not None:
            left_s[0] = max(0.0, left_s[0] - (time.monotonic() - self._began_s))
        return None if left_s is None else max(sum(left_s[place :: self._at_once]) for place in range(self._at_once))

    def num_fitting(self) -> int | None:
        """Returns how many of the remaining runs, with the current one, are expected to end within the budget.

        An unknown kind counts as the mean of the others.  Returns None without a budget, or if all kinds are unknown.
        """
        left_s = self._seconds_of_each()
        if self._budget_s is None or left_s is None:
            return None
        spent_s = (time.monotonic() if self._began_s is None else self._began_s) - self._opened_s
        places_s = (itertools.accumulate(left_s[place :: self._at_once]) for place in range(self._at_once))
        return sum(spent_s + end_s <= self._budget_s for end_s in itertools.chain(*places_s))

    def fits(self) -> bool:
        """Returns whether the next run is expected to end within the budget; True if nothing is known."""
        return self._budget_s is None or self.num_fitting() != 0

    def _in_budget(self) -> str:
        """Returns text: how many of the remaining runs fit in the budget; "" if that is not known."""
        num_fitting, num_left = self.num_fitting(), len(self._kinds) - self._num_done
        if num_fitting is None or self._budget_s is None:
            return ""
        self._is_budget_shown = True
        all_of = "all" if num_fitting >= num_left else f"{num_fitting} of {num_left}"
        return f"; {all_of} fit in the budget, {format_about_s(self._budget_s).removeprefix('about ')}"

    def _seconds_of_each(self) -> list[float] | None:
        """Returns the expected seconds of each remaining run, for an unknown kind the mean of the others, or None."""
        known_s = self._known_s | {kind: statistics.mean(seconds) for kind, seconds in self._spent_s.items()}
        other_s = statistics.mean(known_s.values()) if known_s else 0.0
        return [known_s.get(kind, other_s) for kind in self._kinds[self._num_done :]] if known_s else None

    def _to_go(self) -> str:
        left_s = self.left_s()
        return "" if left_s is None or self._num_done == len(self._kinds) else f", {format_about_s(left_s)} to go"
