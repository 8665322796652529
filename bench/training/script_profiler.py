"""Runs torch's profiler over chosen steps of an unmodified script; script_worker.py installs it.

A step ends when rank 0 prints its line.  Other ranks print nothing, so they count the calls of step() of the optimizer
that steps first.  Rank 0 counts them too, and with each line shares how many calls it has made, so that every rank
knows the step's number, whatever the script did before step 1.  This file uses only the standard library until the
script has imported its torch, which may differ from the harness's.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import re
import struct
import sys
from collections.abc import Callable
from typing import Any

OPTIMIZER = "torch.optim.optimizer"
SHARED = struct.Struct("<qq")  # calls of step() minus the printed step; 1 once that is known


class Profiler:
    """Profiles windows: dicts with name, first_step, last_step, begin_step, ranks (None for all) and options.

    edges is [(pattern, offset)]: a line that matches says that step (number in the match) + offset is done.
    """

    def __init__(self, folder: str, rank: int, windows: list[dict[str, Any]], edges: list[tuple[str, int]]):
        self._folder, self._rank = folder, rank
        mine = [window for window in windows if window["ranks"] is None or rank in window["ranks"]]
        self._waiting = sorted(mine, key=lambda window: window["begin_step"])
        self._edges = [(re.compile(pattern), offset) for pattern, offset in edges]
        self._window: dict[str, Any] = {}  # the window that is being recorded
        self._profile: Any = None  # torch's profile, while it records
        self._done: list[dict[str, Any]] = []
        self._text = ""
        fd = os.open(os.path.join(folder, ".profiled_step.tmp"), os.O_RDWR | os.O_CREAT, 0o644)
        os.ftruncate(fd, SHARED.size)  # a new file is zeros
        self._shared = mmap.mmap(fd, SHARED.size)  # shared by the ranks of this machine
        os.close(fd)
        self._optimizer: Any = None
        self._num_calls = 0

    def heard(self, text: str) -> None:
        """Receives what rank 0's script prints, in pieces."""
        *lines, self._text = (self._text + text).split("\n")
        self._text = self._text[-4096:]
        for line in lines:
            for pattern, offset in self._edges:
                match = pattern.search(line)
                if match:
                    step = int(match[1]) + offset
                    SHARED.pack_into(self._shared, 0, self._num_calls - step, 1)
                    self._step_done(step)
                    break

    def optimizer_stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Called by torch after step() of any optimizer."""
        if self._optimizer is None:
            self._optimizer = optimizer
        if optimizer is not self._optimizer:
            return
        self._num_calls += 1
        if self._rank:
            ahead, is_known = SHARED.unpack_from(self._shared, 0)
            if is_known:
                self._step_done(self._num_calls - ahead)

    def _step_done(self, step: int) -> None:
        torch, following = sys.modules.get("torch"), step + 1
        if self._profile is not None and following > self._window["now"]:
            self._window["now"] = following
            self._profile.step_num = step  # lines may be several steps apart
            self._profile.step()
            if following > self._window["last_step"]:
                self._window["disturbed"][1] = following  # the trace is written during the next step
                self._profile.stop()
                self._profile = None
                self._note(self._window)
        while not self._profile and torch and self._waiting and 1 < following >= self._waiting[0]["begin_step"]:
            window = self._waiting.pop(0)
            if following <= window["first_step"]:
                self._begin(torch, window, following)
            else:  # no line was printed in time: the window is missed
                self._note(window)

    def _begin(self, torch: Any, window: dict[str, Any], following: int) -> None:
        actions = torch.profiler.ProfilerAction

        def action(step: int) -> Any:
            if step > window["last_step"]:
                return actions.NONE
            if step == window["last_step"]:
                return actions.RECORD_AND_SAVE
            return actions.WARMUP if step < window["first_step"] else actions.RECORD

        options = dict(window["options"])
        kinds = options.pop("activities")
        if kinds:
            activities = {"cpu": torch.profiler.ProfilerActivity.CPU, "cuda": torch.profiler.ProfilerActivity.CUDA}
            options["activities"] = [activities[kind] for kind in kinds]
        profile = torch.profiler.profile(schedule=action, on_trace_ready=self._save, **options)
        profile.step_num, profile.current_action = following, action(following)
        profile.start()
        self._profile, self._window = profile, {**window, "now": following, "disturbed": [following, following]}

    def _save(self, profile: Any) -> None:
        self._window["raw"] = os.path.join(self._folder, f".{self._window['name']}_rank{self._rank}.raw.tmp")
        profile.export_chrome_trace(self._window["raw"])

    def _note(self, window: dict[str, Any]) -> None:
        self._done.append(window)
        path = os.path.join(self._folder, f".rank{self._rank}.profiled.tmp")
        with contextlib.suppress(OSError), open(path, "w") as file:
            json.dump(self._done, file)


class Tee:
    """A text stream that also passes what is written to a Profiler; everything else is delegated to the stream."""

    def __init__(self, stream: Any, heard: Callable[[str], None]):
        self._stream, self._heard = stream, heard

    def write(self, text: str) -> int:
        written: int = self._stream.write(text)
        self._heard(text)
        return written

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def install(folder: str, rank: int, settings: dict[str, Any], after_import: Callable[..., object]) -> None:
    """Installs the profiler on a rank, before the script runs.  after_import is that of compile_flags.py."""
    profiler = Profiler(folder, rank, settings["windows"], settings["edges"])
    hook = "register_optimizer_step_post_hook"
    after_import(OPTIMIZER, lambda module: getattr(module, hook)(profiler.optimizer_stepped))
    if rank == 0:
        sys.stdout = Tee(sys.stdout, profiler.heard)
