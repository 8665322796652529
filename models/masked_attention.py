"""Attention to the earlier tokens of one's own document within a window: plain anywhere, FlexAttention where compiled.

A query at position i may see a key at position j when
1. j <= i;
2. both lie in one document: a document begins with its end-of-text token, as in modded-nanogpt's shards, and what comes
   before a row's first one is a document too, because a row may begin in the middle of one;
3. i - j < near_tokens;
4. i // block - j // block < near_blocks.
The plain way gives scaled_dot_product_attention a mask, chunk of queries after chunk, so that 64K tokens fit in memory.
The fast way hands FlexAttention's compiled kernel the blocks that have a visible pair, and those where all are visible.
B batch, T tokens, N blocks, H heads, K head width
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

BLOCK_TOKENS = 128  # FlexAttention's default on CUDA
FAST_ON = ("cuda",)  # types of device on which a compiled model takes FlexAttention; tests add the CPU
NO_LIMIT = 2**30
CHUNK_TOKENS = 1024  # queries of the plain way at once
Chunk = tuple[int, int, int, torch.Tensor]  # start, stop, first, [B, 1, stop - start, stop - first]


def document_ids(tokens_BT: torch.Tensor, eos_token: int | None) -> torch.Tensor:
    """[B, T], of each token the number of its document in its row; eos_token None: every row is one document."""
    return torch.zeros_like(tokens_BT) if eos_token is None else (tokens_BT == eos_token).cumsum(1, dtype=torch.int32)


class Visible:
    """What each token of a batch sees; called as attention: q_BHTK, k_BHTK, v_BHTK -> [B, H, T, K].

    eos_token: None makes each row one document.  near_tokens, near_blocks: 0-D int32 tensors, so that a compiled graph
    serves every window.  reach_tokens: how far back the two let a token see, a bound that only saves work; None: none.
    scale: of the scores; None is 1 / sqrt(K).  A 0-D tensor: one compiled graph serves all its values.
    """

    def __init__(
        self,
        tokens_BT: torch.Tensor,
        eos_token: int | None,
        near_tokens: torch.Tensor,
        near_blocks: torch.Tensor,
        reach_tokens: int | None,
        block: int = BLOCK_TOKENS,
        scale: float | torch.Tensor | None = None,
    ) -> None:
        self.block, self.scale = block, scale
        self.near_tokens, self.near_blocks, self.reach_tokens = near_tokens, near_blocks, reach_tokens
        self.docs_BT = document_ids(tokens_BT, eos_token).to(torch.int32)
        self._chunks: list[Chunk] | None = None
        is_whole_blocks = tokens_BT.shape[1] % block == 0
        self.is_fast = torch.compiler.is_compiling() and tokens_BT.device.type in FAST_ON and is_whole_blocks
        # Made here, once for all layers, and never assigned later: of an attribute assigned in a method, dynamo (torch
        # 2.13) reads None for the second Visible of a graph, and FlexAttention takes None for "everything is visible".
        self._block_mask = self.block_mask() if self.is_fast else None

    def __call__(self, q_BHTK: torch.Tensor, k_BHTK: torch.Tensor, v_BHTK: torch.Tensor) -> torch.Tensor:
        return self.fast(q_BHTK, k_BHTK, v_BHTK) if self.is_fast else self.plain(q_BHTK, k_BHTK, v_BHTK)

    def plain(self, q_BHTK: torch.Tensor, k_BHTK: torch.Tensor, v_BHTK: torch.Tensor) -> torch.Tensor:
        """Works on any device, for any length; needs memory in proportion to T * (CHUNK_TOKENS + reach_tokens)."""
        scale = self.scale
        if isinstance(scale, torch.Tensor) and (torch.compiler.is_compiling() or scale.is_meta):
            q_BHTK, scale = (q_BHTK * scale).type_as(q_BHTK), 1.0
        elif isinstance(scale, torch.Tensor):
            scale = scale.item()
        chunks = self._chunks
        if chunks is None:
            chunks = self._chunks = list(self._masks(q_BHTK.shape[2]))
        mixed = [
            F.scaled_dot_product_attention(
                q_BHTK[:, :, start:stop],
                k_BHTK[:, :, first:stop],
                v_BHTK[:, :, first:stop],
                attn_mask=mask_B1TT,
                scale=scale,
            )
            for start, stop, first, mask_B1TT in chunks
        ]
        return torch.cat(mixed, dim=2)

    def fast(self, q_BHTK: torch.Tensor, k_BHTK: torch.Tensor, v_BHTK: torch.Tensor) -> torch.Tensor:
        """FlexAttention.  T is a multiple of block.  It has no backward pass on a CPU (torch 2.13)."""
        block_mask = self.block_mask() if self._block_mask is None else self._block_mask
        if not isinstance(self.scale, torch.Tensor):
            return flex_attention(q_BHTK, k_BHTK, v_BHTK, block_mask=block_mask, scale=self.scale)

        def scaled(score: Any, b: Any, h: Any, query: Any, key: Any) -> Any:
            return score * self.scale

        return flex_attention(q_BHTK, k_BHTK, v_BHTK, scaled, block_mask=block_mask, scale=1.0)

    def sees(
        self, docs_of_query: torch.Tensor, docs_of_key: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        """The four rules, for positions and document numbers that broadcast."""
        distance, num_blocks = query - key, query // self.block - key // self.block
        near = (distance < self.near_tokens) & (num_blocks < self.near_blocks)
        return (distance >= 0) & near & (docs_of_query == docs_of_key)

    def block_mask(self) -> BlockMask:
        """FlexAttention's form of the same.  ValueError: T is not a multiple of block."""
        partial_BNN, full_BNN = self._blocks()

        def mask_mod(b: Any, h: Any, query: Any, key: Any) -> torch.Tensor:
            return self.sees(self.docs_BT[b, query], self.docs_BT[b, key], query, key)

        return BlockMask.from_kv_blocks(
            *_listed(partial_BNN), *_listed(full_BNN), BLOCK_SIZE=self.block, mask_mod=mask_mod
        )

    def _masks(self, T: int) -> Iterator[Chunk]:
        """Queries start to stop, and the keys from first on that they may see."""
        reach_tokens, chunk_tokens = (T, T) if self.reach_tokens is None else (self.reach_tokens, CHUNK_TOKENS)
        position_T = torch.arange(T, device=self.docs_BT.device, dtype=torch.int32)
        for start in range(0, T, chunk_tokens):
            stop, first = min(start + chunk_tokens, T), max(0, start - reach_tokens)
            docs_of_query, docs_of_key = self.docs_BT[:, start:stop, None], self.docs_BT[:, None, first:stop]
            query, key = position_T[start:stop, None], position_T[None, first:stop]
            yield start, stop, first, self.sees(docs_of_query, docs_of_key, query, key)[:, None]

    def _blocks(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(partial, full), [B, N, N]: blocks with some, and with only visible pairs."""
        block, T = self.block, self.docs_BT.shape[1]
        if T % block:
            raise ValueError(f"data.seq_len={T}: FlexAttention goes by blocks of {block} tokens: use a multiple")
        lowest_BN, highest_BN = self.docs_BT[:, ::block], self.docs_BT[:, block - 1 :: block]
        index_N = torch.arange(T // block, device=self.docs_BT.device, dtype=torch.int32)
        apart_NN = index_N[:, None] - index_N  # of query's block and key's
        nearest_NN, farthest_NN = (apart_NN * block - (block - 1)).clamp_min(0), apart_NN * block + (block - 1)
        near_NN = apart_NN < self.near_blocks
        share_BNN = lowest_BN[:, :, None] <= highest_BN[:, None]  # documents are numbered in order
        one_BNN = highest_BN[:, :, None] == lowest_BN[:, None]
        some_BNN = (apart_NN >= 0) & near_NN & (nearest_NN < self.near_tokens) & share_BNN
        full_BNN = (apart_NN > 0) & near_NN & (farthest_NN < self.near_tokens) & one_BNN
        return some_BNN & ~full_BNN, full_BNN


def _listed(blocks_BNN: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(the number of blocks in each row, [B, 1, N], and their indices in order, [B, 1, N, N])."""
    count_B1N = blocks_BNN.sum(-1, dtype=torch.int32)[:, None].contiguous()
    order_B1NN = blocks_BNN.to(torch.int32).argsort(dim=-1, descending=True, stable=True)[:, None]
    return count_B1N, order_B1NN.to(torch.int32).contiguous()
