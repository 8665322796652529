"""One rank's model, optimizer and data: what step() and evaluate() do, and the warm-up that is undone.

Legend: B sequences, T tokens.
"""

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from bench.config.schema import Config
from bench.config.stages import num_micro_steps
from bench.data.loader import Loader
from bench.data.shards import Shard
from bench.data.sources import datasets
from bench.training import causality, distributed, staging
from bench.training import evaluate as evaluation
from bench.training.build_model import build_model
from bench.training.reducer import reducer_for
from bench.training.step_log import StepLog


class Trainer:
    """Build, warm_up(), then hand step and evaluate to loop.train.  config is resolved, shards are checked."""

    def __init__(
        self, config: Config, ranks: distributed.Ranks, train_shards: Sequence[Shard], val_shards: Sequence[Shard]
    ):
        self.config, self.ranks = config, ranks
        eos_token = datasets.chosen(config.data).eos_token
        self.model = build_model(config, ranks.device, eos_token)
        self.timeline = staging.timeline_of(config, self.model)
        if config.hardware.compile:
            self._allow_graphs()
        self.optimizer = config.optim.build(self.model, ranks.rank, ranks.world_size, ranks.device.type)
        self.reducer = reducer_for(config, self.model, self.optimizer, ranks)
        rank_and_device = (ranks.rank, ranks.world_size, ranks.device)
        self.val_rows = evaluation.val_rows(config, val_shards, *rank_and_device)
        aligned_to = eos_token if config.data.bos_aligned else None
        shapes = staging.batch_shapes(config, self.timeline)
        self.loader = Loader(train_shards, shapes, *rank_and_device, eos_token=aligned_to)
        self._instruments = self._log = None
        self._checks = ()
        self._is_warming_up = False
        self._steps_done = 0
        self._staged = staging.StagedModel(self.model, self.optimizer, self.timeline)
        self._staged.at(0)

    def flops_per_token(self) -> list[tuple[int, int]]:
        """Of each of timeline.portions, in its window, and the same without masked pairs of tokens."""
        result = []
        for portion in self.timeline.portions:
            self._staged.set_window(portion.window_tokens)
            seq_len = portion.stage.seq_len
            result.append((self.model.flops_per_token(seq_len), self.model.flops_per_token_causal(seq_len)))
        self._staged.at(self._steps_done)
        return result

    def attach(self, instruments, log: StepLog, checks: Sequence[Callable[[], None]] = ()) -> None:
        """instruments see the phases, log takes the losses, each of checks is called at the end of each step."""
        self._instruments, self._log, self._checks = instruments, log, checks

    def autocast(self) -> contextlib.AbstractContextManager:
        """What the forward pass runs in, as hardware.dtype says."""
        return evaluation.autocast(self.config, self.ranks.device.type)

    def step(self, step: int) -> None:
        """Optimizer step number step: all its micro-steps, gradients synchronised in the last one only."""
        self._staged.at(step)
        num_parts = num_micro_steps(self.config, self.timeline.at(step).stage)
        for micro_step in range(num_parts):
            self._instruments.on_phase("data")
            tokens_BT, targets_BT = self.loader.next()
            self._instruments.on_phase("forward")
            with self.reducer.micro_step(is_last=micro_step == num_parts - 1):
                with self.autocast():
                    loss = self.reducer.forward(tokens_BT, targets_BT)
                loss = loss / num_parts
                self._instruments.on_phase("backward")
                loss.backward()
            self._log.add_loss(step, loss.detach())
        self._instruments.on_phase("optimizer")
        self.update(step)
        self._steps_done = step + 1
        for check in self._checks:
            check()

    def update(self, step: int) -> None:
        """The optimizer's part of a step: clip, set what changes with the step, update, drop the gradients.

        Parts that the stage updates every so many steps keep theirs till then, frozen ones drop them; the warm-up
        updates all.
        """
        self.reducer.clip(self.config.optim.grad_clip_norm)
        stage = self.timeline.at(step).stage
        self.config.optim.set_step(self.optimizer, step, self.config.goal.num_steps)
        stage.apply(self.optimizer)
        if self._is_warming_up or not (stage.update_every_steps or stage.frozen_steps):
            self.reducer.step()
            self.optimizer.zero_grad(set_to_none=True)
        else:
            frozen = [name for name in self.optimizer.parts if self.timeline.is_frozen(name, step)]
            due = [name for name in self.optimizer.parts if stage.is_due(name, step) and name not in frozen]
            self.reducer.step(due)
            self.optimizer.zero_grad(set_to_none=True, names=[*due, *frozen])

    def weights(self) -> dict[str, torch.Tensor]:
        """The model's, by the names that build_model() gives them."""
        return self.model.state_dict()

    def evaluate(self, max_batches: int | None = None, kept: list[torch.Tensor] | None = None) -> float:
        """Mean nats per token over exactly val_tokens; max_batches is for the warm-up, kept for the referee.

        In the window of goal.val_window_tokens, or in that of the step that comes next.
        """
        with self._in_val_window():
            batches = itertools.islice(self.val_rows.at(self.val_rows.places), max_batches)
            forward, device = self.reducer.evaluated, self.ranks.device
            return evaluation.evaluate(forward, batches, self.autocast, distributed.all_sum, device, kept)

    @contextlib.contextmanager
    def validating(self) -> Iterator[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]:
        """The model as a validation has it -> what evaluate() calls with tokens_BT and targets_BT."""
        forward, was_training = self.reducer.evaluated, self.model.training
        with self._in_val_window(), self.autocast():
            forward.eval()
            try:
                yield forward
            finally:
                forward.train(was_training)

    @contextlib.contextmanager
    def _in_val_window(self):
        self._staged.at(self._steps_done)
        if self.config.goal.val_window_tokens is not None:
            self._staged.set_window(self.config.goal.val_window_tokens)
        yield
        self._staged.at(self._steps_done)

    def lr_frac(self, step: int) -> float:
        """Learning rate of optimizer step number step, as a fraction of the peak."""
        stage = self.timeline.at(step).stage
        return self.config.optim.schedule.lr_frac(step, self.config.goal.num_steps) * (stage.lr_frac or 1.0)

    def warm_up(self) -> dict[str, float | str | list[str] | None]:
        """Run every graph of the run on real batches, see that the model is causal, restore all state bit for bit.

        That is two steps, and a validation before each, of every shape that the stages have; of windows that are no
        graph of their own only the first and the widest of each shape.

        Returns {"warmup_s", "compile_s", "compile_cache"} and what causality.check() found; compile_s is what the first
        call of each graph took longer than the second, compile_cache "warm" where inductor had every graph already;
        both None without torch.compile.  Raises causality.NotCausal.
        """
        started = time.perf_counter()
        saved = self._save()
        self._is_warming_up, first_s, second_s = True, 0.0, 0.0
        for portion in self._distinct():
            first_s += self._warm_up_step(portion.first_step)
            second_s += self._warm_up_step(portion.first_step + (portion.num_steps > 1))
        self._warm_up_last_window()
        data = self.config.data
        result = causality.check(self.model, data.vocab_size, data.seq_len, self.ranks.device, self.autocast)
        self._restore(saved)
        self._is_warming_up = False
        distributed.barrier()
        compiled = self.config.hardware.compile
        return {
            "warmup_s": time.perf_counter() - started,
            "compile_s": max(0.0, first_s - second_s) if compiled else None,
            "compile_cache": _compile_cache() if compiled else None,
            **result,
        }

    def close(self) -> None:
        """Drop the reducer before the process group goes: in the other order gloo aborts at exit now and then."""
        self.loader.close()
        self.reducer.close()
        self.reducer = None

    def _warm_up_last_window(self):
        """A window that grows is at the end of the run wider than in any step."""
        self._steps_done = self.config.goal.num_steps
        windows = {portion.window_tokens for portion in self.timeline.portions}
        if self.config.goal.val_window_tokens is None and self.timeline.window_after(self._steps_done) not in windows:
            self.evaluate(max_batches=1)

    def _warm_up_step(self, step):
        """Seconds of a validation and that step, on the step's own tokens."""
        place = {"step": step, "micro_step": 0}
        if self.loader.state_dict() != place:
            self.loader.load_state_dict(place)
        self._steps_done, started = step, time.perf_counter()
        self.evaluate(max_batches=1)
        self._instruments.on_step_start(step)
        self.step(step)
        self._instruments.on_step_end(step)
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
        self._steps_done = 0
        self._staged.at(0)
        torch.set_rng_state(saved["rng"])
        if saved["cuda_rng"] is not None:
            torch.cuda.set_rng_state(saved["cuda_rng"], self.ranks.device)

    def _distinct(self):
        return self.timeline.distinct(every_window=not getattr(self.model, "windows_are_data", False))

    def _allow_graphs(self):
        """Dynamo gives up on a function of which it has made more graphs than its limit, 8 in torch 2.13."""
        num_graphs = 2 * len(self._distinct()) + 2  # with and without gradients
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, num_graphs)


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
