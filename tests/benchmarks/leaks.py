"""How small a leak random tokens show an audit, by simulation.   python tests/benchmarks leaks [NUM_TOKENS ...]

An honest model is one whose nats of a uniform token are ln V + s**2 / 2 - s * z, z standard normal: V times its
probability is then log-normal with a mean of 1, and it has excess_nats = s**2 / 2 more than ln V, as a model that was
trained on other text than random tokens has.  A leak shows it the next token, for a share of the tokens: they cost 0.
"""

import math
from typing import TYPE_CHECKING

from bench.base import stats

if TYPE_CHECKING:
    import numpy as np

DEFAULT_TOKENS = (4096, 10_485_760)
SHOWN = ((257, 0.0), (257, 2.0), (50257, 0.0), (50257, 4.0))  # vocabulary, excess_nats
REPEATS = 2000
POWER = 0.8


def seen_frac(
    num_tokens: int, vocab_size: int, excess_nats: float, leak_frac: float, rng: "np.random.Generator", repeats: int
) -> float:
    """The share of audits of so many random tokens that find the leak; with leak_frac 0 that of false alarms."""
    ln_v = math.log(vocab_size)
    nats = (_mean_nats(num_tokens, ln_v, excess_nats, leak_frac, rng) for _ in range(repeats))
    return sum(stats.log_e_value(ln_v, mean_nats, num_tokens) >= stats.MIN_LOG_E_VALUE for mean_nats in nats) / repeats


def smallest_leak_frac(num_tokens: int, vocab_size: int, excess_nats: float, rng, repeats: int = REPEATS) -> float:
    """The share of tokens that must leak for POWER of the audits to find it, by halving an interval."""
    low, high = 0.0, 1.0
    for _ in range(20):
        middle = (low + high) / 2
        is_enough = seen_frac(num_tokens, vocab_size, excess_nats, middle, rng, repeats) >= POWER
        low, high = (low, middle) if is_enough else (middle, high)
    return high


def _mean_nats(num_tokens, ln_v, excess_nats, leak_frac, rng):
    """The sum of n standard normal numbers is one of variance n."""
    kept = num_tokens - rng.binomial(num_tokens, leak_frac)
    luck = math.sqrt(2 * excess_nats * kept) * rng.standard_normal()
    return (kept * (ln_v + excess_nats) - luck) / num_tokens


def main(*numbers: str) -> None:
    """A line for each number of tokens and each of SHOWN."""
    import numpy as np

    rng = np.random.default_rng(0)
    for num_tokens in map(int, numbers) if numbers else DEFAULT_TOKENS:
        for vocab_size, excess_nats in SHOWN:
            leak = smallest_leak_frac(num_tokens, vocab_size, excess_nats, rng)
            least = stats.least_nats(math.log(vocab_size), num_tokens)
            print(
                f"{num_tokens:>10,} tokens, V {vocab_size:>6,}, {excess_nats:.1f} nats above ln V if honest: "
                f"found from {leak:.6%} of the tokens on; the bound is {least:.6f}",
                flush=True,
            )
