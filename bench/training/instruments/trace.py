"""Chosen steps under torch.profiler: a Chrome trace in traces/ for each window and rank, its tables in traces/ops/.

conf/instruments/trace.yaml chooses the steps.  A trace is written as soon as its window ends, so that a run that fails
later keeps it; the tables, which take long, are written by summary(), after training.
"""

import mmap
import os
import statistics
import struct
import time
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bench.base.units import format_bytes, format_ms, ms_from_ns
from bench.config import window_settings
from bench.config import windows as config_windows
from bench.config.windows import Options, ProfilerWindow
from bench.training.instruments.base import Context, Instrument
from bench.training.profiling import files
from bench.training.timing.clock import StepMarks

LEAD_STEPS = {"cpu": 1, "cuda": 16}  # CUDA's is assumed, not measured; a rank that is further ahead records nothing
PAGE = struct.Struct("<qqq")  # number of cycles decided, first step, number of steps
NUM_TIMES = 9  # the median distance of this many step starts is the duration of a step


class Profiling(Instrument):
    """Base class of the instruments that record with torch's profiler: flags their steps and merges their facts."""

    flags_steps = True

    def __init__(self, context: Context):
        super().__init__(context)
        self._recording: Any = None  # the Recording that is running on this rank, if any
        self._flagged: dict[int, str] = {}

    def _recording_of(self, name: str, options: Options, **facts: Any) -> Any:
        from bench.training.profiling.recording import Recording  # imports torch, which the launcher does without

        context = self.context
        return Recording(name, options, context.device_type, context.rank, context.world_size, **facts)

    def _flag_next(self, row: int) -> None:
        """Flags the step after a recorded one if a GPU or other ranks had to wait while the trace was written."""
        if self.context.world_size > 1 or self.context.device_type == "cuda":
            self._flagged[row + 1] = config_windows.FLAG

    def _shown(self, path: Path) -> str:
        return path.relative_to(self.context.folder).as_posix()

    def flags(self) -> dict[int, str]:
        return self._flagged

    def merge(self, summaries: list[dict[str, Any]]) -> dict[str, Any]:
        """Returns, for each window, the facts of its first recording rank, with the files of all ranks."""
        merged_windows = {}
        for name in dict.fromkeys(name for summary in summaries for name in summary):
            windows = [summary[name] for summary in summaries if name in summary]
            written = [window for window in windows if window.get("files")] or windows[:1]
            merged_windows[name] = merged = dict(written[0])
            if len(written) > 1:
                merged["files"] = [file for window in written for file in window["files"]]
                merged["flush_ms"] = max(window["flush_ms"] for window in written)
                merged |= {key: sum(window[key] for window in written) for key in ("num_events", "num_bytes")}
                merged["dropped"] = dict(sum((Counter(window["dropped"]) for window in written), Counter()))
        return merged_windows


@dataclass
class Shot:
    """A window and what this rank recorded of it."""

    window: ProfilerWindow
    status: str = "not reached"  # later "recorded", "missed", or "cut short" if the run ended within it
    rows: list[int] = field(default_factory=list)  # recorded steps that have ended
    recording: Any = None  # a Recording (bench/training/profiling/recording.py), which needs torch
    saved: files.Saved | None = None
    flush_ms: float | None = None


