"""The training loop of every run: what is timed, and in which order.  run.py and trainer.py supply its parts."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from bench.training.finish_line import FinishLine
from bench.training.timing.clock import Clock


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
