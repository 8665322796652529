"""The look after the race: trains a few more steps under torch's profiler, once everything has been measured.

By then the clock has stopped, the referee has seen the model, the weights are saved, and the measurements are written
(gather_result.py, with the status "begun" for the look).  The last steps are trained a second time, on their tokens:
some without the profiler, some that warm it up, some recorded by the instruments trace and, on a GPU, memory_history.
The run's results do not change.  The files are traces/look_rank0.pt.trace.json.gz, tables of operators in traces/ops/,
memory/look_rank0.html, and on a GPU memory/look_rank0.pickle.

A failure is a warning in the record.  A rank whose step fails while others wait for it in a collective must end, and
they with it: the launcher then keeps what was measured (bench/launch/finish.py).
"""

import dataclasses
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

from bench.base import atomic
from bench.config import windows
from bench.config.schema import LookConfig
from bench.training import distributed
from bench.training.instruments.base import Context, Instrument, InstrumentSet, Warned, warning
from bench.training.instruments.registry import LOOK as NAME
from bench.training.instruments.registry import load, look_instruments
from bench.training.instruments.trace import Trace
from bench.training.timing.step_log import StepLog
from bench.training.trainer import Trainer


class _NoLog(StepLog):
    """A StepLog that discards losses."""

    def __init__(self) -> None:
        self.rows = []

    def add_loss(self, step: int, loss: Any) -> None:
        pass


def repeated_steps(num_done: int, num_steps: int) -> list[int]:
    """Returns the last num_steps of num_done steps, from 0; a shorter run's steps are repeated as often as needed."""
    last = list(range(max(0, num_done - num_steps), num_done))
    return [last[index % len(last)] for index in range(num_steps)]


def look(config: LookConfig, trainer: Trainer, context: Context, num_done: int) -> tuple[dict[str, Any], list[Warned]]:
    """Trains and records; returns (facts for run.json["look"], the same on every rank; this rank's warnings).

    context is that of the run's instruments.  num_done is the run's number of steps, after which the look's count on.
    """
    began_s = time.perf_counter()
    num_steps = config.wait_steps + config.warmup_steps + config.active_steps
    context = dataclasses.replace(
        context,
        num_steps=num_done + num_steps,
        emit=lambda name, **facts: None,  # the run gets no event, line, flag or row
        say=lambda text: None,
        flagged=set(),
        rows=[],
    )
    first_step = num_done + config.wait_steps + config.warmup_steps + 1
    loaded, failed = load(look_instruments(config, first_step, context.device_type), context)
    instruments = InstrumentSet(loaded, warnings=failed)
    trainer.attach(instruments, _NoLog())
    try:
        _train(trainer, instruments, num_done, repeated_steps(num_done, num_steps))
    except Exception as error:
        if context.world_size > 1:
            raise
        instruments.warnings.append(warning(NAME, "a step", error))
    instruments.on_run_end()
    summaries: dict[str, Any] = instruments.collect("summary")
    pages: list[str] = []
    try:
        pages += _memory_pages(loaded, context)
    except Exception as error:
        instruments.warnings.append(warning(NAME, "memory page", error))
    instruments.close()
    own = {"files": [*_files(summaries), *pages], "summary": summaries.get("trace", {}).get(NAME, {})}
    everyone = distributed.gather(own)
    return _facts(everyone, first_step, time.perf_counter() - began_s), instruments.warnings


def _train(trainer: Trainer, instruments: InstrumentSet, num_done: int, steps: list[int]) -> None:
    instruments.on_run_start()
    for number, step in enumerate(steps, num_done):
        place = {"step": step, "micro_step": 0}
        if trainer.loader.state_dict() != place:
            trainer.loader.load_state_dict(place)
        instruments.on_step_start(number)
        trainer.step(step)
        instruments.on_step_end(number)
    distributed.sync(trainer.ranks.device)


def _memory_pages(instruments: list[Instrument], context: Context) -> Iterator[str]:
    """Writes memory/look_rankN.html, the page of allocations in the trace, and yields its path."""
    from bench.training.profiling import allocations

    for shot in (shot for instrument in instruments if isinstance(instrument, Trace) for shot in instrument.shots):
        if shot.saved is None:
            continue
        caption = f"memory while {windows.described(shot.window)} were recorded, after the race"
        about = f"{context.folder.name}, rank {context.rank}: {caption}, as torch's profiler saw it."
        html, _ = allocations.page_of_trace(shot.saved.path, f"{NAME}, rank {context.rank}: memory", about)
        path = context.folder / "memory" / f"{NAME}_rank{context.rank}.html"
        path.parent.mkdir(exist_ok=True)
        atomic.write_text(path, html, durable=False)
        yield path.relative_to(context.folder).as_posix()


def _files(summaries: dict[str, Any]) -> Iterator[str]:
    """Yields the files that the instruments wrote, relative to the run's folder."""
    yield from summaries.get("trace", {}).get(NAME, {}).get("files", ())
    for window in summaries.get("memory_history", {}).get("windows", ()):
        if "file" in window:
            yield window["file"]


def _facts(everyone: list[dict[str, Any]], first_step: int, look_s: float) -> dict[str, Any]:
    recorded = [rank["summary"] for rank in everyone if rank["summary"].get("status") == "recorded"]
    dropped: Counter[str] = sum((Counter(summary["dropped"]) for summary in recorded), Counter())
    return {
        "status": "recorded" if recorded else "not recorded",
        "steps": recorded[0]["steps"] if recorded else None,
        "num_events": sum(summary["num_events"] for summary in recorded),
        "dropped": dict(dropped),
        "profiled_step_ms": max((summary["profiled_step_ms"] or 0.0 for summary in recorded), default=None),
        "look_s": look_s,
        "files": [file for rank in everyone for file in rank["files"]],
    }
