"""Records 12 to 17, November and December 2024: long sequences of documents, windows, value embeddings.

B batch, T tokens, D width, L layers, K head width
"""

import torch
from torch import nn

from models.base import flops_of_token, normal_, split_heads
from models.ladder import simple
from models.ladder.short_sequences import R11, R02Rotary, R09Attention, R09Block, without_autocast
from models.masked_attention import BLOCK_TOKENS, NO_LIMIT, Visible
from models.modern import ROTARY_BASE


class R12(R11):
    """Record 12, 2024-11-19: 7.2 -> 5.03 minutes.  Sequences of 64K tokens, of whole documents, by FlexAttention.

    A token sees the earlier tokens of its document, at most 1,024 of them.  So a long sequence costs no more than many
    short ones, and few documents are cut.  The record let FlexAttention evaluate the mask for every pair; here blocks
    are found as in later records, which gives the same mask faster.
    Documents are those of the run's data (LanguageModel.eos_token); without eos_token each sequence is one document.
    model.args: window (tokens, for a run whose stages set none), block (tokens of a block of the mask), and those of
    record 11.
    """

    windows_are_data = True  # windows are in buffers

    def __init__(self, *, eos_token: int | None = None, window: int = 1024, block: int = BLOCK_TOKENS, **options):
        super().__init__(**options)
        self.eos_token, self.block = eos_token, block
        self.attention_scale: float | None = None  # factor of scores; None: 1 / sqrt(head width)
        for name in ("near_tokens", "near_blocks"):
            self.register_buffer(name, torch.empty((), dtype=torch.int32), persistent=False)
        self.set_window(window)

    @property
    def window_block(self) -> int:
        """Tokens of which a window is a multiple: half a block, 64, as in the records' schedules."""
        return self.block // 2

    def set_window(self, window_tokens: int) -> None:
        """Sets how many tokens a token sees, itself included, from the next pass on.

        The graph stays: a compiled model reads it from a buffer.  Raises ValueError unless it is whole window_blocks.
        """
        if window_tokens < 1 or window_tokens % self.window_block:
            raise ValueError(f"window={window_tokens}: use a multiple of {self.window_block} tokens")
        self.window_tokens = window_tokens
        near_tokens, near_blocks = self.limits(window_tokens)
        self.near_tokens.fill_(near_tokens)
        self.near_blocks.fill_(near_blocks)

    def limits(self, window_tokens: int) -> tuple[int, int]:
        """Returns (near_tokens, near_blocks) for models/masked_attention.py."""
        return window_tokens, NO_LIMIT

    def windows(self) -> list[int]:
        """Returns how far back each layer with attention sees, in tokens."""
        return [self.window_tokens] * len(self.blocks)

    def reach_tokens(self) -> int:
        """Returns a bound on the longest window, which saves work."""
        return self.window_tokens

    def visible(
        self, tokens_BT: torch.Tensor, near_tokens: torch.Tensor | None = None, near_blocks: torch.Tensor | None = None
    ) -> Visible:
        """Returns the attention for these tokens; near_tokens and near_blocks default to those of the window."""
        return Visible(
            tokens_BT,
            self.eos_token,
            self.near_tokens if near_tokens is None else near_tokens,
            self.near_blocks if near_blocks is None else near_blocks,
            # in a compiled model, a number would need a separate graph for each window
            None if torch.compiler.is_compiling() else self.reach_tokens(),
            self.block,
            self.attention_scale,
        )

    def logits(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        with without_autocast(tokens_BT):
            return self.in_parts(self.stack(self.embed(tokens_BT), self.visible(tokens_BT)))

    def flops_per_token(self, seq_len: int) -> int:
        """Returns FLOPs of forward and backward in the current window; where documents end is not known here."""
        return self._flops([min(window, seq_len) for window in self.windows()])

    def flops_per_token_causal(self, seq_len: int) -> int:
        """Returns the same without masked pairs: w - w * w / (2 * T) per token, as the first w of T see fewer."""
        windows = [min(window, seq_len) for window in self.windows()]
        return self._flops([window - window**2 // (2 * seq_len) for window in windows])

    def _flops(self, windows):
        num_matmul_weights, _, num_heads, head_dim = self._shape()
        return flops_of_token(num_matmul_weights, 1, num_heads, head_dim, sum(windows))


class R13(R12):
    """Record 13, 2024-11-24: 5.03 -> 4.66 minutes.  The window grows with the run, from 64 to 1,792 tokens.

    At step k of n it is 64 + 1,728 * k / n, rounded down to a multiple of 64, and a validation has the window of its
    step (stages of conf/experiment/r13.yaml).
    model.args: window (by default the last one), and those of record 12.
    """

    def __init__(self, *, window: int = 1792, **options):
        super().__init__(window=window, **options)


# ---- value embeddings


class R14Rotary(R02Rotary):
    """A rotary table whose angles are computed in the table's dtype."""

    @torch.no_grad()
    def fill(self):
        seq_len, half_dim = self.cos_TK.shape
        dtype = self.cos_TK.dtype
        turn_K = ROTARY_BASE ** (-torch.arange(half_dim, dtype=torch.float64, device="cpu") / half_dim)
        angle_TK = torch.outer(torch.arange(seq_len, device="cpu").to(dtype), turn_K.to(dtype))
        self.cos_TK.copy_(angle_TK.cos())
        self.sin_TK.copy_(-angle_TK.sin())


class R14Attention(R09Attention):
    def mixed_values(self, v_BHTK, embedded_BHTK):
        return (1 - self.value_mix) * v_BHTK + self.value_mix * embedded_BHTK

    def forward(self, x_BTD, rotary, value_BTD, mix):
        """Returns the layer's output; value_BTD are the tokens' value embeddings."""
        v_BHTK = split_heads(self.value(x_BTD), self.num_heads)
        if self.value_mix is not None:
            v_BHTK = self.mixed_values(v_BHTK, split_heads(value_BTD, self.num_heads))
        return self.attend(x_BTD, v_BHTK, rotary, mix)


class R14Block(R09Block):
    """A block that may lack attention or MLP, which are then None."""

    def forward(self, x_BTD, rotary, value_BTD, embedded_BTD, mix):
        x_BTD = self.mixed(x_BTD, embedded_BTD)
        if self.attention is not None:
            x_BTD = x_BTD + self.attention(self.norm(x_BTD), rotary, value_BTD, mix)
        return x_BTD if self.mlp is None else x_BTD + self.mlp(self.norm(x_BTD))


class R14(R13):
    """Record 14, 2024-12-04: 4.66 -> 4.41 minutes.  Value embeddings instead of the first block's values.

    Each block mixes into its values the token's row of a separate table.  Rotary angles are computed in the dtype of
    the activations: until record 17, in bfloat16, they are wrong far from the start.
    """

    Attention, Block = R14Attention, R14Block

    def __init__(self, **options):
        super().__init__(**options)
        self.rotary = self.make_rotary(len(self.rotary.cos_TK))
        mixes_values = self.blocks[0].attention.value_mix is not None
        self.value_embeddings = self.make_value_embeddings(*self.embedding.weight.shape) if mixes_values else None

    def make_rotary(self, seq_len):
        rotary = R14Rotary(self.head_dim, seq_len).to(self.dtype)
        rotary.fill()
        return rotary

    def make_value_embeddings(self, vocab_size, width):
        return nn.Embedding(vocab_size, len(self.blocks) * width, dtype=self.dtype)

    def init_weights(self, generator: torch.Generator) -> None:
        super().init_weights(generator)
        for name, parameter in self.named_parameters():
            if name.startswith("value_embeddings."):
                normal_(parameter, 1.0, generator)

    def values(self, tokens_BT) -> list:
        """Returns the value embeddings of each layer, [B, T, D] or None."""
        return list(self.value_embeddings(tokens_BT).chunk(len(self.blocks), dim=-1))

    def mixes(self, tokens_BT) -> list:
        """Returns the attention of each layer."""
        return [self.visible(tokens_BT)] * len(self.blocks)

    def logits(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        with without_autocast(tokens_BT):
            x_BTD = self.embed(tokens_BT)
            values = [None] * len(self.blocks) if self.value_embeddings is None else self.values(tokens_BT)
            return self.in_parts(self.stack(x_BTD, values, self.mixes(tokens_BT)))

    def skip_factor(self, index: int) -> torch.Tensor:
        """Returns the factor of a skip connection."""
        return self.skip_weights[index]

    def stack(self, x_BTD, values, mixes):
        embedded_BTD, skips = x_BTD, []
        num_encoding = len(self.blocks) // 2
        for index, block in enumerate(self.blocks):
            if index >= num_encoding:
                x_BTD = x_BTD + self.skip_factor(index - num_encoding) * skips.pop()
            x_BTD = block(x_BTD, self.rotary, values[index], embedded_BTD, mixes[index])
            if index < num_encoding:
                skips.append(x_BTD)
        return self.norm(x_BTD)


class R15Attention(R14Attention):
    def __init__(self, num_heads, width):
        super().__init__(num_heads, width)
        self.value_mix = nn.Parameter(torch.tensor([0.5, 0.5]))  # factors of the layer's values and the embeddings

    def mixed_values(self, v_BHTK, embedded_BHTK):
        return self.value_mix[0] * v_BHTK + self.value_mix[1] * embedded_BHTK


class R15(R14):
    """Record 15, 2024-12-08: 4.41 -> 3.95 minutes.  Value embeddings in a U: the last block has the first one's.

    Both parts of a block's values have learned weights.  The window also ends at a block of the mask, so that no token
    sees more than window / 128 blocks, including its own.
    """

    Attention = R15Attention

    def limits(self, window_tokens: int) -> tuple[int, int]:
        return window_tokens, -(-window_tokens // self.block)

    def make_value_embeddings(self, vocab_size, width):
        return nn.Embedding(vocab_size, len(self.blocks) // 2 * width, dtype=self.dtype)

    def values(self, tokens_BT) -> list:
        first_half = self.value_embeddings(tokens_BT).chunk(len(self.blocks) // 2, dim=-1)
        return [*first_half, *reversed(first_half)]


class R16(R15):
    """Record 16, 2024-12-10: 3.95 -> 3.80 minutes.  A window of whole blocks; a table of value embeddings per layer.

    A token sees whole blocks, so only blocks on the diagonal, or in which a document begins, need a mask.  At step k of
    n the window is (128 + 1,728 * k / n) // 128 blocks of 128 tokens (stages of conf/experiment/r16.yaml).
    """

    @property
    def window_block(self) -> int:
        """Tokens of which a window is a multiple: a block of the mask."""
        return self.block

    def limits(self, window_tokens: int) -> tuple[int, int]:
        return NO_LIMIT, window_tokens // self.block

    def num_value_tables(self) -> int:
        return len(self.blocks) // 2

    def make_value_embeddings(self, vocab_size, width):
        tables = (nn.Embedding(vocab_size, width, dtype=self.dtype) for _ in range(self.num_value_tables()))
        return nn.ModuleList(tables)

    def values(self, tokens_BT) -> list:
        first_half = [table(tokens_BT) for table in self.value_embeddings]
        return [*first_half, *reversed(first_half)]


class R17Attention(R15Attention):
    def forward(self, x_BTD, rotary, value_BTD, mix):
        """Returns the layer's output; value_BTD are the tokens' value embeddings, None in the inner layers."""
        if value_BTD is not None:
            return super().forward(x_BTD, rotary, value_BTD, mix)
        v_BHTK = split_heads(self.value(x_BTD), self.num_heads)
        return self.attend(x_BTD, v_BHTK if self.value_mix is None else self.value_mix[0] * v_BHTK, rotary, mix)


class R17(R16):
    """Record 17, 2024-12-17: 3.80 -> 3.57 minutes.  Value embeddings in the outer layers only, one attention less.

    There are three tables, for the first three of twelve layers and in the same order for the last three; the eighth
    layer has no attention.  Half of a head's pairs are rotated, by 1 to 1/1024 radians per position.
    """

    Attention = R17Attention

    def __init__(self, **options):
        super().__init__(**options)
        self.blocks[len(self.blocks) * 7 // 12].attention = None

    def make_rotary(self, seq_len):
        return simple.Rotary(self.head_dim, seq_len).to(self.dtype)

    def num_value_tables(self) -> int:
        return max(1, len(self.blocks) // 4)

    def values(self, tokens_BT) -> list:
        outer = [table(tokens_BT) for table in self.value_embeddings]
        return [*outer, *[None] * (len(self.blocks) - 2 * len(outer)), *outer]

    def windows(self) -> list[int]:
        return super().windows()[1:]
