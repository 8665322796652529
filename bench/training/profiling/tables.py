"""The operators of a trace, in a folder beside it: ops/STEM.txt for people, ops/STEM.json for programs.

A folder of its own, because HolisticTraceAnalysis takes every .json beside a trace for another trace.
Reading a profile's events takes torch seconds for 100,000 of them: this runs after training, and for more than
MAX_EVENTS not at all, because the other ranks wait meanwhile.
"""

import contextlib
from pathlib import Path

from torch.autograd.profiler_util import EventList

from bench.base import atomic
from bench.base.units import MIB
from bench.training.profiling.files import Saved
from bench.training.profiling.recording import Recording

MAX_EVENTS = 1_000_000  # of the trace; torch needs about 30 us and 2 KiB for each
NUM_ROWS, NUM_MEMORY_ROWS = 40, 15


def readable(saved: Saved) -> bool:
    """Whether a saved trace is small enough for torch to be asked about its events."""
    return saved.num_recorded <= MAX_EVENTS


def write(recording: Recording, stem: Path, **facts) -> list[Path]:
    """recording: a stopped one; stem: its trace's path without suffix.  Returns the paths of what was written."""
    profile = recording.profile
    with _readable_names(profile.profiler):
        averages = _operators(profile, profile.key_averages())
    shaped = _operators(profile, profile.key_averages(group_by_input_shape=True)) if profile.record_shapes else averages
    rows = sorted((_row(one, profile) for one in shaped), key=_cost, reverse=True)
    table = facts | {"ops": rows, "most_memory": _most_memory(rows)}
    text_path, json_path = (stem.parent / "ops" / f"{stem.name}.{suffix}" for suffix in ("txt", "json"))
    text_path.parent.mkdir(exist_ok=True)
    atomic.write_text(text_path, _text(averages, profile, facts), durable=False)
    atomic.write_json(json_path, table, durable=False)
    return [text_path, json_path]


@contextlib.contextmanager
def _readable_names(profiler):
    """torch reads no profile in which a Python call has an undecodable name (allocations._name): without such calls."""
    whole = profiler.kineto_results
    profiler.kineto_results = _Readable(whole)
    try:
        yield
    finally:
        profiler.kineto_results = whole


class _Readable:
    def __init__(self, results):
        self._results = results

    def __getattr__(self, name):
        return getattr(self._results, name)

    def events(self):
        return [event for event in self._results.events() if _has_name(event)]


def _has_name(event):
    try:
        return bool(event.name())
    except UnicodeDecodeError:
        return False


def _operators(profile, averages):
    """Without the rows of Python functions, which with_stack adds by the thousand."""
    kept = [row for row in averages if not (row.key.startswith(("<built-in", "nn.Module: ")) or ".py(" in row.key)]
    return EventList(
        kept, use_device=profile.use_device, profile_memory=profile.profile_memory, with_flops=profile.with_flops
    )


def _row(row, profile):
    """memory_mib: allocated less freed by the operator itself, on the device or, without one, on the processor."""
    own_bytes = row.self_device_memory_usage if profile.use_device else row.self_cpu_memory_usage
    return {
        "name": row.key,
        "count": row.count,
        "cpu_us": row.cpu_time_total,
        "self_cpu_us": row.self_cpu_time_total,
        "device_us": row.device_time_total,
        "self_device_us": row.self_device_time_total,
        "memory_mib": own_bytes / MIB if profile.profile_memory else None,
        "flops": row.flops if profile.with_flops else None,
        "shapes": [list(shape) for shape in row.input_shapes or []] if profile.record_shapes else None,
    }


def _cost(row):
    return row["self_device_us"], row["self_cpu_us"]


def _most_memory(rows):
    named = [row for row in rows if row["memory_mib"] and row["memory_mib"] > 0 and row["name"] != "[memory]"]
    named.sort(key=lambda row: row["memory_mib"], reverse=True)
    return [
        {key: row[key] for key in ("name", "count", "cpu_us", "device_us", "memory_mib", "shapes")}
        for row in named[:NUM_MEMORY_ROWS]
    ]


def _text(averages, profile, facts):
    device = "device" if profile.use_device else "cpu"
    shown = {key: " to ".join(map(str, value)) if isinstance(value, list) else value for key, value in facts.items()}
    lines = [", ".join(f"{key} {value}" for key, value in shown.items()), "", f"By own {device} time:"]
    lines += [averages.table(sort_by=f"self_{device}_time_total", row_limit=NUM_ROWS, max_name_column_width=80)]
    if profile.profile_memory:
        lines += ["", f"By {device} memory that the operator itself allocated:"]
        lines += [averages.table(f"self_{device}_memory_usage", NUM_MEMORY_ROWS, max_name_column_width=80)]
    return "\n".join(lines) + "\n"
