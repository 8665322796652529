"""An event of a trace: its kind by its category, what is decoded of it, and its columns."""

import json

import msgspec
import numpy as np

# What an event is, from its category; names of PyTorch 1.11 to 2.13, CUDA and ROCm.
KERNEL, MEMCPY, MEMSET, RUNTIME, CPU_OP, ANNOTATION, GPU_ANNOTATION, PYTHON, SYNC, MEMORY = range(10)
KINDS = {
    "kernel": KERNEL,
    **dict.fromkeys(("gpu_memcpy", "memcpy"), MEMCPY),
    **dict.fromkeys(("gpu_memset", "memset"), MEMSET),
    **dict.fromkeys(("cuda_runtime", "cuda_driver", "runtime", "driver", "hip_runtime", "hip_driver"), RUNTIME),
    **dict.fromkeys(("mtia_runtime", "xpu_runtime", "privateuse1_runtime", "privateuse1_driver"), RUNTIME),
    **dict.fromkeys(("cpu_op", "operator"), CPU_OP),
    "user_annotation": ANNOTATION,
    "gpu_user_annotation": GPU_ANNOTATION,
    "python_function": PYTHON,
    "cuda_sync": SYNC,
    "cpu_instant_event": MEMORY,
}
DEVICE_KINDS = (KERNEL, MEMCPY, MEMSET)
ON_DEVICE = {kind: kind in (*DEVICE_KINDS, GPU_ANNOTATION, SYNC) for kind in range(10)}
MOMENT = "[memory]"  # an allocation (profile_memory): no duration, and ph "i"
Number = int | float | str | None


class Args(msgspec.Struct, gc=False):
    stream: Number = None
    device: Number = None
    correlation: Number = None
    external_id: Number = msgspec.field(default=None, name="External id")
    bytes: Number = None
    dims: msgspec.Raw | msgspec.UnsetType = msgspec.field(default=msgspec.UNSET, name="Input Dims")
    types: msgspec.Raw | msgspec.UnsetType = msgspec.field(default=msgspec.UNSET, name="Input type")
    collective: Number = msgspec.field(default=None, name="Collective name")
    nelems: Number = msgspec.field(default=None, name="In msg nelems")
    group: Number = msgspec.field(default=None, name="Process Group Name")
    group_size: Number = msgspec.field(default=None, name="Group size")
    dtype: Number = None
    allocated: Number = msgspec.field(default=None, name="Bytes")
    device_type: Number = msgspec.field(default=None, name="Device Type")


class Event(msgspec.Struct, gc=False):
    ph: str | None = None
    cat: str | None = None
    name: Number = None
    ts: Number = None
    dur: Number = None
    pid: Number = None
    tid: Number = None
    args: Args | None = None


class ExactEvent(Event, gc=False):
    ts: msgspec.Raw = msgspec.Raw(b"")


DECODERS = {False: msgspec.json.Decoder(list[Event]), True: msgspec.json.Decoder(list[ExactEvent])}
COLUMNS = {  # one row an event
    "kind": np.int8,
    "ts": np.int64,
    "dur": np.int64,
    "name": np.int32,
    "track": np.int32,
    "correlation": np.int64,
    "external": np.int64,
    "extra": np.int32,
}


def from_plain(value):
    """A dict from the json module -> Event, with all of it that can be used."""
    args = value.get("args") if isinstance(value.get("args"), dict) else {}
    raw = {key: msgspec.Raw(json.dumps(args[_ARG_NAMES[key]]).encode()) for key in _RAW if _ARG_NAMES[key] in args}
    plain = {key: _if(args.get(name), (int, float, str)) for key, name in _ARG_NAMES.items() if key not in _RAW}
    words = {key: _if(value.get(key), str) for key in ("ph", "cat")}
    rest = {key: _if(value.get(key), (int, float, str)) for key in ("name", "ts", "dur", "pid", "tid")}
    return Event(**words, **rest, args=Args(**plain, **raw))


def _if(value, types):
    return value if isinstance(value, types) else None


_RAW = ("dims", "types")
_ARG_NAMES = {field.name: field.encode_name for field in msgspec.structs.fields(Args)}
