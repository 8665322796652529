"""torch's profiler over chosen steps of a script that knows nothing of it: script_worker.py installs it.

A step ends when rank 0 prints its line.  Other ranks print nothing: they count the calls of step() of the optimizer
that steps first.  Rank 0 does so too, and shares with each line how many calls it had made by then, so that every rank
knows the step's number, whatever the script did before step 1.  Standard library alone until the script has imported
its own torch, which may be another than the harness's.
"""

import contextlib
import importlib.abc
import importlib.util
import json
import mmap
import os
import re
import struct
import sys

OPTIMIZER = "torch.optim.optimizer"
SHARED = struct.Struct("<qq")  # calls of step() minus the printed step; 1 once that is known


class Profiler:
    """windows: dicts with name, first_step, last_step, begin_step, ranks (null: all) and options.

    edges: [(pattern, offset)] of a line that says that step number + offset is done.
    """

    def __init__(self, folder, rank, windows, edges):
        self._folder, self._rank = folder, rank
        mine = [window for window in windows if window["ranks"] is None or rank in window["ranks"]]
        self._waiting = sorted(mine, key=lambda window: window["begin_step"])
        self._edges = [(re.compile(pattern), offset) for pattern, offset in edges]
        self._window = self._profile = None
        self._done, self._text = [], ""
        self._shared = shared_memory(os.path.join(folder, ".profiled_step.tmp"))
        self._optimizer, self._num_calls = None, 0

    def heard(self, text):
        """What rank 0's script prints, in pieces."""
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

    def optimizer_stepped(self, optimizer, args, kwargs):
        """torch's hook after step() of any optimizer."""
        if self._optimizer is None:
            self._optimizer = optimizer
        if optimizer is not self._optimizer:
            return
        self._num_calls += 1
        if self._rank:
            ahead, is_known = SHARED.unpack_from(self._shared, 0)
            if is_known:
                self._step_done(self._num_calls - ahead)

    def _step_done(self, step):
        torch, following = sys.modules.get("torch"), step + 1
        if self._profile is not None and following > self._window["now"]:
            self._window["now"] = following
            self._profile.step_num = step  # lines may be several steps apart
            self._profile.step()
            if following > self._window["last_step"]:
                self._end()
        elif self._waiting and torch is not None and following >= self._waiting[0]["begin_step"] and step > 0:
            window = self._waiting.pop(0)
            if following <= window["first_step"]:
                self._begin(torch, window, following)
            else:  # it printed no line in time
                self._note(window)

    def _begin(self, torch, window, following):
        actions = torch.profiler.ProfilerAction

        def action(step):
            if step < window["first_step"]:
                return actions.WARMUP
            is_last = step == window["last_step"]
            return (
                actions.NONE if step > window["last_step"] else actions.RECORD_AND_SAVE if is_last else actions.RECORD
            )

        options = dict(window["options"])
        kinds = options.pop("activities")
        if kinds:
            known = {"cpu": torch.profiler.ProfilerActivity.CPU, "cuda": torch.profiler.ProfilerActivity.CUDA}
            options["activities"] = [known[kind] for kind in kinds]
        profile = torch.profiler.profile(schedule=action, on_trace_ready=self._save, **options)
        profile.step_num, profile.current_action = following, action(following)
        profile.start()
        self._profile, self._window = profile, {**window, "now": following, "disturbed": [following, following]}

    def _save(self, profile):
        self._window["raw"] = os.path.join(self._folder, f".{self._window['name']}_rank{self._rank}.raw.tmp")
        profile.export_chrome_trace(self._window["raw"])

    def _end(self):
        self._window["disturbed"][1] = self._window["now"]  # the trace was written in the step that has begun
        self._profile.stop()
        window, self._profile, self._window = self._window, None, None
        self._note(window)

    def _note(self, window):
        self._done.append(window)
        path = os.path.join(self._folder, f".rank{self._rank}.profiled.tmp")
        with contextlib.suppress(OSError), open(path, "w") as file:
            json.dump(self._done, file)


def shared_memory(path):
    """A file of one SHARED, zeros at first, mapped into each rank of this machine."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        os.ftruncate(fd, SHARED.size)
        return mmap.mmap(fd, SHARED.size)
    finally:
        os.close(fd)


class AfterImport(importlib.abc.MetaPathFinder):
    """Calls back with the module OPTIMIZER once the script has imported it."""

    def __init__(self, call):
        self._call = call

    def find_spec(self, name, path=None, target=None):
        if name != OPTIMIZER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def executed(module):
            execute(module)
            self._call(module)

        spec.loader.exec_module = executed
        return spec


class Tee:
    """A text stream that also passes to a Profiler what is written; all else is the stream's own."""

    def __init__(self, stream, heard):
        self._stream, self._heard = stream, heard

    def write(self, text):
        written = self._stream.write(text)
        self._heard(text)
        return written

    def __getattr__(self, name):
        return getattr(self._stream, name)


def install(folder, rank, settings):
    """Before the script runs, on each rank."""
    profiler = Profiler(folder, rank, settings["windows"], settings["edges"])
    hook = "register_optimizer_step_post_hook"
    sys.meta_path.insert(0, AfterImport(lambda module: getattr(module, hook)(profiler.optimizer_stepped)))
    if rank == 0:
        sys.stdout = Tee(sys.stdout, profiler.heard)
