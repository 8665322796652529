"""Attention to the earlier tokens of the same document within a window: by SDPA, or by FlexAttention if compiled.

A query at position i may see a key at position j if
1. j <= i;
2. both are in the same document.  A document begins with its end-of-text token, as in modded-nanogpt's shards; tokens
   before a row's first one are a document too, because a row may begin in the middle of one;
3. i - j < near_tokens;
4. i // block - j // block < near_blocks.
plain() passes a mask to scaled_dot_product_attention for one chunk of queries at a time, so that 64K tokens fit in
memory.  fast() passes FlexAttention's compiled kernel the blocks with a visible pair, and those where all are visible.
B batch, T tokens, N blocks, H heads, K head width
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

BLOCK_TOKENS = 128  # FlexAttention's default on CUDA
FAST_ON = ("cuda",)  # device types on which a compiled model uses FlexAttention; tests add the CPU
NO_LIMIT = 2**30
CHUNK_TOKENS = 1024  # queries that plain() processes at once
Chunk = tuple[int, int, int, torch.Tensor]  # start, stop, first, [B, 1, stop - start, stop - first]


def document_ids(tokens_BT: torch.Tensor, eos_token: int | None) -> torch.Tensor:
    """Returns each token's document number within its row, [B, T]; without eos_token every row is one document."""
    return torch.zeros_like(tokens_BT) if eos_token is None else (tokens_BT == eos_token).cumsum(1, dtype=torch.int32)


class Visible:
    """Attention in which each token sees what the rules allow; call it as q_BHTK, k_BHTK, v_BHTK -> [B, H, T, K].

    Without eos_token each row is one document.  near_tokens and near_blocks are 0-D int32 tensors, so that one compiled
    graph serves every window.  reach_tokens bounds how far back they let a token see, which only saves work; None sets
    no bound.  scale multiplies the scores, by default 1 / sqrt(K); a 0-D tensor serves one graph with all its values.
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
        # Made here, once for all layers, and never assigned later: if a method assigned the attribute, dynamo (torch
        # 2.13) would read None for the second Visible of a graph, and for FlexAttention None means that all is visible.
        self._block_mask = self.block_mask() if self.is_fast else None

    def __call__(self, q_BHTK: torch.Tensor, k_BHTK: torch.Tensor, v_BHTK: torch.Tensor) -> torch.Tensor:
        return self.fast(q_BHTK, k_BHTK, v_BHTK) if self.is_fast else self.plain(q_BHTK, k_BHTK, v_BHTK)

    def plain(self, q_BHTK: torch.Tensor, k_BHTK: torch.Tensor, v_BHTK: torch.Tensor) -> torch.Tensor:
        """Uses SDPA, on any device and for any length; memory is proportional to T * (CHUNK_TOKENS + reach_tokens)."""
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
        """Uses FlexAttention, which has no backward pass on a CPU (torch 2.13).  T must be a multiple of block."""
        block_mask = self.block_mask() if self._block_mask is None else self._block_mask
        if not isinstance(self.scale, torch.Tensor):
            return flex_attention(q_BHTK, k_BHTK, v_BHTK, block_mask=block_mask, scale=self.scale)

        def scaled(score: Any, b: Any, h: Any, query: Any, key: Any) -> Any:
            return score * self.scale

        return flex_attention(q_BHTK, k_BHTK, v_BHTK, scaled, block_mask=block_mask, scale=1.0)

    def sees(
        self, docs_of_query: torch.Tensor, docs_of_key: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        """Applies the four rules to positions and document numbers that broadcast."""
        distance, num_blocks = query - key, query // self.block - key // self.block
        near = (distance < self.near_tokens) & (num_blocks < self.near_blocks)
        return (distance >= 0) & near & (docs_of_query == docs_of_key)

    def block_mask(self) -> BlockMask:
        """Returns the rules as FlexAttention's mask.  Raises ValueError if T is not a multiple of block."""
        partial_BNN, full_BNN = self._blocks()

        def mask_mod(b: Any, h: Any, query: Any, key: Any) -> torch.Tensor:
            return self.sees(self.docs_BT[b, query], self.docs_BT[b, key], query, key)

        return BlockMask.from_kv_blocks(
            *_listed(partial_BNN), *_listed(full_BNN), BLOCK_SIZE=self.block, mask_mod=mask_mod
        )

    def _masks(self, T: int) -> Iterator[Chunk]:
        """Yields the chunks of queries start to stop, with the first key that they may see, and their mask."""
        reach_tokens, chunk_tokens = (T, T) if self.reach_tokens is None else (self.reach_tokens, CHUNK_TOKENS)
        position_T = torch.arange(T, device=self.docs_BT.device, dtype=torch.int32)
        for start in range(0, T, chunk_tokens):
            stop, first = min(start + chunk_tokens, T), max(0, start - reach_tokens)
            docs_of_query, docs_of_key = self.docs_BT[:, start:stop, None], self.docs_BT[:, None, first:stop]
            query, key = position_T[start:stop, None], position_T[None, first:stop]
            yield start, stop, first, self.sees(docs_of_query, docs_of_key, query, key)[:, None]

    def _blocks(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (partial, full), [B, N, N]: blocks with some visible pairs, and blocks with only visible pairs."""
        block, T = self.block, self.docs_BT.shape[1]
        if T % block:
            raise ValueError(f"data.seq_len={T}: FlexAttention goes by blocks of {block} tokens: use a multiple")
        lowest_BN, highest_BN = self.docs_BT[:, ::block], self.docs_BT[:, block - 1 :: block]
        index_N = torch.arange(T // block, device=self.docs_BT.device, dtype=torch.int32)
        apart_NN = index_N[:, None] - index_N  # query's block minus key's block
        nearest_NN, farthest_NN = (apart_NN * block - (block - 1)).clamp_min(0), apart_NN * block + (block - 1)
        near_NN = apart_NN < self.near_blocks
        share_BNN = lowest_BN[:, :, None] <= highest_BN[:, None]  # documents are numbered in order
        one_BNN = highest_BN[:, :, None] == lowest_BN[:, None]
        some_BNN = (apart_NN >= 0) & near_NN & (nearest_NN < self.near_tokens) & share_BNN
        full_BNN = (apart_NN > 0) & near_NN & (farthest_NN < self.near_tokens) & one_BNN
        return some_BNN & ~full_BNN, full_BNN


def _listed(blocks_BNN: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (number of blocks in each row, [B, 1, N], and their indices in order, [B, 1, N, N])."""
    count_B1N = blocks_BNN.sum(-1, dtype=torch.int32)[:, None].contiguous()
    order_B1NN = blocks_BNN.to(torch.int32).argsort(dim=-1, descending=True, stable=True)[:, None]
    return count_B1N, order_B1NN.to(torch.int32).contiguous()
