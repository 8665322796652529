"""The training loop.  It knows no config, no file and no GPU: it steps, validates, and stops at the goal."""

from collections.abc import Callable

from bench.training.clock import Clock


def train(
    step: Callable[[int], None],
    evaluate: Callable[[], float],
    reached: Callable[[float], bool],
    num_steps: int,
    val_every_steps: int,
    clock: Clock,
    instruments,
    stop_after: int | None = None,
) -> tuple[int, float]:
    """Train until reached(val_loss) or num_steps.  Returns (steps done, last val_loss in nats per token).

    stop_after: end right after so many steps, fewer than num_steps, without a last validation; None: do not.

    step(k) does optimizer step k, k from 0.  evaluate() gives nats per token; it runs before the first step, then every
    val_every_steps and at the end, while the clock stands still.  instruments see every edge (instruments/base.py).
    """
    clock.start()
    steps_done = 0
    while True:
        is_last = steps_done == num_steps
        if is_last or steps_done % val_every_steps == 0:
            with clock.paused("validation"):  # syncs first: the steps before it are in train_s, validation is not
                instruments.on_phase("validation")
                val_loss = evaluate()
                instruments.on_validation(steps_done, val_loss, clock.train_s)
                is_over = is_last or reached(val_loss)
                if is_over:
                    clock.stop()
            if is_over:
                return steps_done, val_loss
        instruments.on_step_start(steps_done)
        step(steps_done)
        instruments.on_step_end(steps_done)
        steps_done += 1
        if steps_done == stop_after and steps_done < num_steps:
            clock.stop()
            return steps_done, val_loss
