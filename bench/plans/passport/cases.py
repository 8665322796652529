"""What is measured of a device, in the order of importance: where time runs out, the last are omitted and named."""

from collections.abc import Sequence
from dataclasses import dataclass

from bench.base.units import GIB, KIB, MIB, format_bytes
from bench.machine.passport import figures

GPU_PRECISIONS = ("bfloat16", "tf32", "float16", "float32", "float8")
CPU_PRECISIONS = ("float32", "bfloat16")
# m, k, n: squares, and products of a language model: tokens by width by its multiples, weights' gradients, a vocabulary
GPU_SHAPES = (
    *((size, size, size) for size in (8192, 4096, 2048, 1024, 512)),
    *((16384, 768, 768), (16384, 768, 3072), (16384, 3072, 768), (768, 16384, 3072), (16384, 768, 50304)),
    (64, 4096, 4096),
)
CPU_SHAPES = (
    *((size, size, size) for size in (512, 256, 1024, 128)),
    *((1024, 128, 512), (128, 1024, 512), (1024, 128, 128), (2, 256, 256)),
)
GPU_COPIES, CPU_COPIES = (2 * GIB, 256 * MIB, 32 * MIB, 2 * MIB), (256 * MIB, 32 * MIB, 2 * MIB, 256 * KIB)
GPU_MESSAGES = (GIB // 4, 64 * MIB, 16 * MIB, MIB, 64 * KIB, 4 * KIB)
CPU_MESSAGES = (16 * MIB, MIB, 64 * KIB, 4 * KIB)
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter")
LAUNCHES = {"cuda": (figures.HOST_LAUNCH, "kernel, until it is done"), "cpu": ("thread wake-up",)}


@dataclass(frozen=True)
class Case:
    """One figure to be.  name: of a collective or a launch; the other fields as of figures.Figure, None: has none."""

    kind: figures.Kind
    name: str | None = None
    precision: str | None = None
    shape: tuple[int, int, int] | None = None
    num_bytes: int | None = None
    num_threads: int | None = None
    world_size: int | None = None

    @property
    def what(self) -> str:
        """The figure's own name."""
        words = [self.kind, self.name, self.precision, self.shape and "x".join(map(str, self.shape))]
        words += [format_bytes(self.num_bytes), self.num_threads and f"{self.num_threads} threads"]
        words += [self.world_size and f"{self.world_size} ranks"]
        return " ".join(word for word in words if word).replace(" 1 threads", " 1 thread")

    @property
    def facts(self) -> dict:
        """What of a Figure is known before it is measured."""
        names = ("name", "precision", "num_bytes", "num_threads", "world_size")
        result = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return {"what": self.what, "kind": self.kind} | result | ({"shape": list(self.shape)} if self.shape else {})


def of_device(device_type: str, num_threads: Sequence[int] = (), has_float8: bool = False) -> list[Case]:
    """num_threads: of a CPU, each number of threads that is measured; has_float8: of a GPU."""
    launches = [Case("launch", name) for name in LAUNCHES[device_type]]
    if device_type == "cuda":
        precisions = [one for one in GPU_PRECISIONS if one != "float8" or has_float8]
        gemms = [Case("gemm", precision=one, shape=shape) for shape in GPU_SHAPES for one in precisions]
        return [Case("clock"), *[Case("copy", num_bytes=size) for size in GPU_COPIES], *launches, *gemms]
    copies = [Case("copy", num_bytes=size, num_threads=number) for size in CPU_COPIES for number in num_threads]
    gemms = [
        Case("gemm", precision=one, shape=shape, num_threads=number)
        for one in CPU_PRECISIONS
        for shape in CPU_SHAPES
        for number in num_threads
    ]
    return [Case("clock"), *copies, *launches, *gemms]


def of_ranks(device_type: str, world_size: int) -> list[Case]:
    """Collectives of all ranks together; none for one."""
    messages = GPU_MESSAGES if device_type == "cuda" else CPU_MESSAGES
    sized = [(size, name) for name in COLLECTIVES for size in messages] if world_size > 1 else []
    return [Case("collective", name, num_bytes=size, world_size=world_size) for size, name in sized]
