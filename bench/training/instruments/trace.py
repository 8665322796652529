"""Chosen steps under torch.profiler: Chrome traces and op tables in traces/, one of each per window and rank.

Which steps: conf/instruments/trace.yaml.  What takes long and can wait is done by summary(), after training; the trace
itself is written at once, so that a run which fails later keeps it.
"""

import time

from bench.base.units import format_bytes, format_ms, ms_from_ns
from bench.config import windows as config_windows
from bench.training.instruments.base import Context, Instrument
from bench.training.profiling import files
from bench.training.profiling.shots import Shot, StepTimes, merged


class Trace(Instrument):
    in_timed_region = (
        "torch's profiler over its windows, whose steps are flagged and do not count; elsewhere a comparison a phase"
    )
    flags_steps = True
    profiler_windows = staticmethod(config_windows.trace_windows)

    @classmethod
    def last_step(cls, settings: dict) -> int | None:
        return max((window.last_step for window in cls.profiler_windows(settings)), default=None)

    def __init__(self, context: Context, **settings):
        super().__init__(context)
        windows, self._folder = self._plan(settings)
        self.shots = [Shot(window) for window in sorted(windows, key=lambda window: window.begin_step)]
        self._waiting = list(self.shots)
        self._current: list[Shot] = []  # shots whose steps are running: more than one only where they share no rank
        self._recording = None  # of this rank
        self._times = StepTimes(context.marks)
        self._flagged: dict[int, str] = {}
        self._last_row = 0

    def _plan(self, settings):
        """Settings -> (windows, folder of their traces)."""
        return self.profiler_windows(settings), self.context.folder / "traces"

    def on_run_start(self) -> None:
        for shot in self.shots:
            ranks = "" if shot.window.ranks is None else f" on rank {', '.join(map(str, shot.window.ranks))}"
            late = shot.window.last_step > self.context.num_steps
            never = f", but the run has {self.context.num_steps} steps" if late else ""
            self._say(f"window {shot.window.name} records {config_windows.described(shot.window)}{ranks}{never}")

    def on_step_start(self, step: int) -> None:
        row = step + 1
        while self._waiting and self._waiting[0].window.begin_step <= row:
            self._current.append(self._waiting.pop(0))
        for shot in self._current:
            self._flagged[row] = config_windows.FLAG
            if shot.window.has(self.context.rank):
                self._begin_step(shot, row)
        self._times.start()

    def _begin_step(self, shot, row):
        window = shot.window
        from bench.training.profiling.recording import Recording  # torch: a launcher reads this class without it

        if shot.recording is None:
            here = self.context
            where = (here.device_type, here.rank, here.world_size)
            steps = {"first_step": window.first_step, "last_step": window.last_step}
            shot.recording = Recording(window.name, window.options, *where, **steps)
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

    def _end(self, shot, status):
        """Stop and write; the step after it is disturbed too where a GPU or other ranks had to wait."""
        self._current.remove(shot)
        shot.status = status if shot.rows else "not reached"
        if self.context.world_size > 1 or self.context.device_type == "cuda":
            self._flagged[self._last_row + 1] = config_windows.FLAG
        recording = shot.recording
        if recording is None:
            if shot.rows:
                ranks, steps = (
                    ", ".join(map(str, shot.window.ranks)),
                    config_windows.span(shot.rows[0], shot.rows[-1]),
                )
                self._say(f"window {shot.window.name} was for rank {ranks}: {steps}")
            return
        from bench.training.profiling import tables

        started_ns = time.perf_counter_ns()
        self._recording = None
        if not shot.rows:
            recording.cancel()
            return
        recording.stop(last_step=shot.rows[-1])
        suffix = ".pt.trace.json.gz" if shot.window.gzip else ".pt.trace.json"
        path = self._folder / f"{shot.window.name}_rank{self.context.rank}{suffix}"
        shot.saved = files.save(recording.profile, path, shot.window.max_mib)
        shot.flush_ms = ms_from_ns(time.perf_counter_ns() - started_ns)
        if not tables.readable(shot.saved):
            shot.recording = None  # millions of events are not kept in memory for a table that is not made
        steps = config_windows.span(shot.rows[0], shot.rows[-1])
        facts = {"steps": [shot.rows[0], shot.rows[-1]], "flush_ms": shot.flush_ms}
        self.context.emit("profile_stop", window=shot.window.name, status=status, **facts)
        size = f"{shot.saved.num_events:,} events, {format_bytes(shot.saved.num_bytes)}"
        cut = f", {sum(shot.saved.dropped.values()):,} events dropped to keep max_mib" if shot.saved.dropped else ""
        end = "" if status == "recorded" else f", {status}"
        self._say(f"window {shot.window.name} recorded {steps}{end}: {self._shown(path)} ({size}{cut})")

    def on_run_end(self) -> None:
        for shot in list(self._current):
            self._end(shot, "cut short")
        self._times.read_all()

    def on_failure(self, error: BaseException) -> None:
        """What was recorded until then is kept."""
        for shot in list(self._current):
            self._end(shot, "cut short")

    def flags(self) -> dict[int, str]:
        return self._flagged

    def summary(self) -> dict:
        """{window: {"status", "steps", "files", "num_events", "profiled_step_ms", "other_step_ms", "cost_pct", ...}}"""
        return {shot.window.name: self._of(shot) for shot in self.shots}

    def _of(self, shot):
        window = shot.window
        recorded = {"status": shot.status, "steps_asked": [window.first_step, window.last_step]}
        recorded |= {"warmup_steps": window.warmup_steps, "ranks": window.ranks and list(window.ranks)}
        recorded["steps"] = [shot.rows[0], shot.rows[-1]] if shot.rows else None
        if shot.status != "recorded":
            status = f"{'was ' * (not shot.rows)}{shot.status}"
            self._say(f"window {window.name} {status}: the run ended after step {self._last_row}")
        if shot.saved is None:
            return recorded
        from bench.training.profiling import tables

        stem = shot.saved.path.with_name(shot.saved.path.name.split(".pt.trace")[0])
        facts = {"window": window.name, "rank": self.context.rank, "steps": recorded["steps"]}
        written = [] if shot.recording is None else tables.write(shot.recording, stem, **facts)
        recorded["files"] = [self._shown(path) for path in (shot.saved.path, *written)]
        recorded |= shot.saved.facts() | {"flush_ms": shot.flush_ms} | self._times.cost(shot.rows, self._flagged)
        if recorded["cost_pct"] is not None:
            took = f"took {format_ms(recorded['profiled_step_ms'])}, another {format_ms(recorded['other_step_ms'])}"
            self._say(f"a recorded step of window {window.name} {took}: {recorded['cost_pct']:+.0f} %")
        return recorded

    def merge(self, summaries: list[dict]) -> dict:
        return merged(summaries)

    def close(self) -> None:
        for shot in self.shots:
            if shot.recording is not None:
                shot.recording.cancel()
        self._recording, self._current = None, []

    def _shown(self, path):
        return path.relative_to(self.context.folder).as_posix()

    def _say(self, text):
        self.context.say(f"profiler: {text}")


INSTRUMENT = Trace
