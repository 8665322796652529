"""An instrument observes: it never changes a number of the run, and its failure never ends one.

The methods are called in this order: on_build_start, on_build_end, on_warmup_start, on_warmup_end (the warm-up's steps
are not shown), on_run_start, then per step on_step_start, on_phase("data" | "forward" | "backward" | "optimizer", each
once a micro-step), on_step_end; on_phase("validation") and on_validation between steps, while the clock is paused;
on_run_end, or on_failure at any time.  Record inside these, compute in summary(), which runs after training.

InstrumentSet is all instruments of a run as one: who is called at which edge, what they answer, what is recorded of a
failure.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.base.metric import VAL_BPB
from bench.config.windows import ProfilerWindow
from bench.record import step_files

TIMED_EDGES = ("on_step_start", "on_phase", "on_step_end")  # called while the clock runs
PHASES = ("data", "forward", "backward", "optimizer")  # of a step, in the order they first happen
Warned = dict[str, str]  # {"instrument", "edge", "error"}: warning()
ANSWERS: dict[str, Any] = {  # what instruments answer after training: its type
    "columns": dict[str, dict[int, int | float | None]],
    "flags": dict[int, str],
    "summary": dict,
    "merge": dict,
    "doubts": list[str],
    "warnings": list[str],
}


@dataclass(frozen=True)
class Context:
    """What an instrument may know of its run."""

    folder: Path  # of the run; an instrument's files carry the rank in their names
    rank: int
    world_size: int
    device_type: str  # "cuda" or "cpu"
    num_steps: int
    marks: Any  # bench.training.clock backend, shared so that its events are pooled
    device_index: int | None = None  # of torch.cuda, on a GPU
    emit: Callable[..., None] = lambda name, **facts: None  # emit("gc", ms=3.2): a line of events.jsonl, from any rank
    say: Callable[[str], None] = lambda text: None  # a line for the terminal (rank 0) and this rank's log
    peaks: Any = None  # of bench.training.memory, shared with the run: a peak that another object resets is lost
    # rows that an instrument of this rank disturbed; complete in summary()
    flagged: set[int] = field(default_factory=set)
    # of the run's StepLog: {"step", "step_ms", ...}; complete after on_run_end
    rows: list[dict[str, Any]] = field(default_factory=list)
    node: int = 0  # which of the run's machines this rank is on
    local_rank: int | None = None  # among the ranks of its node; None: rank
    local_size: int | None = None  # ranks of its node; None: world_size, all are

    @property
    def is_first_of_node(self) -> bool:
        return (self.rank if self.local_rank is None else self.local_rank) == 0

    @property
    def ranks_of_node(self) -> int:
        return self.world_size if self.local_size is None else self.local_size

    def undisturbed(self, column: Mapping[int, float]) -> list[float]:
        """The values of the rows that no instrument of this rank disturbed; in summary()."""
        return [value for row, value in column.items() if row not in self.flagged]


class Instrument:
    """Its file is read where torch is not: it imports torch, and what does so, inside functions."""

    name = "?"  # set when it is loaded: the name of its file
    in_timed_region = ""  # what it does between the edges of the clock, and what that costs
    # whether it disturbs steps, which are then left out of every statistic: such a run is never ranked
    flags_steps = False

    @staticmethod
    def check(settings: dict[str, Any]) -> None:
        """settings: of the types of its yaml.  Raises ValueError, before the run, for what cannot be."""

    @staticmethod
    def profiler_windows(settings: dict[str, Any]) -> list[ProfilerWindow] | None:
        """Windows of steps (bench/config/windows.py) in which it runs torch's profiler; None: at any time."""
        return []

    @staticmethod
    def program(settings: dict[str, Any], folder: Path, device_type: str) -> list[str]:
        """Words before each rank's own command: a program that runs it; [] for none.  folder: of the run.

        Raises ValueError, before the run, where it is not to be had, or not on such a device.
        """
        return []

    @staticmethod
    def last_step(settings: dict[str, Any]) -> int | None:
        """The last step (the first is 1) that it records in windows of steps; None: it records the whole run."""
        return None

    @classmethod
    def is_in_timed_region(cls) -> bool:
        """Whether any of its code runs while the clock does: then only runs that all have it are comparable."""
        return any(getattr(cls, edge) is not getattr(Instrument, edge) for edge in TIMED_EDGES)

    def __init__(self, context: Context):
        self.context = context

    def on_build_start(self) -> None:
        """Model, optimizer and loader are about to be built."""

    def on_build_end(self) -> None:
        """They are built, and nothing has been compiled or run yet."""

    def on_warmup_start(self) -> None:
        """Every graph of the run is about to be compiled and executed; all of it is undone afterwards."""

    def on_warmup_end(self) -> None:
        """The state is what it was before the warm-up."""

    def on_run_start(self) -> None:
        """The clock is about to start."""

    def on_step_start(self, step: int) -> None:
        """Optimizer step number step, from 0, begins."""

    def on_phase(self, name: str) -> None:
        """A phase begins; the one before it has ended."""

    def on_step_end(self, step: int) -> None:
        """All work of the step is submitted; a GPU may still be doing it."""

    def on_validation(self, steps_done: int, val_loss: float, train_s: float) -> None:
        """A validation after steps_done steps gave val_loss nats per token; the clock stood at train_s."""

    def on_run_end(self) -> None:
        """The clock has stopped."""

    def on_failure(self, error: BaseException) -> None:
        """The run ends with this exception; only close() follows."""

    def columns(self) -> Mapping[str, Mapping[int, float | None]]:
        """{column: {row: value}} for steps.csv; row k is after k steps.  The maximum over ranks is kept."""
        return {}

    def flags(self) -> dict[int, str]:
        """{row: word}: steps that this instrument disturbed; they enter no timing statistic."""
        return {}

    def summary(self) -> dict[str, Any]:
        """{name: number or words} for run.json, units in the names.  Called after training."""
        return {}

    def merge(self, summaries: list[dict[str, Any]]) -> dict[str, Any]:
        """Called on rank 0 with every rank's summary(), {} if it has none; returns what is recorded, here rank 0's."""
        return summaries[0]

    def doubts(self) -> list[str]:
        """Sentences, each a reason with its number why the run should not be trusted: the record becomes suspect."""
        return []

    def warnings(self) -> list[str]:
        """Sentences on what it could not measure: warnings in the record, without effect on its validity."""
        return []

    def close(self) -> None:
        """Release what is held; also called when the run failed."""


