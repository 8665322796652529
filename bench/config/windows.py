"""Defines the windows of steps that instruments record, and checks them before a run. Needs no torch.

Steps are counted as the run prints them: step 1 is the first optimizer step, row 1 of steps.csv. A process can have
only one torch profiler at a time (two crash it), so profilers' windows never overlap, and the instrument stages runs
without others. Windows of the memory history share one history. A schedule of torch.profiler is a repeated window.
"""

import functools
import itertools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
FLAGS = ("record_shapes", "profile_memory", "with_stack", "with_flops", "with_modules")
FLAG = "profiled"  # the flag of steps that a profiler recorded
STEP_RANGE = "ProfilerStep#"  # the name that readers of such traces look for
CLOCK_FIELDS = ("first_s", "active_s", "every_s")
STEP_FIELDS = ("first_step", "warmup_steps", "active_steps", "every_steps", "repeat")
TRACE_FIELDS = ("name", *STEP_FIELDS, *CLOCK_FIELDS, "ranks", "activities", "gzip", "max_mib", *FLAGS)
SCHEDULE_FIELDS = ("wait", "warmup", "active", "repeat", "skip_first", "skip_first_wait")  # torch.profiler.schedule's
MEMORY_FIELDS = ("name", "first_step", "active_steps", "ranks", "max_entries", "stacks")
TAKEN_NAME = "oom"  # the name of snapshots made at an out-of-memory error
KEMPNER_FLAGS: dict[str, Any] = {"record_shapes": True, "profile_memory": True, "with_stack": False, "with_flops": True}


_FILE_NAME = "letters, digits, '-', '_' and '.', because it becomes part of a file's name inside the run"


@functools.cache
def hints() -> dict[str, Any]:
    """Returns {setting: its type}; a name means the same in every instrument.

    Made at first use, because a user's program that imports this for its profiler may have a module `models`.
    """
    from bench.config.typed import AtLeast1
    from models.settings import NotNegativeInt, Range, one_of

    name = Annotated[str, Range(NAME.fullmatch, _FILE_NAME)]
    path = Annotated[str, Range(lambda path: all(map(NAME.fullmatch, path.split("/"))) or not path, _FILE_NAME)]
    duration = Annotated[float, Range(lambda seconds: 0 < seconds < math.inf, "of seconds above 0")]
    are_ranks = Range(
        lambda ranks: ranks and all(type(rank) is int and rank >= 0 for rank in ranks), "of ranks, e.g. [0]"
    )
    are_known = Range(lambda names: names and all(name in ("cpu", "cuda") for name in names), "of cpu and cuda")
    return {
        **dict.fromkeys(("step", "first_step", "active_steps", "end_step", "max_entries"), AtLeast1),
        **dict.fromkeys(("warmup_steps", "start_step", "repeat"), NotNegativeInt),
        "every_steps": AtLeast1 | None,
        "first_s": Annotated[float, Range(lambda seconds: 0 <= seconds < math.inf, "of seconds, 0 or more")] | None,
        **dict.fromkeys(("active_s", "every_s"), duration | None),
        **dict.fromkeys((*FLAGS, "gzip", "compilation", "enable"), bool),
        "stacks": Annotated[str, one_of("python", "all")],
        "classifier": Annotated[str, one_of("fixed", "kempner_v0")],
        "name": name,
        "trace_dir": path | None,
        "max_mib": Annotated[float, Range(lambda mib: mib > 0, "of MiB above 0")] | None,
        "ranks": Annotated[list, are_ranks] | None,
        "activities": Annotated[list, are_known] | None,
    }


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


