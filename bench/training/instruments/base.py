"""The interface of instruments.  They observe: they never change a run's numbers, and their failure never ends a run.

The methods are called in this order: on_build_start, on_build_end, on_warmup_start, on_warmup_end (none for the steps
of the warm-up), on_run_start, then per step on_step_start, on_phase("data" | "forward" | "backward" | "optimizer", each
once a micro-step), on_step_end; on_phase("validation") and on_validation between steps, while the clock is paused;
on_run_end, or on_failure at any time.  Record in these methods, compute in summary(), which runs after training.

InstrumentSet calls all instruments of a run as one, collects their answers, and records those that fail.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.base import private
from bench.base.metric import VAL_BPB
from bench.base.paths import REPO
from bench.config.windows import ProfilerWindow
from bench.record import step_files

TIMED_EDGES = ("on_step_start", "on_phase", "on_step_end")  # called while the clock runs
PHASES = ("data", "forward", "backward", "optimizer")  # phases of a step, in the order in which they first begin
MAX_SUMMARY_CHARS = 2**20  # of one instrument in run.json (assumed)
NO_CELL = re.compile(r'[,;"\x00-\x1f\x7f-\x9f]|^[=+@-]')  # ends a cell or a flag, or begins a formula
Warned = dict[str, str]  # {"instrument", "edge", "error"}: what warning() returns
ANSWERS: dict[str, Any] = {  # the methods that instruments answer after training, and the types of their answers
    "columns": dict[str, dict[int, int | float | None]],
    "flags": dict[int, str],
    "summary": dict,
    "merge": dict,
    "doubts": list[str],
    "warnings": list[str],
}


@dataclass(frozen=True)
class Context:
    """What an instrument may know about its run."""

    folder: Path  # the run's folder; an instrument's files carry the rank in their names
    rank: int
    world_size: int
    device_type: str  # "cuda" or "cpu"
    num_steps: int
    marks: Any  # backend of bench.training.timing.clock, shared so that its events are pooled
    device_index: int | None = None  # torch.cuda's index of the GPU; None on a CPU
    emit: Callable[..., None] = lambda name, **facts: None  # emit("gc", ms=3.2) writes to events.jsonl, from any rank
    say: Callable[[str], None] = lambda text: None  # prints a line on the terminal (rank 0) and in this rank's log
    peaks: Any = None  # bench.training.memory's, shared with the run: a peak that another object resets is lost
    # rows of steps that an instrument of this rank disturbed; complete in summary()
    flagged: set[int] = field(default_factory=set)
    # rows of the run's StepLog, {"step", "step_ms", ...}; complete after on_run_end
    rows: list[dict[str, Any]] = field(default_factory=list)
    node: int = 0  # index of this rank's machine among the run's
    local_rank: int | None = None  # rank among those of its node; None: the same as rank
    local_size: int | None = None  # number of ranks on its node; None: all, world_size

    @property
    def is_first_of_node(self) -> bool:
        return (self.rank if self.local_rank is None else self.local_rank) == 0

    @property
    def ranks_of_node(self) -> int:
        return self.world_size if self.local_size is None else self.local_size

    def undisturbed(self, column: Mapping[int, float]) -> list[float]:
        """Returns the values of the rows that no instrument of this rank disturbed; call it in summary()."""
        return [value for row, value in column.items() if row not in self.flagged]


class Instrument:
    """Base class.  The launcher imports it without torch: import torch, and modules that need it, in methods."""

    name = "?"  # the name of its file, set when it is loaded
    in_timed_region = ""  # sentences: what it does while the clock runs, and what that costs
    # whether it disturbs steps, which every statistic then excludes; such a run is never ranked
    flags_steps = False

    @staticmethod
    def check(settings: dict[str, Any]) -> None:
        """Raises ValueError, before the run, if the settings (of the types in its yaml) are invalid."""

    @staticmethod
    def profiler_windows(settings: dict[str, Any]) -> list[ProfilerWindow] | None:
        """Returns the windows (bench/config/windows.py) in which it runs torch's profiler; None means at any time."""
        return []

    @staticmethod
    def program(settings: dict[str, Any], folder: Path, device_type: str) -> list[str]:
        """Returns the arguments of a program that runs each rank's command, such as a profiler; [] for none.

        folder is the run's.  Raises ValueError, before the run, if the program is missing or does not fit the device.
        """
        return []

    @staticmethod
    def last_step(settings: dict[str, Any]) -> int | None:
        """Returns the last step (the first is 1) of its windows; None means that it records the whole run."""
        return None

    @classmethod
    def is_in_timed_region(cls) -> bool:
        """Whether any of its code runs while the clock does; then only runs that all have it are comparable."""
        return any(getattr(cls, edge) is not getattr(Instrument, edge) for edge in TIMED_EDGES)

    def __init__(self, context: Context):
        self.context = context

    def on_build_start(self) -> None:
        """Model, optimizer and loader are about to be built."""

    def on_build_end(self) -> None:
        """Model, optimizer and loader are built, and nothing has been compiled or run yet."""

    def on_warmup_start(self) -> None:
        """Every graph of the run is about to be compiled and executed; the state is restored afterwards."""

    def on_warmup_end(self) -> None:
        """The state has been restored to what it was before the warm-up."""

    def on_run_start(self) -> None:
        """The clock is about to start."""

    def on_step_start(self, step: int) -> None:
        """An optimizer step begins; the first is 0."""

    def on_phase(self, name: str) -> None:
        """A phase begins, and the previous one has ended."""

    def on_step_end(self, step: int) -> None:
        """All work of the step is submitted; a GPU may still be doing it."""

    def on_validation(self, steps_done: int, val_loss: float, train_s: float) -> None:
        """A validation after steps_done steps gave val_loss nats per token; the clock stood at train_s."""

    def on_run_end(self) -> None:
        """The clock has stopped."""

    def on_failure(self, error: BaseException) -> None:
        """The run ends with this exception; only close() follows."""

    def columns(self) -> Mapping[str, Mapping[int, float | None]]:
        """Returns {column: {row: value}} for steps.csv, which keeps the maximum over ranks; row k is after k steps."""
        return {}

    def flags(self) -> dict[int, str]:
        """Returns {row: flag} for the steps that this instrument disturbed, which timing statistics exclude."""
        return {}

    def summary(self) -> dict[str, Any]:
        """Returns {name: number or text} for run.json, with units in the names.  Called after training."""
        return {}

    def merge(self, summaries: list[dict[str, Any]]) -> dict[str, Any]:
        """Returns what is recorded, by default rank 0's.  Called on rank 0 with every rank's summary(), or {}."""
        return summaries[0]

    def doubts(self) -> list[str]:
        """Returns reasons, with their numbers, not to trust the run; any of them makes the record suspect."""
        return []

    def warnings(self) -> list[str]:
        """Returns sentences on what it could not measure; they do not affect the record's validity."""
        return []

    def close(self) -> None:
        """Releases what is held; also called when the run failed."""


