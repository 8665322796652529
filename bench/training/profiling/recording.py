"""Records one segment of a run with torch's profiler, from an exact step to an exact step.

    recording = Recording("early", Options(), "cpu", rank=0, world_size=1)
    recording.warm(); ...; recording.start(); recording.ranges.open("ProfilerStep#5"); ...; recording.stop()
    saved = files.save(recording.profile, path)

torch's schedule is not used, because it counts calls of step(): a step without that call would move the window.
"""

import json
from typing import Any

import torch
from torch.profiler import ProfilerActivity, record_function

from bench.config.windows import CRASH, FLAGS, Options

_holder: Any = None  # the profile that runs in this process: two at once end it with a segmentation fault


class ExclusiveProfile(torch.profiler.profile):
    """A torch.profiler.profile that refuses to start while another one runs, instead of crashing the process."""

    owner = "a profiler"

    def prepare_trace(self) -> None:
        global _holder
        other = None if _holder in (None, self) else _holder.owner
        if _holder is None and getattr(torch.autograd, "_profiler_enabled", bool)():
            other = "a profiler of another program"
        if other is not None:
            raise RuntimeError(f"{self.owner} cannot begin: {other} is recording, and {CRASH}")
        super().prepare_trace()
        _holder = self

    def stop_trace(self) -> None:
        global _holder
        super().stop_trace()
        _holder = None


class Ranges:
    """A stack of annotations (record_function) that are opened at one edge and closed at another."""

    def __init__(self) -> None:
        self._open: list[Any] = []

    def open(self, name: str) -> None:
        entered = record_function(name)
        entered.__enter__()
        self._open.append(entered)

    def close(self, down_to: int = 0) -> None:
        """Closes the innermost annotations until down_to of them are open."""
        while len(self._open) > down_to:
            self._open.pop().__exit__(None, None, None)


class Recording:
    """Call warm(), start() and stop() once each, in this order; warm() may be omitted, and cancel() called at any time.

    facts go into the trace's metadata as "speedrun".  profile is torch's object, for events, averages and export.
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
        """Starts the profiler's machinery (CUPTI, on a GPU) without recording."""
        self.profile.prepare_trace()
        self.is_warm = True

    def start(self) -> None:
        if not self.is_warm:
            self.warm()
        if self._device_type == "cuda":
            torch.cuda.synchronize()  # otherwise kernels of the previous step would be recorded
        self.profile.start_trace()
        self.is_recording = True
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):  # otherwise torch writes it
            info = {"backend": None, "rank": self._rank, "world_size": self._world_size}
            self.profile.add_metadata_json("distributedInfo", json.dumps(info))

    def stop(self, **facts: Any) -> None:
        """Stops after the device has finished, so that the last step's kernels are in.  facts override earlier ones."""
        self.ranges.close()
        self.profile.add_metadata_json("speedrun", json.dumps(self._facts | facts))
        self.is_recording = self.is_warm = False
        self.profile.stop_trace()

    def cancel(self) -> None:
        """Ends the recording and discards it.  A profiler that is left prepared would prevent the next one."""
        if self.is_warm and not self.is_recording:
            self.profile.start_trace()
        if self.is_warm:
            self.stop()
