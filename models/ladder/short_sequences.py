"""Records 2 to 11, June to November 2024: from GPT-2 to a U-net with sequences of 1,024 tokens.

B batch, T tokens, D width, V vocabulary, H heads, K head width
"""

import contextlib

import torch
import torch.nn.functional as F
from torch import nn

from models import modern
from models.base import LanguageModel, causal_attention, constant_, merge_heads, normal_, split_heads

PART_TOKENS = 8192  # of each row: logits of 1.5 GiB in float32


@torch.no_grad()
def uniform_(parameter, bound, generator):
    """Draws uniformly from -bound to bound, on the CPU."""
    parameter.copy_(torch.empty(parameter.shape, device="cpu").uniform_(-bound, bound, generator=generator))


@torch.no_grad()
def set_(parameter, value):
    """Sets a parameter to a number, or to a list of numbers."""
    parameter.copy_(torch.tensor(value))


class Linear(nn.Linear):
    """A linear layer without biases, whose weights stay float32 even if x is not."""

    def __init__(self, num_in, num_out):
        super().__init__(num_in, num_out, bias=False)

    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype))


# ---- record 2


def r02_norm(x):
    return F.rms_norm(x, (x.shape[-1],), eps=1e-6)


class R02Rotary(modern.Rotary):
    """Rotates in the opposite direction to modern's, and multiplies in the dtype of table and input together."""

    def fill(self, device="cpu"):
        super().fill(device)
        self.sin_TK.neg_()

    def forward(self, x_BHTK):
        T = x_BHTK.shape[2]
        cos_TK, sin_TK = self.cos_TK[:T], self.sin_TK[:T]
        left, right = x_BHTK.chunk(2, dim=-1)
        turned_BHTK = torch.cat((left * cos_TK - right * sin_TK, right * cos_TK + left * sin_TK), dim=-1)
        return turned_BHTK.type_as(x_BHTK)


class R02Attention(nn.Module):
    def __init__(self, num_heads, width):
        super().__init__()
        self.num_heads = num_heads
        self.query = Linear(width, width)
        self.key = Linear(width, width)
        self.value = Linear(width, width)
        self.proj = Linear(width, width)

    def positioned(self, x_BHTK, rotary):
        """Returns queries or keys with their positions."""
        return rotary(x_BHTK)

    def forward(self, x_BTD, rotary):
        return self.attend(x_BTD, split_heads(self.value(x_BTD), self.num_heads), rotary)

    def attend(self, x_BTD, v_BHTK, rotary, mix=causal_attention):
        """Returns the layer's output; mix is the attention, from q, k and v to [B, H, T, K]."""
        q_BHTK = self.positioned(split_heads(self.query(x_BTD), self.num_heads), rotary)
        k_BHTK = self.positioned(split_heads(self.key(x_BTD), self.num_heads), rotary)
        return self.proj(merge_heads(mix(q_BHTK, k_BHTK, v_BHTK)))


