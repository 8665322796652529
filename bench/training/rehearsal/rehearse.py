"""One experiment as a GPU would run it, on FakeTensors.  python -m bench.training.rehearsal.rehearse OVERRIDES

Prints one JSON object.  The model, optimizer, stages, step and validation are the trainer's own, of one rank of eight;
batches are FakeTensors, so that no number is computed, and torch.compile is inductor, its kernels for sm_90.
"""

import contextlib
import json
import sys
import time
import traceback
from typing import Any

from bench.training.rehearsal import device

NUM_GPUS = 8
MEMORY_GIB = 79.6  # of an H100 as the driver says it, of which "80 GB" are sold
EOS_VOCAB = 50257  # GPT-2's, where the data source does not say


def main(overrides: list[str]) -> int:
    started_s = time.monotonic()
    found: dict[str, Any] = {"overrides": overrides}
    try:
        device.load()
        found |= rehearse(overrides)
    except device.Unavailable as error:
        found["unavailable"] = str(error)
    except Exception as error:
        found["error"] = f"{type(error).__name__}: {error}"[:600]
        found["stack"] = "".join(traceback.format_tb(error.__traceback__))[-3000:]
    found["rehearsal_s"] = time.monotonic() - started_s
    print(json.dumps(found))
    return 0 if "error" not in found and "unavailable" not in found else 1


def rehearse(overrides: list[str]) -> dict[str, Any]:
    """What the run of these overrides would do on an H100: see watch.Watch, and findings()."""
    from bench.config import compose, resolve, schema
    from bench.data.sources import datasets

    machine = schema.Machine(NUM_GPUS, 16, MEMORY_GIB)
    config = compose.compose(overrides, machine)
    vocab_size = datasets.chosen(config.data).vocab_size or EOS_VOCAB
    config = resolve.resolve(config, machine, vocab_size)
    device.install()
    from bench.training.rehearsal.watch import Watch

    watch = Watch(device.has_triton())
    watch.install()
    with watch.mode:
        trainer = build(config, watch)
        return play(trainer, watch) | facts(trainer, watch)


def build(config: Any, watch: Any) -> Any:
    """The trainer of rank 0, its weights on the made-up device, its batches made up."""
    import torch

    from bench.training import trainer as training
    from bench.training.distributed import Ranks
    from bench.training.model import choose_kernels

    watch.at("build")
    choose_kernels(config.hardware)
    module: Any = torch.nn.Module
    moved, module.to = module.to, _to_device
    names: Any = training
    names.Loader, names.val_rows = Batches, Rows
    try:
        trainer = training.Trainer(config, Ranks(0, 1, torch.device("cuda", 0)), [], [])
    finally:
        module.to = moved
    silent: Any = _Silent()
    trainer.attach(silent, silent)
    return trainer


def play(trainer: Any, watch: Any) -> dict[str, Any]:
    """The warm-up as a run does it, and then a step of every portion of the run: what that compiles is a finding."""
    trainer._is_warming_up = True
    for portion in trainer._distinct():
        _step(trainer, watch, portion.first_step, "warm-up")
        _step(trainer, watch, portion.first_step + (portion.num_steps > 1), "warm-up")
    trainer._steps_done = trainer.config.goal.num_steps
    _validate(trainer, watch, "warm-up validation")
    trainer._is_warming_up = False
    warmed_up = len(watch.graphs), len(watch.recompiles)
    per_step = {}
    portions = trainer.timeline.portions
    shapes: dict[Any, Any] = {}
    for portion in portions:
        shapes.setdefault((portion.shape, portion.window_tokens), portion)
    for portion in shapes.values():
        before = watch.launches.total(), watch.calls.total()
        _step(trainer, watch, portion.first_step, "step", validates=False)
        per_step[portion.first_step] = {
            "triton_kernels": watch.launches.total() - before[0],
            "other_operators": watch.calls.total() - before[1],
        }
        _step(trainer, watch, portion.first_step + portion.num_steps - 1, "step")
    return {
        "num_graphs": warmed_up[0],
        "graphs_after_warmup": watch.graphs[warmed_up[0] :],
        "recompiles_in_warmup": watch.recompiles[: warmed_up[1]],
        "recompiles_after_warmup": watch.recompiles[warmed_up[1] :],
        "per_step": per_step,
    }


