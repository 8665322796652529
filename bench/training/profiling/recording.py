"""One segment of a run under torch's profiler, begun and ended where we say, and the operators of what it recorded.

    recording = Recording("early", Options(), "cpu", rank=0, world_size=1)
    recording.warm(); ...; recording.start(); recording.ranges.open("ProfilerStep#5"); ...; recording.stop()
    saved = files.save(recording.profile, path)
    write_operators(recording, path_without_suffix)

torch's own schedule is not used: it counts calls of step(), and a step without that call moves the window.

The operators are in a folder beside the trace, ops/STEM.txt for people, ops/STEM.json for programs: a folder of its
own, because HolisticTraceAnalysis takes every .json beside a trace for another trace.
"""

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.autograd.profiler_util import EventList
from torch.profiler import ProfilerActivity, record_function

from bench.base import atomic
from bench.base.units import MIB
from bench.config.windows import FLAGS, Options

NUM_ROWS, NUM_MEMORY_ROWS = 40, 15

_holder: Any = None  # whose profiler runs in this process: two at once end it with a segmentation fault


class ExclusiveProfile(torch.profiler.profile):
    """torch.profiler.profile that refuses to begin where another one runs, instead of crashing the process."""

    owner = "a profiler"

    def prepare_trace(self) -> None:
        global _holder
        if _holder not in (None, self):
            raise RuntimeError(
                f"{self.owner} cannot begin: {_holder.owner} is recording, and two torch profilers at once crash"
            )
        if _holder is None and getattr(torch.autograd, "_profiler_enabled", bool)():
            raise RuntimeError(
                f"{self.owner} cannot begin: a torch profiler is recording, and two at once crash the process"
            )
        super().prepare_trace()
        _holder = self

    def stop_trace(self) -> None:
        global _holder
        super().stop_trace()
        _holder = None


class Ranges:
    """Annotations that open at one edge and close at another: the last opened is the first closed."""

    def __init__(self) -> None:
        self._open: list[Any] = []

    def open(self, name: str) -> None:
        entered = record_function(name)
        entered.__enter__()
        self._open.append(entered)

    def close(self, down_to: int = 0) -> None:
        """Close until only down_to are open."""
        while len(self._open) > down_to:
            self._open.pop().__exit__(None, None, None)


class Recording:
    """warm(), start(), stop(), each once and in this order; warm() may be omitted.  cancel() from anywhere.

    facts go into the trace's metadata as "speedrun".  profile is torch's object: events, key_averages, export.
    """

    def __init__(self, name: str, options: Options, device_type: str, rank: int, world_size: int, **facts: Any):
        self.name, self.is_warm, self.is_recording = name, False, False
        self.ranges = Ranges()
        self._device_type, self._rank, self._world_size = device_type, rank, world_size
        self._facts = {"window": name} | facts
        activities = options.activities or (("cpu", "cuda") if device_type == "cuda" else ("cpu",))
        wanted = {getattr(ProfilerActivity, activity.upper()) for activity in activities}
        if not wanted & torch.profiler.supported_activities():
            where = f"window {name}: activities={list(activities)}"
            raise ValueError(f"{where}: this torch can record none of them here: use null")
        chosen = {flag: getattr(options, flag) for flag in FLAGS}
        self.profile = ExclusiveProfile(activities=sorted(wanted, key=str), **chosen)
        self.profile.owner = f"window {name}"

    def warm(self) -> None:
        """The profiler's machinery runs (CUPTI, on a GPU) and nothing is recorded."""
        self.profile.prepare_trace()
        self.is_warm = True

    def start(self) -> None:
        if not self.is_warm:
            self.warm()
        if self._device_type == "cuda":
            torch.cuda.synchronize()  # kernels of the step before would be recorded as this one's
        self.profile.start_trace()
        self.is_recording = True
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):  # else torch writes it
            here = {"backend": None, "rank": self._rank, "world_size": self._world_size}
            self.profile.add_metadata_json("distributedInfo", json.dumps(here))

    def stop(self, **facts: Any) -> None:
        """Waits for the device, so that the last step's kernels are in.  facts: of the trace, over the planned."""
        self.ranges.close()
        self.profile.add_metadata_json("speedrun", json.dumps(self._facts | facts))
        self.is_recording = self.is_warm = False
        self.profile.stop_trace()

    def cancel(self) -> None:
        """End what runs; nothing is kept.  A profiler left prepared would prevent the next one."""
        if self.is_warm and not self.is_recording:
            self.profile.start_trace()
        if self.is_warm:
            self.stop()


