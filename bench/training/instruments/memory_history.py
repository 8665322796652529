"""CUDA's memory history (who allocated what, and when) over windows of steps, and when memory runs out.

The history also runs during build and warm-up, which are not timed: so later snapshots have the stacks of weights and
optimizer state, and running out of memory there, where it mostly happens, has its history.  Afterwards it runs in the
windows only.  torch keeps no history of CPU memory; there, the process's resident set at each phase is recorded.
"""

import time
from pathlib import Path
from typing import Any

from bench.base import atomic
from bench.base.units import MS_PER_S, format_bytes
from bench.config.window_settings import memory_windows
from bench.config.windows import MemoryWindow
from bench.training.instruments.base import Context, Instrument
from bench.training.memory import History, ProcessPeaks, when_out_of_memory

FLAG = "memory_history"
MAX_OOM_SNAPSHOTS = 3  # a run that survives running out of memory may do so often


class MemoryHistory(Instrument):
    in_timed_region = (
        "In its windows the allocator records a stack for each allocation. These steps are flagged and do not count."
    )
    flags_steps = True

    @staticmethod
    def check(settings: dict[str, Any]) -> None:
        memory_windows(settings)

    @staticmethod
    def last_step(settings: dict[str, Any]) -> int | None:
        return memory_windows(settings)[-1].last_step

    def __init__(self, context: Context, **settings: Any):
        super().__init__(context)
        self._rank, self._folder = context.rank, Path(context.folder) / "memory"
        self._windows = [window for window in memory_windows(settings) if window.has(context.rank)]
        self._always: History | None = None  # history of build and warm-up; None on a CPU
        if context.device_type == "cuda":
            self._always = History("memory_history, the build", settings["max_entries"], settings["stacks"])
        self._open: tuple[MemoryWindow, History | Samples] | None = None  # the window being recorded, if any
        self._done: dict[str, dict[str, Any]] = {}  # {window's name: its status and facts}
        self._row: int | None = None
        self._edge = "build"
        self._flags: set[int] = set()
        self._num_ooms = 0
        self._oom_row: int | None = -1

    def on_build_start(self) -> None:
        if self._always is not None:
            when_out_of_memory(self._out_of_memory)
            try:
                self._always.start()
            except RuntimeError as error:
                self.context.say(f"no memory history of build and warm-up: {error}")

    def on_warmup_start(self) -> None:
        self._edge = "warm-up"

    def on_run_start(self) -> None:
        self._edge = "training"
        if self._always is not None:
            self._always.stop()

    def on_step_start(self, step: int) -> None:
        self._row = step + 1
        starting = [window for window in self._windows if window.first_step == self._row]
        if self._open is None and starting:
            self._begin(starting[0])
        self.on_phase(f"step {self._row}")

    def on_phase(self, name: str) -> None:
        if self._open is not None:
            self._open[1].mark(name)

    def on_step_end(self, step: int) -> None:
        if self._open is not None:
            self._flags.add(step + 1)
            if step + 1 == self._open[0].last_step:
                self._end(*self._open)

    def on_run_end(self) -> None:
        last_row, self._row, self._edge = self._row, None, "after training"
        if self._open is not None:  # training stopped early, at its target
            self._end(*self._open, last_row)
        if self._rank == 0 and any("file" in facts for facts in self._done.values()):
            self.context.say(f"./run.sh memory {self.context.folder.name} shows who held the memory")

    def _begin(self, window: MemoryWindow) -> None:
        recording: History | Samples = Samples()
        try:
            if self._always is not None:
                recording = History(f"memory_history, {window.name}", window.max_entries, window.stacks)
                recording.start()
        except RuntimeError as error:  # another instrument records a history
            self._done[window.name] = {"status": f"not recorded: {error}"}
            return
        self._open = window, recording

    def _end(self, window: MemoryWindow, recording: "History | Samples", last_step: int | None = None) -> None:
        """Writes the window's file, and flags the next step too, which begins with an idle GPU and waiting ranks.

        last_step is the run's last step if the run ended within the window, else None.
        """
        self._open = None
        status = "recorded" if last_step is None else "cut short"
        last_step = self._row if last_step is None else last_step
        suffix = ".rss.json" if isinstance(recording, Samples) else ".pickle"
        path = self._folder / f"{window.name}_rank{self._rank}{suffix}"
        began_s = time.perf_counter()
        facts: dict[str, Any] = {"window": window.name, "first_step": window.first_step, "last_step": last_step}
        try:
            num_bytes = recording.dump(path, rank=self._rank, **facts)
        finally:
            if isinstance(recording, History):
                recording.stop()
        ms = MS_PER_S * (time.perf_counter() - began_s)
        if self._row is not None:
            self._flags.add(self._row + 1)
        facts["file"] = f"memory/{path.name}"
        self.context.emit("memory_snapshot", step=self._row, ms=ms, **facts)
        self._done[window.name] = {"status": status, **facts, "num_bytes": num_bytes, "dump_ms": ms}

    def _out_of_memory(self, device: int, requested_bytes: int, limit_bytes: int, free_bytes: int) -> None:
        """Writes a snapshot; the allocator calls this before freeing anything.  A second call in a step is ignored."""
        if self._num_ooms >= MAX_OOM_SNAPSHOTS or self._row == self._oom_row:
            return
        self._num_ooms, self._oom_row = self._num_ooms + 1, self._row
        if self._row is not None:
            self._flags |= {self._row, self._row + 1}
        number = "" if self._num_ooms == 1 else str(self._num_ooms)
        path = self._folder / f"oom{number}_rank{self._rank}.pickle"
        where = self._edge if self._row is None else f"step {self._row}"
        request: dict[str, Any] = {"device": device, "requested_bytes": requested_bytes}
        request |= {"limit_bytes": limit_bytes, "free_bytes": free_bytes}
        running = self._always if self._open is None else self._open[1]
        assert running is not None  # on a GPU
        running.dump(path, rank=self._rank, where=where, **request)
        self.context.emit("out_of_memory", step=self._row, where=where, file=f"memory/{path.name}", **request)
        requested_text, free = format_bytes(requested_bytes), format_bytes(free_bytes)
        self.context.say(
            f"rank {self._rank} ran out of memory ({where}): {requested_text} asked for, {free} free; "
            f"./run.sh memory {self.context.folder.name} shows who holds the rest"
        )

    def flags(self) -> dict[int, str]:
        return {row: FLAG for row in sorted(self._flags) if row <= self.context.num_steps}

    def summary(self) -> dict[str, Any]:
        """Returns {"what", "windows": [facts and status of each], "num_ooms"}."""
        windows = []
        for window in self._windows:
            steps = {"first_step": window.first_step, "last_step": window.last_step}
            windows.append({"window": window.name} | self._done.get(window.name, {"status": "not reached", **steps}))
        source = "CUDA allocator"
        if self._always is None:
            source = "resident set of the process: torch keeps no memory history without a GPU"
        return {"what": source, "windows": windows, "num_ooms": self._num_ooms}

    def merge(self, summaries: list[dict[str, Any]]) -> dict[str, Any]:
        """Lists every rank's windows once, each with its recording ranks, their bytes summed, and the slowest dump."""
        reported = [(rank, summary) for rank, summary in enumerate(summaries) if summary]
        windows: dict[str, dict[str, Any]] = {}
        for rank, summary in reported:
            for window in summary["windows"]:
                merged = windows.setdefault(window["window"], {**window, "ranks": []})
                if "file" in window:
                    if not merged["ranks"]:
                        merged.update(window)
                    else:
                        merged["num_bytes"] += window["num_bytes"]
                        merged["dump_ms"] = max(merged["dump_ms"], window["dump_ms"])
                    merged["ranks"].append(rank)
        if not reported:
            return {}
        num_ooms = sum(summary["num_ooms"] for _, summary in reported)
        return {"what": reported[0][1]["what"], "windows": list(windows.values()), "num_ooms": num_ooms}

    def close(self) -> None:
        if self._always is not None:
            when_out_of_memory(None)
            self._always.stop()
            if self._open is not None and isinstance(self._open[1], History):
                self._open[1].stop()


class Samples:
    """The process's resident set at each mark, which is recorded on a CPU instead of a History."""

    def __init__(self) -> None:
        self._peaks = ProcessPeaks()
        self._marks: list[tuple[float, str]] = []  # (us, name)
        self._rss_bytes: list[int] = []

    def mark(self, name: str) -> None:
        self._marks.append((time.time_ns() / 1e3, name))
        self._rss_bytes.append(self._peaks.now_bytes())

    def dump(self, path: Path, **facts: Any) -> int:
        self.mark("end")
        path.parent.mkdir(parents=True, exist_ok=True)
        samples = {"what": self._peaks.source, **facts, "marks": self._marks, "rss_bytes": self._rss_bytes}
        atomic.write_json(path, samples, durable=False)
        return path.stat().st_size


INSTRUMENT = MemoryHistory
