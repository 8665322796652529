"""What a GPU says of the harness, in one interleaved run of 20 minutes or less: against plain loops, and its own cost.

Where there are several, gpu_ranks.py races ways of reducing gradients over all of them before: under 15 minutes more.
A rehearsal does all of it at nano size on a CPU, so that on a GPU everything but the figures is known: its own figures
say nothing of a GPU.

The plain loops are nanoGPT's and modded-nanogpt's for track 3, written from github.com/karpathy/nanoGPT train.py and
github.com/KellerJordan/modded-nanogpt records/track_3_optimization/train_gpt_simple.py, without logging to files,
checkpoints and validation, for one process.  B batch, T tokens
"""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

import models
from bench.machine.gpus import nvml_facts, visible
from bench.machine.peak_rates import peak_flops
from bench.training.instruments.base import InstrumentSet
from bench.training.memory import History
from benchmarks import gpu_ranks, overhead
from benchmarks.overhead import Loops
from models.ladder.simple import Simple


@dataclass
class Setting:
    """What the loops share: tokens is one shard, uint16; a step is num_micro_steps times [num_seqs, seq_len]."""

    tokens: np.ndarray
    num_seqs: int
    seq_len: int
    num_micro_steps: int
    device: torch.device
    compile: bool
    autocast: Callable[[], AbstractContextManager]

    def compiled(self, function: Callable) -> Callable:
        """Returns the function, compiled by torch.compile where the setting asks for it."""
        return torch.compile(function, dynamic=False) if self.compile else function

    def on_device(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """A batch from pinned memory on a GPU, without waiting for the copy."""
        if self.device.type != "cuda":
            return tokens_BT
        return tokens_BT.pin_memory().to(self.device, non_blocking=True)


class NanoGPT:
    """nanoGPT's loop around any model with forward(tokens, targets): AdamW, clipping, a loss read every 10 steps."""

    def __init__(self, model: nn.Module, setting: Setting):
        self.model, self.setting, self._num_steps = model, setting, 0
        self._forward = setting.compiled(model)
        decays = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
        others = [parameter for parameter in model.parameters() if parameter.ndim < 2]
        groups = [{"params": decays, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        on_gpu = setting.device.type == "cuda"
        self._optimizer = torch.optim.AdamW(groups, lr=6e-4, betas=(0.9, 0.95), fused=on_gpu)
        self._batch = self._get_batch()

    def _get_batch(self):
        """Rows from random places of the shard."""
        setting, T = self.setting, self.setting.seq_len
        starts = torch.randint(len(setting.tokens) - T - 1, (setting.num_seqs,))
        rows = [torch.from_numpy(setting.tokens[i : i + T + 1].astype(np.int64)) for i in starts]
        both = torch.stack(rows)
        return setting.on_device(both[:, :-1].contiguous()), setting.on_device(both[:, 1:].contiguous())

    def step(self) -> None:
        num_micro_steps = self.setting.num_micro_steps
        for group in self._optimizer.param_groups:
            group["lr"] = 6e-4
        for _ in range(num_micro_steps):
            with self.setting.autocast():
                loss = self._forward(*self._batch) / num_micro_steps
            self._batch = self._get_batch()  # while the GPU is busy
            loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        if self._num_steps % 10 == 0:
            loss.item()
        self._num_steps += 1


class Track3:
    """train_gpt_simple.py: its model (models/ladder/simple.py) and settings, AdamW, compiled Muon."""

    def __init__(self, num_layers: int, width: int, vocab_size: int, setting: Setting):
        self.setting = setting
        model = Simple(vocab_size, setting.seq_len, num_layers, width // min(128, width // 2), width)
        model.init_weights(torch.Generator().manual_seed(0))
        self.model = model = model.to(setting.device)
        self._forward = setting.compiled(self.model)
        on_gpu = setting.device.type == "cuda"
        groups = [
            {"params": [model.embedding.weight], "lr": 0.7},
            {"params": [model.head.weight], "lr": 0.004},
            {"params": [parameter for parameter in model.parameters() if parameter.ndim < 2], "lr": 0.015},
        ]
        self._adamw = torch.optim.AdamW(groups, betas=(0.8, 0.95), eps=1e-10, weight_decay=0.001, fused=on_gpu)
        self._matrices = model.hidden_matrices()
        self._momenta = [torch.zeros_like(matrix) for matrix in self._matrices]
        self._update = setting.compiled(muon_update)
        self._batches = self._generate()
        self._num_steps, self._started_s = 0, time.perf_counter()

    def _generate(self) -> Iterator:
        """Batches in the shard's order, begun again at its end."""
        setting = self.setting
        size, start = setting.num_micro_steps * setting.num_seqs * setting.seq_len, 0
        while True:
            if start + size + 1 >= len(setting.tokens):
                start = 0
            part = torch.from_numpy(setting.tokens[start : start + size + 1].astype(np.int64))
            inputs, targets = setting.on_device(part[:-1]), setting.on_device(part[1:])
            yield inputs.view(-1, setting.seq_len), targets.view(-1, setting.seq_len)
            start += size

    def step(self) -> None:
        tokens_BT, targets_BT = next(self._batches)
        for tokens, targets in zip(tokens_BT.split(self.setting.num_seqs), targets_BT.split(self.setting.num_seqs)):
            (self._forward(tokens, targets) * targets.numel()).backward()  # the script adds up, and takes no mean
        self._adamw.step()
        with torch.no_grad():
            for matrix, momentum in zip(self._matrices, self._momenta):
                update = self._update(matrix.grad, momentum)
                matrix.mul_(1 - 0.025 * 0.05)
                matrix.add_(update, alpha=-0.025)
        self.model.zero_grad(set_to_none=True)
        self._num_steps += 1
        mean_ms = 1e3 * (time.perf_counter() - self._started_s) / self._num_steps
        with open(os.devnull, "a") as log:
            print(f"step:{self._num_steps} step_avg:{mean_ms:.2f}ms", file=log)


def muon_update(grad, momentum, mu=0.95):
    """Nesterov's look ahead, then 12 Newton-Schulz steps (2, -1.5, 0.5) in bfloat16."""
    momentum.lerp_(grad, 1 - mu)
    X = grad.lerp(momentum, mu).bfloat16()
    tall = X.size(0) > X.size(1)
    X = X.mT if tall else X
    X = X / (X.norm() + 1e-7)
    for _ in range(12):
        A = X @ X.mT
        X = 2 * X + (-1.5 * A + 0.5 * A @ A) @ X
    return (X.mT if tall else X) * max(1, grad.size(0) / grad.size(1)) ** 0.5


Keep = Callable[[list[tuple]], object]
MOST_MINUTES = 20.0  # of rounds, from the start; what is compiled before is in it
MOST_REDUCER_MINUTES = 5.0  # of rounds
MAX_ROUNDS = 30
NUM_BLOCK_STEPS = 2  # a step is about a second on one H200 (estimate)
GIB_PER_SEQ, GIB_FIXED = 0.6, 15.0  # of 1,024 tokens, compiled, and five models with their optimizers; estimated
FAST = ["model.num_heads=6", "model.residual_dtype=bfloat16"]  # as track 3's loop has it; and optim.muon_batched
RATIOS = (  # (faster, slower, target): seconds of the one over those of the other
    ("gpt2", "nanoGPT's loop", 0.95),
    ("modern", "track 3's loop", None),
    ("modern, fast settings", "track 3's loop", 0.95),
    ("gpt2", "gpt2 without instruments", 1.002),
    ("gpt2", "gpt2 in a bare loop", 1.002),
    ("gpt2", "gpt2 without telemetry", 1.001),
    ("gpt2 with memory history", "gpt2", None),
)


@dataclass(frozen=True)
class Size:
    """The size of all our contestants, by overrides.  A step has num_micro_steps times num_seqs of seq_len tokens."""

    overrides: list[str]
    num_seqs: int
    seq_len: int
    num_micro_steps: int
    muon: str  # optim.muon_batched of the fast one


def measure(rehearse: bool = False, minutes: float = MOST_MINUTES, keep: Keep = lambda rows: None) -> list[tuple]:
    """Returns a rows.Row (what, measured, sign, target, interval) of each figure; [] without GPU and rehearsal.

    minutes: no round but the first five begins later; those of several GPUs together come before.  keep: is given the
    rows so far after each round, as the measurement may be cut off.
    """
    gpus = [gpu for gpu in nvml_facts()["gpus"] if gpu["visible"] == 0]  # CUDA's device 0, which the run takes
    if not gpus and not rehearse:
        print("gpu: skipped, this machine shows no NVIDIA GPU; --rehearse runs it on a CPU", file=sys.stderr)
        return []
    size, where = (_nano(), "rehearsal on a CPU") if rehearse else (_small(gpus[0]), gpus[0]["name"])
    reducer_rows = _reducers(size, where, rehearse)  # first: what this process has on a GPU would be in its way
    keep(reducer_rows)
    started_s = time.perf_counter()
    with Contest(size) as contest:
        peak = None if rehearse else peak_flops(where, "bfloat16")
        if peak is None and not rehearse:
            print(f"gpu: no peak is known for {where}, so no MFU", file=sys.stderr)

        def rows_of(times_s):
            ratios = [_ratio(times_s, *ratio, where, rehearse) for ratio in RATIOS if {*ratio[:2]} <= times_s.keys()]
            return [*ratios, *_rates(contest, times_s, peak, where), *reducer_rows]

        def is_spent(times_s):
            keep(rows_of(times_s))
            return time.perf_counter() > started_s + 60 * minutes

        times_s = contest.rounds(2 if rehearse else MAX_ROUNDS, is_spent)
        rows = rows_of(times_s)
    print(f"gpu: {len(times_s['gpt2'])} rounds, {(time.perf_counter() - started_s) / 60:.1f} minutes", file=sys.stderr)
    return rows


def _reducers(size, where, rehearse):
    """The rows of gpu_ranks.py, of as many GPUs as divide a step; in a rehearsal of two processes."""
    world_size = 2 if rehearse else 2 ** (len(visible()).bit_length() - 1)  # 7 -> 4
    if world_size == 1:
        print("gpu: one GPU has no gradients to reduce", file=sys.stderr)
        return []
    overrides = [override for override in size.overrides if not override.startswith("hardware.num_processes")]
    return gpu_ranks.measure(overrides, world_size, 2 if rehearse else MAX_ROUNDS, 60 * MOST_REDUCER_MINUTES, where)


def _nano():
    """Two layers: a CPU without bfloat16 instructions is slow in it."""
    batch = ["data.seq_len=32", "data.batch_tokens=128", "goal.val_tokens=128", "hardware.micro_batch_seqs=2"]
    shape = ["model.num_layers=2", "model.width=64", "model.num_heads=2", "hardware.dtype=bfloat16"]
    return Size(["hardware=cpu", *shape, *batch], 2, 32, 2, "eager")


def _small(gpu):
    """GPT-2 124M in the steps of track gpt2_small, 524,288 tokens, in micro-steps that the GPU's memory holds."""
    seqs = 64
    while seqs > 1 and gpu["memory_gib"] and GIB_PER_SEQ * seqs + GIB_FIXED > 0.9 * gpu["memory_gib"]:
        seqs //= 2
    batch = ["data.seq_len=1024", "data.batch_tokens=524288", "goal.val_tokens=65536"]
    shape = ["model/size=small", "model.vocab_size=50304", f"hardware.micro_batch_seqs={seqs}"]
    return Size(["hardware=cuda", "hardware.num_processes=1", *shape, *batch], seqs, 1024, 512 // seqs, "compiled")


class Contest:
    """All contestants, built and warm: blocks is {name: seconds of NUM_BLOCK_STEPS steps of it, anew at each call}."""

    def __init__(self, size):
        self.size = size

        def ours(*overrides):
            made = Loops(["track=free", *size.overrides, *overrides], NUM_BLOCK_STEPS)
            self._ours.append(made)
            return made

        self._ours = []
        gpt2 = self.gpt2 = ours("model=gpt2", "optim=adamw")
        modern = ours("model=modern", "optim=muon")
        heads = FAST if gpt2.config.model.num_heads == 12 else FAST[1:]
        fast = ours("model=modern", "optim=muon", *heads, f"optim.muon_batched={size.muon}")
        self.plain = {"nanoGPT's loop": self._nanogpt(), "track 3's loop": self._track3()}
        self._history = History("benchmarks")
        silent = InstrumentSet([part for part in gpt2.instrumented.instruments if not hasattr(part, "pause")])
        self.blocks: dict[str, Callable[[], float]] = {
            "gpt2": lambda: gpt2.train(gpt2.instrumented),
            "gpt2 without instruments": lambda: gpt2.train(gpt2.plain),
            "gpt2 in a bare loop": gpt2.bare,
            "gpt2 without telemetry": lambda: gpt2.train(silent),
            "modern": lambda: modern.train(modern.instrumented),
            "modern, fast settings": lambda: fast.train(fast.instrumented),
            **{name: lambda loop=loop: self._plain_block(loop) for name, loop in self.plain.items()},
        }
        self.models = {"gpt2": gpt2.trainer.model, "nanoGPT's loop": gpt2.trainer.model}
        self.models |= {"modern": modern.trainer.model, "modern, fast settings": fast.trainer.model}
        if gpt2.device.type == "cuda":
            self.blocks["gpt2 with memory history"] = self._with_history
        for name in self.blocks:
            started_s = time.perf_counter()
            self._seconds_of(name)
            print(f"gpu: {name}: warm after {time.perf_counter() - started_s:.0f} s", file=sys.stderr, flush=True)

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self._history.stop()
        for ours in self._ours:
            ours.close()

    def rounds(self, max_rounds: int, is_spent: Callable[[Any], bool]) -> dict[str, list[float]]:
        """Returns overhead.measured() of all contestants."""
        blocks = {name: lambda name=name: self._seconds_of(name) for name in self.blocks}
        return overhead.measured(blocks, max_rounds, is_spent)

    def _with_history(self):
        self._history.start()
        try:
            return self.gpt2.train(self.gpt2.instrumented)
        finally:
            self._history.stop()

    def _seconds_of(self, name):
        for ours in self._ours:  # each has a sampler of its own, which its own block lets go on
            ours.sample(False)
        return self.blocks[name]()

    def _plain_block(self, loop):
        self.gpt2.sync()
        started_s = time.perf_counter()
        for _ in range(NUM_BLOCK_STEPS):
            loop.step()
        self.gpt2.sync()
        return time.perf_counter() - started_s

    def _setting(self):
        size, gpt2 = self.size, self.gpt2
        shape = (size.num_seqs, size.seq_len, size.num_micro_steps)
        return Setting(gpt2.tokens, *shape, gpt2.device, gpt2.config.hardware.compile, gpt2.trainer.autocast)

    def _nanogpt(self):
        of = self.gpt2.config.model
        model = models.load("gpt2")(of.vocab_size, self.size.seq_len, of.num_layers, of.num_heads, of.width)
        model.init_weights(torch.Generator().manual_seed(0))
        return NanoGPT(model.to(self.gpt2.device), self._setting())

    def _track3(self):
        of = self.gpt2.config.model
        return Track3(of.num_layers, of.width, of.vocab_size, self._setting())


def _ratio(times_s, name, other, target, where, rehearse):
    return overhead.ratio(f"{name} / {other} ({where})", times_s[name], times_s[other], None if rehearse else target)


def _rates(contest, times_s, peak, where):
    """Milliseconds a step of each contestant, and its MFU where the GPU's peak is known."""
    size, rows = contest.size, []
    num_tokens = size.num_micro_steps * size.num_seqs * size.seq_len
    for name, seconds in times_s.items():
        rows.append(gpu_ranks.step_ms(name, seconds, NUM_BLOCK_STEPS, where))
        if peak is not None and name in contest.models:
            mfu = contest.models[name].flops_per_token(size.seq_len) * num_tokens / (rows[-1][1] / 1e3) / peak
            rows.append((f"{name}, MFU ({where})", mfu, *((">=", 0.40) if name == "gpt2" else (None, None))))
    return rows