# ---- its operators


def write_operators(recording: Recording, stem: Path, **facts: Any) -> list[Path]:
    """recording: a stopped one; stem: its trace's path without suffix.  Returns the paths of what was written.

    torch takes seconds for 100,000 events: call it after training, and only where files.Saved.is_readable.
    """
    profile = recording.profile
    with _readable_names(profile.profiler):
        averages = _operators(profile, profile.key_averages())
    shaped = _operators(profile, profile.key_averages(group_by_input_shape=True)) if profile.record_shapes else averages
    rows = [_row(row, profile) for row in shaped]
    rows.sort(key=lambda row: (row["self_device_us"], row["self_cpu_us"]), reverse=True)
    named = [row for row in rows if row["memory_mib"] and row["memory_mib"] > 0 and row["name"] != "[memory]"]
    named.sort(key=lambda row: row["memory_mib"], reverse=True)
    shown = ("name", "count", "cpu_us", "device_us", "memory_mib", "shapes")
    table = facts | {"ops": rows, "most_memory": [{key: row[key] for key in shown} for row in named[:NUM_MEMORY_ROWS]]}
    text_path, json_path = (stem.parent / "ops" / f"{stem.name}.{suffix}" for suffix in ("txt", "json"))
    text_path.parent.mkdir(exist_ok=True)
    atomic.write_text(text_path, _text(averages, profile, facts), durable=False)
    atomic.write_json(json_path, table, durable=False)
    return [text_path, json_path]


@contextlib.contextmanager
def _readable_names(profiler: Any) -> Iterator[None]:
    """Without the Python calls of with_stack, which no table shows; and torch reads no profile in which one has an
    undecodable name (torch 2.13 now and then gives one a name from memory that is not its own).
    """

    class Readable:
        def __getattr__(self, name: str) -> Any:
            return getattr(whole, name)

        def events(self) -> list[Any]:
            return [event for event in whole.events() if is_shown(event)]

    def is_shown(event: Any) -> bool:
        try:
            # bool() is False: torch 2.11 has no such method, and lists no Python calls here
            return bool(event.name()) and not getattr(event, "is_python_function", bool)()
        except UnicodeDecodeError:
            return False

    whole = profiler.kineto_results
    profiler.kineto_results = Readable()
    try:
        yield
    finally:
        profiler.kineto_results = whole


def _operators(profile: Any, averages: Sequence[Any]) -> Any:
    """Without the rows of Python functions, which with_stack adds by the thousand."""
    kept = [row for row in averages if not (row.key.startswith(("<built-in", "nn.Module: ")) or ".py(" in row.key)]
    return EventList(
        kept, use_device=profile.use_device, profile_memory=profile.profile_memory, with_flops=profile.with_flops
    )


def _row(row: Any, profile: Any) -> dict[str, Any]:
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


def _text(averages: Any, profile: Any, facts: dict[str, Any]) -> str:
    device = "device" if profile.use_device else "cpu"
    shown = {key: " to ".join(map(str, value)) if isinstance(value, list) else value for key, value in facts.items()}
    lines = [", ".join(f"{key} {value}" for key, value in shown.items()), "", f"By own {device} time:"]
    lines += [averages.table(sort_by=f"self_{device}_time_total", row_limit=NUM_ROWS, max_name_column_width=80)]
    if profile.profile_memory:
        lines += ["", f"By {device} memory that the operator itself allocated:"]
        lines += [averages.table(f"self_{device}_memory_usage", NUM_MEMORY_ROWS, max_name_column_width=80)]
    return "\n".join(lines) + "\n"
