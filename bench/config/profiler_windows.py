"""Which steps torch's profiler may record: windows out of settings, and what is refused before a run.  No torch.

A process can have one torch profiler at a time (two crash it), so windows never overlap and the stages stand alone.
"""

from dataclasses import dataclass, field

from bench.config import windows

FLAG = "profiled"  # of steps
STEP_RANGE = "ProfilerStep#"  # what every reader of such traces looks for
WINDOW_FIELDS = ("name", "first_step", "warmup_steps", "active_steps", "ranks", "activities", "gzip", "max_mib")
WINDOW_FIELDS += windows.FLAGS
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


@dataclass(frozen=True, kw_only=True)
class Window(windows.Window):
    """Its steps are recorded after warmup_steps in which the profiler runs and records nothing."""

    warmup_steps: int = 0
    options: Options = field(default_factory=Options)
    gzip: bool = True
    max_mib: float | None = None  # of the trace before compression; None: no limit

    @property
    def begin_step(self) -> int:
        """The first step that the window disturbs."""
        return self.first_step - self.warmup_steps

    def overlaps(self, other: "Window") -> bool:
        """Whether some rank would have both at once."""
        together = self.begin_step <= other.last_step and other.begin_step <= self.last_step
        shared = self.ranks is None or other.ranks is None or set(self.ranks) & set(other.ranks)
        return together and bool(shared)


def check(windows_by_instrument: dict[str, list[Window] | None]) -> None:
    """{instrument: its windows, or None where it profiles at any time}.  Raises ValueError where two profilers meet."""
    profiling = [name for name, result in windows_by_instrument.items() if result is None or result]
    alone = next((name for name in profiling if windows_by_instrument[name] is None), None)
    beside = [name for name in profiling if name != alone]
    if alone and beside:
        raise ValueError(
            f"instruments.{beside[0]}: instruments.{alone} profiles too, and two torch profilers at once crash the "
            "process: keep one of them, e.g. profile=window or profile=stages"
        )
    result = [] if alone else [window for name in profiling for window in windows_by_instrument[name]]
    result.sort(key=lambda window: window.begin_step)
    for number, window in enumerate(result):
        for other in result[number + 1 :]:
            _refuse_overlap(window, other)


def _refuse_overlap(window, other):
    if window.name == other.name:
        remedy = "two windows have this name and would write the same files: rename one"
        raise ValueError(f"window name={window.name}: {remedy}")
    if window.overlaps(other):
        raise ValueError(
            f"window {other.name}, {words(other)}: it overlaps with window {window.name}, {words(window)}, and two "
            f"torch profilers at once crash the process: let it begin after step {window.last_step}, warm-up included"
        )


def words(window: Window) -> str:
    """Window -> "steps 11 to 14 after warm-up from step 6"."""
    warmup = f" after warm-up from step {window.begin_step}" if window.warmup_steps else ""
    return span(window.first_step, window.last_step) + warmup


def span(first_step: int, last_step: int) -> str:
    """Both included -> "steps 11 to 14", or "step 11" where they are the same."""
    return f"step {first_step}" if first_step == last_step else f"steps {first_step} to {last_step}"


def windows_of(settings: dict) -> list[Window]:
    """Settings of the instrument trace -> its windows: one, or those listed, each with its differences."""
    return [_window(where, values) for where, values in windows.each("instruments.trace", settings, WINDOW_FIELDS)]


def _window(where, values):
    windows.check(where, values)
    if values["first_step"] <= values["warmup_steps"]:
        raise ValueError(
            f"{where}.first_step={values['first_step']}: its warmup_steps={values['warmup_steps']} come before it: use "
            f"first_step={values['warmup_steps'] + 1} or more, or fewer warmup_steps"
        )
    activities = values["activities"] and tuple(values["activities"])
    same = {key: values[key] for key in ("name", "first_step", "active_steps", "warmup_steps", "gzip", "max_mib")}
    options = Options(activities, **{flag: values[flag] for flag in windows.FLAGS})
    return Window(**same, ranks=windows.ranks_of(values["ranks"]), options=options)


def kempner_window(settings: dict) -> Window | None:
    """KempnerForge's start_step and end_step -> Window, or None where it is not enabled.

    As there: start_step is the warm-up, start_step + 1 to end_step are recorded (what their profiler does, whatever
    its log line says).  start_step=0 has no warm-up and records from step 1 (theirs recorded from 2).
    """
    where, start_step, end_step = "instruments.window", settings["start_step"], settings["end_step"]
    windows.check(where, settings)
    if end_step <= start_step:
        remedy = f"end_step must be greater than start_step, which is {start_step}"
        raise ValueError(f"{where}.end_step={end_step}: {remedy}")
    if not settings["enable"]:
        return None
    return Window(
        name="window",
        first_step=start_step + 1,
        active_steps=end_step - start_step,
        warmup_steps=min(1, start_step),
        ranks=windows.ranks_of(settings["ranks"]),
        options=Options(**KEMPNER_FLAGS),
        gzip=settings["gzip"],
        max_mib=settings["max_mib"],
    )


def stage_options(settings: dict) -> Options:
    """Settings of the instrument stages, checked -> what its profiler records."""
    return Options(None, settings["record_shapes"], settings["profile_memory"], settings["with_stack"])
