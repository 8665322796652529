"""When a run of a sweep can no longer win: rules that launch() asks with every validation."""

from collections.abc import Iterable

from bench.record import step_files

Validations = list[tuple[int, float]]  # (step, val_loss in nats per token), the newest last


class AboveBest:
    """A run is stopped where its val_loss is more than above_nats over that of the best run before it, at one step.

    The best is the complete run with the lowest val_loss, among those that reached their target where one did.  Before
    from_frac of its steps nothing is stopped: curves cross early.
    """

    def __init__(self, above_nats: float, from_frac: float, runs: Iterable[dict]):
        """runs: records of the sweep so far, with their folders."""
        self.above_nats, self.from_frac = above_nats, from_frac
        complete = [run for run in runs if run["status"] == "complete"]
        reached = [run for run in complete if run["metrics"]["target_reached"]]
        self.best = min(reached or complete, key=lambda run: run["metrics"]["val_loss"], default=None)
        rows = step_files.read(self.best["folder"]) if self.best else ()
        self.curve = {row["step"]: row["val_loss"] for row in rows if row["val_loss"] is not None}

    def __call__(self, validations: Validations) -> str | None:
        """Why the run is to end now, or None."""
        step, val_loss = validations[-1]
        if step not in self.curve or step < self.from_frac * max(self.curve):
            return None
        above_nats = val_loss - self.curve[step]
        if above_nats <= self.above_nats:
            return None
        words = f"val_loss {val_loss:.4f} at step {step} is {above_nats:.4f} nats above that of {self.best['run_id']}"
        return f"{words}, the best of the sweep (hydra.launcher.stop_above_nats={self.above_nats:g})"
