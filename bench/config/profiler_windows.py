"""Which steps torch's profiler may record: windows out of settings, and what is refused before a race.  No torch.

Steps are counted as the race prints them: step 1 is the first optimizer step, row 1 of steps.csv.  A process can have
one torch profiler at a time (two crash it), so windows never overlap and the stages stand alone.
"""

import re
from dataclasses import dataclass, field

ACTIVITIES = ("cpu", "cuda")
FLAGS = ("record_shapes", "profile_memory", "with_stack", "with_flops", "with_modules")
CLASSIFIERS = ("fixed", "kempner_v0")
STACKS = ("python", "all")
WINDOW_FIELDS = ("name", "first_step", "warmup_steps", "active_steps", "ranks", "activities", *FLAGS, "gzip", "max_mib")
KEMPNER_FLAGS = {"record_shapes": True, "profile_memory": True, "with_stack": False, "with_flops": True}


@dataclass(frozen=True)
class Options:
    """What a profiler records beside names and times."""

    activities: tuple[str, ...] | None = None  # None: cpu, and cuda on a GPU
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False


@dataclass(frozen=True)
class Window:
    """Steps first_step to last_step, recorded, after warmup_steps in which the profiler runs and records nothing."""

    name: str
    first_step: int
    active_steps: int
    warmup_steps: int = 0
    ranks: tuple[int, ...] | None = None  # None: every rank
    options: Options = field(default_factory=Options)
    gzip: bool = True
    max_mib: float | None = None  # of the trace before compression; None: no limit

    @property
    def last_step(self):
        return self.first_step + self.active_steps - 1

    @property
    def begin_step(self):
        """The first step that the window disturbs."""
        return self.first_step - self.warmup_steps

    def has(self, rank):
        return self.ranks is None or rank in self.ranks

    def overlaps(self, other):
        """Whether some rank would have both at once."""
        together = self.begin_step <= other.last_step and other.begin_step <= self.last_step
        shared = self.ranks is None or other.ranks is None or set(self.ranks) & set(other.ranks)
        return together and bool(shared)


def check(instruments):
    """instruments: {name: settings}, settings of the types of their yaml.  Raises ValueError for what cannot run."""
    windows = []
    if "trace" in instruments:
        windows += windows_of(instruments["trace"])
    kempner = kempner_window(instruments["window"]) if "window" in instruments else None
    if kempner:
        windows.append(kempner)
    windows.sort(key=lambda window: window.begin_step)
    for number, window in enumerate(windows):
        for other in windows[number + 1 :]:
            _refuse_overlap(window, other)
    if "stages" in instruments:
        _check_stages(instruments["stages"])
        beside = [name for name in ("trace", "window") if name in instruments and (name != "window" or kempner)]
        if beside:
            raise ValueError(
                f"instruments.{beside[0]}: instruments.stages profiles too, and two torch profilers at once crash the "
                "process: keep one of them, e.g. profile=window or profile=stages"
            )


def check_ranks(instruments, num_processes):
    """Raises ValueError where ranks are chosen that the race has not: nothing would be recorded."""
    for name, settings in instruments.items():
        chosen = [(f"instruments.{name}.ranks", settings.get("ranks"))]
        chosen += [
            (f"instruments.{name}.windows: ranks", window.get("ranks")) for window in settings.get("windows") or ()
        ]
        for where, ranks in chosen:
            missing = [rank for rank in ranks or () if rank >= num_processes]
            if missing:
                raise ValueError(
                    f"{where}={list(ranks)}: the race has {num_processes} process{'es' * (num_processes > 1)}, ranks from 0: leave {missing[0]} out"
                )


def _refuse_overlap(window, other):
    if window.name == other.name:
        raise ValueError(
            f"window name={window.name}: two windows are called so, and their files would be one: rename one"
        )
    if window.overlaps(other):
        raise ValueError(
            f"window {other.name}, {words(other)}: it overlaps with window {window.name}, {words(window)}, and two "
            f"torch profilers at once crash the process: let it begin after step {window.last_step}, warm-up included"
        )


def words(window):
    """Window -> "steps 11 to 14 after warm-up from step 6"."""
    warmup = f" after warm-up from step {window.begin_step}" if window.warmup_steps else ""
    return span(window.first_step, window.last_step) + warmup


def span(first_step, last_step):
    return f"step {first_step}" if first_step == last_step else f"steps {first_step} to {last_step}"


def windows_of(settings):
    """Settings of the instrument trace -> its windows: one, or those listed, each with its differences."""
    common = {key: value for key, value in settings.items() if key != "windows"}
    listed = settings.get("windows") or [{}]
    if not isinstance(listed, (list, tuple)):
        raise ValueError(f"instruments.trace.windows={listed!r}: give a list, e.g. [{{name:early,first_step:5}}]")
    where = "instruments.trace.windows[{}]" if settings.get("windows") else "instruments.trace"
    return [_window(where.format(number), common, differences) for number, differences in enumerate(listed)]


