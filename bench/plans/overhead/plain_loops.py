"""Training as plain scripts do it, to race the harness against: nanoGPT's loop, and modded-nanogpt's for track 3.

Written from github.com/karpathy/nanoGPT train.py and github.com/KellerJordan/modded-nanogpt
records/track_3_optimization/train_gpt_simple.py, without logging to files, checkpoints and validation, for one process.
B batch, T tokens
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

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
        """function by torch.compile, where the setting asks for it."""
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
