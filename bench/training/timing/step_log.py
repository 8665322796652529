"""Logs each step's time and loss, and raises an error when a loss is no longer finite.

It is part of every run, with or without instruments.  Nothing waits for the device: steps are read one or more late.
"""

import contextlib
import math
import time
from collections.abc import Callable
from typing import Any

import torch

from bench.training.timing.clock import Marks

READ_LATE_STEPS = 1  # 1 or more, so that the last step before a validation is read together with it


class NonFiniteLoss(RuntimeError):
    """A loss became nan or inf at .step, a row of steps.csv."""

    def __init__(self, step: int, loss: float, name: str = "train_loss"):
        super().__init__(f"{name}={loss} at step {step}")
        self.step = step


class StepLog:
    """Passes a row per step to on_row(row): {"step", "t_ns", "step_ms", "train_s", "train_loss", "val_loss"}.

    step is the row of steps.csv, 1 after the first optimizer step.  t_ns is the host's clock when the step began (on a
    GPU, began to be submitted), train_s the run's clock at its end, train_loss this rank's mean over its micro-steps.
    val_loss is None if there was no validation; metrics() returns what else a validation measured.
    The validation before the first step is row 0, which has no step and is in .first_row instead of .rows.
    For a run that resumes from a checkpoint, rows and train_s are those of its earlier segments.
    """

    def __init__(
        self,
        marks: Marks,
        device: torch.device,
        num_steps: int,
        on_row: Callable[[dict[str, Any]], None] | None = None,
        now_ns: Callable[[], int] = time.perf_counter_ns,
        rows: list[dict[str, Any]] | None = None,
        metrics: Callable[[], dict[str, float | None]] = dict,
        train_s: float = 0.0,
    ):
        self._marks, self._now_ns, self._on_row, self._metrics = marks, now_ns, on_row, metrics
        on_gpu = device.type == "cuda"
        self._losses = torch.zeros(num_steps, device=device)
        self._host_losses = torch.zeros(num_steps, pin_memory=True) if on_gpu else self._losses
        self._unread: list[tuple[int, int, Any, Any]] = []  # [(step, host's clock, start mark, end mark)], oldest first
        # train_s when the clock was last paused, and the start mark of the first step after it
        self._segment: tuple[float, Any] = (train_s, None)
        self.first_row: dict[str, Any] | None = None  # row 0
        self._start: Any = None  # start mark of the current step
        self._start_ns = 0
        self.rows = [] if rows is None else rows
        self.step = self.rows[-1]["step"] if self.rows else 0  # the row of the step that runs, or of the last one

    def on_step_start(self, step: int) -> None:
        self._start_ns, self.step = self._now_ns(), step + 1
        self._start = self._marks.mark()
        if self._segment[1] is None:
            self._segment = (self._segment[0], self._start)

    def add_loss(self, step: int, loss: torch.Tensor) -> None:
        """Adds a micro-step's share of the step's mean loss, a scalar tensor on the device."""
        self._losses[step].add_(loss)

    def on_step_end(self, step: int) -> None:
        if self._host_losses is not self._losses:
            self._host_losses[step : step + 1].copy_(self._losses[step : step + 1], non_blocking=True)
        self._unread.append((step, self._start_ns, self._start, self._marks.mark()))
        while len(self._unread) > READ_LATE_STEPS and self._marks.ready(self._unread[0][-1]):
            self._read()

    def on_validation(self, steps_done: int, val_loss: float, train_s: float) -> None:
        """Reads everything (the caller has waited for the device), and begins a new segment of the clock."""
        while len(self._unread) > 1:
            self._read()
        if self._unread:
            self._read(val_loss, train_s)
        else:
            before = {"step": steps_done, "t_ns": None, "step_ms": None, "train_loss": None}
            self.first_row = before | {"train_s": train_s, "val_loss": val_loss, **self._metrics()}
            self._hand_on(self.first_row)
        self._begin_segment(train_s)

    def on_checkpoint(self, train_s: float) -> None:
        """Does the same as on_validation() at a checkpoint, where there is no val_loss."""
        while self._unread:
            self._read(train_s=train_s if len(self._unread) == 1 else None)
        self._begin_segment(train_s)

    def _begin_segment(self, train_s: float) -> None:
        if self._segment[1] is not None:
            self._marks.free(self._segment[1])
        self._segment = (train_s, None)

    def on_run_end(self) -> None:
        """Reads the steps that no validation followed; the caller has waited for the device."""
        while self._unread:
            self._read()

    def read_completed(self) -> None:
        """Reads what the device has completed, of a run that an error may be ending."""
        with contextlib.suppress(Exception):  # a GPU that failed, a loss that is not finite: the run has its error
            while self._unread and self._marks.ready(self._unread[0][-1]):
                self._read()

    def _read(self, val_loss: float | None = None, train_s: float | None = None) -> None:
        """Reads the oldest unread step; train_s is the clock's if it was paused after the step, else by marks."""
        step, start_ns, start, end = self._unread.pop(0)
        before_s, segment_start = self._segment
        row = {
            "step": step + 1,
            "t_ns": start_ns,
            "step_ms": self._marks.ms_between(start, end),
            "train_s": before_s + self._marks.ms_between(segment_start, end) / 1e3 if train_s is None else train_s,
            "train_loss": self._host_losses[step].item(),
            "val_loss": val_loss,
            **({} if val_loss is None else self._metrics()),
        }
        self._marks.free(end) if start is segment_start else self._marks.free(start, end)
        self.rows.append(row)
        self._hand_on(row)

    def _hand_on(self, row: dict[str, Any]) -> None:
        if self._on_row:
            self._on_row(row)
        for name in ("train_loss", "val_loss"):
            if row[name] is not None and not math.isfinite(row[name]):
                raise NonFiniteLoss(row["step"], row[name], name)
