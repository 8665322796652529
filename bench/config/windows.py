"""Defines the windows of steps that instruments record, and refuses those that meet. Needs no torch.

Steps are counted as the run prints them: step 1 is the first optimizer step, row 1 of steps.csv. A process can have
only one torch profiler at a time (two crash it), so profilers' windows never overlap, and the instrument stages runs
without others. Windows of the memory history share one history. window_settings.py makes windows of settings; this
file imports nothing of models/, because a user's program that imports it for its profiler may have a module `models`.
"""

import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
FLAGS = ("record_shapes", "profile_memory", "with_stack", "with_flops", "with_modules")
FLAG = "profiled"  # the flag of steps that a profiler recorded
STEP_RANGE = "ProfilerStep#"  # the name that readers of such traces look for
SAME_NAME = "two windows have this name and would write the same files: rename one"
CRASH = "two torch profilers at once crash the process"


@dataclass(frozen=True, kw_only=True)
class Window:
    """The steps from first_step to last_step."""

    name: str
    first_step: int
    active_steps: int
    ranks: tuple[int, ...] | None = None  # None: every rank

    @property
    def last_step(self) -> int:
        return self.first_step + self.active_steps - 1

    def has(self, rank: int) -> bool:
        """Returns whether that rank records the window."""
        return self.ranks is None or rank in self.ranks


@dataclass(frozen=True)
class Options:
    """What a profiler records besides names and times."""

    activities: tuple[str, ...] | None = None  # None: cpu, and cuda on a GPU
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False


@dataclass(frozen=True, kw_only=True)
class ProfilerWindow(Window):
    """A window that is recorded after warmup_steps, in which the profiler runs and records nothing.

    With every_steps it is the first of several cycles, which begin that many steps apart.
    """

    warmup_steps: int = 0
    options: Options = field(default_factory=Options)
    gzip: bool = True
    max_mib: float | None = None  # size of the trace before compression; None: no limit
    every_steps: int | None = None  # steps between the first steps of two cycles; None: no cycles
    repeat: int = 0  # number of cycles, with every_steps or every_s; 0: until the run ends
    first_s: float | None = None  # training time at which the warm-up begins, instead of first_step; None: in steps
    active_s: float | None = None  # how long a window by the clock records, instead of active_steps
    every_s: float | None = None  # time between the beginnings of two such cycles

    @property
    def begin_step(self) -> int:
        """The first step that the window disturbs."""
        return self.first_step - self.warmup_steps

    @property
    def end_step(self) -> int | None:
        """The last step of its last cycle; None if it repeats until the run ends, or is timed by the clock."""
        if self.first_s is not None:
            return None
        if self.every_steps is None:
            return self.last_step
        return self.last_step + (self.repeat - 1) * self.every_steps if self.repeat else None

    def cycles(self, num_steps: int | None = None) -> Iterator["ProfilerWindow"]:
        """Yields each cycle as a window, named NAME_cycle1 and so on, or the window itself if it does not repeat.

        With num_steps, the run's, the first cycle and those that the run can begin; None: all, perhaps without end. A
        window by the clock yields nothing, because its steps are not known in advance.
        """
        if self.first_s is not None:
            return
        yield self._cycle(0)
        for cycle in range(1, self.repeat) if self.repeat or not self.every_steps else itertools.count(1):
            following = self._cycle(cycle)
            if num_steps is not None and following.begin_step > num_steps:
                return
            yield following

    def _cycle(self, cycle: int) -> "ProfilerWindow":
        """Returns a cycle as a window, counted from 0."""
        if self.every_steps is None or self.repeat == 1:
            return replace(self, every_steps=None)
        first_step = self.first_step + cycle * self.every_steps
        return replace(self, name=f"{self.name}_cycle{cycle + 1}", first_step=first_step, every_steps=None)

    def overlaps(self, other: "ProfilerWindow") -> bool:
        """Returns whether a rank may have both at once: a window by the clock may meet every other.

        A repeated window takes all steps to the end of its last cycle.
        """
        if self.first_s is not None or other.first_s is not None:
            return True
        share_ranks = self.ranks is None or other.ranks is None or set(self.ranks) & set(other.ranks)
        begins = max(self.begin_step, other.begin_step)
        return bool(share_ranks) and begins <= min(self.end_step or math.inf, other.end_step or math.inf)


def check_profilers(windows_by_instrument: dict[str, list[ProfilerWindow] | None]) -> None:
    """Raises ValueError if two profilers of {instrument: its windows, None: at any time} meet or share a name."""
    profiling = [name for name, own in windows_by_instrument.items() if own is None or own]
    alone = next((name for name in profiling if windows_by_instrument[name] is None), None)
    beside = [name for name in profiling if name != alone]
    if alone and beside:
        remedy = "keep one of them, e.g. profile=window or profile=stages"
        raise ValueError(f"instruments.{beside[0]}: instruments.{alone} profiles too, and {CRASH}: {remedy}")
    windows = [] if alone else [window for name in profiling for window in windows_by_instrument[name] or ()]
    windows.sort(key=lambda window: window.begin_step)
    for first, second in itertools.combinations(windows, 2):
        cycles = [f"{window.name}_cycle" for window in (first, second) if window.every_steps]
        if first.name == second.name or any(window.name.startswith(tuple(cycles)) for window in (first, second)):
            raise ValueError(f"window name={second.name}: {SAME_NAME}")
        if first.overlaps(second):
            both = f"{second.name}, {described(second)}: it overlaps with window {first.name}, {described(first)}"
            has_end = first.end_step is not None and second.first_s is None
            remedy = f"let it begin after step {first.end_step}, warm-up included" if has_end else "keep one of them"
            raise ValueError(f"window {both}, and {CRASH}: {remedy}")


def described(window: ProfilerWindow) -> str:
    """Describes a window: "steps 11 to 14 after warm-up from step 6, and again every 500 steps, 3 times in all"."""
    if window.first_s is not None:
        how_long = _steps(window.active_steps) if window.active_s is None else f"{window.active_s:g} s"
        often = "" if window.every_s is None else f", and again every {window.every_s:g} s"
        return f"{how_long} after {window.first_s:g} s and {_steps(window.warmup_steps)} of warm-up{often}"
    warmup = f" after warm-up from step {window.begin_step}" if window.warmup_steps else ""
    often = f"{window.repeat} times in all" if window.repeat else "until the run ends"
    is_repeated = window.every_steps is not None and window.repeat != 1
    again = f", and again every {window.every_steps} steps, {often}" if is_repeated else ""
    return span(window.first_step, window.last_step) + warmup + again


def _steps(number: int) -> str:
    return f"{number} step{'s' * (number != 1)}"


def span(first_step: int, last_step: int) -> str:
    """Returns "steps 11 to 14", both included, or "step 11" if they are the same."""
    return f"step {first_step}" if first_step == last_step else f"steps {first_step} to {last_step}"


@dataclass(frozen=True, kw_only=True)
class MemoryWindow(Window):
    """A window of torch's memory history; max_entries and stacks are arguments of _record_memory_history."""

    max_entries: int
    stacks: str
