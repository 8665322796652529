"""Decodes the events of a trace: kinds by category, the fields that are used, columns, and numbers as int64.

Timestamps become nanoseconds, exactly.  Kineto writes microseconds with three decimals, and since the epoch they have
16 digits before them: a float would lose the nanoseconds, so they are read as text, a column at a time.
"""

import contextlib
import json
import re
from typing import Any

import msgspec
import numpy as np

# Kinds of events by category, as PyTorch 1.11 to 2.13 names them, for CUDA and ROCm.
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
    "mtia_ccp_events": SYNC,  # waits and records of events; its kernels and copies are recognized by their arguments
}
UNTIMED = ("trace", "overhead", "cuda_profiler_range")  # categories whose events hold no work of the program
DEVICE_KINDS = (KERNEL, MEMCPY, MEMSET)
ON_DEVICE = {kind: kind in (*DEVICE_KINDS, GPU_ANNOTATION, SYNC) for kind in range(10)}
MOMENT = "[memory]"  # an allocation (profile_memory): no duration, and ph "i"
Number = int | float | str | None
COLUMNS = {  # one row per event
    "kind": np.int8,
    "ts": np.int64,
    "dur": np.int64,
    "name": np.int32,
    "track": np.int32,
    "correlation": np.int64,
    "external": np.int64,
    "extra": np.int32,
}
_RAW = ("dims", "types", "concrete")
# Operators whose numbers and lists decide what they compute: strides, windows, lengths.  Others' are not kept.
NEEDS_CONCRETE = re.compile(r"conv|attn|attention|^triton_|topk", re.I)
EXACT_BELOW = 2**42  # microseconds, below which a double keeps the nanoseconds exact
NO_NUMBER = -1
ZERO = msgspec.Raw(b"0")
BAD = np.iinfo(np.int64).min  # an invalid timestamp
DECIMALS = 3
FAR_NS = 3600 * 10**9  # of a trace's first rows; those of 85 public traces lie within 44 s
BELOW = 2**62  # nanoseconds of a valid timestamp, so that a duration can be added


class Args(msgspec.Struct, gc=False):
    stream: Number = None
    device: Number = None
    correlation: Number = None
    external_id: Number = msgspec.field(default=None, name="External id")
    bytes: Number = None
    dims: msgspec.Raw | msgspec.UnsetType = msgspec.field(default=msgspec.UNSET, name="Input Dims")
    types: msgspec.Raw | msgspec.UnsetType = msgspec.field(default=msgspec.UNSET, name="Input type")
    concrete: msgspec.Raw | msgspec.UnsetType = msgspec.field(default=msgspec.UNSET, name="Concrete Inputs")
    kernel: Number = None  # the kernel that a call launches, in traces of ROCm
    collective: Number = msgspec.field(default=None, name="Collective name")
    nelems: Number = msgspec.field(default=None, name="In msg nelems")
    group: Number = msgspec.field(default=None, name="Process Group Name")
    group_size: Number = msgspec.field(default=None, name="Group size")
    seq: Number = msgspec.field(default=None, name="Seq")  # number of a collective in its group, equal on all ranks
    dtype: Number = None
    allocated: Number = msgspec.field(default=None, name="Bytes")
    device_type: Number = msgspec.field(default=None, name="Device Type")
    row: Number = None  # of the grid of an MTIA's processors on which a kernel ran
    direction: Number = None  # of an MTIA's copy


class Event(msgspec.Struct, gc=False):
    ph: str | None = None
    cat: str | None = None
    name: Number = None
    ts: msgspec.Raw = msgspec.Raw(b"")  # ts and dur as text: see above
    dur: msgspec.Raw = msgspec.Raw(b"")
    pid: Number = None
    tid: Number = None
    args: Args | None = None


DECODER = msgspec.json.Decoder(list[Event])
WHOLES, FLOATS = msgspec.json.Decoder(list[int]), msgspec.json.Decoder(list[float])


