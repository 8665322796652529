"""A device "cuda" that computes nothing, which FakeTensors, autograd and inductor accept in a CPU build of torch.

no_cuda.cpp registers the device with c10, so that autograd's engine finds a stream for it; it compiles in about 3
seconds and must be loaded before torch is imported, which checks only once whether there is a GPU.  The rest is Python:
torch.cuda answers as one of GPUS would, inductor writes Triton code for it, and Triton and ptxas, which need no driver,
compile each kernel.  Made for torch 2.13 and Triton 3.7.
"""

import contextlib
import ctypes
import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bench.machine import gpus

TORCH = "2.13"
SOURCE = Path(__file__).parent / "no_cuda.cpp"


def _gpu(name: str, major: int, num_processors: int, shared_kib: int, cache_mib: int) -> SimpleNamespace:
    """Returns properties like those of torch.cuda.get_device_properties().

    shared_kib is per multiprocessor; a block can have 1 KiB less (CUDA C++ programming guide, compute capabilities).
    """
    return SimpleNamespace(
        name=name,
        major=major,
        minor=0,
        multi_processor_count=num_processors,
        total_memory=80 * 2**30,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048,
        max_threads_per_block=1024,
        warp_size=32,
        shared_memory_per_block=48 * 2**10,
        shared_memory_per_block_optin=(shared_kib - 1) * 2**10,
        shared_memory_per_multiprocessor=shared_kib * 2**10,
        L2_cache_size=cache_mib * 2**20,
        is_integrated=0,
    )


GPUS = {  # from NVIDIA's data sheets
    "h100": _gpu("NVIDIA H100 80GB HBM3", 9, 132, 228, 50),
    "a100": _gpu("NVIDIA A100-SXM4-80GB", 8, 108, 164, 40),
}


class Unavailable(RuntimeError):
    """This machine lacks something that the rehearsal needs; the message says what, and what to do."""


def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def load() -> None:
    """Registers the device.  Raises Unavailable without a C++ compiler, or if torch is imported already."""
    if "torch" in sys.modules:
        raise Unavailable("torch is imported already: rehearse in a process of its own")
    spec, build = importlib.util.find_spec("torch"), gpus.torch_build()
    if spec is None or spec.origin is None or build is None:
        raise Unavailable("there is no torch: ./run.sh makes an environment that has it")
    refuse_unknown(*build)
    ctypes.CDLL(str(_library(Path(spec.origin).parent)))


def refuse_unknown(version: str, cuda: str | None) -> None:
    """Raises Unavailable if torch is a build for GPUs, or another version than TORCH."""
    if cuda is not None:
        raise Unavailable(f"torch {version} is a build for GPUs: rehearse with a build for CPUs (SPEEDRUN_TORCH=cpu)")
    if not version.startswith(f"{TORCH}."):
        raise Unavailable(f"torch {version} is untried, the rehearsal is made for torch {TORCH}: install {TORCH}")


def _library(torch: Path) -> Path:
    """Returns the library, compiled once for a torch and a source and kept in this user's temporary files."""
    named = hashlib.sha256(SOURCE.read_bytes() + str(torch).encode() + (torch / "version.py").read_bytes()).hexdigest()
    path = Path(tempfile.gettempdir()) / f"speedrun-no-cuda-{os.getuid()}" / f"{named[:16]}.so"
    if path.exists():
        return path
    path.parent.mkdir(mode=0o700, exist_ok=True)
    built = path.with_suffix(f".{os.getpid()}")
    flags = ["-std=c++20", "-O0", "-fPIC", "-shared", f"-I{torch}/include", f"-L{torch}/lib", f"-Wl,-rpath,{torch}/lib"]
    compiler = os.environ.get("CXX", "g++")
    command = [compiler, *flags, str(SOURCE), "-lc10", "-ltorch_cpu", "-o", str(built)]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except FileNotFoundError:
        raise Unavailable(f"CXX={compiler}: no such compiler; install g++") from None
    except subprocess.CalledProcessError as error:
        raise Unavailable(f"{SOURCE.name} does not compile against this torch: {error.stderr[-500:]}") from None
    built.rename(path)
    return path


