"""One segment of a run under torch's profiler, begun and ended where we say.

    recording = Recording("early", Options(), "cpu", rank=0, world_size=1)
    recording.warm(); ...; recording.start(); recording.ranges.open("ProfilerStep#5"); ...; recording.stop()
    saved = files.save(recording.profile, path)

torch's own schedule is not used: it counts calls of step(), and a step without that call moves the window.
"""

import json
from typing import Any

import torch
from torch.profiler import ProfilerActivity, record_function

from bench.config.windows import FLAGS, Options

_holder: Any = None  # whose profiler runs in this process: two at once end it with a segmentation fault


class ExclusiveProfile(torch.profiler.profile):
    """torch.profiler.profile that refuses to begin where another one runs, instead of crashing the process."""

    owner = "a profiler"

    def prepare_trace(self) -> None:
        global _holder
        other = None if _holder in (None, self) else _holder.owner
        if _holder is None and getattr(torch.autograd, "_profiler_enabled", bool)():
            other = "a profiler of another program"
        if other is not None:
            crash = "two torch profilers at once crash the process"
            raise RuntimeError(f"{self.owner} cannot begin: {other} is recording, and {crash}")
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
