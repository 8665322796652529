"""The training loop: what is timed, and in which order.  Every run goes through it; run.py and trainer.py fill it."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from bench.training.clock import Clock
from bench.training.finish_line import FinishLine


def train(
    step: Callable[[int], None],
    evaluate: Callable[[], float],
    finish_line: FinishLine,
    clock: Clock,
    instruments: Any,
    checkpoints: tuple[Callable[[int], bool], Callable[[int, int], bool]] | None = None,
    begin: Sequence[int] = (0, 0),
) -> tuple[int, float | None]:
    """Train until the finish line.  Returns (steps done, last val_loss in nats per token).

    step(k) does optimizer step k, k from 0.  evaluate() gives nats per token; it runs before the first step, then where
    the finish line says, while the clock stands still.  instruments see every edge (instruments/base.py).
    checkpoints: (is one due after so many steps, save it -> whether the run ends there); then val_loss is None.
    begin: (steps done, steps after which the next validation comes), which the second of these was given.
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
