"""Causal self-attention over all earlier tokens, shared by the architectures.

B batch, T tokens, D width = H * K, H heads, K head width
"""

import torch.nn.functional as F


def split_heads(x_BTD, num_heads):
    """[B, T, D] -> [B, H, T, K], a view."""
    B, T, D = x_BTD.shape
    return x_BTD.view(B, T, num_heads, D // num_heads).transpose(1, 2)


def merge_heads(x_BHTK):
    """[B, H, T, K] -> [B, T, D]."""
    B, H, T, K = x_BHTK.shape
    return x_BHTK.transpose(1, 2).reshape(B, T, H * K)


def causal_attention(q_BHTK, k_BHTK, v_BHTK):
    """Token t attends to tokens 0..t; scores are divided by sqrt(K).

    SDPA and not FlexAttention, which has no backward pass on a CPU (torch 2.13).
    """
    return F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, is_causal=True)
