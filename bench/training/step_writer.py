"""Rank 0's step writer: writes step lines, steps.csv, events and progress from a thread beside the training loop.

The loop only appends to a deque.  Twice a second the thread writes what has arrived: lines in modded-nanogpt's format
to standard output, rows to steps.csv, events to events.jsonl, and .progress.tmp for the launcher's progress bar.  Until
gather_result.py replaces it at the end by the numbers of all ranks, steps.csv holds rank 0's, which survive a kill.
Other ranks keep their events until rank 0 gathers them.
"""

import collections
import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

from bench.base import atomic, utc
from bench.base.units import ms_from_s
from bench.record import run_folder, step_files
from bench.record.metrics import step_avg_ms

INTERVAL_S = 0.5
NOTE = "note: "  # marks a line of rank0.log that the terminal shows, besides the step lines


def step_lines(row: dict[str, Any], num_steps: int) -> list[str]:
    """Returns the step line of a row of StepLog, and the line of its validation if there was one."""
    start, train_ms = f"step:{row['step']}/{num_steps}", ms_from_s(row["train_s"])
    times = f"train_time:{train_ms:.0f}ms"
    if row["step"]:  # row 0 has no average
        times += f" step_avg:{step_avg_ms(train_ms, row['step']):.2f}ms"
    lines = [f"{start} {times}"] if row["step"] else []
    if row["val_loss"] is None:
        return lines
    bpb = f" val_bpb:{row['val_bpb']:.6f}" if row.get("val_bpb") is not None else ""
    return [*lines, f"{start} val_loss:{row['val_loss']:.4f}{bpb} {times}"]


class StepWriter:
    """A context around the training loop, which calls row(), event() and emitted(); check() raises the thread's error.

    tokens(num_steps) returns the tokens that so many steps train on, lr(step) a step's learning rate, and
    speed(train_s, num_steps) the numbers of progress (bench/record/metrics.py).  out(text) receives the step lines;
    None prints them on standard output.  metrics are columns of validations besides val_loss.  earlier are rows of the
    run's earlier segments, as row() received them.
    """

    def __init__(
        self,
        folder: Path,
        num_steps: int,
        tokens: Callable[[int], int | None],
        lr: Callable[[int], float],
        speed: Callable[[float, int], dict[str, Any]],
        out: Callable[[str], object] | None = None,
        metrics: Sequence[str] = (),
        earlier: Sequence[dict[str, Any]] = (),
    ):
        self._folder, self._num_steps, self._tokens = folder, num_steps, tokens
        self._lr, self._speed = lr, speed
        self._out = out or (lambda text: os.write(1, text.encode()))
        self._new: collections.deque[tuple[str, dict[str, Any]]] = collections.deque()
        self._stop = threading.Event()
        self._error: Exception | None = None
        self._columns = (*step_files.RUN_COLUMNS, *metrics)
        self.rows = [self._with_facts(row) for row in earlier]  # rank 0's rows of steps.csv
        step_files.write(folder, self.rows, self._columns)
        self._thread = threading.Thread(target=self._run, name="step-writer", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, error_type: object, *error: object) -> None:
        """Writes what is left.  Raises the thread's error, unless the loop has raised one."""
        self._stop.set()
        self._thread.join()
        if error_type is None:
            self.check()

    def row(self, row: dict[str, Any]) -> None:
        self._new.append(("row", row))
        if row["val_loss"] is not None:
            self.event("eval_stop", step=row["step"], val_loss=row["val_loss"], train_s=row["train_s"])

    def event(self, name: str, **facts: Any) -> None:
        self.emitted({"t_ns": time.perf_counter_ns(), "utc": utc.now(), "event": name, **facts})

    def emitted(self, event: dict[str, Any]) -> None:
        """Takes an event that is complete."""
        self._new.append(("event", event))

    def check(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            while not self._stop.wait(INTERVAL_S):
                self._write()
            self._write()
        except Exception as error:  # for example a full disk; the loop raises it at the end of its next step
            self._error = error

    def _write(self) -> None:
        new = [self._new.popleft() for _ in range(len(self._new))]
        rows = [row for kind, row in new if kind == "row"]
        if rows:
            step = rows[-1]["step"]
            self.rows += map(self._with_facts, rows)
            step_files.append(self._folder, self.rows[-len(rows) :], self._columns)
            self._out("".join(f"{line}\n" for row in rows for line in step_lines(row, self._num_steps)))
            progress = {"step": step, "num_steps": self._num_steps}
            progress |= self._speed(rows[-1]["train_s"], step) if step else {}
            atomic.write_json(self._folder / run_folder.PROGRESS, progress, durable=False)
        for kind, event in new:
            if kind == "event":
                step_files.append_event(self._folder, event)

    def _with_facts(self, row: dict[str, Any]) -> dict[str, Any]:
        step = row["step"]
        facts = {"flags": "", "tokens": self._tokens(step), "lr": self._lr(step - 1) if step else None}
        return facts | {name: row[name] for name in self._columns if name in row}


class RankEvents:
    """Call events("gc", ms=3.2) from anywhere on this rank.  .kept has the events not yet written, oldest first."""

    def __init__(self, rank: int):
        self._rank = rank
        self._sink: Callable[[dict[str, Any]], None] | None = None
        self.kept: list[dict[str, Any]] = []

    def __call__(self, name: str, **facts: Any) -> None:
        now_ns = time.perf_counter_ns()
        t_ns = facts.pop("t_ns", now_ns)  # passed if the event happened earlier
        event = {"t_ns": t_ns, "utc": utc.now((now_ns - t_ns) / 1e9), "event": name, "rank": self._rank, **facts}
        self._sink(event) if self._sink else self.kept.append(event)

    @contextlib.contextmanager
    def handed_to(self, sink: Callable[[dict[str, Any]], None]) -> Iterator[None]:
        """Within this context, passes events to sink, beginning with those that were kept."""
        while self.kept:
            sink(self.kept.pop(0))
        self._sink = sink
        try:
            yield
        finally:
            self._sink = None

    def write(self, folder: Path) -> None:
        """Writes the kept events of a run that has failed, for which nothing will be gathered."""
        while self.kept:
            with contextlib.suppress(OSError):
                step_files.append_event(folder, self.kept.pop(0))
