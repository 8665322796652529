"""Contestants side by side: a round runs the block of each, then once more in the other order.

A clock that drifts falls on all alike so.  Ratios are taken within a round; medians over rounds, with 95 % intervals.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence

from bench.base import stats

MIN_ROUNDS = 5


def measured(
    blocks: Mapping[str, Callable[[], float]], max_rounds: int, is_spent: Callable[[], bool]
) -> dict[str, list[float]]:
    """{name: seconds of its two blocks, of each round}; after MIN_ROUNDS only until is_spent(), asked every round."""
    result = {name: [] for name in blocks}
    for number in range(max_rounds):
        if is_spent() and number >= MIN_ROUNDS:
            break
        seconds = dict.fromkeys(blocks, 0.0)
        for name in [*blocks, *reversed(blocks)]:
            seconds[name] += blocks[name]()
        for name, spent_s in seconds.items():
            result[name].append(spent_s)
    return result


def ratio(what: str, ours: Sequence[float], theirs: Sequence[float], target: float | None = None) -> tuple:
    """A row for bench-self, (what, measured, sign, target, 95 % interval), of the seconds of two contestants."""
    ratios = [one / other for one, other in zip(ours, theirs, strict=True)]
    sign = None if target is None else "<="
    return what, statistics.median(ratios), sign, target, stats.median_interval(ratios)


def step_ms(name: str, seconds: Sequence[float], num_block_steps: int, where: str) -> tuple:
    """The same of one contestant's milliseconds a step."""
    return f"{name}, ms a step ({where})", 1e3 * statistics.median(seconds) / 2 / num_block_steps, None, None