class InstrumentSet:
    """Calls all instruments as one.  An instrument that raises is dropped, with a warning in the record.

    essential has the same methods but is part of the run (bench/training/timing/step_log.py): what it raises is raised.
    """

    EDGES = tuple(name for name in vars(Instrument) if name.startswith("on_"))
    if TYPE_CHECKING:  # _bind() sets these methods

        def __getattr__(self, edge: str) -> Callable[..., None]: ...

    def __init__(self, instruments: Iterable[Instrument] = (), essential: Any = None, warnings: Iterable[Warned] = ()):
        self.instruments = list(instruments)
        self.warnings = list(warnings)
        self._dropped: list[Instrument] = []  # instruments that raised; the steps that they flagged stay flagged
        self.attach(essential)

    def attach(self, essential: Any) -> None:
        """Calls essential too from now on."""
        self._essential = essential
        self._bind()

    def _bind(self) -> None:
        """Binds each edge to the instruments that define it, so that the others cost nothing per step."""
        for edge in self.EDGES:
            empty = getattr(Instrument, edge)
            calls = [getattr(each, edge) for each in self.instruments if getattr(type(each), edge) is not empty]
            setattr(self, edge, self._guarded(edge, getattr(self._essential, edge, None), calls))

    def _guarded(self, edge: str, essential: Any, calls: list[Any]) -> Callable[..., None]:
        """Returns the function that calls essential and then calls; at the end of a step, essential is called last.

        So the run's marks enclose the instruments', and what instruments cost in a step is in its step_ms.
        """
        is_last = edge == "on_step_end"

        def call_all(*args: Any) -> None:
            if essential is not None and not is_last:
                essential(*args)
            for call in calls:
                try:
                    call(*args)
                except Exception as error:
                    self._drop(call.__self__, edge, error)
            if essential is not None and is_last:
                essential(*args)

        return call_all

    def _drop(self, instrument: Instrument, edge: str, error: Exception) -> None:
        self.warnings.append(warning(instrument.name, edge, error))
        self.instruments = [other for other in self.instruments if other is not instrument]
        self._dropped.append(instrument)
        self._bind()
        self._close(instrument)

    def collect(self, kind: str) -> dict[str, Any]:
        """Returns {instrument: value}; kind is "columns", "flags", "summary", "doubts" or "warnings".

        An instrument that raises, or whose value the record cannot hold, gets a warning instead.
        """
        collected: dict[str, Any] = {}
        column_names = {*step_files.RUN_COLUMNS, VAL_BPB.name}
        for instrument in self.instruments + (self._dropped if kind == "flags" else []):
            try:
                value = _cleaned(kind, instrument, _checked(kind, getattr(instrument, kind)()))
                if kind == "columns" and (names := column_names & value.keys()):
                    raise ValueError(f"columns {sorted(names)} are written by the run or by another instrument already")
            except Exception as error:
                self.warnings.append(warning(instrument.name, kind, error))
                continue
            collected[instrument.name] = value
            if kind == "columns":
                column_names.update(value)
        if kind == "flags":
            for instrument in self.instruments:
                instrument.context.flagged.update(*collected.values())
        return collected

    def collect_warnings(self) -> None:
        """Adds the instruments' own warnings() to self.warnings."""
        for name, sentences in self.collect("warnings").items():
            self.warnings += [{"instrument": name, "edge": "run", "error": sentence} for sentence in sentences]

    def merge(self, by_rank: list[dict[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
        """Merges every rank's {name: summary} into one; if merge() raises, keeps rank 0's and adds a warning."""
        instruments = {instrument.name: instrument for instrument in self.instruments + self._dropped}
        merged = {}
        for name in dict.fromkeys(name for summaries in by_rank for name in summaries):
            rank_summaries = [summaries.get(name) or {} for summaries in by_rank]
            merged[name] = rank_summaries[0]
            try:
                if name in instruments:
                    whole = _checked("merge", instruments[name].merge(rank_summaries))
                    merged[name] = _cleaned("merge", instruments[name], whole)
            except Exception as error:
                self.warnings.append(warning(name, "merge", error))
        return {name: summary for name, summary in merged.items() if summary}

    def close(self) -> None:
        for instrument in self.instruments:
            self._close(instrument)

    def _close(self, instrument: Instrument) -> None:
        try:
            instrument.close()
        except Exception as error:
            self.warnings.append(warning(instrument.name, "close", error))


def warning(name: str, edge: str, error: Exception) -> Warned:
    """Returns the record's warning about an instrument that failed: at which edge, with which exception."""
    return {"instrument": name, "edge": edge, "error": f"{type(error).__name__}: {error}"}


def _cleaned(kind: str, instrument: Instrument, value: Any) -> Any:
    """Returns an answer of an instrument of the user's own without what is private; names of columns and flags without
    what is no part of a cell of a csv."""
    if type(instrument).__module__.startswith("bench."):
        return value
    if kind == "columns":  # of a million numbers only the names are texts
        return {NO_CELL.sub("_", private.redact(name, REPO)) or "_": column for name, column in value.items()}
    clean = private.redact_all(value, REPO, is_prose=True, names=True)
    return {step: NO_CELL.sub("_", flag) for step, flag in clean.items()} if kind == "flags" else clean


def _checked(kind: str, value: Any) -> Any:
    """Returns the value.  Raises TypeError or ValueError unless its type is that in ANSWERS and numbers are finite."""
    import msgspec

    encoded = json.dumps(value, allow_nan=False)
    if ANSWERS[kind] is dict and len(encoded) > MAX_SUMMARY_CHARS:
        raise ValueError(f"{kind}() has {len(encoded):,} characters as JSON, of which {MAX_SUMMARY_CHARS:,} are kept")
    decoded = msgspec.json.decode(encoded, type=ANSWERS[kind])
    return value if ANSWERS[kind] is dict else decoded
