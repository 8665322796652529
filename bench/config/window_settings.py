"""Declares the settings of the instruments that record windows of steps, and makes those windows of them.

bench/config/typed.py builds the classes here of the values of conf/instruments/, and refuses what their types do not
allow. A name means the same in every instrument.
"""

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Any

from bench.config import typed
from bench.config.typed import AtLeast1
from bench.config.windows import FLAGS, NAME, SAME_NAME, MemoryWindow, Options, ProfilerWindow
from models.settings import NotNegativeInt, Range, one_of

_OF_FILE = "letters, digits, '-', '_' and '.', because it becomes part of a file's name inside the run"
_OF_MEMORY = "letters, digits, '-' and '_', because it becomes part of a file's name, and no oom in front"
FileName = Annotated[str, Range(NAME.fullmatch, _OF_FILE)]
MemoryName = Annotated[
    str, Range(lambda name: NAME.fullmatch(name) and "." not in name and not name.startswith("oom"), _OF_MEMORY)
]
FolderName = Annotated[str, Range(lambda path: all(map(NAME.fullmatch, path.split("/"))) or not path, _OF_FILE)]
Stacks = Annotated[str, one_of("python", "all")]
Mib = Annotated[float, Range(lambda mib: mib > 0, "of MiB above 0")]
Seconds = Annotated[float, Range(lambda seconds: seconds > 0, "of seconds above 0")]
SecondsFrom0 = Annotated[float, Range(lambda seconds: seconds >= 0, "of seconds, 0 or more")]
_are_ranks = Range(lambda ranks: ranks and all(type(rank) is int and rank >= 0 for rank in ranks), "of ranks, e.g. [0]")
Ranks = Annotated[list[int], _are_ranks]
Activities = Annotated[
    list[str], Range(lambda names: names and all(name in ("cpu", "cuda") for name in names), "of cpu and cuda")
]
Traced = Annotated[
    list[str],
    Range(lambda kinds: kinds and all(isinstance(kind, str) for kind in kinds), "of what nsys profile --trace takes"),
]
_EXAMPLE = "of windows, e.g. [{name:early,first_step:5},{name:late,first_step:90}]"
Rows = Annotated[list[dict[str, Any]], Range(lambda rows: all(isinstance(row, dict) for row in rows), _EXAMPLE)]
KEMPNER_OPTIONS = Options(record_shapes=True, profile_memory=True, with_flops=True)


@dataclass(kw_only=True)
class _Recorded:
    first_step: AtLeast1
    active_steps: AtLeast1
    ranks: Ranks | None


@dataclass(kw_only=True)
class Nsys(_Recorded):
    name: FileName
    trace: Traced


@dataclass(kw_only=True)
class _Profiled:
    record_shapes: bool
    profile_memory: bool
    with_stack: bool
    gzip: bool
    max_mib: Mib | None


@dataclass(kw_only=True)
class Stages(_Profiled):
    step: AtLeast1
    ranks: Ranks | None
    compilation: bool
    max_entries: AtLeast1
    stacks: Stacks


@dataclass(kw_only=True)
class Memory(_Recorded):
    name: MemoryName
    max_entries: AtLeast1
    stacks: Stacks


@dataclass(kw_only=True)
class Trace(_Recorded, _Profiled):
    name: FileName
    warmup_steps: NotNegativeInt
    every_steps: AtLeast1 | None
    repeat: NotNegativeInt
    first_s: SecondsFrom0 | None
    active_s: Seconds | None
    every_s: Seconds | None
    activities: Activities | None
    with_flops: bool
    with_modules: bool

    def __post_init__(self) -> None:
        timed = {"active_s": self.active_s, "every_s": self.every_s}
        by_clock = [f"{key}={seconds:g}" for key, seconds in timed.items() if seconds is not None]
        num_disturbed = self.warmup_steps + self.active_steps
        if self.first_s is None and by_clock:
            raise ValueError(f"{by_clock[0]}: a window by the clock has a beginning: set first_s too")
        if self.first_s is not None and self.every_steps is not None:
            raise ValueError(f"every_steps={self.every_steps}: first_s is set: use every_s=SECONDS")
        if self.first_step <= self.warmup_steps:
            remedy = f"use first_step={self.warmup_steps + 1} or more, or fewer warmup_steps"
            raise ValueError(
                f"first_step={self.first_step}: its warmup_steps={self.warmup_steps} come before it: {remedy}"
            )
        if self.repeat and self.every_steps is None and self.every_s is None:
            raise ValueError(f"repeat={self.repeat}: no distance is set: give every_steps too")
        if self.every_steps is not None and self.every_steps < num_disturbed:
            remedy = f"one cycle takes {num_disturbed} steps, warm-up included: use every_steps={num_disturbed} or more"
            raise ValueError(f"every_steps={self.every_steps}: {remedy}")


