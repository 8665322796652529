"""The race.  It knows no config, no file and no GPU: it runs steps, validates, and says when it is over."""


def race(step, evaluate, reached, num_steps, val_every_steps, clock, watch):
    """Run step(k) until reached(val_loss) or num_steps.  Returns (steps done, last val_loss).

    step(k) does optimizer step k, k from 0.  evaluate() gives nats per token; it runs before the first step, then every
    val_every_steps and at the end, while the clock stands still.  watch sees each edge (bench/instruments/base.py).
    """
    clock.start()
    done = 0
    while True:
        last = done == num_steps
        if last or done % val_every_steps == 0:
            with clock.paused("validation"):  # syncs first: the steps before it are all paid for, validation is not
                watch.on_phase("validation")
                val_loss = evaluate()
                watch.on_validation(done, val_loss, clock.train_s)
            if last or reached(val_loss):
                clock.stop()
                return done, val_loss
        watch.on_step_start(done)
        step(done)
        watch.on_step_end(done)
        done += 1