def from_plain(value: dict[str, Any]) -> Event:
    """Converts a dict of the json module to an Event, with all of it that can be used."""
    args: dict[str, Any] = value["args"] if isinstance(value.get("args"), dict) else {}
    raw: dict[str, Any] = {
        key: msgspec.Raw(json.dumps(args[_ARG_NAMES[key]]).encode()) for key in _RAW if _ARG_NAMES[key] in args
    }
    plain = {key: _if(args.get(name), (int, float, str)) for key, name in _ARG_NAMES.items() if key not in _RAW}
    texts = {key: _if(value.get(key), str) for key in ("ph", "cat")}
    rest = {key: _if(value.get(key), (int, float, str)) for key in ("name", "pid", "tid")}
    stamps: dict[str, Any] = {key: msgspec.Raw(str(value.get(key)).encode()) for key in ("ts", "dur")}
    return Event(**texts, **rest, **stamps, args=Args(**plain, **raw))


def kind_on_mtia(args: Args | None) -> int:
    """Returns the kind of an MTIA's event by its arguments: the processors of a kernel, or the direction of a copy."""
    if args is None or args.row is None and args.direction is None:
        return SYNC
    return KERNEL if args.direction is None else MEMCPY


def _if(value: Any, types: Any) -> Any:
    return value if isinstance(value, types) else None


_ARG_NAMES = {field.name: field.encode_name for field in msgspec.structs.fields(Args)}


def nanoseconds(texts: list[msgspec.Raw]) -> np.ndarray:
    """Converts microseconds, as JSON text, to int64 nanoseconds exactly; what is not a number becomes BAD.

    A column of whole microseconds, of equally long stamps with three decimals, as Kineto writes both, or of small
    numbers is converted at once.
    """
    joined = b",".join(texts)
    is_ns = b"." in joined and _have_three_decimals(joined, len(texts))
    digits, unit_ns = (joined.replace(b".", b""), 1) if is_ns else (joined, 1000)
    if b"." not in digits:
        with contextlib.suppress(msgspec.DecodeError, OverflowError):  # not whole numbers, or more than 64 bits
            wholes = np.array(WHOLES.decode(b"[" + digits + b"]"), np.int64)
            if len(wholes) == len(texts) and ((wholes < BELOW // unit_ns) & (wholes > -BELOW // unit_ns)).all():
                return wholes * unit_ns
    with contextlib.suppress(msgspec.DecodeError):  # not numbers
        stamps_us = np.array(FLOATS.decode(b"[" + joined + b"]"), np.float64)
        if len(stamps_us) == len(texts) and (np.abs(stamps_us) < EXACT_BELOW).all():
            return np.rint(stamps_us * 1000).astype(np.int64)
    return np.array([_one_ns(bytes(text).decode("ascii", "replace").strip('" ')) for text in texts], np.int64)


def _have_three_decimals(joined: bytes, num_texts: int) -> bool:
    """Returns whether texts joined by commas have one length, and each a single point before its last three bytes."""
    if (len(joined) + 1) % num_texts or joined.count(b".") != num_texts:
        return False
    rows = np.frombuffer(joined + b",", np.uint8).reshape(num_texts, -1)
    places = -DECIMALS - 2
    return rows.shape[1] >= -places and bool((rows[:, [places, -1]] == [ord("."), ord(",")]).all())


def _one_ns(text: str) -> int:
    whole, _, decimals = text.partition(".")
    try:
        if whole.lstrip("-").isdigit() and (decimals or "0").isdigit():
            ns = int(whole) * 1000 + (-1 if whole.startswith("-") else 1) * round(int((decimals + "0000")[:4]) / 10)
        else:
            ns = round(float(text) * 1000)
        return ns if abs(ns) < BELOW else int(BAD)
    except (ValueError, OverflowError):
        return int(BAD)


def whole(value: Any, otherwise: Any = None) -> int:
    """Returns value, else otherwise, as an int, however it is written; NO_NUMBER if neither is a number."""
    for candidate in (value, otherwise):
        if type(candidate) is int:
            return candidate
        for number in (int, lambda text: int(float(text))):  # "7.0"
            with contextlib.suppress(TypeError, ValueError, OverflowError):
                return number(candidate)
    return NO_NUMBER


def integers(values: list[Any]) -> np.ndarray:
    """Converts numbers, however they are written, to int64; what is not a number or does not fit is NO_NUMBER."""
    if set(map(type, values)) <= {int, type(None)}:
        with contextlib.suppress(OverflowError):
            return np.array([NO_NUMBER if value is None else value for value in values], np.int64)
    numbers = [value if type(value) is int else NO_NUMBER if value is None else whole(value) for value in values]
    return np.array([value if -(2**63) <= value < 2**63 else NO_NUMBER for value in numbers], np.int64)
