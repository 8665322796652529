"""Trains small runs with stages in this process."""

import torch

from bench.config import compose, resolve, schema
from bench.data import shards
from bench.launch.prepare import prepare
from bench.training import distributed
from bench.training.instruments.base import InstrumentSet
from bench.training.timing.clock import marks_for
from bench.training.timing.step_log import StepLog
from bench.training.trainer import Trainer

CPU = schema.Machine(num_gpus=0, num_cpus=2)
SMALL = ["goal.num_steps=6", "goal.val_tokens=4096", "goal.val_every_steps=3", "hardware=cpu", "hardware.num_threads=1"]
SMALL += ["model.num_layers=1", "model.width=32", "model.num_heads=2"]
TWO_STAGES = "stages=[{until_step:2,batch_tokens:512,seq_len:64},{batch_tokens:1536,lr_frac:0.5}]"


def resolved(*overrides):
    return resolve.resolve(compose.compose(["track=free", *overrides], CPU), CPU, vocab_size=257)


def trainer_of(*overrides):
    return trainer_of_job(prepare(["track=free", *overrides], check_own=False))


def trainer_of_job(job, ranks=None):
    """Returns (trainer, its step log, {split: shards}) of a job."""
    files = {split: [shards.check(file.path) for file in getattr(job.dataset, split)] for split in ("train", "val")}
    trainer = Trainer(job.config, ranks or distributed.start("cpu", 60), files["train"], files["val"])
    log = StepLog(marks_for("cpu"), torch.device("cpu"), job.config.goal.num_steps)
    trainer.attach(InstrumentSet(essential=log), log)
    return trainer, log, files


def trained(trainer, log):
    """Trains 6 steps; returns their losses, and the validation losses before steps 0 and 3 and after the last."""
    val_losses = []
    for step in range(6):
        if step in (0, 3):
            val_losses.append(trainer.evaluate())
        log.on_step_start(step)
        trainer.step(step)
        log.on_step_end(step)
    val_losses.append(trainer.evaluate())
    trainer.close()
    return log._losses.tolist(), val_losses


def tensors(state):
    """All tensors of nested dicts, in order."""
    for value in state.values():
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, dict):
            yield from tensors(value)