class R02MLP(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = Linear(width, 4 * width)
        self.proj = Linear(4 * width, width)

    def forward(self, x_BTD):
        return self.proj(F.gelu(self.up(x_BTD)))


class R02Block(nn.Module):
    norm = staticmethod(r02_norm)

    def __init__(self, attention, mlp, num_layers):
        super().__init__()
        self.attention, self.mlp = attention, mlp
        self.attention_scale = (2 * num_layers) ** -0.5

    def forward(self, x_BTD, rotary):
        x_BTD = x_BTD + self.attention_scale * self.attention(self.norm(x_BTD), rotary)
        return x_BTD + self.mlp(self.norm(x_BTD))


class R02(LanguageModel):
    """Record 2, 2024-06-06: 45 -> 31.4 minutes.  Rotary positions, RMSNorm, no biases, three times the learning rate.

    GPT-2 without learned positions, biases and norm weights; the attention's output is divided by sqrt(2 * layers)
    instead of its initial weights.  Weights begin as in torch's layers, the tied head as a linear layer.
    logits() is embed(), stack() and to_logits(): a later record overrides one of them, or a class of the parts.
    """

    Attention, MLP, Block, norm = R02Attention, R02MLP, R02Block, staticmethod(r02_norm)
    begins: dict[str, float | list[float]] = {}  # {name's ending: initial value} of a rung's learned scalars

    def __init__(self, vocab_size: int, seq_len: int, num_layers: int, num_heads: int, width: int):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, width // num_heads
        self.rotary = R02Rotary(self.head_dim, seq_len)
        self.embedding = nn.Embedding(vocab_size, width)
        self.blocks = nn.ModuleList(
            self.Block(self.Attention(num_heads, width), self.MLP(width), num_layers) for _ in range(num_layers)
        )
        self.head = Linear(width, vocab_size)
        self.head.weight = self.embedding.weight

    def init_weights(self, generator: torch.Generator) -> None:
        """Initializes every parameter from a CPU generator, and the rotary table; linear layers as torch does."""
        for module in self.modules():
            if isinstance(module, Linear):
                uniform_(module.weight, module.weight.shape[1] ** -0.5, generator)
        for rung in reversed(type(self).__mro__):
            for ending, value in vars(rung).get("begins", {}).items():
                for name, parameter in self.named_parameters():
                    if name.endswith(ending):
                        set_(parameter, value)
        self.rotary.fill()

    def embed(self, tokens_BT):
        return self.embedding(tokens_BT)

    def stack(self, x_BTD):
        """Applies all blocks, and the last norm."""
        for block in self.blocks:
            x_BTD = block(x_BTD, self.rotary)
        return self.norm(x_BTD)

    def to_logits(self, x_BTD):
        return self.head(x_BTD).float()

    def in_parts(self, x_BTD):
        """Returns to_logits(); eager and without gradients, of PART_TOKENS at a time.

        The referee calls logits() so.  Of a validation's 256K tokens, the records' formulas keep several copies at
        once, each of 26 GiB in bfloat16 or 49 GiB in float32; this keeps the answer and those of a part.
        """
        B, T, _ = x_BTD.shape
        if T <= PART_TOKENS or torch.is_grad_enabled() or torch.compiler.is_compiling():
            return self.to_logits(x_BTD)
        first_BTD, *others = x_BTD.split(PART_TOKENS, dim=1)
        first_BTV = self.to_logits(first_BTD)
        logits_BTV = first_BTV.new_empty((B, T, first_BTV.shape[-1]))  # joined at the end, they would be there twice
        logits_BTV[:, :PART_TOKENS] = first_BTV
        for number, part_BTD in enumerate(others, 1):
            logits_BTV[:, number * PART_TOKENS : (number + 1) * PART_TOKENS] = self.to_logits(part_BTD)
        return logits_BTV

    def logits(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """Returns the next token's logits, [B, T] -> [B, T, V], float32."""
        return self.in_parts(self.stack(self.embed(tokens_BT)))

    def head_weight(self) -> nn.Parameter:
        """Returns the head's matrix, [V, D]."""
        return self.head.weight


# ---- records 5 and 6


def rms_norm(x):
    """RMSNorm with torch's epsilon for the dtype."""
    return F.rms_norm(x, (x.shape[-1],))


class R05Attention(R02Attention):
    def positioned(self, x_BHTK, rotary):
        return rms_norm(rotary(x_BHTK))


class R05MLP(R02MLP):
    def forward(self, x_BTD):
        return self.proj(F.relu(self.up(x_BTD)).square())


class R05Block(R02Block):
    norm = staticmethod(rms_norm)

    def forward(self, x_BTD, rotary):
        x_BTD = x_BTD + self.attention(self.norm(x_BTD), rotary)
        return x_BTD + self.mlp(self.norm(x_BTD))


class R05(R02):
    """Record 5, 2024-10-14: 22.3 -> 15.2 minutes.  Padded vocabulary, ReLU squared, zero projections, QK-norm, 6 heads.

    Vocabulary and heads are set in conf/experiment/r05.yaml.  The attention's output is no longer scaled, but its
    projection begins at zero; the rotary table is rounded to bfloat16.
    """

    Attention, MLP, Block, norm = R05Attention, R05MLP, R05Block, staticmethod(rms_norm)

    def __init__(self, **shape):
        super().__init__(**shape)
        self.rotary.to(torch.bfloat16)

    def init_weights(self, generator: torch.Generator) -> None:
        super().init_weights(generator)
        for name, parameter in self.blocks.named_parameters():
            if name.endswith(".proj.weight"):
                constant_(parameter, 0.0)


class R06Attention(R05Attention):
    def positioned(self, x_BHTK, rotary):
        return rotary(rms_norm(x_BHTK))


class R06(R05):
    """Record 6, 2024-10-17: 15.2 -> 13.1 minutes.  Each GPU does Muon's work for its share of the matrices.

    Here Muon's work is always divided.  The model norms queries and keys before it rotates them, not afterwards: the
    same numbers except for rounding, since a rotation keeps the length.
    """

    Attention = R06Attention


# ---- records 8 to 11


class R08(R06):
    """Record 8, 2024-11-03: 12.0 -> 10.8 minutes.  An untied, zero-initialised head; a norm right after the embedding.

    Embedding and head have separate learning rates now, 0.3 and 0.002 (conf/experiment/r08.yaml).
    """

    def __init__(self, **shape):
        super().__init__(**shape)
        self.head = Linear(*reversed(self.embedding.weight.shape))

    def init_weights(self, generator: torch.Generator) -> None:
        super().init_weights(generator)
        normal_(self.embedding.weight, 1.0, generator)
        constant_(self.head.weight, 0.0)

    def embed(self, tokens_BT):
        return self.norm(super().embed(tokens_BT))


class R09Attention(R06Attention):
    def __init__(self, num_heads, width):
        super().__init__(num_heads, width)
        self.value_mix = nn.Parameter(torch.tensor(0.5))  # share of the first block's values

    def forward(self, x_BTD, rotary, first_v_BHTK, mix=causal_attention):
        """Returns (the layer's output, the first block's values); first_v_BHTK is None in the first block."""
        v_BHTK = split_heads(self.value(x_BTD), self.num_heads)
        first_v_BHTK = v_BHTK if first_v_BHTK is None else first_v_BHTK
        if self.value_mix is not None:
            v_BHTK = (1 - self.value_mix) * v_BHTK + self.value_mix * first_v_BHTK
        return self.attend(x_BTD, v_BHTK, rotary, mix), first_v_BHTK


class R09Block(R05Block):
    def __init__(self, attention, mlp, num_layers):
        super().__init__(attention, mlp, num_layers)
        self.stream_mix = nn.Parameter(torch.tensor([1.0, 0.0]))  # factors of the stream and the embedding

    def mixed(self, x_BTD, embedded_BTD):
        """Returns the block's input: the stream, mixed with the embedding unless stream_mix is None."""
        if self.stream_mix is None:
            return x_BTD
        return self.stream_mix[0] * x_BTD + self.stream_mix[1] * embedded_BTD

    def forward(self, x_BTD, rotary, first_v_BHTK, embedded_BTD, mix=causal_attention):
        x_BTD = self.mixed(x_BTD, embedded_BTD)
        attended_BTD, first_v_BHTK = self.attention(self.norm(x_BTD), rotary, first_v_BHTK, mix)
        x_BTD = x_BTD + attended_BTD
        return x_BTD + self.mlp(self.norm(x_BTD)), first_v_BHTK


class R09(R08):
    """Record 9, 2024-11-06: 10.8 -> 8.2 minutes.  Value residual, embedding skip, momentum warm-up, capped logits.

    Every block mixes the first block's values into its own, and the embedding into its input, by learned scalars.
    model.args: softcap (null: not capped), value_residual, embedding_skip.
    """

    Attention, Block = R09Attention, R09Block
    begins = {"value_mix": 0.5, "stream_mix": [1.0, 0.0]}

    def __init__(
        self, *, softcap: float | None = 30.0, value_residual: bool = True, embedding_skip: bool = True, **shape
    ):
        super().__init__(**shape)
        self.softcap = softcap
        for block in self.blocks:
            block.attention.value_mix = block.attention.value_mix if value_residual else None
            block.stream_mix = block.stream_mix if embedding_skip else None

    def stack(self, x_BTD):
        embedded_BTD, first_v_BHTK = x_BTD, None
        for block in self.blocks:
            x_BTD, first_v_BHTK = block(x_BTD, self.rotary, first_v_BHTK, embedded_BTD)
        return self.norm(x_BTD)

    def to_logits(self, x_BTD):
        logits_BTV = self.head(x_BTD)
        if self.softcap is not None:
            logits_BTV = self.softcap * torch.tanh(logits_BTV / self.softcap)
        return logits_BTV.float()


def without_autocast(tensor):
    """Returns a context without autocast, which would norm in float32; the meta device has no autocast."""
    device = tensor.device.type
    return contextlib.nullcontext() if device == "meta" else torch.autocast(device, enabled=False)


class R10(R09):
    """Record 10, 2024-11-08: 8.2 -> 7.8 minutes.  Activations in bfloat16 from end to end, not by autocast.

    The embedding and the learned scalars are bfloat16 too; matrices and head stay float32.
    model.args: activations (float32 makes it record 9, and is fast on a CPU), and those of record 9.
    """

    def __init__(self, *, activations: str = "bfloat16", **options):
        super().__init__(**options)
        self.dtype = getattr(torch, activations)
        matrices = {id(matrix) for matrix in (*self.hidden_matrices(), self.head.weight)}
        for parameter in self.parameters():
            if id(parameter) not in matrices:
                parameter.data = parameter.data.to(self.dtype)

    def logits(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        with without_autocast(tokens_BT):
            return super().logits(tokens_BT)


class R11(R10):
    """Record 11, 2024-11-10: 7.8 -> 7.2 minutes.  U-net skips: the first half's outputs enter the second, last first.

    Learning rates are doubled, the head's fourfold (conf/experiment/r11.yaml).
    """

    begins = {"skip_weights": 1.0}

    def __init__(self, **options):
        super().__init__(**options)
        num_layers = len(self.blocks)
        if num_layers % 2:
            raise ValueError(f"model.num_layers={num_layers}: every skip joins two blocks: use an even number")
        self.skip_weights = nn.Parameter(torch.ones(num_layers // 2, dtype=self.dtype))

    def stack(self, x_BTD, mix=causal_attention):
        embedded_BTD, first_v_BHTK, skips = x_BTD, None, []
        num_encoding = len(self.blocks) // 2
        for index, block in enumerate(self.blocks):
            if index >= num_encoding:
                x_BTD = x_BTD + self.skip_weights[index - num_encoding] * skips.pop()
            x_BTD, first_v_BHTK = block(x_BTD, self.rotary, first_v_BHTK, embedded_BTD, mix)
            if index < num_encoding:
                skips.append(x_BTD)
        return self.norm(x_BTD)