class ByTheClock:
    """A window in seconds: rank 0's clock decides when it begins, and all ranks record the same steps.

    due(), called at the start of every step, returns each cycle of the window once on every rank.  Rank 0 decides in it
    and writes the steps into a page (a file in the run's folder) that the ranks share.  The window begins LEAD_STEPS
    later, because a rank may be ahead of rank 0: on a GPU by the steps that its host has launched ahead, on a CPU by
    none, as each step ends with a blocking collective.  Seconds count from construction, validations included.
    """

    def __init__(self, window: ProfilerWindow, folder: Path, rank: int, world_size: int, device_type: str):
        assert window.first_s is not None
        self._window, self._rank, self._next_s = window, rank, window.first_s
        self._lead_steps = LEAD_STEPS[device_type] if world_size > 1 else 0
        self._starts_s: deque[float] = deque(maxlen=NUM_TIMES)
        self._path = folder / f".{window.name}.clock.tmp"
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        os.ftruncate(fd, PAGE.size)  # a new file is zeros
        self._page = mmap.mmap(fd, PAGE.size)
        os.close(fd)
        if rank == 0:  # the barrier at the start of the clock comes after this, and every due() after the barrier
            PAGE.pack_into(self._page, 0, 0, 0, 0)
        self._num_seen = self._last_step = 0
        self._started_s = time.perf_counter()

    def due(self, row: int) -> ProfilerWindow | None:
        """Returns the window decided since the last call, or None; its warm-up begins at this step or later."""
        if self._rank == 0:
            self._decide(row, time.perf_counter() - self._started_s)
        num_decided, first_step, num_steps = PAGE.unpack_from(self._page, 0)
        if num_decided == self._num_seen:
            return None
        self._num_seen = num_decided
        cycle = f"_cycle{num_decided}" if self._window.every_s is not None and self._window.repeat != 1 else ""
        name = f"{self._window.name}{cycle}"
        return replace(self._window, name=name, first_step=first_step, active_steps=num_steps, first_s=None)

    def _decide(self, row: int, now_s: float) -> None:
        self._starts_s.append(now_s)
        window, active_steps = self._window, self._window.active_steps
        if now_s < self._next_s or row <= self._last_step or (self._num_seen == window.repeat != 0):
            return
        if window.active_s is not None:
            times_s = list(self._starts_s)
            if len(times_s) < 2:
                return  # the duration of a step is not known yet
            step_s = statistics.median(later - earlier for earlier, later in zip(times_s, times_s[1:]))
            active_steps = max(1, round(window.active_s / step_s))
        first_step = row + self._lead_steps + window.warmup_steps
        self._last_step = first_step + active_steps - 1
        while window.every_s is not None and self._next_s <= now_s:
            self._next_s += window.every_s
        if window.every_s is None:
            self._next_s = float("inf")
        PAGE.pack_into(self._page, 0, self._num_seen, first_step, active_steps)
        PAGE.pack_into(self._page, 0, self._num_seen + 1, first_step, active_steps)  # the number is the signal: last

    def close(self) -> None:
        self._page.close()
        self._path.unlink(missing_ok=True)


