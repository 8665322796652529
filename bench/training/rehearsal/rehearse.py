"""Rehearses a run for a GPU, on FakeTensors:  python -m bench.training.rehearsal.rehearse GPU LAYERS OVERRIDES

GPU is a key of device.GPUS, LAYERS the largest number of layers (0 for all of the model's).  Prints a JSON object.
Model, optimizer, stages, step and validation are the trainer's: of rank 0 of eight and then, in eager mode, of the last
rank, whose collectives must be the same.  Batches are FakeTensors, so no numbers are computed, but inductor's kernels
are compiled.
"""

import functools
import json
import sys
import time
import traceback
from types import SimpleNamespace
from typing import Any
from unittest import mock

from bench.training.rehearsal import device

NUM_GPUS = 8
MEMORY_GIB = 79.6  # memory of an 80 GB GPU as the driver reports it
EOS_VOCAB = 50257  # GPT-2's vocabulary, for a data source that declares none


def main(gpu: str, num_layers: str, *overrides: str) -> int:
    started_s = time.monotonic()
    report: dict[str, Any] = {"gpu": gpu, "overrides": overrides}
    try:
        device.load()
        report |= rehearse(gpu, int(num_layers), list(overrides))
    except device.Unavailable as error:
        report["unavailable"] = str(error)
    except Exception as error:
        report["error"] = f"{type(error).__name__}: {error}"[:600]
        report["stack"] = "".join(traceback.format_tb(error.__traceback__))[-3000:]
    report |= {"rehearsal_s": time.monotonic() - started_s, "cpu_s": time.process_time()}
    print(json.dumps(report))
    return 0 if "error" not in report and "unavailable" not in report else 1


def rehearse(gpu: str, num_layers: int, overrides: list[str]) -> dict[str, Any]:
    """Returns what a run with these overrides would do on that GPU: the keys of play() and facts(), and collectives."""
    from bench.config import compose, resolve, schema
    from bench.data.sources import datasets

    machine = schema.Machine(NUM_GPUS, 16, MEMORY_GIB)
    config = compose.compose(overrides, machine)
    vocab_size = datasets.chosen(config.data).vocab_size or EOS_VOCAB
    config = resolve.resolve(config, machine, vocab_size)  # before layers are cut: micro-batches fit the whole model
    assert config.model is not None  # a script is never rehearsed
    if num_layers:
        config.model.num_layers = min(config.model.num_layers, num_layers)
    device.install(device.GPUS[gpu])
    from bench.training.rehearsal.watch import Watch

    watch = Watch(device.GPUS[gpu], device.has_triton())
    watch.install()
    with watch.mode:
        trainer = build(config, watch)
        played = play(trainer, watch) | facts(trainer, watch)
        del trainer
        watch.rank, config.hardware.compile = NUM_GPUS - 1, False  # eager: gradients arrive in another order
        play(build(config, watch), watch)
    return played | {"collectives": len(watch.collectives.get(0, ())), "out_of_order": watch.out_of_order()}


def build(config: Any, watch: Any) -> Any:
    """Returns the trainer of rank watch.rank, with weights and batches on the fake device."""
    import torch

    from bench.training import distributed, reducer
    from bench.training import trainer as training
    from bench.training.model import choose_kernels

    watch.at("build")
    choose_kernels(config.hardware)
    ranks = _join(watch.rank)
    with (
        mock.patch.object(torch.nn.Module, "to", _to_device),
        mock.patch.multiple(training, Loader=Batches, val_rows=Rows),
        mock.patch.object(reducer, "Ddp", _ddp()),
    ):
        trainer = training.Trainer(config, ranks, [], [])
    everyone: Any = distributed
    everyone.from_first = lambda numbers: _first_order(trainer.reducer, watch)
    # in place of instruments and step log
    observer: Any = SimpleNamespace(on_phase=functools.partial(setattr, watch, "part"), add_loss=lambda *_: None)
    trainer.attach(observer, observer)
    return trainer


