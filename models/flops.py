"""Floating point operations of one training step, counted from the model's shape.

A matrix multiplication costs 2 per weight and token forwards and 4 backwards (one for each gradient): 6 in all.
Attention multiplies scores and values: 2 * 2 * H * K per pair of tokens forwards, twice that backwards: 12 in all.
Embedding lookups, norms, activations, softmax and the optimizer are not counted, as is usual for MFU.
"""


def flops_per_token(num_matmul_weights, num_layers, num_heads, head_dim, window):
    """Forward and backward, every pair of tokens in a window counted, also the half that the causal mask drops.

    num_matmul_weights: weights of all matrix multiplications, the head's among them, embedding tables not.
    window: how many tokens a token attends to.  This is what torch.utils.flop_counter counts, to the digit.
    """
    return 6 * num_matmul_weights + num_layers * 12 * num_heads * head_dim * window


def flops_per_token_causal(num_matmul_weights, num_layers, num_heads, head_dim, window):
    """The same with half the attention term: a kernel that skips masked pairs computes about half of them.

    Exactly (window + 1) / 2 pairs a token when window is the sequence: the diagonal's half pair is dropped here.
    """
    return 6 * num_matmul_weights + num_layers * 6 * num_heads * head_dim * window
