"""Causal self-attention over all earlier tokens, shared by the architectures.

B batch, T tokens, D width = H * K, H heads, K head width
"""

import torch
import torch.nn.functional as F


def split_heads(x_BTD, num_heads):
    """[B, T, D] -> [B, H, T, K], a view."""
    B, T, D = x_BTD.shape
    return x_BTD.view(B, T, num_heads, D // num_heads).transpose(1, 2)


def merge_heads(x_BHTK):
    """[B, H, T, K] -> [B, T, D]."""
    B, H, T, K = x_BHTK.shape
    return x_BHTK.transpose(1, 2).reshape(B, T, H * K)


def causal_attention(q_BHTK, k_BHTK, v_BHTK, mask_B1TT=None):
    """Token t attends to tokens 0..t, or to those of mask_B1TT; scores are divided by sqrt(K).

    SDPA and not FlexAttention, which has no backward pass on a CPU (torch 2.13).
    """
    is_causal = mask_B1TT is None
    return F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, attn_mask=mask_B1TT, is_causal=is_causal)


def window_mask(documents_BT, window_tokens):
    """Token t attends to the last window_tokens tokens up to itself that are of its document: [B, 1, T, T], bool.

    The plain reference: of B * T * T pairs, none is skipped.
    """
    T = documents_BT.shape[1]
    position_T = torch.arange(T, device=documents_BT.device)
    distance_TT = position_T[:, None] - position_T[None, :]
    in_window_TT = (distance_TT >= 0) & (distance_TT < window_tokens)
    same_BTT = documents_BT[:, :, None] == documents_BT[:, None, :]
    return (in_window_TT & same_BTT)[:, None]
