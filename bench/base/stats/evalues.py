"""How low a loss can be by luck: an e-value, which needs no standard error and no assumption about the model.

Let tokens x_1 ... x_N be drawn from a known distribution p, and let q be any causal model: its q(x_t | x_<t) sums to
1 over the vocabulary and depends on the tokens before t alone, however it was trained.  Given the past, the expectation
of q(x_t | past) / p(x_t | past) is the sum of q over the tokens that p can draw, so at most 1.  Hence the product M of
these ratios over all tokens has an expectation of at most 1, and by Markov's inequality P(M >= 1 / alpha) <= alpha.
But ln M = N * (nats of p - nats of q), both means over the tokens that were drawn.  So a mean loss below
(nats of p) - ln(1 / alpha) / N happens to an honest model with probability alpha at most, at every N.  For tokens drawn
uniformly over a vocabulary of V the nats of p are ln V.
"""

import math

ALPHA = 1e-6  # of one check: a false alarm in a million
LOG_E = math.log(1 / ALPHA)  # 13.8


def log_e(nats_of_p: float, nats: float, num_tokens: int) -> float:
    """ln M of a mean loss of nats; at LOG_E or above no causal model gives it but with probability ALPHA."""
    return num_tokens * (nats_of_p - nats)


def least_nats(nats_of_p: float, num_tokens: int) -> float:
    """The mean loss below which log_e() is above LOG_E."""
    return nats_of_p - LOG_E / num_tokens
