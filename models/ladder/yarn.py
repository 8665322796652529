"""Records 28 to 33, August and September 2025: gated heads, windows in tokens, YaRN.

B batch, T tokens, D width, H heads, K head width
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

from models.base import constant_, merge_heads
from models.ladder import simple
from models.ladder.fp8_head import R19, R26, R20Attention
from models.ladder.short_sequences import R05MLP, Linear, R02Rotary
from models.masked_attention import NO_LIMIT, Visible

GATE_INPUTS = 12  # first numbers of the layer's input, which the gates see
ALPHA, BETA, SCALE_GAIN = 1, 32, 0.2  # YaRN's constants


class Transposed(Linear):
    """A linear layer whose weight is [in, out]."""

    def __init__(self, num_in, num_out):
        super().__init__(num_in, num_out)
        self.weight = nn.Parameter(self.weight.detach().T.clone())

    def forward(self, x):
        return F.linear(x, self.weight.T.to(x.dtype))


class R28Attention(R20Attention):
    def __init__(self, num_heads, width):
        super().__init__(num_heads, width)
        self.gate = Linear(GATE_INPUTS, num_heads)

    def output(self, mixed_BHTK, x_BTD):
        gate_BHT1 = torch.sigmoid(self.gate(x_BTD[..., :GATE_INPUTS])).transpose(1, 2)[..., None]
        return self.projected(merge_heads(mixed_BHTK * gate_BHT1))


class R28MLP(R05MLP):
    def __init__(self, width):
        super().__init__(width)
        self.up = Transposed(width, 4 * width)


class R28(R26):
    """Record 28, 2025-08-23: 2.817 (record 27) -> 2.812 minutes.  A gate on each head, of 12 numbers of the stream.

    A head's output is multiplied by the sigmoid of a linear layer, at first 0.5: a head can be silent.  Muon updates
    gates too.  Record 27 stores the MLP's first matrix transposed, so that Muon no longer doubles its step; its Triton
    kernel that multiplies a matrix by its transpose is omitted, because it computes the same.  The head's logits are no
    longer divided.
    """

    Attention, MLP = R28Attention, R28MLP
    WEIGHT_SCALE = 2.0**9
    to_logits = R19.to_logits

    def init_weights(self, generator: torch.Generator) -> None:
        super().init_weights(generator)
        for name, parameter in self.named_parameters():
            if name.endswith("gate.weight"):
                constant_(parameter, 0.0)


class R29(R28):
    """Record 29, 2025-09-03: 2.812 -> 2.731 minutes.  FlashAttention 3, and a window in three steps: 3, 7, 11 blocks.

    A token sees itself and exactly `window` tokens before it, wherever blocks end; short windows are half as many whole
    blocks.  Here a model compiled for a GPU uses FlexAttention, as FlashAttention 3 is a package for Hopper only.  The
    record's loader keeps 2,048 tokens of each document, the first; ours keeps all of it (docs/reference/ladder.md).
    """

    def limits(self, window_tokens: int) -> tuple[int, int]:
        return window_tokens + 1, NO_LIMIT

    def reach_tokens(self) -> int:
        return self.window_tokens + 1

    def halved(self, window_tokens):
        """Returns the tokens of half a window's blocks, at least one block; window_tokens is an int or a tensor."""
        num_blocks = window_tokens // self.block // 2
        return (max(1, num_blocks) if isinstance(num_blocks, int) else num_blocks.clamp_min(1)) * self.block

    def short_window(self) -> int:
        return self.halved(self.window_tokens)

    def windows(self) -> list[int]:
        return [window_tokens + 1 for window_tokens in super().windows()]  # a token sees itself, too

    def visible_in_short(self, tokens_BT: torch.Tensor) -> Visible:
        return self.visible(tokens_BT, self.halved(self.near_tokens - 1) + 1)


class R30(R29):
    """Record 30, 2025-09-05: 2.731 -> 2.717 minutes.  No MLP in the first layer."""

    def __init__(self, **options):
        super().__init__(**options)
        self.blocks[0].mlp = None


class Yarn(simple.Rotary):
    """A rotary table for a path: the windows of the run so far, in tokens, of which the first changes nothing."""

    path: tuple[int, ...] = ()

    def turns(self) -> torch.Tensor:
        turn_K = super().turns()
        for before, after in zip(self.path, self.path[1:], strict=False):
            rounds_K = before * turn_K / (2 * math.pi)
            kept_K = ((rounds_K - ALPHA) / (BETA - ALPHA)).clamp(0, 1)
            turn_K = turn_K * (before / after + kept_K * (1 - before / after))
        return turn_K


