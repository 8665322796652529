"""The race's own bookkeeping: when each step ended, what its loss was, and whether that loss is still a number.

Part of every race, instruments or none.  Nothing waits for the device: a step is read one or more steps late.
"""

import math
import time

import torch

READ_LATE_STEPS = 1


class NonFiniteLoss(RuntimeError):
    """A loss became nan or inf at .step (a row of steps.csv: after that many steps)."""

    def __init__(self, step, loss, what="train_loss"):
        super().__init__(f"{what}={loss} at step {step}")
        self.step = step


class StepLog:
    """Rows as they become known: {"step", "t_ns", "step_ms", "train_s", "train_loss"}, and validations between them.

    on_row(row) and on_val(steps_done, val_loss, train_s) hand them on in order (to the scribe).

    step is the row of steps.csv, 1 after the first optimizer step; t_ns is the host's clock when the step began (on a
    GPU: began to be submitted); train_s is the clock at the end of that step; train_loss is this rank's, mean over its
    micro-steps.
    """

    def __init__(self, marks, device, num_steps, on_row=None, on_val=None, now_ns=time.perf_counter_ns, rows=None):
        self._marks, self._now_ns = marks, now_ns
        self._on_row, self._on_val = on_row, on_val
        on_gpu = device.type == "cuda"
        self._losses = torch.zeros(num_steps, device=device)
        self._host_losses = torch.zeros(num_steps, pin_memory=True) if on_gpu else self._losses
        self._unread = []  # [(step, host's clock, start mark, end mark)], oldest first
        self._segment = (0.0, None)  # train_s at the last validation, and the mark of the first step after it
        self._start = self._start_ns = None
        self.rows = [] if rows is None else rows
        self.val_losses = {}  # steps done -> nats per token

    def on_step_start(self, step):
        self._start_ns = self._now_ns()
        self._start = self._marks.mark()
        if self._segment[1] is None:
            self._segment = (self._segment[0], self._start)

    def add_loss(self, step, loss):
        """loss: this micro-step's share of the step's mean, a scalar tensor on the device."""
        self._losses[step].add_(loss)

    def on_step_end(self, step):
        if self._host_losses is not self._losses:
            self._host_losses[step : step + 1].copy_(self._losses[step : step + 1], non_blocking=True)
        self._unread.append((step, self._start_ns, self._start, self._marks.mark()))
        while len(self._unread) > READ_LATE_STEPS and self._marks.ready(self._unread[0][-1]):
            self._read()

    def on_validation(self, steps_done, val_loss, train_s):
        """The device has been waited for: read everything, and begin a new segment of the clock."""
        while self._unread:
            self._read()
        if self._segment[1] is not None:
            self._marks.free(self._segment[1])
        self._segment = (train_s, None)
        self.val_losses[steps_done] = val_loss
        if self._on_val:
            self._on_val(steps_done, val_loss, train_s)
        if not math.isfinite(val_loss):
            raise NonFiniteLoss(steps_done, val_loss, "val_loss")

    def _read(self):
        step, start_ns, start, end = self._unread.pop(0)
        loss = self._host_losses[step].item()
        before_s, segment_start = self._segment
        row = {
            "step": step + 1,
            "t_ns": start_ns,
            "step_ms": self._marks.ms_between(start, end),
            "train_s": before_s + self._marks.ms_between(segment_start, end) / 1e3,
            "train_loss": loss,
        }
        self._marks.free(end) if start is segment_start else self._marks.free(start, end)
        self.rows.append(row)
        if self._on_row:
            self._on_row(row)
        if not math.isfinite(loss):
            raise NonFiniteLoss(step + 1, loss)