def _window(where, common, differences):
    if not isinstance(differences, dict):
        raise ValueError(
            f"{where}={differences!r}: give {{name:NAME,first_step:N}}, and more of {', '.join(WINDOW_FIELDS)}"
        )
    for key in differences:
        if key not in WINDOW_FIELDS:
            raise ValueError(
                f"unknown setting {where}.{key}={differences[key]!r}: a window has {', '.join(WINDOW_FIELDS)}"
            )
    values = common | differences
    _check_name(f"{where}.name", values["name"])
    for key, least in (("first_step", 1), ("warmup_steps", 0), ("active_steps", 1)):
        _check_whole(f"{where}.{key}", values[key], least)
    _check_switches(where, values, *FLAGS, "gzip")
    if values["first_step"] <= values["warmup_steps"]:
        raise ValueError(
            f"{where}.first_step={values['first_step']}: its warmup_steps={values['warmup_steps']} come before it: use "
            f"first_step={values['warmup_steps'] + 1} or more, or fewer warmup_steps"
        )
    _check_max_mib(where, values["max_mib"])
    options = Options(_activities(where, values["activities"]), **{flag: values[flag] for flag in FLAGS})
    ranks = _ranks(where, values["ranks"])
    steps = {key: values[key] for key in ("first_step", "active_steps", "warmup_steps")}
    return Window(values["name"], **steps, ranks=ranks, options=options, gzip=values["gzip"], max_mib=values["max_mib"])


def kempner_window(settings):
    """KempnerForge's start_step and end_step -> Window, or None where it is not enabled.

    As there: start_step is the warm-up, start_step + 1 to end_step are recorded (what their profiler does, whatever
    its log line says).  start_step=0 has no warm-up and records from step 1 (theirs recorded from 2).
    """
    where = "instruments.window"
    start_step, end_step = settings["start_step"], settings["end_step"]
    _check_whole(f"{where}.start_step", start_step, 0)
    _check_whole(f"{where}.end_step", end_step, 1)
    if end_step <= start_step:
        raise ValueError(
            f"{where}.end_step={end_step}: end_step must be greater than start_step, which is {start_step}"
        )
    if settings["classifier"] not in CLASSIFIERS:
        raise ValueError(f"{where}.classifier={settings['classifier']}: choose from {', '.join(CLASSIFIERS)}")
    folder = settings["trace_dir"]
    if folder:
        for part in folder.split("/"):
            _check_name(f"{where}.trace_dir", part, folder)
    _check_max_mib(where, settings["max_mib"])
    _check_switches(where, settings, "enable", "gzip")
    if not settings["enable"]:
        return None
    return Window(
        "window",
        start_step + 1,
        end_step - start_step,
        min(1, start_step),
        _ranks(where, settings["ranks"]),
        Options(None, **KEMPNER_FLAGS),
        settings["gzip"],
        settings["max_mib"],
    )


def stage_options(settings):
    return Options(None, settings["record_shapes"], settings["profile_memory"], settings["with_stack"])


def _check_stages(settings):
    _check_whole("instruments.stages.step", settings["step"], 1)
    _check_whole("instruments.stages.max_entries", settings["max_entries"], 1)
    _ranks("instruments.stages", settings["ranks"])
    _check_max_mib("instruments.stages", settings["max_mib"])
    _check_switches(
        "instruments.stages", settings, "record_shapes", "profile_memory", "with_stack", "compilation", "gzip"
    )
    if settings["stacks"] not in STACKS:
        raise ValueError(f"instruments.stages.stacks={settings['stacks']}: choose from {', '.join(STACKS)}")


def _check_name(where, name, shown=None):
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", name):
        raise ValueError(
            f"{where}={name if shown is None else shown}: it becomes part of a file's name inside the run: use letters, "
            "digits, '-', '_' and '.'"
        )


def _check_switches(where, values, *keys):
    for key in keys:
        if not isinstance(values[key], bool):
            raise ValueError(f"{where}.{key}={values[key]!r}: use true or false")


def _check_whole(where, value, least):
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{where}={value!r}: use a whole number of {least} or more")


def _check_max_mib(where, value):
    if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0):
        raise ValueError(f"{where}.max_mib={value!r}: use a number of MiB above 0, or null for no limit")


def _ranks(where, ranks):
    if ranks is None:
        return None
    whole = isinstance(ranks, (list, tuple)) and all(
        isinstance(rank, int) and not isinstance(rank, bool) for rank in ranks
    )
    if not whole or not ranks or min(ranks) < 0:
        raise ValueError(f"{where}.ranks={ranks!r}: give a list of ranks, e.g. [0], or null for all")
    return tuple(sorted(set(ranks)))


def _activities(where, activities):
    if activities is None:
        return None
    if not isinstance(activities, (list, tuple)) or not activities or not set(activities) <= set(ACTIVITIES):
        raise ValueError(
            f"{where}.activities={activities!r}: give a list of {' and '.join(ACTIVITIES)}, or null for what there is"
        )
    return tuple(activities)