class InstrumentSet:
    """All instruments as one.  One that raises is dropped, with a warning in the record; the run goes on.

    essential has the same methods and is not an instrument but part of the run (bench/training/step_log.py): its
    exceptions are raised.
    """

    EDGES = tuple(name for name in vars(Instrument) if name.startswith("on_"))
    if TYPE_CHECKING:  # _bind() makes the edges

        def __getattr__(self, edge: str) -> Callable[..., None]: ...

    def __init__(self, instruments: Iterable[Instrument] = (), essential: Any = None, warnings: Iterable[Warned] = ()):
        self.instruments = list(instruments)
        self.warnings = list(warnings)
        self._dropped: list[Instrument] = []  # what they flagged before stays flagged
        self.attach(essential)

    def attach(self, essential: Any) -> None:
        """Call essential too from now on."""
        self._essential = essential
        self._bind()

    def _bind(self) -> None:
        """Each edge calls only the instruments that define it: the others cost nothing per step."""
        for edge in self.EDGES:
            empty = getattr(Instrument, edge)
            calls = [getattr(each, edge) for each in self.instruments if getattr(type(each), edge) is not empty]
            setattr(self, edge, self._guarded(edge, getattr(self._essential, edge, None), calls))

    def _guarded(self, edge: str, essential: Any, calls: list[Any]) -> Callable[..., None]:
        """The run's own marks enclose those of the instruments: what they cost in a step is in its step_ms."""
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

    def collect(self, what: str) -> dict[str, Any]:
        """what: columns, flags, summary, doubts or warnings -> {instrument name: its answer}.

        An instrument that raises, or whose answer the record cannot hold, has a warning instead.
        """
        answers: dict[str, Any] = {}
        column_names = {*step_files.RUN_COLUMNS, VAL_BPB.name}
        for instrument in self.instruments + (self._dropped if what == "flags" else []):
            try:
                answer = _checked(what, getattr(instrument, what)())
                if what == "columns" and (names := column_names & answer.keys()):
                    raise ValueError(f"columns {sorted(names)} are written by the run or by another instrument already")
            except Exception as error:
                self.warnings.append(warning(instrument.name, what, error))
                continue
            answers[instrument.name] = answer
            if what == "columns":
                column_names.update(answer)
        if what == "flags":
            for instrument in self.instruments:
                instrument.context.flagged.update(*answers.values())
        return answers

    def collect_warnings(self) -> None:
        """What instruments warn of by themselves joins the warnings."""
        for name, sentences in self.collect("warnings").items():
            self.warnings += [{"instrument": name, "edge": "run", "error": sentence} for sentence in sentences]

    def merge(self, by_rank: list[dict[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
        """[{name: summary} of each rank] -> {name: merged summary}; where merging raises, rank 0's and a warning."""
        known = {instrument.name: instrument for instrument in self.instruments + self._dropped}
        merged = {}
        for name in dict.fromkeys(name for summaries in by_rank for name in summaries):
            rank_summaries = [summaries.get(name) or {} for summaries in by_rank]
            merged[name] = rank_summaries[0]
            try:
                if name in known:
                    merged[name] = _checked("merge", known[name].merge(rank_summaries))
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
    """What is recorded of an instrument that failed: at which edge, with which exception."""
    return {"instrument": name, "edge": edge, "error": f"{type(error).__name__}: {error}"}


def _checked(what: str, answer: Any) -> Any:
    """The answer as a record can hold it: of the type in ANSWERS, its numbers finite.  Or TypeError, ValueError."""
    import msgspec

    decoded = msgspec.json.decode(json.dumps(answer, allow_nan=False), type=ANSWERS[what])
    return answer if ANSWERS[what] is dict else decoded
