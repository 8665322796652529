"""One rank's model, optimizer and data: what step() and evaluate() do, and the warm-up that is undone.

Legend: B sequences, T tokens.
"""

import contextlib
import itertools
import time
from collections.abc import Callable, Sequence

import torch

import models
from bench.config.schema import Config, num_micro_steps
from bench.data.loader import Loader, val_batches
from bench.data.shards import Shard
from bench.training import causality, distributed
from bench.training import evaluate as evaluation
from bench.training.reducer import reducer_for
from bench.training.step_log import StepLog
from bench.user_code import classes

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Trainer:
    """Build, warm_up(), then hand step and evaluate to loop.train.  config is resolved, shards are checked."""

    def __init__(
        self, config: Config, ranks: distributed.Ranks, train_shards: Sequence[Shard], val_shards: Sequence[Shard]
    ):
        self.config, self.ranks, self._val_shards = config, ranks, val_shards
        self._num_micro_steps = num_micro_steps(config)
        self.model = _build_model(config, ranks.device)
        self.optimizer = config.optim.build(self.model, ranks.rank, ranks.world_size, ranks.device.type)
        self.reducer = reducer_for(config, self.model, self.optimizer, ranks)
        batch = (config.data.batch_tokens, config.data.seq_len, self._num_micro_steps)
        self.loader = Loader(train_shards, *batch, ranks.rank, ranks.world_size, ranks.device)
        self._instruments = self._log = None
        self._checks = ()

    def attach(self, instruments, log: StepLog, checks: Sequence[Callable[[], None]] = ()) -> None:
        """instruments see the phases, log takes the losses, each of checks is called at the end of each step."""
        self._instruments, self._log, self._checks = instruments, log, checks

    def autocast(self) -> contextlib.AbstractContextManager:
        """What the forward pass runs in, as hardware.dtype says."""
        dtype = DTYPES[self.config.hardware.dtype]
        if dtype is torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.ranks.device.type, dtype=dtype)

    def step(self, step: int) -> None:
        """Optimizer step number step: all its micro-steps, gradients synchronised in the last one only."""
        for micro_step in range(self._num_micro_steps):
            self._instruments.on_phase("data")
            tokens_BT, targets_BT = self.loader.next()
            self._instruments.on_phase("forward")
            with self.reducer.micro_step(is_last=micro_step == self._num_micro_steps - 1):
                with self.autocast():
                    loss = self.reducer.forward(tokens_BT, targets_BT)
                loss = loss / self._num_micro_steps
                self._instruments.on_phase("backward")
                loss.backward()
            self._log.add_loss(step, loss.detach())
        self._instruments.on_phase("optimizer")
        self.update(step)
        for check in self._checks:
            check()

    def update(self, step: int) -> None:
        """The optimizer's part of a step: clip, set what changes with the step, update, drop the gradients."""
        self.reducer.clip(self.config.optim.grad_clip_norm)
        self.config.optim.set_step(self.optimizer, step, self.config.goal.num_steps)
        self.reducer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def evaluate(self, max_batches: int | None = None) -> float:
        """Mean nats per token over exactly val_tokens; max_batches is for the warm-up."""
        batches, forward = self._val_batches(max_batches), self.reducer.evaluated
        return evaluation.evaluate(forward, batches, self.autocast, distributed.all_sum, self.ranks.device)

    def lr_frac(self, step: int) -> float:
        """Learning rate of optimizer step number step, as a fraction of the peak."""
        return self.config.optim.schedule.lr_frac(step, self.config.goal.num_steps)

    def warm_up(self) -> dict[str, float | str | list[str] | None]:
        """Run every graph of the run on real batches, see that the model is causal, restore all state bit for bit.

        Returns {"warmup_s", "compile_s", "compile_cache"} and what causality.check() found; compile_s is what the first
        call of each graph took longer than the second, compile_cache "warm" where inductor had every graph already;
        both None without torch.compile.  Raises causality.NotCausal.
        """
        started = time.perf_counter()
        saved = self._save()
        first_s = self._timed(lambda: self._warmup_pass(0))
        second_s = self._timed(lambda: self._warmup_pass(min(1, self.config.goal.num_steps - 1)))
        data = self.config.data
        found = causality.check(self.model, data.vocab_size, data.seq_len, self.ranks.device, self.autocast)
        self._restore(saved)
        distributed.barrier()
        compiled = self.config.hardware.compile
        return {
            "warmup_s": time.perf_counter() - started,
            "compile_s": max(0.0, first_s - second_s) if compiled else None,
            "compile_cache": _compile_cache() if compiled else None,
            **found,
        }

    def close(self) -> None:
        """Drop the reducer before the process group goes: in the other order gloo aborts at exit now and then."""
        self.loader.close()
        self.reducer.close()
        self.reducer = None

    def _warmup_pass(self, step):
        self.evaluate(max_batches=1)
        self._instruments.on_step_start(step)
        self.step(step)
        self._instruments.on_step_end(step)

    def _timed(self, work):
        started = time.perf_counter()
        work()
        distributed.sync(self.ranks.device)
        return time.perf_counter() - started

    def _save(self):
        on_gpu = self.ranks.device.type == "cuda"
        return {
            "weights": {name: value.clone() for name, value in self.model.state_dict().items()},
            "loader": self.loader.state_dict(),
            "rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state(self.ranks.device) if on_gpu else None,
        }

    def _restore(self, saved):
        self.model.load_state_dict(saved["weights"])
        _zero_state(self.optimizer.state_dict())
        self.optimizer.zero_grad(set_to_none=True)
        self.loader.load_state_dict(saved["loader"])
        torch.set_rng_state(saved["rng"])
        if saved["cuda_rng"] is not None:
            torch.cuda.set_rng_state(saved["cuda_rng"], self.ranks.device)

    def _val_batches(self, max_batches):
        val_tokens, config, ranks = self.config.goal.val_tokens, self.config, self.ranks
        shape = (config.data.seq_len, config.hardware.micro_batch_seqs)
        batches = val_batches(self._val_shards, val_tokens, *shape, ranks.rank, ranks.world_size, ranks.device)
        return itertools.islice(batches, max_batches)


def _compile_cache():
    from torch._dynamo.utils import counters

    counts = counters["inductor"]
    return "warm" if counts["fxgraph_cache_hit"] and not counts["fxgraph_cache_miss"] else "cold"


def _zero_state(state):
    """An optimizer's state -> zeros, in place: the state it begins with, already allocated.

    AdamW's moments and step counts and Muon's momentum all begin at zero.  Loading the empty state of before the
    warm-up would have the first timed step allocate them again.  state_dict() refers to the live tensors.
    """
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            value.zero_()
        elif isinstance(value, dict) and key != "param_groups":
            _zero_state(value)


def _build_model(config, device):
    """The same weights on every rank and device: drawn on the CPU from the run's seed."""
    arch = config.model.arch
    model_class = classes.load("model.arch", arch) if classes.is_import_path(arch) else models.load(arch)
    model = model_class(
        vocab_size=config.model.vocab_size,
        seq_len=config.data.seq_len,
        num_layers=config.model.num_layers,
        num_heads=config.model.num_heads,
        width=config.model.width,
        **({"residual_dtype": config.model.residual_dtype} if config.model.residual_dtype else {}),
        **(config.model.args or {}),
    )
    model.init_weights(torch.Generator().manual_seed(config.seed))
    torch.manual_seed(config.seed)
    return model.to(device)
