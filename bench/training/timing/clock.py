"""The only definition of training time, and the timing of a device's work.

The clock runs from start() to stop() and is stopped inside paused(reason).  Every edge first waits for the device, so
that work queued before an edge is paid for before it.  It is host time, time.perf_counter_ns; a run's time is the
maximum over ranks, which bench/training/run.py gathers.  Each edge is also reported, off the clock, to the launcher,
which has a separate clock (bench/record/outside_clock.py).

Marks measure the time between two places of a device's work without waiting in between: CUDA events from a pool, which
are read once the device has passed them, or host timestamps.

A full garbage collection of a training process takes 0.1 to 0.5 s and stops every thread, so speedruns tame it:
modded-nanogpt collects before its clock starts, nanochat also freezes and switches it off, torchtitan runs generation 1
every 50 steps.  hardware.gc chooses the policy, which is recorded.
"""

import contextlib
import gc
import os
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from bench.record.outside_clock import GO, PAUSE, SAVE, START, STOP

TIMING_PROTOCOL = {
    "id": "tp-1",  # a change of anything below needs a new id: runs timed differently are not comparable
    "clock": "host time.perf_counter_ns between barrier + device sync and device sync + barrier, maximum over ranks",
    "excluded": ["launch", "imports", "building", "compilation", "warm-up", "validation", "writing the record"],
    "in_timed_region": ["next batch", "forward", "backward", "optimizer", "gradient and Muon communication"],
    "step_ms": "CUDA events on the compute stream read late, or host time on a CPU; maximum over ranks",
    "step_lines": "train_time and step_avg of step lines come from the same marks; lines are written by another thread",
    "warm_up": "every graph of the race on real batches, then weights, optimizer, RNG and loader restored bit for bit",
    "garbage_collection": "collected and frozen before the start, left on",
}
# {hardware.gc: timing_protocol.garbage_collection}; None means "freeze", for which TIMING_PROTOCOL has the text
GC_WORDS = {
    "on": "collected before the start, left on",
    "off": "collected and frozen before the start, then off",
    "manual": "collected and frozen before the start, then off but for generation 1 every {every_steps} steps, timed",
}
GC_GENERATION = 1  # collected by "manual": young objects that survived one collection; frozen ones stay untouched


def reporter(path: str | None) -> Callable[[str], None]:
    """Returns a function that writes a word into the launcher's pipe, in about 2 us; without a path it does nothing.

    What cannot be written is lost, which the launcher reports: no rank waits for it.
    """
    try:
        fd = None if path is None else os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        fd = None

    def report(event: str) -> None:
        if fd is not None:
            with contextlib.suppress(OSError):
                os.write(fd, f"{event}\n".encode())

    return report


class Clock:
    """Measures training time: start(); ...; with paused("validation"): ...; stop().  sync() waits for the device.

    report(word) is called at each edge, while the clock is stopped.  train_s is that of the run's earlier segments.
    """

    def __init__(
        self,
        sync: Callable[[], None],
        barrier: Callable[[], None],
        now_ns: Callable[[], int] = time.perf_counter_ns,
        report: Callable[[str], None] = lambda event: None,
        train_s: float = 0.0,
    ):
        self._sync, self._barrier, self._now_ns, self._report = sync, barrier, now_ns, report
        self._running_since_ns: int | None = None
        self._train_ns, self._has_started, self._has_stopped = round(train_s * 1e9), False, False
        self.paused_ns: dict[str, int] = {}  # {reason: ns}
        self.num_pauses: dict[str, int] = {}

    def start(self) -> None:
        assert not self._has_started, "a clock is started once"
        self._has_started = True
        self._barrier()
        self._sync()
        self._report(START)
        self._running_since_ns = self._now_ns()

    @contextlib.contextmanager
    def paused(self, reason: str) -> Iterator[None]:
        assert self._running_since_ns is not None, "a clock is paused while it runs"
        self._sync()
        stopped_ns = self._now_ns()
        self._train_ns += stopped_ns - self._running_since_ns
        self._running_since_ns = None
        self._report(PAUSE if reason == "validation" else SAVE)
        yield
        if not self._has_stopped:
            self._barrier()  # waiting for the rank whose pause was longest is not training time
            self._sync()
            self._report(GO)
        started_ns = self._now_ns()
        self.paused_ns[reason] = self.paused_ns.get(reason, 0) + started_ns - stopped_ns
        self.num_pauses[reason] = self.num_pauses.get(reason, 0) + 1
        self._running_since_ns = None if self._has_stopped else started_ns

    def stop(self) -> None:
        """Stops for good.  Inside a pause, train_s stays what it was when the pause began, as in the last step line."""
        if self._running_since_ns is not None:
            self._sync()
            self._train_ns += self._now_ns() - self._running_since_ns
            self._running_since_ns = None
        self._report(STOP)
        self._has_stopped = True
        self._barrier()

    @property
    def train_s(self) -> float:
        """Training time in seconds up to the last edge; exact after stop() and inside paused()."""
        return self._train_ns / 1e9


