"""torch.cuda on device.cpp: install() gives a CPU build of torch the functions of torch._C that a CUDA build has.

What torch.cuda does in Python stays torch's own.  A stream is the host, so an event's time is the host's when it was
recorded; a snapshot's segments are blocks of their own.
"""

import contextlib
import ctypes
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

MULTIPROCESSORS, L2_BYTES = 132, 50 * 2**20  # NVIDIA H100 SXM5, data sheet
KEYS = ("total", "others", "allocated", "reserved", "peak_allocated", "peak_reserved", "allocs", "retries", "ooms")


def lines():
    """Reads the file that STAND_IN_GPUS names -> [(UUID, {key: number})]."""
    gpus = []
    for line in Path(os.environ["STAND_IN_GPUS"]).read_text().splitlines():
        uuid, *fields = line.split()
        gpus.append((uuid, {key: int(value) for key, value in (field.split("=") for field in fields)}))
    return gpus


def visible(gpus):
    """The lines that CUDA_VISIBLE_DEVICES shows, in its order, by the rules of the CUDA programming guide."""
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    numbers = []
    for part in [str(num) for num in range(len(gpus))] if wanted is None else wanted.split(","):
        fits = [num for num, (uuid, _) in enumerate(gpus) if part == str(num) or (len(part) > 3 and uuid in part)]
        fits = fits or [num for num, (uuid, _) in enumerate(gpus) if part.startswith("GPU-") and uuid.startswith(part)]
        if len(fits) != 1:
            break
        numbers += fits
    return numbers


