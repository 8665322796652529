"""Records 18 to 26, January to July 2025: a lower cap of logits, an 8-bit head, long and short windows.

B batch, T tokens, D width, V vocabulary, H heads, K head width
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from models.base import constant_, merge_heads, split_heads
from models.ladder import simple
from models.ladder.long_sequences import R17, R17Attention
from models.ladder.short_sequences import Linear, uniform_
from models.masked_attention import Visible

FP8_LARGEST = 448  # largest number of float8_e4m3fn


class Scales(NamedTuple):
    """Factors by which tensors are multiplied before they are rounded."""

    x: float
    weight: float
    grad: float


class _Linear(torch.autograd.Function):
    """A product in 8-bit floating point with fixed scales, and its gradients, for compute capability 8.9 and later.

    Activations and weights become float8_e4m3fn (largest 448), gradients float8_e5m2 (largest 57,344, fewer digits).
    Each is multiplied by its scale before it is rounded, and the product is divided by both scales.  Values that a
    scale pushes beyond the largest number are lost, so scales are specific to a model, its batch and its way of taking
    the mean.  N rows, I inputs, O outputs.
    """

    @staticmethod
    def forward(ctx: Any, x_NI: torch.Tensor, weight_OI: torch.Tensor, scales: Scales) -> torch.Tensor:
        x8_NI = (x_NI * scales.x).to(torch.float8_e4m3fn)
        weight8_OI = (weight_OI * scales.weight).to(torch.float8_e4m3fn)
        ctx.save_for_backward(x8_NI, weight8_OI)
        ctx.scales = scales
        return _product(x8_NI, weight8_OI.t(), scales.x, scales.weight, torch.bfloat16, True)

    @staticmethod
    def backward(ctx: Any, grad_NO: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x8_NI, weight8_OI = ctx.saved_tensors
        scales = ctx.scales
        grad8_NO = (grad_NO * scales.grad).to(torch.float8_e5m2)
        # the kernel needs its first factor row-major and its second column-major
        weight8_by_columns, grad8_by_columns = (factor.t().contiguous().t() for factor in (weight8_OI, grad8_NO))
        grad_x_NI = _product(grad8_NO, weight8_by_columns, scales.grad, scales.weight, torch.bfloat16, False)
        x8_IN = x8_NI.t().contiguous()
        grad_weight_IO = _product(x8_IN, grad8_by_columns, scales.x, scales.grad, torch.float32, False)
        return grad_x_NI, grad_weight_IO.t(), None


class R18(R17):
    """Record 18, 2025-01-04: 3.57 -> 3.4 minutes.  Logits within -15..15 instead of -30..30.

    Only embeddings are bfloat16 now: learned scalars and the rotary table stay float32.
    """

    def __init__(self, *, softcap: float | None = 15.0, **options):
        super().__init__(softcap=softcap, **options)
        for parameter in self.parameters():
            if parameter.ndim < 2:
                parameter.data = parameter.data.float()

    def make_rotary(self, seq_len):
        return simple.Rotary(self.head_dim, seq_len)


class R19(R18):
    """Record 19, 2025-01-13: 3.4 -> 3.142 minutes.  An 8-bit head in training; smaller initial weights.

    The cap is a sigmoid in float32: the same logits as with tanh, except for a shift that softmax ignores.  In
    conf/experiment/r19.yaml the learning rate falls to a tenth instead of 0, and the window is 1,728 * k / n tokens at
    step k of n, rounded up to blocks.
    model.args: fp8_head (null: if the GPU has 8-bit floats, which is untested here; false: never), and those of
    record 18.
    """

    WEIGHT_SCALE = 2.0**5
    GRAD_SCALE = 2.0**13  # multiplied by the tokens of a pass (the loss is their mean): 2**29 for the record's 64K

    def __init__(self, *, fp8_head: bool | None = None, **options):
        super().__init__(**options)
        self.fp8_head = fp8_head

    def init_weights(self, generator: torch.Generator) -> None:
        super().init_weights(generator)
        for module in self.blocks.modules():
            if isinstance(module, Linear) and module.weight.any():
                uniform_(module.weight, 3**0.5 * 0.5 * module.in_features**-0.5, generator)
        constant_(self.head.weight, 0.0)

    def x_scale(self, width: int) -> float:
        """Returns the scale of the activations before the 8-bit head."""
        return 2.0

    def uncapped(self, x_BTD):
        """Returns the head's product, before the cap."""
        in_fp8 = is_fast_on(x_BTD.device.type) if self.fp8_head is None else self.fp8_head
        if not (in_fp8 and self.training):
            return self.head(x_BTD)
        B, T, D = x_BTD.shape
        return linear(x_BTD, self.head.weight, Scales(self.x_scale(D), self.WEIGHT_SCALE, self.GRAD_SCALE * B * T))

    def to_logits(self, x_BTD):
        return self.capped(self.uncapped(x_BTD).float())

    def capped(self, logits_BTV):
        if self.softcap is None:
            return logits_BTV
        return 2 * self.softcap * torch.sigmoid(logits_BTV * (2 / self.softcap))


