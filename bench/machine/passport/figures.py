"""One device's measured figures, and the ceilings that they give.

A ceiling is a figure's "high", of a launch its "low": what the device sustained in the best tenth of its samples.
Where a size or shape was not measured, the nearest by the sum of its factors' ratios, in powers of two, stands for it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, NotRequired, TypedDict

import msgspec

from bench.base.units import GIB

Positive = Annotated[float, msgspec.Meta(gt=0)]
Count = Annotated[int, msgspec.Meta(gt=0)]
Kind = Literal["gemm", "copy", "collective", "launch", "clock"]
UNIT = {"gemm": "TFLOP/s", "copy": "GiB/s", "collective": "GiB/s", "launch": "us", "clock": "MHz"}
LOWER_IS_BETTER = ("launch",)
HOST_LAUNCH = "kernel, host time"  # of one kernel among many, which nobody waits for
MAX_DISTANCE = 3.0  # powers of two over m, k and n together: further away, the rate of a shape is not known


class Figure(TypedDict):
    """what: the same in every passport, e.g. "gemm bfloat16 4096x4096x4096"; value, low, high: the median, the 10th and
    the 90th percentile of the samples, in unit (TFLOP is 1e12, GiB 2**30).

    shape: [m, k, n]; num_bytes: of a copy, read and written; of a collective as nccl-tests counts it, whose bus
    bandwidth the value is; num_threads: of a CPU.
    """

    what: str
    kind: Kind
    unit: str
    value: Positive
    low: Positive
    high: Positive
    num_samples: Count
    name: NotRequired[str]  # of a collective, of a launch
    precision: NotRequired[str]
    shape: NotRequired[Annotated[list[Count], msgspec.Meta(min_length=3, max_length=3)]]
    num_bytes: NotRequired[Count]
    num_threads: NotRequired[Count]
    world_size: NotRequired[Count]


@dataclass(frozen=True)
class Ceilings:
    """of: figures of one device and of its box's collectives; at: when they were measured, UTC; num_threads: of whose
    figures, None on a GPU; foreign_cores: what other programs took of a CPU that was measured beside them, else 0."""

    of: Sequence[Figure]
    at: str
    num_threads: int | None = None
    foreign_cores: float = 0.0

    @property
    def source(self) -> str:
        """For a person: where these are from."""
        beside = f" beside programs that took {self.foreign_cores:.1f} cores" if self.foreign_cores else ""
        return f"measured{beside}, passport of {self.at[:10]}"

    def peak_flops(self, precision: str | None) -> float | None:
        """FLOP/s of the best shape of a precision ("bfloat16", "tf32", ...); None where it was not measured."""
        rates = [figure["high"] for figure in self._of("gemm") if figure.get("precision") == precision]
        return 1e12 * max(rates) if rates else None

    def shape_flops(self, precision: str | None, shape: Sequence[int]) -> float | None:
        """FLOP/s of the nearest shape to m, k, n; None where none is near."""
        near = [
            (sum(abs(math.log2(ours / theirs)) for ours, theirs in zip(shape, figure["shape"])), figure["high"])
            for figure in self._of("gemm")
            if figure.get("precision") == precision and min(shape) > 0
        ]
        distance, rate = min(near, default=(math.inf, 0.0))
        return 1e12 * rate if distance <= MAX_DISTANCE else None

    def bytes_per_s(self, num_bytes: float) -> float | None:
        """Memory bandwidth of a copy of about so many bytes, read and written."""
        return self._nearest(self._of("copy"), num_bytes)

    @property
    def launch_s(self) -> float | None:
        """The host's time of launching a kernel, in the best tenth of the samples; None where it was not measured."""
        return next((1e-6 * figure["low"] for figure in self._of("launch") if figure.get("name") == HOST_LAUNCH), None)

    def bus_bytes_per_s(self, name: str, num_bytes: float, world_size: int) -> float | None:
        """Bus bandwidth of a collective of about so many bytes among so many ranks; None where it was not measured."""
        among = [figure for figure in self._of("collective") if figure.get("world_size") == world_size]
        return self._nearest([figure for figure in among if figure.get("name") == name], num_bytes)

    def _of(self, kind):
        return [
            figure
            for figure in self.of
            if figure["kind"] == kind and (self.num_threads is None or figure.get("num_threads") == self.num_threads)
        ]

    @staticmethod
    def _nearest(figures, num_bytes):
        if not figures or num_bytes <= 0:
            return None
        nearest = min(figures, key=lambda figure: abs(math.log2(num_bytes / figure["num_bytes"])))
        return GIB * nearest["high"]


# Bytes on the wire of each rank's link over the bytes of the message: nccl-tests, doc/PERFORMANCE.md
BUS_FACTORS = {
    "all_reduce": lambda num_ranks: 2 * (num_ranks - 1) / num_ranks,
    "all_gather": lambda num_ranks: (num_ranks - 1) / num_ranks,
    "reduce_scatter": lambda num_ranks: (num_ranks - 1) / num_ranks,
}


def bus_bytes(name: str, num_bytes: float, world_size: int) -> float:
    """Bytes that a message of num_bytes costs the bus; name: of BUS_FACTORS."""
    return BUS_FACTORS[name](world_size) * num_bytes