class Memory:
    """The allocator's history while it is recorded, in the form of torch.cuda.memory._snapshot()."""

    def __init__(self, library):
        self._library, self._trace, self._live, self.recording, self.observers = library, [], {}, None, []
        self._callback = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_int64)(self._note)

    def record(self, enabled="all", *args, **settings):
        self.recording = enabled
        self._trace.clear()
        if enabled:  # from then on: blocks keep the stacks of their allocation when a history ends
            self._library.stand_in_history(self._callback)

    def _note(self, device, is_alloc, address, size):
        stack, frame = [], sys._getframe(1) if is_alloc and self.recording else None
        while frame is not None and len(stack) < 60:
            code = frame.f_code
            stack.append({"filename": code.co_filename, "line": frame.f_lineno or 0, "name": code.co_name})
            frame = frame.f_back
        actions = ("alloc",) if is_alloc else ("free_requested", "free_completed")
        for action in actions if self.recording else ():
            self._trace.append(self._entry(device, action, size, stack) | {"addr": address})
        if is_alloc:
            self._live[address] = device, size, stack
        else:
            self._live.pop(address, None)

    def _entry(self, device, action, size, stack, **fields):
        facts = {"stream": 0, "compile_context": "N/A", "user_metadata": "", "pool_id": (0, 0)}
        clock = {"time_us": time.time_ns() // 1000, "device": device}
        return {"action": action, "size": size, "frames": stack, **facts, **clock, **fields}

    def out_of_memory(self, device, size, total, free):
        if self.recording:
            self._trace.append(self._entry(device, "oom", size, [], device_free=free))
        for observer in self.observers:
            observer(device, size, total, free)

    def snapshot(self, *args):
        segments = []
        for address, (device, size, stack) in sorted(self._live.items()):
            rounded = -(-size // 512) * 512
            block = {"address": address, "size": rounded, "requested_size": size, "state": "active_allocated"}
            sizes = {"total_size": rounded, "allocated_size": rounded, "active_size": rounded, "requested_size": size}
            kind = {"stream": 0, "segment_type": "large", "segment_pool_id": (0, 0), "is_expandable": False}
            blocks = {"blocks": [block | {"frames": stack}], "frames": []}
            segments.append({"device": device, "address": address, **sizes, **kind, **blocks})
        traces = [[] for _ in range(1 + max((entry["device"] for entry in self._trace), default=0))]
        for entry in self._trace:
            traces[entry["device"]].append({key: value for key, value in entry.items() if key != "device"})
        settings = {"PYTORCH_CUDA_ALLOC_CONF": "", "max_split_size": -1, "expandable_segments": False}
        settings["roundup_power2_divisions"] = {"1": 0}
        empty = {"allocator_settings": settings, "external_annotations": []}
        return {"segments": segments, "device_traces": traces, **empty}


def stats_of(library, device):
    room = (ctypes.c_int64 * len(KEYS))()
    library.stand_in_stats(device, room)
    return dict(zip(KEYS, room))


def memory_stats(library, device):
    """The allocator's statistics, nested as torch._C._cuda_memoryStats() returns them."""
    now = stats_of(library, device)

    def kind(current, peak):
        return {"all": {"current": current, "peak": peak, "allocated": peak, "freed": peak - current}}

    held = {f"{name}_bytes": kind(now["allocated"], now["peak_allocated"]) for name in ("allocated", "active")}
    held |= {"requested_bytes": kind(now["allocated"], now["peak_allocated"])}
    held |= {"reserved_bytes": kind(now["reserved"], now["peak_reserved"])}
    counts = {"num_alloc_retries": now["retries"], "num_ooms": now["ooms"], "num_device_alloc": now["allocs"]}
    return held | {"allocation": kind(now["allocs"], now["allocs"])} | counts


class Event:
    def __init__(self, enable_timing=False, blocking=False, interprocess=False, external=False):
        self._is_timed, self._ns = enable_timing, None

    def record(self, stream=None):
        self._ns = time.perf_counter_ns()

    def elapsed_time(self, end):
        if not (self._is_timed and end._is_timed) or self._ns is None or end._ns is None:
            raise ValueError("Both events must be created with argument 'enable_timing=True' and be recorded.")
        return (end._ns - self._ns) / 1e6

    def query(self):
        return True

    def synchronize(self):
        pass

    wait = record_stream = lambda self, stream=None: None


class Stream:
    cuda_stream = 0

    def __init__(self, device=None, priority=0, **options):
        self.device = device

    def record_event(self, event=None):
        event = Event() if event is None else event
        event.record(self)
        return event

    def query(self):
        return True

    wait_event = wait_stream = lambda self, other: None
    synchronize = lambda self: None  # noqa: E731


def aot_eager(graph, inputs):
    """Takes what inductor would compile for the GPU through AOTAutograd and interprets it."""
    from torch._dynamo.backends.registry import lookup_backend

    return lookup_backend("aot_eager")(graph, inputs)


def install(library):
    """Call it once, after torch was imported.  library: the ctypes handle of device.cpp."""
    import torch
    import torch.distributed.distributed_c10d as c10d

    gpus = lines()
    shown = visible(gpus)
    history = Memory(library)
    c = torch._C
    oom = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)(history.out_of_memory)
    library.stand_in_begin(len(shown), (ctypes.c_int * max(1, len(shown)))(*shown), oom)
    library.kept = oom

    def index_of(device):
        return torch.cuda._utils._get_device_index(device, optional=True)

    def begin():
        if not shown:
            raise RuntimeError("No CUDA GPUs are available")

    def set_device(index):
        if index >= len(shown):
            raise torch.AcceleratorError("CUDA error: invalid device ordinal")
        library.stand_in_set_device(index)
        folder = Path(os.environ["STAND_IN_GPUS"] + ".processes")
        folder.mkdir(exist_ok=True)
        (folder / f"{gpus[shown[index]][0]}.{os.getpid()}").touch()

    def exchange(index):
        before = library.stand_in_device()
        if index >= 0:
            library.stand_in_set_device(index)
        return before

    def synchronize():
        torch.empty(1, device=f"cuda:{library.stand_in_device()}")  # raises where the GPU does not answer

    def properties(device=None):
        begin()
        index = index_of(device)
        uuid, now = gpus[shown[index]]
        return SimpleNamespace(
            name="NVIDIA H100 80GB HBM3",
            major=now["capability"] // 10,
            minor=now["capability"] % 10,
            total_memory=now["memory_mib"] * 2**20,
            multi_processor_count=MULTIPROCESSORS,
            L2_cache_size=L2_BYTES,
            warp_size=32,
            is_integrated=0,
            uuid=uuid.removeprefix("GPU-"),
        )

    class CudaRuntime:
        cudaError = SimpleNamespace(success=0)

        @staticmethod
        def cudaMemGetInfo(device):
            now = stats_of(library, device)
            return now["total"] - now["others"] - now["reserved"], now["total"]

        cudaGetErrorString = str
        cudaProfilerStart = cudaProfilerStop = staticmethod(lambda: 0)

    functions = {
        "_cuda_getDeviceCount": lambda: len(shown),
        "_cuda_init": begin,
        "_cuda_isInBadFork": lambda: False,
        "_cuda_getArchFlags": lambda: "sm_80 sm_90",
        "_cuda_setDevice": set_device,
        "_cuda_getDevice": lambda: library.stand_in_device(),  # dynamo hashes what is here: no function of ctypes
        "_cuda_exchangeDevice": lambda index: exchange(index),
        "_cuda_maybeExchangeDevice": lambda index: exchange(index),
        "_cuda_synchronize": synchronize,
        "_cuda_memoryStats": lambda device: memory_stats(library, device),
        "_cuda_resetPeakMemoryStats": lambda device: library.stand_in_reset_peaks(device),
        "_cuda_resetAccumulatedMemoryStats": lambda device: None,
        "_cuda_emptyCache": lambda: library.stand_in_empty_cache(library.stand_in_device()),
        "_cuda_isHistoryEnabled": lambda: bool(history.recording),
        "_cuda_record_memory_history": history.record,
        "_cuda_memorySnapshot": history.snapshot,
        "_cuda_attach_out_of_memory_observer": history.observers.append,
        "_cuda_getCurrentRawStream": lambda index: 0,
        "_nccl_version": lambda: 22900,
    }
    for name, function in functions.items():
        setattr(c, name, function)
    streams = {name: lambda device=None: Stream(device) for name in ("current_stream", "default_stream")}
    cuda = {
        "_cudart": CudaRuntime,
        "_exchange_device": lambda index: exchange(index),
        "_maybe_exchange_device": lambda index: exchange(index),
        "_get_device_properties": properties,
        "get_device_properties": lambda device=None: properties(device),
        "default_generators": tuple(torch.Generator() for _ in shown),
        "Event": Event,
        "Stream": Stream,
        "stream": lambda stream: contextlib.nullcontext(),
        "set_stream": lambda stream: None,
        "_is_in_bad_fork": lambda: False,
        **streams,
    }
    for name, function in cuda.items():
        setattr(torch.cuda, name, function)
    torch.cuda.streams.Event, torch.cuda.streams.Stream = Event, Stream
    torch.Tensor.record_stream = lambda tensor, stream: None
    torch.cuda.nvtx._nvtx = SimpleNamespace(rangePushA=lambda name: 0, rangePop=lambda: 0, markA=lambda name: None)
    torch.cuda.nccl.version = lambda: (2, 29, 0)
    torch.version.cuda = "13.0"

    class ProcessGroupNCCL(c10d.ProcessGroupGloo):
        class Options:
            def __init__(self, is_high_priority_stream=False):
                self._timeout, self.group_name, self.global_ranks_in_group = c10d.default_pg_nccl_timeout, "", []

        def __init__(self, store, rank, size, options):
            super().__init__(store, rank, size, options._timeout)

        def eager_connect_single_device(self, device):
            pass

        supports_splitting = False

    torch._TorchCompileInductorWrapper.__call__ = lambda inductor, graph, inputs: aot_eager(graph, inputs)

    c10d._NCCL_AVAILABLE, c10d.ProcessGroupNCCL = True, ProcessGroupNCCL
    c10d.default_pg_nccl_timeout = c10d.default_pg_nccl_timeout or c10d.default_pg_timeout