class R31(R30):
    """Record 31, 2025-09-10: 2.717 -> 2.656 minutes.  YaRN: rotations slow down and scores grow with the window.

    Each time the window grows from a to b tokens, a pair that rotates r times within a is slowed down to a / b of its
    speed if r is at most 1, less as r approaches 32, and not beyond (Peng et al. 2023, arXiv 2309.00071, with alpha 1
    and beta 32).  Scores are first multiplied by 0.1, and each time by a further 1 + 0.2 ln(b / a).  In the last
    validation the window is 13 blocks, which no step has (stages[].end_window_tokens).
    model.args: yarn_blocks (the run's windows in order, in blocks), attention_scale (for the first of them), and those
    of record 21.
    """

    def __init__(self, *, attention_scale: float = 0.1, yarn_blocks: tuple[int, ...] = (3, 7, 11, 13), **options):
        super().__init__(attention_scale=attention_scale, **options)
        self.first_scale, self.yarn_blocks = attention_scale, yarn_blocks
        del self.attention_scale  # a number would need a separate graph for each window
        self.register_buffer("attention_scale", torch.empty(()), persistent=False)
        self.set_window(self.window_tokens)

    def make_rotary(self, seq_len):
        return Yarn(self.head_dim, seq_len)

    def yarn_window(self, window_tokens: int) -> int:
        """Returns the window for rotations and scores, which do not change beyond the schedule's last window."""
        return min(window_tokens, self.yarn_blocks[-1] * self.block)

    def set_window(self, window_tokens: int) -> None:
        """Sets how far back a token sees from the next pass on, with the rotations and the scale for it."""
        super().set_window(window_tokens)
        if isinstance(self.rotary, Yarn):  # not yet while base classes are constructed
            last = self.yarn_window(window_tokens)
            before = [blocks * self.block for blocks in self.yarn_blocks if blocks * self.block < last]
            self.turn_by((*before, last))

    def turn_by(self, path):
        if path == self.rotary.path:
            return
        self.rotary.path = path
        self.rotary.fill(self.attention_scale.device)
        gains = (1 + SCALE_GAIN * math.log(after / before) for before, after in zip(path, path[1:], strict=False))
        self.attention_scale.fill_(self.first_scale * math.prod(gains))


class R32Rotary(Yarn):
    forward = R02Rotary.forward  # in its table's dtype


class R32(R31):
    """Record 32, 2025-09-11: 2.656 -> 2.625 minutes.  Skips through a sigmoid; head, gates, rotations in bfloat16.

    A skip is multiplied by the sigmoid of its weight, at first -1.5.  Muon's work is divided into whole stacks of
    matrices, and Adam's epsilon is larger.  The record's Adam keeps bfloat16 state even for its float32 scalars, and
    adds epsilon before the bias correction; ours keeps float32 state and adds it afterwards, which differs for the
    smallest gradients of the first steps.
    """

    begins = {"skip_weights": -1.5}

    def __init__(self, **options):
        super().__init__(**options)
        for name, parameter in self.named_parameters():
            if name.endswith(("gate.weight", "head.weight")):
                parameter.data = parameter.data.to(self.dtype)

    def make_rotary(self, seq_len):
        return R32Rotary(self.head_dim, seq_len).to(self.dtype)

    def skip_factor(self, index: int) -> torch.Tensor:
        return torch.sigmoid(self.skip_weights[index])


class R33(R32):
    """Record 33, 2025-09-15: 2.625 -> 2.565 minutes.  The last layer sees 20 blocks in the last validation.

    Only the last layer uses a window beyond the schedule's last one, 13 blocks (stages[].end_window_tokens: 2560).
    The record also reads and indexes shards in a thread, as every loader does here.
    """

    def reaches_far(self, index: int) -> bool:
        """Whether a block uses a window beyond the schedule's last one."""
        return index == len(self.blocks) - 1

    def window_of(self, index: int) -> int:
        last = self.yarn_window(self.window_tokens)
        if not self.has_long_window(index):
            return self.halved(last)
        return self.window_tokens if self.reaches_far(index) else last

    def mixes(self, tokens_BT) -> list:
        far = self.near_tokens
        long = far.clamp_max(self.yarn_blocks[-1] * self.block + 1)
        far, long, short = (self.visible(tokens_BT, near) for near in (far, long, self.halved(long - 1) + 1))
        return [
            (far if self.reaches_far(index) else long) if self.has_long_window(index) else short
            for index in range(len(self.blocks))
        ]