class R20Attention(R17Attention):
    def forward(self, x_BTD, rotary, value_BTD, mix):
        qkv = F.linear(x_BTD, self.merged_weights(x_BTD)).chunk(3, dim=-1)
        q_BHTK, k_BHTK, v_BHTK = (split_heads(part_BTD, self.num_heads) for part_BTD in qkv)
        v_BHTK = self.with_embedded(v_BHTK, None if value_BTD is None else split_heads(value_BTD, self.num_heads))
        mixed_BHTK = mix(self.positioned(q_BHTK, rotary), self.positioned_keys(k_BHTK, rotary), v_BHTK)
        return self.output(mixed_BHTK, x_BTD)

    def merged_weights(self, x_BTD):
        """Returns the weights of q, k and v as one matrix, [3 * D, D], in x's dtype."""
        return torch.cat((self.query.weight, self.key.weight, self.value.weight)).type_as(x_BTD)

    def with_embedded(self, v_BHTK, embedded_BHTK):
        """Returns values mixed with their value embeddings, which are None in the inner layers."""
        if self.value_mix is None:
            return v_BHTK
        return self.value_mix[0] * v_BHTK if embedded_BHTK is None else self.mixed_values(v_BHTK, embedded_BHTK)

    def positioned_keys(self, k_BHTK, rotary):
        return self.positioned(k_BHTK, rotary)

    def output(self, mixed_BHTK, x_BTD):
        """Returns the layer's output; mixed_BHTK is that of its heads, x_BTD the layer's input."""
        return self.projected(merge_heads(mixed_BHTK))

    def projected(self, mixed_BTD):
        return self.proj(mixed_BTD)


class R20(R19):
    """Record 20, 2025-01-16: 3.142 -> 2.992 minutes.  Long and short windows, merged q, k and v, scores times 0.12.

    Of twelve layers the first, fifth, eighth and twelfth see the whole window, the others half of it.  For Muon q, k
    and v remain separate matrices, which are concatenated for the product.
    model.args: attention_scale (null: 1 / sqrt(head width)), long_short, and those of record 19.
    """

    Attention = R20Attention

    def __init__(self, *, attention_scale: float | None = 0.12, long_short: bool = True, **options):
        super().__init__(**options)
        self.attention_scale, self.long_short = attention_scale, long_short

    def has_long_window(self, index: int) -> bool:
        """Whether a block has a long window: every fourth does, counted from both ends."""
        return not self.long_short or min(index, len(self.blocks) - 1 - index) % 4 == 0

    def short_window(self) -> int:
        """Returns the tokens of a short window."""
        return max(self.block, self.window_tokens // 2 // self.block * self.block)

    def window_of(self, index: int) -> int:
        """Returns how many tokens back a token sees in a block."""
        return self.window_tokens if self.has_long_window(index) else self.short_window()

    def windows(self) -> list[int]:
        return [self.window_of(index) for index, block in enumerate(self.blocks) if block.attention is not None]

    def visible_in_short(self, tokens_BT: torch.Tensor) -> Visible:
        """Returns the attention of a layer with a short window."""
        return self.visible(tokens_BT, near_blocks=(self.near_blocks // 2).clamp_min(1))

    def mixes(self, tokens_BT) -> list:
        long, short = self.visible(tokens_BT), self.visible_in_short(tokens_BT)
        return [long if self.has_long_window(index) else short for index in range(len(self.blocks))]


class R21(R20):
    """Record 21, 2025-01-26: 2.992 -> 2.933 minutes.  A quarter fewer tokens per step; other scales of the 8-bit head.

    A step is 8 sequences of 48K tokens, and validation has sequences of 256K (conf/experiment/r21.yaml).
    """

    WEIGHT_SCALE = 2.0**9
    GRAD_SCALE = 2.0**19 / 49152  # multiplied by the tokens of a pass: 2**19 for the record's 48K


class R26(R21):
    """Record 26, 2025-07-13: 2.896 (record 25, a new torch) -> 2.863 minutes.  Every sequence begins at a document.

    conf/experiment/r26.yaml sets data.bos_aligned and a cooldown of 0.45.  Besides communication, records 22 to 25
    changed this: the head's logits are divided by sqrt(width), its learning rate is 27.5 times as large, and its 8-bit
    scales are those of its largest weights.  They also sum the loss over tokens, where this model takes the mean, so
    their epsilon of Adam is ours times the tokens of a sequence.
    """

    WEIGHT_SCALE = FP8_LARGEST / 24
    GRAD_SCALE = 448.0

    def x_scale(self, width: int) -> float:
        return FP8_LARGEST / width**0.5

    def to_logits(self, x_BTD):
        return self.capped(self.uncapped(x_BTD).float() * x_BTD.shape[-1] ** -0.5)


@torch.compiler.assume_constant_result
def is_fast_on(device_type: str) -> bool:
    """Whether this machine's GPU multiplies 8-bit floats.  False on a CPU, which multiplies them in float32."""
    return device_type == "cuda" and torch.cuda.get_device_capability() >= (8, 9)


def linear(x: torch.Tensor, weight_OI: torch.Tensor, scales: Scales) -> torch.Tensor:
    """Returns x @ weight.T, [..., O] bfloat16; the gradient of weight is float32.  N, I and O are multiples of 16."""
    return _Linear.apply(x.flatten(0, -2), weight_OI, scales).view(*x.shape[:-1], -1)


def _product(
    left: torch.Tensor,
    right: torch.Tensor,
    left_scale: float,
    right_scale: float,
    dtype: torch.dtype,
    fast_accumulation: bool,
) -> torch.Tensor:
    if left.device.type == "cpu":  # few CPUs have a kernel; products of 8-bit floats are exact in float32
        return (left.float() @ right.float() / (left_scale * right_scale)).to(dtype)
    scale_a, scale_b = (
        torch.full((), 1 / scale, dtype=torch.float32, device=left.device) for scale in (left_scale, right_scale)
    )
    return torch._scaled_mm(
        left, right, out_dtype=dtype, scale_a=scale_a, scale_b=scale_b, use_fast_accum=fast_accumulation
    )
