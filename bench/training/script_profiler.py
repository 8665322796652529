"""torch's profiler over chosen steps of a script that knows nothing of it: script_worker.py installs it.

A step ends when rank 0 prints its line, so only rank 0 is recorded.  Standard library alone until the script has
imported its own torch, which may be another than the harness's.
"""

import contextlib
import json
import os
import re
import sys


class Profiler:
    """windows: dicts with name, first_step, last_step, begin_step and options.

    edges: [(pattern, offset)] of a line that says that step number + offset is done.
    """

    def __init__(self, folder, windows, edges):
        self._folder = folder
        self._waiting = sorted(windows, key=lambda window: window["begin_step"])
        self._edges = [(re.compile(pattern), offset) for pattern, offset in edges]
        self._window = self._profile = None
        self._done, self._text = [], ""

    def heard(self, text):
        """What the script prints, in pieces."""
        *lines, self._text = (self._text + text).split("\n")
        self._text = self._text[-4096:]
        for line in lines:
            for pattern, offset in self._edges:
                match = pattern.search(line)
                if match:
                    self._step_done(int(match[1]) + offset)
                    break

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
            if following <= window["first_step"]:  # else it printed no line in time
                self._begin(torch, window, following)

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
        self._window["raw"] = os.path.join(self._folder, f".{self._window['name']}_rank0.raw.tmp")
        profile.export_chrome_trace(self._window["raw"])

    def _end(self):
        self._window["disturbed"][1] = self._window["now"]  # the trace was written in the step that has begun
        self._profile.stop()
        self._done.append(self._window)
        self._profile = self._window = None
        with contextlib.suppress(OSError), open(os.path.join(self._folder, ".rank0.profiled.tmp"), "w") as file:
            json.dump(self._done, file)


class Tee:
    """A text stream that also tells a Profiler what is written; all else is the stream's own."""

    def __init__(self, stream, heard):
        self._stream, self._heard = stream, heard

    def write(self, text):
        written = self._stream.write(text)
        self._heard(text)
        return written

    def __getattr__(self, name):
        return getattr(self._stream, name)


def install(folder, settings):
    """Before the script runs, on rank 0."""
    sys.stdout = Tee(sys.stdout, Profiler(folder, settings["windows"], settings["edges"]).heard)