def facts(trainer: Any, watch: Any) -> dict[str, Any]:
    """What is known once all has been seen."""
    from bench.base.units import GIB

    config = trainer.config
    compiled = [one for found in watch.kernels.values() for one in found]
    return {
        "arch": trainer.arch,
        "micro_batch_seqs": [portion.stage.micro_batch_seqs for portion in trainer._distinct()],
        "seq_len": [portion.stage.seq_len for portion in trainer._distinct()],
        "graph_breaks": watch.graph_breaks(),
        "without_kernel": watch.without_kernel(),
        "has_triton": watch.with_kernels,
        "num_kernels": len(watch.kernels),
        "num_compiled": len([one for one in compiled if "error" not in one]),
        "largest_shared_bytes": max((one.get("shared_bytes", 0) for one in compiled), default=0),
        "too_large": watch.too_large(),
        "num_flex": watch.num_flex,
        "num_maskless": watch.num_maskless,
        "syncs": [[*where, count] for where, count in watch.syncs.items()],
        "peak_gib": {phase: num_bytes / GIB for phase, num_bytes in watch.peaks.items()},
        "memory_gib": MEMORY_GIB,
        "dtype": config.hardware.dtype,
    }


def _step(trainer: Any, watch: Any, step: int, phase: str, validates: bool = True) -> None:
    trainer._steps_done = step
    if validates:
        _validate(trainer, watch, f"{phase} validation")
    watch.at(phase)
    trainer.loader.stage = trainer.timeline.at(step).stage
    trainer.step(step)


def _validate(trainer: Any, watch: Any, phase: str) -> None:
    import torch

    watch.at(phase)
    with trainer.validating() as forward, torch.no_grad():
        for tokens_BT, targets_BT in trainer.val_rows.at([0]):
            forward(tokens_BT, targets_BT)


def _to_device(model: Any, target: Any) -> Any:
    """Module.to(), which leaves a tensor that two modules share in two when its tensors are FakeTensors."""
    import torch

    moved: dict[int, Any] = {}
    with torch.no_grad():
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    if id(parameter) not in moved:
                        value = torch.nn.Parameter(parameter.detach().to(target), parameter.requires_grad)
                        moved[id(parameter)] = parameter, value
                    module._parameters[name] = moved[id(parameter)][1]
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    if id(buffer) not in moved:
                        moved[id(buffer)] = buffer, buffer.to(target)
                    module._buffers[name] = moved[id(buffer)][1]
    return model


class Batches:
    """In place of the loader: tokens that have a shape and no values."""

    def __init__(self, shards: Any, shapes: Any, rank: int, world_size: int, target: Any, eos_token: Any = None):
        self.stage: Any = None  # of the step that comes

    def next(self) -> tuple[Any, Any]:
        return _batch(self.stage.micro_batch_seqs, self.stage.seq_len)


class Rows:
    """In place of the validation's rows: one batch."""

    def __init__(self, config: Any, shards: Any, rank: int, world_size: int, target: Any):
        from bench.config.stages import val_seq_len

        seq_len, tokens = val_seq_len(config), config.hardware.micro_batch_seqs * config.data.seq_len
        rank_seqs = config.goal.val_tokens // (seq_len * (config.hardware.num_processes or 1))
        most = max(1, tokens // seq_len)
        num_seqs = next(num for num in range(max(1, min(most, rank_seqs)), 0, -1) if rank_seqs % num == 0)
        self.shape_BT = num_seqs, seq_len

    def at(self, places: Any) -> Any:
        return [_batch(*self.shape_BT) for _ in places]


def _batch(num_seqs: int, seq_len: int) -> tuple[Any, Any]:
    import torch

    tokens_BT, targets_BT = (torch.zeros(num_seqs, seq_len, dtype=torch.int64, device="cuda:0") for _ in range(2))
    return tokens_BT, targets_BT


class _Silent:
    """Instruments and step log that see nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **more: contextlib.nullcontext()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