def _join(rank: int) -> Any:
    """Joins, as that rank, a process group whose collectives send nothing and which averages as NCCL does."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from bench.training import distributed

    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", rank=rank, world_size=NUM_GPUS, store=FakeStore())
    everyone: Any = distributed
    everyone._mean_op = lambda: dist.ReduceOp.AVG
    everyone.gather = lambda value: [value] * NUM_GPUS  # the real one pickles, and FakeTensors have no bytes
    return distributed.Ranks(rank, NUM_GPUS, torch.device("cuda", 0))


def _first_order(shard: Any, watch: Any) -> Any:
    """Returns what rank 0 broadcasts in the first step of hardware.reducer=shard, which a FakeTensor cannot hold."""
    if watch.rank == 0:
        watch.first_order = [shard._order.index(bucket) for bucket in shard._filled]
    return SimpleNamespace(tolist=lambda: watch.first_order)


def _ddp() -> Any:
    """Returns a stand-in for torch's DDP, whose C++ rejects FakeTensors: the same buckets, reduced after backward."""
    import torch
    import torch.distributed as dist

    from bench.training import distributed, reducer

    class Ddp(reducer.Ddp):
        def __init__(self, config: Any, model: Any, optimizer: Any, ranks: Any) -> None:
            reducer.Alone.__init__(self, config, model, optimizer)
            self._world_size = ranks.world_size
            for tensor in self._late:
                tensor._ddp_ignored = True
            late = {id(tensor) for tensor in self._late}
            reduced = [tensor for tensor in model.parameters() if tensor.requires_grad and id(tensor) not in late]
            limits = [dist._DEFAULT_FIRST_BUCKET_BYTES, reducer.BUCKET_BYTES]
            places, _ = dist._compute_bucket_assignment_by_size(reduced, limits)
            self._buckets = [[reduced[index] for index in bucket] for bucket in reversed(places)]

        def micro_step(self, is_last: bool) -> Any:
            return reducer.Alone.micro_step(self, is_last)

        def clip(self, most_norm: float | None) -> None:
            for bucket in self._buckets:
                num_elements = sum(tensor.numel() for tensor in bucket)
                distributed.all_sum(torch.empty(num_elements, dtype=bucket[0].dtype, device="cuda:0"))
            super().clip(most_norm)

        def _compiled(self, model: Any) -> Any:
            return torch.compile(model, dynamic=False, backend=reducer.cut_at(reducer.BUCKET_BYTES))

    return Ddp


