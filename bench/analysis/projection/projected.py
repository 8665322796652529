"""Projects a step to more GPUs: divided work, messages on another link, what hides them, and the slowest of all.

    step = work + replicated + exposed messages + waiting for the slowest

work        the forward and backward passes.  strong: the batch stays the same, so N GPUs have 1/N of it each; weak:
            each GPU keeps its own
replicated  what every GPU does in full, such as an optimizer that is not sharded
exposed     messages after the backward pass, and of those beside it what is not done when it ends: they become ready
            one after the other, evenly over the last backward pass, and follow each other on the link
slowest     the expected maximum of N steps that differ by chance, each by the spread of one

The measured step is taken apart by the same rules: projected to the measured number of GPUs, it stays as it was.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from bench.analysis.projection.links import Curve

Scaling = Literal["strong", "weak"]


@dataclass(frozen=True)
class Message:
    """A message.  num_bytes: of all ranks together, as nccl-tests counts; count: how often in a step, on average.

    is_beside: the backward pass can hide it.  is_per_rank: num_bytes is one rank's part and count the number of parts,
    of which every rank has one in each round, as modded-nanogpt gathers what Muon updated.
    """

    collective: str
    num_bytes: float
    count: float = 1.0
    is_beside: bool = False
    is_per_rank: bool = False

    def on(self, num_gpus: int) -> tuple[float, float]:
        """Returns (bytes, count) among so many GPUs."""
        if self.is_per_rank:
            return self.num_bytes * num_gpus, float(math.ceil(self.count / num_gpus))
        return self.num_bytes, self.count


@dataclass(frozen=True)
class Step:
    """One step as measured, in milliseconds.  backward_ms: of all its micro-batches; num_micro: their number.

    spread_ms: the standard deviation of a rank's step by chance, 0 if not known; slots: how many processes run side by
    side at full speed, None for any number (one on each GPU).
    """

    ms: float
    num_gpus: int
    messages: Sequence[Message] = ()
    num_nodes: int = 1
    backward_ms: float = 0.0
    num_micro: int = 1
    replicated_ms: float = 0.0
    spread_ms: float = 0.0
    slots: int | None = None


@dataclass(frozen=True)
class Projection:
    """The parts of a step on num_gpus GPUs, in milliseconds, which add up to ms.  messages_ms: hidden ones included."""

    num_gpus: int
    num_nodes: int
    work_ms: float
    replicated_ms: float
    exposed_ms: float
    slowest_ms: float
    messages_ms: float

    @property
    def ms(self) -> float:
        return self.work_ms + self.replicated_ms + self.exposed_ms + self.slowest_ms

    @property
    def exposed_frac(self) -> float:
        return self.exposed_ms / self.ms


def project(step: Step, num_gpus: int, num_nodes: int, curve: Curve, scaling: Scaling) -> Projection:
    """Projects a step.  Raises ValueError if the curve lacks so many GPUs, or if messages leave no time for work."""
    here_ms, _ = _exposed(step, step.num_gpus, step.num_nodes, 1.0, curve)
    work_ms = step.ms - step.replicated_ms - here_ms - step.spread_ms * expected_maximum(step.num_gpus)
    if work_ms <= 0:
        remedy = "the link is slower here than where it was measured: name another"
        raise ValueError(
            f"--link {curve.name}: messages alone take {here_ms:.4g} of {step.ms:.4g} ms measured: {remedy}"
        )
    share = step.num_gpus / num_gpus if scaling == "strong" else 1.0
    slowdown = _crowding(num_gpus, step.slots) / _crowding(step.num_gpus, step.slots)
    exposed_ms, messages_ms = _exposed(step, num_gpus, num_nodes, share, curve)
    slowest_ms = step.spread_ms * (1.0 if scaling == "weak" else math.sqrt(share)) * expected_maximum(num_gpus)
    replicated_ms = step.replicated_ms * slowdown
    return Projection(
        num_gpus, num_nodes, work_ms * share * slowdown, replicated_ms, exposed_ms, slowest_ms, messages_ms
    )


def _crowding(num_gpus: int, slots: int | None) -> float:
    return max(1.0, num_gpus / slots) if slots else 1.0


def _exposed(step: Step, num_gpus: int, num_nodes: int, share: float, curve: Curve) -> tuple[float, float]:
    """Returns (exposed ms, all ms) of a step's messages.  share: of the measured work that each GPU has now."""
    last_backward_ms = step.backward_ms * share / max(1.0, step.num_micro * share)
    after_ms, beside = 0.0, []
    for message in step.messages:
        num_bytes, count = message.on(num_gpus)
        ms = 1e3 * curve.seconds(message.collective, num_bytes, num_gpus, num_nodes)
        if message.is_beside:
            times = max(1, round(count))
            beside += [ms * count / times] * times
        else:
            after_ms += count * ms
    end_ms = 0.0
    for number, ms in enumerate(beside, 1):
        end_ms = max(end_ms, last_backward_ms * number / len(beside)) + ms
    return after_ms + max(0.0, end_ms - last_backward_ms), after_ms + sum(beside)


@functools.cache
def expected_maximum(count: int) -> float:
    """Returns the expected maximum of count independent standard normal values: 0 of one, 1.42 of 8 (Tippett 1925)."""
    if count < 2:
        return 0.0
    total, step = 0.0, 1 / 256
    for index in range(-8 * 256, 8 * 256 + 1):
        z = index * step
        below = 0.5 * math.erfc(-z / math.sqrt(2))
        total += z * count * math.exp(-z * z / 2) / math.sqrt(2 * math.pi) * below ** (count - 1) * step
    return total