@dataclass(kw_only=True)
class Kempner:
    enable: bool
    start_step: NotNegativeInt
    end_step: AtLeast1
    trace_dir: FolderName | None
    classifier: Annotated[str, one_of("fixed", "kempner_v0")]
    ranks: Ranks | None
    gzip: bool
    max_mib: Mib | None

    def __post_init__(self) -> None:
        if self.end_step <= self.start_step:
            raise ValueError(f"end_step={self.end_step}: it must be greater than start_step={self.start_step}")


@dataclass(kw_only=True)
class Schedule:
    """Arguments of torch.profiler.schedule."""

    wait: NotNegativeInt
    warmup: NotNegativeInt
    active: AtLeast1
    repeat: NotNegativeInt = 0
    skip_first: NotNegativeInt = 0
    skip_first_wait: NotNegativeInt = 0


def build(cls: Any, where: str, settings: dict[str, Any]) -> Any:
    """Returns those settings of an instrument that cls declares. Raises ValueError for the first that is wrong."""
    return typed.build(cls, {field.name: settings[field.name] for field in dataclasses.fields(cls)}, f"{where}.")


def _listed(cls: Any, where: str, settings: dict[str, Any]) -> list[Any]:
    """Returns the settings of each entry of an instrument's windows, or of its only window if it lists none."""
    listed = typed.checked(f"{where}.windows", settings.get("windows") or [], Rows)
    common = {field.name: settings[field.name] for field in dataclasses.fields(cls)}
    places = {f"{where}.windows[{number}].": row for number, row in enumerate(listed)} or {f"{where}.": {}}
    return [typed.build(cls, common | row, place) for place, row in places.items()]


def ranks_of(ranks: list[int] | None) -> tuple[int, ...] | None:
    """Converts the checked setting ranks to a Window's."""
    return None if ranks is None else tuple(sorted(set(ranks)))


def steps_of_schedule(schedule: Any) -> dict[str, int]:
    """Converts arguments of torch.profiler.schedule to the equivalent settings of the instrument trace.

    torch counts steps from 0, this program from 1. Raises ValueError if an argument is wrong or missing.
    """
    needed = dict.fromkeys(("wait", "warmup", "active"))
    values = needed | schedule if isinstance(schedule, dict) else schedule
    schedule = typed.checked("profile.schedule", values, Schedule)
    waited = schedule.skip_first + (0 if schedule.skip_first_wait else schedule.wait)
    first_step, warmup, active = waited + schedule.warmup + 1, schedule.warmup, schedule.active
    window = {"first_step": first_step, "warmup_steps": warmup, "active_steps": active}
    every_steps = schedule.wait + warmup + active
    return window if schedule.repeat == 1 else window | {"every_steps": every_steps, "repeat": schedule.repeat}


def trace_windows(settings: dict[str, Any]) -> list[ProfilerWindow]:
    """Returns the windows of the instrument trace: one, or those listed in its setting windows."""
    windows = []
    for row in _listed(Trace, "instruments.trace", settings):
        values = vars(row)
        flags = {flag: values.pop(flag) for flag in FLAGS}
        activities, ranks = values.pop("activities"), ranks_of(values.pop("ranks"))
        options = Options(activities and tuple(activities), **flags)
        windows.append(ProfilerWindow(**values, ranks=ranks, options=options))
    return windows


def kempner_window(settings: dict[str, Any]) -> ProfilerWindow | None:
    """Returns the window of KempnerForge's start_step and end_step, or None if it is not enabled.

    As there, start_step is the warm-up, and start_step + 1 to end_step are recorded (this is what their profiler does,
    whatever its log line says). start_step=0 has no warm-up and records from step 1 (theirs recorded from 2).
    """
    row = build(Kempner, "instruments.window", settings)
    if not row.enable:
        return None
    return ProfilerWindow(
        name="window",
        first_step=row.start_step + 1,
        active_steps=row.end_step - row.start_step,
        warmup_steps=min(1, row.start_step),
        ranks=ranks_of(row.ranks),
        options=KEMPNER_OPTIONS,
        gzip=row.gzip,
        max_mib=row.max_mib,
    )


def memory_windows(settings: dict[str, Any]) -> list[MemoryWindow]:
    """Returns the windows of the instrument memory_history in order: one, or those listed."""
    where = "instruments.memory_history"
    rows = _listed(Memory, where, settings)
    windows = [MemoryWindow(**vars(row) | {"ranks": ranks_of(row.ranks)}) for row in rows]
    windows.sort(key=lambda window: window.first_step)
    for window, later in zip(windows, windows[1:]):
        if later.first_step <= window.last_step:
            meets = f"{later.name} begins at step {later.first_step}, but {window.name} ends at step {window.last_step}"
            remedy = f"there is only one memory history: let it begin after step {window.last_step}"
            raise ValueError(f"{where}.windows: {meets}: {remedy}")
    names = [window.name for window in windows]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{where}.windows: name={name}: {SAME_NAME}")
    return windows