class HostMarks:
    """Marks on a device that computes synchronously (a CPU): timestamps of time.perf_counter_ns."""

    def __init__(self, now_ns: Callable[[], int] = time.perf_counter_ns):
        self.mark = now_ns

    def ready(self, mark: int) -> bool:
        return True

    def wait(self, mark: int) -> None:
        pass

    def ms_between(self, start: int, end: int) -> float:
        return (end - start) / 1e6

    def free(self, *marks: int) -> None:
        pass


class CudaMarks:
    """CUDA events on the current stream, which are reused: creating an event costs more than recording it."""

    def __init__(self) -> None:
        self._pool: list[Any] = []  # torch.cuda.Event objects that are free

    def mark(self) -> Any:
        import torch

        event = self._pool.pop() if self._pool else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def ready(self, mark: Any) -> bool:
        return bool(mark.query())

    def wait(self, mark: Any) -> None:
        mark.synchronize()

    def ms_between(self, start: Any, end: Any) -> float:
        return float(start.elapsed_time(end))

    def free(self, *marks: Any) -> None:
        self._pool.extend(marks)


Marks = HostMarks | CudaMarks


def marks_for(device_type: str) -> Marks:
    """Returns the marks for "cuda" or "cpu"."""
    return CudaMarks() if device_type == "cuda" else HostMarks()


class StepMarks:
    """Measures named parts of each step in .ms, {name: {row: ms}}; parts of the same name in a step are added up.

    Call start(), then mark(name) where a part begins and the previous one ends, then end(row).  A mark is read after
    the device has passed it: nothing waits before read_all().  Between steps mark() does nothing.
    """

    READ_LATE_STEPS = 2  # a GPU is seldom further behind its host; marks that are not ready then are read later

    def __init__(self, marks: Marks, names: Iterable[str]):
        self._marks = marks
        self.ms: dict[str, dict[int, float]] = {name: {} for name in names}
        self._edges: list[tuple[str, Any]] | None = None  # [(name, mark)] of the current step; None between steps
        self._unread: list[tuple[int, list[tuple[str, Any]]]] = []  # [(row, edges)]

    def start(self) -> None:
        self._edges = []

    def mark(self, name: str) -> None:
        if self._edges is not None:
            self._edges.append((name, self._marks.mark()))

    def end(self, row: int) -> None:
        assert self._edges is not None, "the step has begun"
        self._edges.append(("", self._marks.mark()))
        self._unread.append((row, self._edges))
        self._edges = None
        if len(self._unread) > self.READ_LATE_STEPS and self._marks.ready(self._unread[0][1][-1][1]):
            self._read()

    def _read(self) -> None:
        row, edges = self._unread.pop(0)
        for (name, start), (_, end) in zip(edges, edges[1:]):
            self.ms[name][row] = self.ms[name].get(row, 0.0) + self._marks.ms_between(start, end)
        self._marks.free(*(mark for _, mark in edges))

    def read_all(self) -> None:
        while self._unread:
            self._marks.wait(self._unread[0][1][-1][1])
            self._read()


class GcPolicy:
    """Applies hardware.gc: call before_training(), each of .checks at the end of every step, then after_training()."""

    def __init__(self, policy: str | None = None, every_steps: int | None = None):
        self._policy, self._every_steps = policy, every_steps
        self._steps_done = 0

    @property
    def checks(self) -> tuple[Callable[[], None], ...]:
        """The functions to call at the end of each step; none unless the policy is "manual"."""
        return (self.each_step,) if self._policy == "manual" else ()

    def before_training(self) -> None:
        if self._policy == "on":
            gc.unfreeze()  # undoes the worker's freezing of its imports
        gc.collect()
        if self._policy != "on":
            gc.freeze()
        if self._policy in ("off", "manual"):
            gc.disable()

    def each_step(self) -> None:
        self._steps_done += 1
        if self._every_steps and self._steps_done % self._every_steps == 0:
            gc.collect(GC_GENERATION)

    def after_training(self) -> None:
        gc.enable()  # what is frozen stays frozen


def gc_protocol(policy: str | None, every_steps: int | None) -> dict[str, str]:
    """Returns the record's changes to TIMING_PROTOCOL; none for the default policy."""
    return {} if policy is None else {"garbage_collection": GC_WORDS[policy].format(every_steps=every_steps)}