def entries(where: str, settings: dict[str, Any], fields: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (dotted key, all settings) for each entry of an instrument's windows, or once if it lists none."""
    listed = settings.get("windows") or [{}]
    example = "give a list, e.g. [{name:early,first_step:5},{name:late,first_step:90}]"
    if not isinstance(listed, (list, tuple)) or not all(isinstance(window, dict) for window in listed):
        raise ValueError(f"{where}.windows={listed!r}: {example}")
    for number, differences in enumerate(listed):
        place = f"{where}.windows[{number}]" if settings.get("windows") else where
        for key in differences:
            if key not in fields:
                has = ", ".join(fields)
                raise ValueError(f"unknown setting {place}.{key}={differences[key]!r}: a window has {has}")
        yield place, {key: differences.get(key, settings[key]) for key in fields}


def check(where: str, values: dict[str, Any]) -> None:
    """Raises ValueError for the first value that its hint does not allow. Settings without a hint are ignored."""
    from bench.config import typed

    for key in filter(hints().get, values):
        typed.checked(f"{where}.{key}", values[key], hints()[key])


def ranks_of(ranks: list[int] | None) -> tuple[int, ...] | None:
    """Converts the checked setting ranks to a Window's."""
    return None if ranks is None else tuple(sorted(set(ranks)))


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
        """Returns whether a rank has both at once. A repeated window takes all steps to the end of its last cycle."""
        share_ranks = self.ranks is None or other.ranks is None or set(self.ranks) & set(other.ranks)
        begins = max(self.begin_step, other.begin_step)
        return bool(share_ranks) and begins <= min(self.end_step or math.inf, other.end_step or math.inf)


def steps_of_schedule(schedule: dict[str, Any]) -> dict[str, int]:
    """Converts arguments of torch.profiler.schedule to the equivalent settings of the instrument trace.

    torch counts steps from 0, this program from 1. Raises ValueError if an argument is wrong or missing.
    """
    where, example = "profile.schedule", "as torch.profiler.schedule: {wait:5,warmup:5,active:4,repeat:2,skip_first:10}"
    unknown = [key for key in schedule if key not in SCHEDULE_FIELDS]
    missing = [key for key in ("wait", "warmup", "active") if key not in schedule]
    if unknown or missing:
        problem = f"unknown setting {unknown[0]}" if unknown else f"{missing[0]} is missing"
        raise ValueError(f"{where}={schedule}: {problem}: write it {example}")
    for key, number in schedule.items():
        least = int(key == "active")
        if type(number) is not int or number < least:
            raise ValueError(f"{where}={schedule}: {key}={number!r}: use a whole number of {least} or more")
    wait, warmup, active = schedule["wait"], schedule["warmup"], schedule["active"]
    waited = schedule.get("skip_first", 0) + (0 if schedule.get("skip_first_wait") else wait)
    repeat = schedule.get("repeat", 0)
    window = {"first_step": waited + warmup + 1, "warmup_steps": warmup, "active_steps": active}
    return window if repeat == 1 else window | {"every_steps": wait + warmup + active, "repeat": repeat}


def trace_windows(settings: dict[str, Any]) -> list[ProfilerWindow]:
    """Returns the windows of the instrument trace: one, or those listed in its setting windows."""
    windows = []
    for where, values in entries("instruments.trace", settings, TRACE_FIELDS):
        check(where, values)
        if values["first_s"] is None:
            for key in ("active_s", "every_s"):
                if values[key] is not None:
                    problem = "a window by the clock has a beginning: set first_s too"
                    raise ValueError(f"{where}.{key}={values[key]}: {problem}")
        elif values["every_steps"] is not None:
            raise ValueError(f"{where}.every_steps={values['every_steps']}: first_s is set: use every_s=SECONDS")
        first_step, warmup_steps, every_steps = (values[key] for key in ("first_step", "warmup_steps", "every_steps"))
        if first_step <= warmup_steps:
            remedy = f"use first_step={warmup_steps + 1} or more, or fewer warmup_steps"
            raise ValueError(f"{where}.first_step={first_step}: its {warmup_steps=} come before it: {remedy}")
        num_disturbed = warmup_steps + values["active_steps"]
        if every_steps is None and values["every_s"] is None and values["repeat"]:
            raise ValueError(f"{where}.repeat={values['repeat']}: no distance is set: give every_steps too")
        if every_steps is not None and every_steps < num_disturbed:
            problem = f"one cycle takes {num_disturbed} steps, warm-up included"
            raise ValueError(f"{where}.every_steps={every_steps}: {problem}: use every_steps={num_disturbed} or more")
        activities = values["activities"] and tuple(values["activities"])
        options = Options(activities, **{flag: values[flag] for flag in FLAGS})
        same = {key: values[key] for key in ("name", *STEP_FIELDS, *CLOCK_FIELDS, "gzip", "max_mib")}
        windows.append(ProfilerWindow(**same, ranks=ranks_of(values["ranks"]), options=options))
    return windows


def kempner_window(settings: dict[str, Any]) -> ProfilerWindow | None:
    """Returns the window of KempnerForge's start_step and end_step, or None if it is not enabled.

    As there, start_step is the warm-up, and start_step + 1 to end_step are recorded (this is what their profiler does,
    whatever its log line says). start_step=0 has no warm-up and records from step 1 (theirs recorded from 2).
    """
    where, start_step, end_step = "instruments.window", settings["start_step"], settings["end_step"]
    check(where, settings)
    if end_step <= start_step:
        remedy = f"end_step must be greater than start_step, which is {start_step}"
        raise ValueError(f"{where}.end_step={end_step}: {remedy}")
    if not settings["enable"]:
        return None
    return ProfilerWindow(
        name="window",
        first_step=start_step + 1,
        active_steps=end_step - start_step,
        warmup_steps=min(1, start_step),
        ranks=ranks_of(settings["ranks"]),
        options=Options(**KEMPNER_FLAGS),
        gzip=settings["gzip"],
        max_mib=settings["max_mib"],
    )


def check_profilers(windows_by_instrument: dict[str, list[ProfilerWindow] | None]) -> None:
    """Raises ValueError if two profilers of {instrument: its windows, None: at any time} meet or share a name."""
    profiling = [name for name, own in windows_by_instrument.items() if own is None or own]
    alone = next((name for name in profiling if windows_by_instrument[name] is None), None)
    beside = [name for name in profiling if name != alone]
    if alone and beside:
        raise ValueError(
            f"instruments.{beside[0]}: instruments.{alone} profiles too, and two torch profilers at once crash the "
            "process: keep one of them, e.g. profile=window or profile=stages"
        )
    windows = [] if alone else [window for name in profiling for window in windows_by_instrument[name] or ()]
    windows.sort(key=lambda window: window.begin_step)
    by_clock = next((window for window in windows if window.first_s is not None), None)
    if by_clock and len(windows) > 1:
        why = "whether it overlaps with another window cannot be known before the run: keep one of them"
        raise ValueError(f"window {by_clock.name}: first_s={by_clock.first_s:g}: {why}")
    for first, second in itertools.combinations(windows, 2):
        cycles = [f"{window.name}_cycle" for window in (first, second) if window.every_steps]
        if first.name == second.name or any(window.name.startswith(tuple(cycles)) for window in (first, second)):
            remedy = "two windows have this name and would write the same files: rename one"
            raise ValueError(f"window name={second.name}: {remedy}")
        if first.overlaps(second):
            later = f"let it begin after step {first.end_step}, warm-up included"
            raise ValueError(
                f"window {second.name}, {described(second)}: it overlaps with window {first.name}, {described(first)}, "
                f"and two torch profilers at once crash the process: {later if first.end_step else 'keep one of them'}"
            )


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


def memory_windows(settings: dict[str, Any]) -> list[MemoryWindow]:
    """Returns the windows of the instrument memory_history in order: one, or those listed."""
    where = "instruments.memory_history"
    windows = []
    for place, values in entries(where, settings, MEMORY_FIELDS):
        check(place, values)
        if values["name"].startswith(TAKEN_NAME) or "." in values["name"]:
            remedy = f"file names begin with it: no dot in it, and no {TAKEN_NAME} in front"
            raise ValueError(f"{place}.name={values['name']}: {remedy}")
        windows.append(MemoryWindow(**values | {"ranks": ranks_of(values["ranks"])}))
    windows.sort(key=lambda window: window.first_step)
    for window, later in zip(windows, windows[1:]):
        if later.first_step <= window.last_step:
            raise ValueError(
                f"{where}.windows: {later.name} begins at step {later.first_step}, but {window.name} ends at step "
                f"{window.last_step}: there is only one memory history: let it begin after step {window.last_step}"
            )
    names = [window.name for window in windows]
    for name in names:
        if names.count(name) > 1:
            why = f"two windows are called {name} and would write the same files: rename one"
            raise ValueError(f"{where}.windows: {why}")
    return windows