class Trace(Profiling):
    in_timed_region = (
        "torch's profiler records its windows, whose steps are flagged and do not count. In the other steps it "
        "marks the step, and checks a variable in each phase."
    )
    profiler_windows = staticmethod(window_settings.trace_windows)
    keeps_profiles = False  # whether torch's profile objects are kept until summary()

    @classmethod
    def last_step(cls, settings: dict[str, Any]) -> int | None:
        last_step = 0
        for window in cls.profiler_windows(settings):
            if window.end_step is None:
                remedy = "give instruments.trace.repeat=N" if window.first_s is None else "give first_step instead"
                problem = f"window {window.name} records {config_windows.described(window)}: it has no last step"
                raise ValueError(f"profile.stop_after_window=true: {problem}: {remedy}")
            last_step = max(last_step, window.end_step)
        return last_step or None

    def __init__(self, context: Context, **settings: Any):
        super().__init__(context)
        self._folder = context.folder / "traces" / (settings.get("trace_dir") or "")
        self._windows = sorted(self.profiler_windows(settings), key=lambda window: window.begin_step)
        cycles = [cycle for window in self._windows for cycle in window.cycles(context.num_steps)]
        self.shots = [Shot(cycle) for cycle in sorted(cycles, key=lambda cycle: cycle.begin_step)]
        self._waiting = self.shots[::-1]  # shots that have not begun; the next one is the last element
        self._clock: ByTheClock | None = None  # schedules the window that is in seconds, if there is one
        self._current: list[Shot] = []  # shots whose steps are running: several only if they share no rank
        self._times = StepMarks(context.marks, ("step",))
        self._last_row = 0

    def on_run_start(self) -> None:
        for window in self._windows:
            ranks = "" if window.ranks is None else f" on rank {', '.join(map(str, window.ranks))}"
            late = window.first_s is None and (window.end_step or window.last_step) > self.context.num_steps
            never = f", but the run has {self.context.num_steps} steps" if late else ""
            self._say(f"window {window.name} records {config_windows.described(window)}{ranks}{never}")
            if window.first_s is not None:
                context = self.context
                place = context.folder, context.rank, context.world_size, context.device_type
                self._clock = ByTheClock(window, *place)

    def on_step_start(self, step: int) -> None:
        row = step + 1
        if self._clock is not None and (window := self._clock.due(row)):
            self.shots.append(Shot(window))
            if row <= window.begin_step:
                self._waiting = [self.shots[-1]]
            else:
                self.shots[-1].status = "missed"  # this rank was ahead of rank 0
        while self._waiting and self._waiting[-1].window.begin_step <= row:
            self._current.append(self._waiting.pop())
        for shot in self._current:
            self._flagged[row] = config_windows.FLAG
            if shot.window.has(self.context.rank):
                self._begin_step(shot, row)
        self._times.start()
        self._times.mark("step")

    def _begin_step(self, shot: Shot, row: int) -> None:
        window = shot.window
        if shot.recording is None:
            steps = {"first_step": window.first_step, "last_step": window.last_step}
            shot.recording = self._recording_of(window.name, window.options, **steps)
        if row == window.first_step:
            shot.recording.start()
            self._recording = shot.recording
            self.context.emit("profile_start", window=window.name, step=row)
        elif not shot.recording.is_warm:
            shot.recording.warm()
        if self._recording is not None:
            self._recording.ranges.open(f"{config_windows.STEP_RANGE}{row}")

    def on_phase(self, name: str) -> None:
        if self._recording is not None:
            self._recording.ranges.close(down_to=0 if name == "validation" else 1)
            self._recording.ranges.open(name)

    def on_validation(self, steps_done: int, val_loss: float, train_s: float) -> None:
        if self._recording is not None:
            self._recording.ranges.close()

    def on_step_end(self, step: int) -> None:
        row = self._last_row = step + 1
        if self._recording is not None:
            self._recording.ranges.close()
        self._times.end(row)
        for shot in list(self._current):
            if row >= shot.window.first_step:
                shot.rows.append(row)
            if row == shot.window.last_step:
                self._end(shot, "recorded")

    def _end(self, shot: Shot, status: str) -> None:
        """Ends a shot: stops its recording on this rank and writes the trace."""
        self._current.remove(shot)
        shot.status = status if shot.rows else "not reached"
        self._flag_next(self._last_row)
        recording, window = shot.recording, shot.window
        steps = config_windows.span(shot.rows[0], shot.rows[-1]) if shot.rows else ""
        if recording is None:
            if shot.rows:
                self._say(f"window {window.name} was for rank {', '.join(map(str, window.ranks or ()))}: {steps}")
            return
        started_ns = time.perf_counter_ns()
        self._recording = None
        if not shot.rows:
            recording.cancel()
            return
        recording.stop(last_step=shot.rows[-1])
        suffix = ".pt.trace.json.gz" if window.gzip else ".pt.trace.json"
        path = self._folder / f"{window.name}_rank{self.context.rank}{suffix}"
        saved = shot.saved = files.save(recording.profile, path, window.max_mib)
        if not (self.keeps_profiles and saved.is_readable):
            shot.recording = None  # frees its events, of which a large trace has millions
        shot.flush_ms = ms_from_ns(time.perf_counter_ns() - started_ns)
        facts = {"steps": [shot.rows[0], shot.rows[-1]], "flush_ms": shot.flush_ms}
        self.context.emit("profile_stop", window=window.name, status=status, **facts)
        size = f"{saved.num_events:,} events, {format_bytes(saved.num_bytes)}"
        cut = f", {sum(saved.dropped.values()):,} events dropped to keep max_mib" if saved.dropped else ""
        end = "" if status == "recorded" else f", {status}"
        self._say(f"window {window.name} recorded {steps}{end}: {self._shown(path)} ({size}{cut})")

    def on_run_end(self) -> None:
        for shot in list(self._current):
            self._end(shot, "cut short")
        self._times.read_all()

    def on_failure(self, error: BaseException) -> None:
        """Writes what was recorded until then."""
        for shot in list(self._current):
            self._end(shot, "cut short")

    def summary(self) -> dict[str, Any]:
        """Returns {window: {"status", "steps", "files", "num_events", "profiled_step_ms", "cost_pct", ...}}."""
        if unreached := [shot.window.name for shot in self.shots if shot.status == "not reached"]:
            others = f" and {len(unreached) - 1} more" if len(unreached) > 1 else ""
            self._say(f"window {unreached[0]}{others} not reached: the run ended after step {self._last_row}")
        summaries = {shot.window.name: self._summary_of(shot) for shot in self.shots}
        for window in self._windows:
            if window.first_s is not None and not self.shots:
                summaries[window.name] = {"status": "not reached", "first_s_asked": window.first_s}
                self._say(f"window {window.name} not reached: the run ended before {window.first_s:g} s")
        return summaries

    def _summary_of(self, shot: Shot) -> dict[str, Any]:
        window = shot.window
        recorded: dict[str, Any] = {"status": shot.status, "steps_asked": [window.first_step, window.last_step]}
        recorded |= {"warmup_steps": window.warmup_steps, "ranks": window.ranks and list(window.ranks)}
        recorded["steps"] = [shot.rows[0], shot.rows[-1]] if shot.rows else None
        if shot.status == "cut short":
            self._say(f"window {window.name} cut short: the run ended after step {self._last_row}")
        if shot.saved is None:
            return recorded
        path, steps = shot.saved.path, recorded["steps"]
        stem = path.name.partition(".pt.trace")[0]
        tables = files.write_tables(path, stem, window=window.name, rank=self.context.rank, steps=steps)
        recorded["files"] = [self._shown(written) for written in (path, *tables)]
        recorded |= shot.saved.facts() | {"flush_ms": shot.flush_ms}
        recorded |= cost(self._times.ms["step"], shot.rows, self._flagged)
        if recorded["cost_pct"] is not None:
            took = f"took {format_ms(recorded['profiled_step_ms'])}, another {format_ms(recorded['other_step_ms'])}"
            self._say(f"a recorded step of window {window.name} {took}: {recorded['cost_pct']:+.0f} %")
        return recorded

    def close(self) -> None:
        for shot in self.shots:
            if shot.recording is not None:
                shot.recording.cancel()
        if self._clock is not None:
            self._clock.close()
        self._recording, self._current, self._clock = None, [], None

    def _say(self, text: str) -> None:
        self.context.say(f"profiler: {text}")


def cost(
    step_ms: dict[int, float], profiled_rows: Iterable[int], disturbed_rows: Iterable[int]
) -> dict[str, float | None]:
    """Returns the medians "profiled_step_ms" and "other_step_ms", and "cost_pct", by how much the first is longer.

    step_ms is {row: milliseconds} of the measured steps.  A median of no steps is None.
    """
    profiled = [step_ms[row] for row in profiled_rows if row in step_ms]
    others = [step_ms[row] for row in step_ms.keys() - set(disturbed_rows)]
    profiled_ms, other_ms = (statistics.median(ms) if ms else None for ms in (profiled, others))
    cost_pct = 100 * (profiled_ms / other_ms - 1) if profiled_ms is not None and other_ms else None
    return {"profiled_step_ms": profiled_ms, "other_step_ms": other_ms, "cost_pct": cost_pct}


INSTRUMENT = Trace
