"""The documents in a batch, found by the token that begins each of them.  Static shapes: nothing here breaks a graph.

What comes before a row's first document is one too, because a row may begin in the middle of one.
B batch, T tokens, N documents
"""

import torch


def document_ids(tokens_BT: torch.Tensor, eos_token: int | None) -> torch.Tensor:
    """[B, T], of each token the number of its document in its row; eos_token None: every row is one document."""
    return torch.zeros_like(tokens_BT) if eos_token is None else (tokens_BT == eos_token).cumsum(1)


def cu_seqlens(tokens_BT: torch.Tensor, eos_token: int | None, max_documents: int) -> torch.Tensor:
    """[max_documents + 1], int32: where in the flattened batch each document begins, and then B * T to the end.

    What attention over packed sequences takes.  Documents beyond max_documents become one with the last of them: choose
    it so that they never are, for attention would see across their borders.
    """
    num_tokens = tokens_BT.numel()
    starts_BT = torch.zeros_like(tokens_BT, dtype=torch.bool) if eos_token is None else tokens_BT == eos_token
    first_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device) == 0
    ids = ((starts_BT | first_T).flatten().cumsum(0) - 1).clamp(max=max_documents - 1)
    positions = torch.arange(num_tokens, dtype=torch.int32, device=tokens_BT.device)
    starts_N = torch.full((max_documents + 1,), num_tokens, dtype=torch.int32, device=tokens_BT.device)
    return starts_N.scatter_reduce(0, ids, positions, "amin")
