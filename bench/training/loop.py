"""The training loop: what is timed, and in which order.  Every run goes through it; run.py and trainer.py fill it."""

from collections.abc import Callable, Sequence
from typing import Any

from bench.training.clock import Clock


def train(
    step: Callable[[int], None],
    evaluate: Callable[[], float],
    reached: Callable[[float], bool],
    num_steps: int,
    val_every_steps: int,
    clock: Clock,
    instruments: Any,
    stop_after: int | None = None,
    next_stop: Callable[[int, float], int | None] | None = None,
    checkpoints: tuple[Callable[[int], bool], Callable[[int, int], bool]] | None = None,
    begin: Sequence[int] | None = None,
) -> tuple[int, float | None]:
    """Train until reached(val_loss) or num_steps.  Returns (steps done, last val_loss in nats per token).

    stop_after: end right after so many steps, fewer than num_steps, without a last validation; None: do not.
    next_stop: (steps done, train_s) -> the steps after which to validate next, None: the run is over.
    checkpoints: (is one due after so many steps, save it -> whether the run ends there); then val_loss is None.
    begin: what the second of these was given, (steps done, next_stop's last answer): the run goes on from there.

    step(k) does optimizer step k, k from 0.  evaluate() gives nats per token; it runs before the first step, then every
    val_every_steps and at the end, while the clock stands still.  instruments see every edge (instruments/base.py).
    """
    clock.start()
    steps_done, stop = begin or (0, 0)
    validated_at = None if begin is None else steps_done
    while True:
        is_last = steps_done == num_steps
        is_due = is_last or (steps_done % val_every_steps == 0 if next_stop is None else steps_done == stop)
        if is_due and steps_done != validated_at:
            with clock.paused("validation"):  # syncs first: the steps before it are in train_s, validation is not
                instruments.on_phase("validation")
                val_loss = evaluate()
                instruments.on_validation(steps_done, val_loss, clock.train_s)
                following = None if next_stop is None else next_stop(steps_done, clock.train_s)
                is_over = is_last or reached(val_loss) or (next_stop is not None and following is None)
                stop = following or 0
                if is_over:
                    clock.stop()
            if is_over:
                return steps_done, val_loss
        if checkpoints is not None and checkpoints[0](steps_done):
            with clock.paused("checkpoint"):
                if ends := checkpoints[1](steps_done, stop):
                    clock.stop()
            if ends:
                return steps_done, None
        instruments.on_step_start(steps_done)
        step(steps_done)
        instruments.on_step_end(steps_done)
        steps_done += 1
        if steps_done == stop_after and steps_done < num_steps:
            clock.stop()
            return steps_done, val_loss
