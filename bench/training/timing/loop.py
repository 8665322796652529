"""The training loop of every run: what is timed, and in which order.  run.py and trainer.py supply its parts."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from bench.config.schema import GoalConfig
from bench.training.timing.clock import Clock

# share of the steps that still fit by the last estimate which are done before the clock is read again
FITTING_FRAC = 0.98
GROWTH = 10  # limits the first intervals, when little is known: the clock is read after 1 step, 10, 100 ...


class FinishLine:
    """Decides when a run is validated and when it ends: at its last step, at its target, or when its budget is spent.

    A budget in tokens or FLOPs is a number of steps.  A budget in seconds is kept without reading the clock in the
    timed region: at each validation, while the clock is paused, the time of the steps since the previous one says how
    many still fit.  So validations come closer together towards the end, and the last one comes before the budget is
    spent.  From the first validation on, the estimate also gives the schedule the length of the run.  All ranks use the
    slowest one's clock.

    flops_per_token and batch_tokens are those of a step.  slowest_s(train_s) returns the largest train_s of all ranks.
    on_horizon(step, num_steps) is called with the length of the run, as it is estimated from that step on.
    is_target(val_loss) says whether the run may end there.  stop_after ends the run right after so many steps, without
    a last validation; None does not.
    """

    def __init__(
        self,
        goal: GoalConfig,
        flops_per_token: float,
        batch_tokens: float,
        slowest_s: Callable[[float], float],
        on_horizon: Callable[[int, int], None],
        is_target: Callable[[float], bool] = lambda val_loss: False,
        stop_after: int | None = None,
    ):
        self._goal, self._slowest_s, self._on_horizon, self._is_target = goal, slowest_s, on_horizon, is_target
        self.num_steps = goal.num_steps
        self.last: tuple[int, float] = (0, 0.0)  # (steps done, train_s) at the last validation
        if goal.flop_budget is not None:
            step_flops = flops_per_token * batch_tokens
            fitting = math.floor(goal.flop_budget / step_flops)
            if fitting < 1:
                cost = f"a step of {batch_tokens:,.0f} tokens has {step_flops:.3g} FLOPs"
                remedy = "give more, or a smaller batch or model"
                raise ValueError(f"goal.flop_budget={goal.flop_budget:g}: {cost}: {remedy}")
            self.num_steps = min(self.num_steps, fitting)
            on_horizon(0, self.num_steps)
        self.stop_after = stop_after if stop_after is not None and stop_after < self.num_steps else None

    def next_stop(self, steps_done: int, val_loss: float, train_s: float) -> int | None:
        """Returns the number of steps after which the run is validated next; None if it is over."""
        if steps_done == self.num_steps or self._is_target(val_loss):
            return None
        every = self._goal.val_every_steps
        planned = min((steps_done // every + 1) * every, self.num_steps)
        if self._goal.time_budget_s is None:
            return planned
        if not steps_done:
            return 1
        train_s = self._slowest_s(train_s)
        before, before_s = self.last
        self.last = steps_done, train_s
        steps_left = (self._goal.time_budget_s - train_s) * (steps_done - before) / (train_s - before_s)
        fitting = math.floor(FITTING_FRAC * steps_left)
        if steps_done == 1 and steps_left < 0:
            why = f"the first step took {train_s:.3g} s"
            raise ValueError(f"goal.time_budget_s={self._goal.time_budget_s:g}: {why}: give more, or smaller steps")
        self._on_horizon(steps_done, min(self.num_steps, steps_done + max(1, math.floor(steps_left))))
        return min(planned, steps_done + fitting, GROWTH * steps_done) if fitting >= 1 else None


def train(
    step: Callable[[int], None],
    evaluate: Callable[[], float],
    finish_line: FinishLine,
    clock: Clock,
    instruments: Any,
    checkpoints: tuple[Callable[[int], bool], Callable[[int, int], bool]] | None = None,
    begin: Sequence[int] = (0, 0),
) -> tuple[int, float | None]:
    """Trains until the finish line.  Returns (steps done, last val_loss in nats per token).

    step(k) does optimizer step k, k from 0.  evaluate() returns nats per token; it runs before the first step, then
    where the finish line says, while the clock is paused.  instruments see every edge (instruments/base.py).
    checkpoints is (is_due(steps_done), save(steps_done, next_stop)); if save returns True, the run ends there, and the
    returned val_loss is None.  To resume, begin is the (steps_done, next_stop) that save was given.
    """
    clock.start()
    steps_done, next_stop = begin
    val_loss = math.nan
    while True:
        if steps_done == next_stop:
            with clock.paused("validation"):  # syncs first: the steps before it are in train_s, validation is not
                instruments.on_phase("validation")
                val_loss = evaluate()
                instruments.on_validation(steps_done, val_loss, clock.train_s)
                following = finish_line.next_stop(steps_done, val_loss, clock.train_s)
                if following is None:
                    clock.stop()
            if following is None:
                return steps_done, val_loss
            next_stop = following
        if checkpoints is not None and checkpoints[0](steps_done):
            with clock.paused("checkpoint"):
                if ends := checkpoints[1](steps_done, next_stop):
                    clock.stop()
            if ends:
                return steps_done, None
        instruments.on_step_start(steps_done)
        step(steps_done)
        instruments.on_step_end(steps_done)
        steps_done += 1
        if steps_done == finish_line.stop_after:
            clock.stop()
            return steps_done, val_loss
