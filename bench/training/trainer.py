"""A rank's model, optimizer and data: its steps, its validations, and the warm-up that is undone.

Legend: B sequences, T tokens.
"""

import contextlib
import copy
import itertools
import math
import numbers
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from bench.config import user_code
from bench.config.schema import Config
from bench.config.stages import num_micro_steps
from bench.data.loader import Loader
from bench.data.shards import Shard
from bench.data.sources import datasets
from bench.training import causality, checkpoint, distributed, side_effects
from bench.training.instruments.base import InstrumentSet
from bench.training.model import StagedModel, autocast, batch_shapes, build_model, mean_nats, timeline_of, val_rows
from bench.training.reducer import reducer_for
from bench.training.timing.step_log import StepLog
from models.stages import Portion


class Trainer:
    """Construct it, call warm_up(), then pass step and evaluate to loop.py.  config is resolved, shards are checked."""

    def __init__(
        self, config: Config, ranks: distributed.Ranks, train_shards: Sequence[Shard], val_shards: Sequence[Shard]
    ):
        self.config, self.ranks = config, ranks
        assert config.model is not None and config.optim is not None, "a script has its own"
        assert config.data.vocab_size is not None, "resolve.py has set it"
        self.arch, self._optim, self.vocab_size = config.model.arch, config.optim, config.data.vocab_size
        eos_token = datasets.chosen(config.data).eos_token
        self.model = build_model(config, ranks.device, eos_token)
        self.timeline = timeline_of(config, self.model)
        if config.hardware.compile:  # dynamo stops compiling a function that has more graphs than its limit
            num_graphs = 2 * len(self._distinct()) + 2  # with and without gradients
            torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, num_graphs)
        # compiler flags that the harness sets, here and in model.choose_kernels(), and not a contestant
        self.own_flags = ["dynamo.recompile_limit"] * bool(config.hardware.compile)
        self.own_flags += ["inductor.deterministic"] * config.hardware.deterministic
        self.optimizer = self._optim.optimizer(self.model, ranks.rank, ranks.world_size, ranks.device.type)
        self.reducer = reducer_for(config, self.model, self.optimizer, ranks)
        rank_and_device = (ranks.rank, ranks.world_size, ranks.device)
        self.val_rows = val_rows(config, val_shards, *rank_and_device)
        aligned_to = eos_token if config.data.bos_aligned else None
        shapes = batch_shapes(config, self.timeline)
        self.loader = Loader(train_shards, shapes, *rank_and_device, eos_token=aligned_to)
        self._instruments: Any = None  # set by attach()
        self._log: Any = None
        self._checks: Sequence[Callable[[], None]] = ()
        self._horizons = [(0, config.goal.num_steps)]  # [(step, the run's number of steps as known from it on)]
        self._is_warming_up = False
        self._steps_done = 0
        self.val_nats: list[torch.Tensor] = []  # the last validation's loss of each batch
        self.causality_seed = distributed.gather(causality.new_seed(config.seed))[0]  # rank 0's, for every rank
        self._staged = StagedModel(self.model, self.reducer, self.timeline)
        self._staged.at(0)

    def flops_per_token(self) -> list[tuple[int, int]]:
        """Returns the FLOPs per token of each of timeline.portions, with and without masked pairs of tokens."""

        def counted(method: str, seq_len: int | None) -> int:
            flops = getattr(self.model, method)(seq_len)
            if not (isinstance(flops, numbers.Real) and math.isfinite(flops) and float(flops) >= 0):
                remedy = "return the FLOPs of a training step per token as a number of 0 or more"
                raise ValueError(f"model.arch={self.arch}: {method}({seq_len}) gave {flops!r}: {remedy}")
            return int(round(flops))

        flops = []
        for portion in self.timeline.portions:
            self._staged.set_window(portion.window_tokens)
            seq_len = portion.stage.seq_len
            flops.append((counted("flops_per_token", seq_len), counted("flops_per_token_causal", seq_len)))
        self._staged.at(self._steps_done)
        return flops

    def attach(self, instruments: InstrumentSet, log: StepLog, checks: Sequence[Callable[[], None]] = ()) -> None:
        """Sets the instruments, which see the phases, the log of losses, and the checks to call after each step."""
        self._instruments, self._log, self._checks = instruments, log, checks

    def autocast(self) -> contextlib.AbstractContextManager[None]:
        """Returns the context of forward passes for hardware.dtype."""
        return autocast(self.config, self.ranks.device.type)

    def step(self, step: int) -> None:
        """Does an optimizer step, counted from 0: all its micro-steps, with gradients synchronised in the last only."""
        self._staged.at(step)
        stage = self.timeline.at(step).stage
        num_parts = num_micro_steps(self.config, stage)
        self.reducer.expect(self._due(step))
        for micro_step in range(num_parts):
            self._instruments.on_phase("data")
            tokens_BT, targets_BT = self.loader.next()
            self._instruments.on_phase("forward")
            with self.reducer.micro_step(is_last=micro_step == num_parts - 1):
                with self.autocast():
                    loss = self.reducer.forward(tokens_BT, targets_BT)
                loss = loss / num_parts
                self._instruments.on_phase("backward")
                (loss if stage.loss_scale is None else stage.loss_scale * loss).backward()
            self._log.add_loss(step, loss.detach())
        self._instruments.on_phase("optimizer")
        self.update(step)
        self._steps_done = step + 1
        for check in self._checks:
            check()

    def update(self, step: int) -> None:
        """Does the optimizer's part of a step: clips, sets what changes with the step, updates, drops the gradients.

        Parts that the stage updates only every few steps keep their gradients until then, frozen parts drop them; the
        warm-up updates all parts.
        """
        self.reducer.clip(self._optim.grad_clip_norm)
        stage = self.timeline.at(step).stage
        self._optim.set_step(self.optimizer, step, self.config.goal.num_steps)
        stage.apply(self.optimizer)
        due = self._due(step)
        self.reducer.step(due)
        if due is None:
            self.optimizer.zero_grad(set_to_none=True)
        else:
            frozen = [name for name in self.optimizer.parts if self.timeline.is_frozen(name, step)]
            self.reducer.drop_grads([*due, *frozen])

    def _due(self, step: int) -> list[str] | None:
        """Returns the optimizer's parts that a step updates; None means all."""
        stage = self.timeline.at(step).stage
        if self._is_warming_up or not (stage.update_every_steps or stage.frozen_steps):
            return None
        parts = self.optimizer.parts
        return [name for name in parts if stage.is_due(name, step) and not self.timeline.is_frozen(name, step)]

    def evaluate(self, max_batches: int | None = None) -> float:
        """Returns the mean nats per token over exactly val_tokens, and sets val_nats to the loss of each batch.

        The window is goal.val_window_tokens, or that of the next step.  max_batches is for the warm-up.
        """
        with self.validating() as forward:
            self.val_nats = [forward(*batch).detach().clone() for batch in self._val_batches(max_batches)]
        return mean_nats(self.val_nats, math.prod(self.val_rows.shape_BT), self.ranks.device)

    @contextlib.contextmanager
    def validating(self) -> Iterator[torch.nn.Module]:
        """A context that sets the model as it is validated now; yields what to call with tokens_BT and targets_BT."""
        forward: Any = self.reducer.evaluated
        was_training = self.model.training
        self._staged.at(self._steps_done)
        if self.config.goal.val_window_tokens is not None:
            self._staged.set_window(self.config.goal.val_window_tokens)
        forward.eval()
        try:
            with torch.no_grad(), self.autocast():
                yield forward
        finally:
            forward.train(was_training)
            self._staged.at(self._steps_done)

    def lr(self, step: int) -> float:
        """Returns the learning rate of an optimizer step."""
        stage_frac = self.timeline.at(step).stage.lr_frac or 1.0
        num_steps = next(num_steps for first, num_steps in reversed(self._horizons) if first <= step)
        return self._optim.lr * (self._optim.schedule.lr_frac(step, num_steps) * stage_frac)

    def set_horizon(self, step: int, num_steps: int) -> None:
        """From step on, uses the schedule of a run of num_steps; a run by the clock learns its length as it trains."""
        self._horizons.append((step, num_steps))

    def warm_up(self) -> dict[str, Any]:
        """Runs every graph of the run on real batches, checks causality, and restores all state bit for bit.

        For every shape that the stages have it does two steps, with a validation before each.  Windows that do not
        change the graph are warmed up only at the first and the widest of each shape.

        Returns {"warmup_s", "compile_s", "compile_cache", "causality"}; the last is causality.check()'s.  compile_s is
        how much longer the first call of each graph took than the second, and compile_cache is "warm" if inductor had
        every graph already; both are None without torch.compile.  Raises causality.NotCausal.
        """
        started_s = time.perf_counter()
        weights = {name: value.clone() for name, value in self.model.state_dict().items()}
        place = self.loader.state_dict()
        is_own = user_code.is_import_path(self._optim.name)  # a user's optimizer may begin with any state
        state = copy.deepcopy(self.optimizer.state_dict()) if is_own else {}
        self._is_warming_up, first_s, second_s = True, 0.0, 0.0
        with causality.forked_rng(self.ranks.device):
            for portion in self._distinct():
                first_s += self._warm_up_step(portion.first_step)
                second_s += self._warm_up_step(portion.first_step + (portion.num_steps > 1))
            self._warm_up_last_window()
            self._steps_done = 0
            self._staged.at(0)
            causal = self._check_causality(has_noise=True)
            self.model.load_state_dict(weights)
            if is_own:
                self.optimizer.load_state_dict(state)
            else:
                _zero_state(self.optimizer.state_dict())
            self.optimizer.zero_grad(set_to_none=True)
            self.loader.load_state_dict(place)
            self._staged.at(0)
        self._is_warming_up = False
        distributed.barrier()
        compile_s = compile_cache = None
        if self.config.hardware.compile:
            from torch._dynamo.utils import counters

            counts = counters["inductor"]
            compile_s = max(0.0, first_s - second_s)
            compile_cache = "warm" if counts["fxgraph_cache_hit"] and not counts["fxgraph_cache_miss"] else "cold"
        return {
            "warmup_s": time.perf_counter() - started_s,
            "compile_s": compile_s,
            "compile_cache": compile_cache,
            "causality": causal,
        }

    def state(self) -> dict[str, Any]:
        """Returns everything that the next step depends on, except the random state; its tensors are the live ones."""
        self._staged.at(self._steps_done)  # as at the start of the next step
        grads = {name: tensor.grad for name, tensor in self.model.named_parameters() if tensor.grad is not None}
        return {
            "tensors": {name: tensor.detach() for name, tensor in self._tensors()},
            "grads": grads,  # those of parts that a stage does not update in every step
            "optimizer": self.optimizer.state_dict(),
            "loader": self.loader.state_dict(),
            "horizons": self._horizons,
            "steps_done": self._steps_done,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restores a state(), after warm_up().  Raises ValueError if it is of another model or optimizer."""
        self._steps_done, self._horizons = state["steps_done"], [(step, num) for step, num in state["horizons"]]
        self._staged.at(self._steps_done)
        tensors = dict(self._tensors())
        if tensors.keys() != state["tensors"].keys():
            raise ValueError("model: the checkpoint is of another one")
        with torch.no_grad():
            for name, tensor in tensors.items():
                tensor.copy_(state["tensors"][name])
            if user_code.is_import_path(self._optim.name):
                self.optimizer.load_state_dict(state["optimizer"])
            else:
                checkpoint.copy_into(self.optimizer.state_dict(), state["optimizer"])
        for name, grad in state["grads"].items():
            self.model.get_parameter(name).grad = grad
        self.loader.load_state_dict(state["loader"])

    def check_at_end(self) -> dict[str, Any]:
        """Returns {"causality", "evaluation"} of the model that the run ends with, right after its last validation.

        They are causality.check() of the weights as they are, which also finds what a model does only after some number
        of calls, and side_effects.check().  Weights, buffers and the random state are restored.
        """
        saved = {name: tensor.clone() for name, tensor in self._tensors()}
        try:
            evaluation_found = self._check_evaluation()
            try:
                causal = self._check_causality(has_noise=False)
            except causality.NotCausal as error:
                causal = {"found": "not causal", "why": str(error)}
        finally:
            with torch.no_grad():
                for name, tensor in self._tensors():
                    if name in saved and saved[name].shape == tensor.shape:  # it may be a buffer for another shape now
                        tensor.copy_(saved[name])
        return {"causality": causal, "evaluation": evaluation_found}

    def close(self) -> None:
        """Drops the reducer; call it before the process group is destroyed, or gloo sometimes aborts at exit."""
        self.loader.close()
        self.reducer.close()
        del self.reducer

    def _tensors(self) -> list[tuple[str, torch.Tensor]]:
        """Returns all parameters and buffers, including those that state_dict() does not have."""
        return [*self.model.named_parameters(), *self.model.named_buffers()]

    def _check_causality(self, has_noise: bool) -> dict[str, Any]:
        """Checks each way in which the model is called, in the current stage."""

        @contextlib.contextmanager
        def training() -> Iterator[None]:
            self.model.train()
            with self.reducer.micro_step(is_last=False), self.autocast():  # reduces no gradients
                yield

        stage = self.timeline.at(self._steps_done).stage
        assert stage.micro_batch_seqs is not None and stage.seq_len is not None  # set in a resolved config
        seed, compiled = self.causality_seed + (not has_noise), bool(self.config.hardware.compile)
        (batch,) = self.val_rows.at([random.Random(seed).choice(self.val_rows.places)])
        ways = [
            causality.Way("evaluation", self.val_rows.shape_BT, self.reducer.evaluated, self.validating, batch),
            causality.Way("training", (stage.micro_batch_seqs, stage.seq_len), self.reducer.forward, training),
        ]
        return causality.check(self.model, ways, self.vocab_size, self.ranks.device, seed, compiled, has_noise)

    def _check_evaluation(self) -> dict[str, Any]:
        roots = {"model": self.model, "optimizer": self.optimizer}
        try:
            with self.validating() as forward:
                return side_effects.check(forward, self._val_batches(None), self.val_nats, roots, self.causality_seed)
        except Exception as error:
            return side_effects.unknown(f"repeating the last validation fails with {type(error).__name__}: {error}")

    def _warm_up_last_window(self) -> None:
        """Warms up the window of the last validation, since a growing one is then wider than in any step."""
        self._steps_done = self.config.goal.num_steps
        windows = {portion.window_tokens for portion in self.timeline.portions}
        if self.config.goal.val_window_tokens is None and self.timeline.window_after(self._steps_done) not in windows:
            self.evaluate(max_batches=1)

    def _warm_up_step(self, step: int) -> float:
        """Does a validation and a step, on the step's own tokens; returns the seconds that they took."""
        place = {"step": step, "micro_step": 0}
        if self.loader.state_dict() != place:
            self.loader.load_state_dict(place)
        self._steps_done, started_s = step, time.perf_counter()
        self.evaluate(max_batches=1)
        self._instruments.on_step_start(step)
        self.step(step)
        self._instruments.on_step_end(step)
        distributed.sync(self.ranks.device)
        return time.perf_counter() - started_s

    def _distinct(self) -> Sequence[Portion]:
        """Returns the portions whose graphs differ."""
        return self.timeline.distinct(every_window=not getattr(self.model, "windows_are_data", False))

    def _val_batches(self, max_batches: int | None) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return itertools.islice(self.val_rows.at(self.val_rows.places), max_batches)


def _zero_state(state: dict[str, Any]) -> None:
    """Sets an optimizer's state to zeros, in place: the state that it begins with, already allocated.

    AdamW's moments and step counts and Muon's momentum all begin at zero.  If the empty state from before the warm-up
    were loaded, the first timed step would allocate them again.  state_dict() refers to the live tensors.
    """
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            value.zero_()
        elif isinstance(value, dict) and key != "param_groups":
            _zero_state(value)