def install(gpu: SimpleNamespace) -> None:
    """Makes torch and inductor treat the device as that GPU, for the rest of this process.  Call load() before."""
    import torch
    import torch._dynamo
    import torch._inductor.compile_fx
    from torch._dynamo import device_interface
    from torch._inductor import config
    from torch._subclasses import fake_tensor

    replacements: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: False,
        "_is_compiled": lambda: True,
        "_lazy_init": lambda: None,
        "init": lambda: None,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "synchronize": lambda device=None: None,
        "get_device_capability": lambda device=None: (gpu.major, gpu.minor),
        "get_device_properties": lambda device=None: gpu,
        "get_device_name": lambda device=None: gpu.name,
        "get_arch_list": lambda: [f"sm_{gpu.major}{gpu.minor}"],
        "is_bf16_supported": lambda *args, **kwargs: True,
        "is_current_stream_capturing": lambda: False,
        "get_rng_state": lambda device=None: torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda state, device=None: None,
        "_exchange_device": lambda index: 0,
        "_maybe_exchange_device": lambda index: 0,
    }
    for name, replacement in replacements.items():
        setattr(torch.cuda, name, replacement)
    for name in ("current_device", "device_count", "set_device", "synchronize", "get_device_properties"):
        setattr(device_interface.CudaInterface, name, staticmethod(replacements[name]))
    interface: Any = device_interface.CudaInterface
    interface.is_bf16_supported = staticmethod(replacements["is_bf16_supported"])
    interface.get_raw_stream = interface.exchange_device = interface.maybe_exchange_device = staticmethod(lambda at: 0)
    torch.version.cuda = "12.8"  # inductor checks for its features; Triton's ptxas is newer
    missing: Any = torch._C
    missing._cuda_getCurrentRawStream = lambda index: 0
    guards: Any = torch._C._dynamo.guards
    guards._empty_strided_cuda = lambda size, stride, dtype: torch.empty_strided(
        size, stride, dtype=dtype, device="cuda:0"
    )
    guards._reinterpret_tensor = lambda tensor, size, stride, offset=0: torch.as_strided(tensor, size, stride, offset)
    fake_tensor.init_gpu_context = lambda device: None
    fake: Any = fake_tensor.FakeTensorMode
    fake.avoid_device_init = property(lambda mode: True)  # makes torch.tensor(2.0, device="cuda") begin on the CPU
    settings: Any = config
    settings.fx_graph_cache = settings.use_static_triton_launcher = False
    settings.compile_threads = 1
    settings.assume_aligned_inputs = True  # FakeTensors have no address that could be checked
    settings.shape_padding = False  # otherwise inductor times a product with and without padding
    settings.triton.unique_kernel_names = False  # kernels with the same source are the same, in Triton's cache too
    settings.size_asserts = settings.alignment_asserts = False
    _fold_on_cpu()
    _choose_attention()
    if has_triton():
        _install_triton(gpu)


def _fold_on_cpu() -> None:
    """Makes inductor compute a graph's constants, of one element each, on the CPU instead of the graph's device."""
    import torch
    from torch._inductor.fx_passes import joint_graph
    from torch.utils._python_dispatch import TorchDispatchMode

    class OnCpu(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            cpu = torch.device("cpu")
            kwargs = {name: cpu if isinstance(value, torch.device) else value for name, value in (kwargs or {}).items()}
            return func(*(cpu if isinstance(value, torch.device) else value for value in args), **kwargs)

    folder: Any = joint_graph.UniformValueConstantFolder
    deduce = folder._deduce_value

    def deduce_on_cpu(self: Any, node: Any) -> Any:
        with OnCpu():
            return deduce(self, node)

    folder._deduce_value = deduce_on_cpu


LIBRARIES: list[Any] = []  # keeps each torch.library.Library alive: freeing it undoes its work


def _choose_attention() -> None:
    """Makes scaled_dot_product_attention choose a kernel as on an H100; a CPU build of torch would choose the math."""
    import torch

    def attention(
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: Any = None,
        enable_gqa: bool = False,
    ) -> Any:
        ops, is_half = torch.ops.aten, query.dtype in (torch.bfloat16, torch.float16)
        settings = dropout_p, is_causal
        if enable_gqa:  # repeats keys and values, as the math kernel does
            key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
        if attn_mask is None and is_half:
            return ops._scaled_dot_product_flash_attention(query, key, value, *settings, False, scale=scale)[0]
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = torch.where(attn_mask, 0.0, float("-inf")).to(query.dtype)
        if attn_mask is not None:
            attn_mask = attn_mask.expand(*query.shape[:2], query.shape[2], key.shape[2])
        needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
        return ops._scaled_dot_product_efficient_attention(
            query, key, value, attn_mask, needs_grad, *settings, scale=scale
        )[0]

    library = torch.library.Library("aten", "IMPL")
    for dispatch_key in ("CUDA", "AutogradCUDA"):
        with contextlib.suppress(RuntimeError):
            library.impl("scaled_dot_product_attention", attention, dispatch_key)
    LIBRARIES.append(library)


def _install_triton(gpu: SimpleNamespace) -> None:
    """Replaces Triton's driver, which asks libcuda for the GPU, by one that reports this GPU and launches nothing."""
    import torch
    import triton
    from torch._inductor.runtime import triton_helpers
    from triton.backends.compiler import GPUTarget

    driver = SimpleNamespace(
        utils=None,
        is_active=lambda: True,
        get_current_target=lambda: GPUTarget("cuda", gpu.major * 10 + gpu.minor, gpu.warp_size),
        get_active_torch_device=lambda: torch.device("cuda", 0),
        get_current_device=lambda: 0,
        get_current_stream=lambda device=0: 0,
        get_device_interface=lambda: torch.cuda,
        map_python_to_cpp_type=lambda name: name,
    )
    triton.runtime.driver.set_active(driver)
    helpers: Any = triton_helpers
    helpers.set_driver_to_gpu = lambda: None
