"""A reference for bench/compare/design.py: the same model solved with dummies for the blocks and numpy's least squares.

The arguments are the logs of A's and B's runs and their slots; two slots are a round, two rounds a block.
"""

import math
from typing import NamedTuple

import numpy as np

HUBER_SDS = 2.0


class Solved(NamedTuple):
    difference: float
    se: float
    df: int
    trend: float  # change per slot
    residuals: np.ndarray  # in the order of the slots
    num_clipped: int = 0

    @property
    def t(self):
        return self.difference / self.se

    def interval_pct(self, confidence=0.95):
        from scipy import stats

        half = stats.t.ppf((1 + confidence) / 2, self.df) * self.se
        return [100 * math.expm1(self.difference + side * half) for side in (-1, 1)]


def in_turns(num_a, num_b=None, order="ABBA"):
    """Returns the slots of both arms if they are interleaved as by raced() in tests/comparing.py."""
    slots = [order[slot % len(order)] for slot in range(num_a + (num_a if num_b is None else num_b))]
    return [[slot for slot, name in enumerate(slots) if name == arm] for arm in "AB"]


def raced(a_times_s, b_times_s):
    """Fits the log times of equally many runs of each arm in the order A B B A, clipped as the harness does."""
    return clipped([np.log(a_times_s), np.log(b_times_s)], in_turns(len(a_times_s)))


def _model(values, slots):
    runs = sorted((slot, arm, log) for arm in (0, 1) for slot, log in zip(slots[arm], values[arm], strict=True))
    slot, arm, log = (np.array(column, dtype=float) for column in zip(*runs, strict=True))
    blocks = slot // 4
    dummies = [blocks == block for block in np.unique(blocks)]
    return np.column_stack([*dummies, slot, arm]).astype(float), log


def plain(values, slots):
    """Returns the fit by ordinary least squares."""
    x, y = _model(values, slots)
    solution, _, rank, _ = np.linalg.lstsq(x, y, rcond=None)
    assert rank == x.shape[1]
    residuals, df = y - x @ solution, len(y) - rank
    covariance = np.linalg.inv(x.T @ x) * (residuals @ residuals / df)
    return Solved(float(solution[-1]), math.sqrt(covariance[-1, -1]), df, float(solution[-2]), residuals)


def clipped(values, slots, sds=HUBER_SDS):
    """Returns Huber's estimate by reweighted least squares, with his standard error (Huber 1973, K of formula 6.5)."""
    x, y = _model(values, slots)
    (num, num_parameters), weights = x.shape, np.ones(len(y))
    df = num - num_parameters
    for _ in range(10_000):
        root = np.sqrt(weights)
        solution = np.linalg.lstsq(x * root[:, None], y * root, rcond=None)[0]
        residuals = y - x @ solution
        limit = sds * 1.4826 * np.median(np.abs(residuals)) * math.sqrt(num / df)
        before, weights = weights, np.minimum(1.0, limit / np.maximum(np.abs(residuals), 1e-300))
        if np.max(np.abs(weights - before)) < 1e-14:
            break
    psi = np.clip(residuals, -limit, limit)
    num_clipped = int(np.sum(np.abs(residuals) > limit))
    inside = 1 - num_clipped / num
    k = 1 + num_parameters / num * (1 - inside) / inside
    se = k / inside * math.sqrt(psi @ psi / df * np.linalg.inv(x.T @ x)[-1, -1])
    return Solved(float(solution[-1]), se, max(1, df - num_clipped), float(solution[-2]), residuals, num_clipped)


def mde(solved, alpha, floor=0.0):
    """Returns the true difference that has p < alpha, and exceeds the floor (a logarithm), in 80 of 100 races."""
    from scipy import optimize, stats

    t = stats.t.ppf(1 - alpha / 2, solved.df)
    difference = optimize.brentq(lambda shift: stats.nct.sf(t, solved.df, shift) - 0.8, 1e-9, 1000.0) * solved.se
    return max(difference, floor + stats.t.ppf(0.8, solved.df) * solved.se) if floor else difference