def play(trainer: Any, watch: Any) -> dict[str, Any]:
    """Does a run's warm-up, then two steps of every portion; a graph that only those compile is a finding."""
    from bench.training import referee_loss

    trainer._is_warming_up = True
    for portion in trainer._distinct():
        _step(trainer, watch, portion.first_step, "warm-up")
        _step(trainer, watch, portion.first_step + (portion.num_steps > 1), "warm-up")
    trainer._steps_done = trainer.config.goal.num_steps
    _validate(trainer, watch, "warm-up validation")
    if callable(getattr(trainer.model, "logits", None)) and watch.rank == 0:  # track=free accepts models without it
        watch.at("referee")
        with trainer.validating():
            num_rows = max(1, referee_loss.MAX_TOKENS // trainer.val_rows.shape_BT[1])
            trainer.model.logits(trainer.val_rows.at([0])[0][0][:num_rows])
    trainer._is_warming_up = False
    num_graphs, num_recompiles = len(watch.graphs), len(watch.recompiles)
    per_step: dict[int, dict[str, int]] = {}
    single: dict[str, int] = {}
    num_tensors = len(list(trainer.model.parameters()))
    for portion in trainer.timeline.portions:  # all portions, not only those that the warm-up considers distinct
        calls, launches = watch.calls.copy(), watch.launches.total()
        _step(trainer, watch, portion.first_step, "step", validates=False)
        calls = watch.calls - calls
        per_step[portion.first_step] = {
            "triton_kernels": watch.launches.total() - launches,
            "other_operators": calls.total(),
        }
        single |= {name: count for name, count in watch.one_by_one(calls).items() if count >= num_tensors}
        _step(trainer, watch, portion.first_step + portion.num_steps - 1, "step")
    return {
        "num_graphs": num_graphs,
        "graphs_after_warmup": watch.graphs[num_graphs:],
        "recompiles_in_warmup": watch.recompiles[:num_recompiles],
        "recompiles_after_warmup": watch.recompiles[num_recompiles:],
        "per_step": per_step,
        "one_by_one": single,
    }


def facts(trainer: Any, watch: Any) -> dict[str, Any]:
    """Returns what is known at the end: shapes, kernels, graph breaks, syncs, and memory against its estimate."""
    from bench.base.units import GIB
    from bench.config import resolve

    config, stages = trainer.config, [portion.stage for portion in trainer._distinct()]
    estimates = [resolve.estimated_gib(config, stage.seq_len) for stage in stages]
    num_val_seqs, val_seq_len = trainer.val_rows.shape_BT
    val_fixed_gib, val_seq_gib = resolve.estimated_gib(config, val_seq_len, trains=False)
    compiled = [kernel for configs in watch.kernels.values() for kernel in configs]
    return {
        "num_layers": config.model.num_layers,
        "micro_batch_seqs": [stage.micro_batch_seqs for stage in stages],
        "seq_len": [stage.seq_len for stage in stages],
        "graph_breaks": watch.graph_breaks(),
        "without_kernel": watch.without_kernel(),
        "has_triton": watch.with_kernels,
        "num_kernels": len(watch.kernels),
        "largest_shared_bytes": max((kernel.get("shared_bytes", 0) for kernel in compiled), default=0),
        "shared_limit_bytes": watch.gpu.shared_memory_per_block_optin,
        "too_large": watch.too_large(),
        "num_flex": watch.num_flex,
        "num_maskless": watch.num_maskless,
        "syncs": [[*where, count] for where, count in watch.syncs.items()],
        "peak_gib": {phase: num_bytes / GIB for phase, num_bytes in watch.peaks.items()},
        "estimated_gib": max(
            fixed + stage.micro_batch_seqs * seq for (fixed, seq), stage in zip(estimates, stages, strict=True)
        ),
        "estimated_val_gib": val_fixed_gib + num_val_seqs * val_seq_gib,
        "memory_gib": MEMORY_GIB,
        "reducer": trainer.reducer.name,
    }


def _step(trainer: Any, watch: Any, step: int, phase: str, validates: bool = True) -> None:
    trainer._steps_done = step
    if validates:
        _validate(trainer, watch, f"{phase} validation")
    watch.at(phase)
    trainer.loader.stage = trainer.timeline.at(step).stage
    trainer.step(step)


def _validate(trainer: Any, watch: Any, phase: str) -> None:
    if watch.rank:  # only collectives of the last rank are compared, and a validation's passes have none
        return
    watch.at(phase)
    with trainer.validating() as forward:
        for tokens_BT, targets_BT in trainer.val_rows.at([0]):
            forward(tokens_BT, targets_BT)


def _to_device(model: Any, target: Any) -> Any:
    """Replaces Module.to(), which would split a tensor that two modules share if it is a FakeTensor."""
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
    """A stand-in for the loader, with tokens that have a shape and no values."""

    def __init__(self, shards: Any, shapes: Any, rank: int, world_size: int, target: Any, eos_token: Any = None):
        self.stage: Any = None  # stage of the next step

    def next(self) -> tuple[Any, Any]:
        return _batch(self.stage.micro_batch_seqs, self.stage.seq_len)


class Rows:
    """A stand-in for the validation's rows, of which at() returns a batch without values for each place."""

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


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
