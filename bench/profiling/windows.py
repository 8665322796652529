"""The windows of one race: torch's profiler on exactly the steps that were asked for, and what became of each window.

Follows the edges of bench/instruments/base.py.  Everything that takes long and can wait is done by summary(), after
the race; the trace itself is written at once, so that a race which dies later keeps it.
"""

import time
from dataclasses import dataclass, field

from bench.config import profiler_windows as rules
from bench.profiling import files, tables
from bench.profiling.cost import StepTimes
from bench.profiling.recording import Recording
from bench.units import format_bytes, format_ms, ms_from_ns


@dataclass
class Shot:
    """One window, and what has come of it on this rank."""

    window: rules.Window
    status: str = "not reached"  # then "recorded", or "cut short" if the race ended in its midst
    rows: list[int] = field(default_factory=list)  # recorded, finished
    recording: Recording | None = None
    saved: files.Saved | None = None
    flush_ms: float | None = None


def merged(summaries):
    """Windows.summary() of every rank -> one: of each window what its first recording rank says, with the files and sizes of all."""
    known = [summary for summary in summaries if summary]
    found = {}
    for name in dict.fromkeys(name for summary in known for name in summary):
        of_ranks = [summary[name] for summary in known if name in summary]
        written = [one for one in of_ranks if one.get("files")] or of_ranks[:1]
        found[name] = dict(written[0])
        if len(written) > 1:
            found[name] |= {
                "files": [file for one in written for file in one["files"]],
                "flush_ms": max(one["flush_ms"] for one in written),
            }
            found[name] |= {key: sum(one[key] for one in written) for key in ("num_events", "num_bytes")}
            kinds = dict.fromkeys(kind for one in written for kind in one["left_out"])
            found[name]["left_out"] = {kind: sum(one["left_out"].get(kind, 0) for one in written) for kind in kinds}
    return found


class Windows:
    """Call the on_... at every edge, then flags() and summary(); close() gives back what is held.

    context: bench.instruments.base.Context.  folder: of the traces, inside context.folder.
    """

    def __init__(self, context, windows, folder):
        self._context, self._folder = context, folder
        self.shots = [Shot(window) for window in sorted(windows, key=lambda window: window.begin_step)]
        self._waiting = list(self.shots)
        self._current = []  # shots whose steps are running: more than one only where they share no rank
        self._recording = None  # of this rank
        self._times = StepTimes(context.marks)
        self._flagged = {}
        self._last_row = 0

    def on_run_start(self):
        for shot in self.shots:
            ranks = "" if shot.window.ranks is None else f" on rank {', '.join(map(str, shot.window.ranks))}"
            late = shot.window.last_step > self._context.num_steps
            never = f", but the race has {self._context.num_steps}" if late else ""
            self._say(f"window {shot.window.name} records {rules.words(shot.window)}{ranks}{never}")

    def on_step_start(self, step):
        row = step + 1
        while self._waiting and self._waiting[0].window.begin_step <= row:
            self._current.append(self._waiting.pop(0))
        for shot in self._current:
            self._flagged[row] = rules.FLAG
            if shot.window.has(self._context.rank):
                self._begin_step(shot, row)
        self._times.start()

    def _begin_step(self, shot, row):
        window = shot.window
        if shot.recording is None:
            facts = {"first_step": window.first_step, "last_step": window.last_step}
            context = self._context
            shot.recording = Recording(
                window.name, window.options, context.device_type, context.rank, context.world_size, **facts
            )
        if row == window.first_step:
            shot.recording.start()
            self._recording = shot.recording
            self._context.emit("profile_start", window=window.name, step=row)
        elif not shot.recording.is_warm:
            shot.recording.warm()
        if self._recording is not None:
            self._recording.ranges.open(f"{rules.STEP_RANGE}{row}")

    def on_phase(self, name):
        if self._recording is not None:
            self._recording.ranges.close(down_to=0 if name == "validation" else 1)
            self._recording.ranges.open(name)

    def on_validation(self):
        if self._recording is not None:
            self._recording.ranges.close()

    def on_step_end(self, step):
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
        if self._context.world_size > 1 or self._context.device_type == "cuda":
            self._flagged[self._last_row + 1] = rules.FLAG
        recording = shot.recording
        if recording is None:
            if shot.rows:
                self._say(
                    f"window {shot.window.name} was for rank {', '.join(map(str, shot.window.ranks))}: {rules.span(shot.rows[0], shot.rows[-1])}"
                )
            return
        started_ns = time.perf_counter_ns()
        self._recording = None
        if not shot.rows:
            recording.cancel()
            return
        recording.stop(last_step=shot.rows[-1])
        suffix = ".pt.trace.json.gz" if shot.window.gzip else ".pt.trace.json"
        path = self._folder / f"{shot.window.name}_rank{self._context.rank}{suffix}"
        shot.saved = files.save(recording.profile, path, shot.window.max_mib)
        shot.flush_ms = ms_from_ns(time.perf_counter_ns() - started_ns)
        if not tables.readable(shot.saved):
            shot.recording = None  # millions of events are not kept in memory for a table that is not made
        steps = rules.span(shot.rows[0], shot.rows[-1])
        self._context.emit(
            "profile_stop",
            window=shot.window.name,
            status=status,
            steps=[shot.rows[0], shot.rows[-1]],
            flush_ms=shot.flush_ms,
        )
        size = f"{shot.saved.num_events:,} events, {format_bytes(shot.saved.num_bytes)}"
        cut = f", {sum(shot.saved.left_out.values()):,} events left out for max_mib" if shot.saved.left_out else ""
        end = "" if status == "recorded" else f", {status}"
        self._say(f"window {shot.window.name} recorded {steps}{end}: {self._shown(path)} ({size}{cut})")

    def on_run_end(self):
        for shot in list(self._current):
            self._end(shot, "cut short")
        self._times.read_all()

    def on_failure(self):
        """What was recorded until then is worth keeping most of all."""
        for shot in list(self._current):
            self._end(shot, "cut short")

    def flags(self):
        return self._flagged

    def summary(self):
        """{window: {"status", "steps", "files", "num_events", "profiled_step_ms", "other_step_ms", "cost_pct", ...}}"""
        return {shot.window.name: self._of(shot) for shot in self.shots}

    def _of(self, shot):
        window = shot.window
        found = {
            "status": shot.status,
            "steps_asked": [window.first_step, window.last_step],
            "warmup_steps": window.warmup_steps,
        }
        found["ranks"] = None if window.ranks is None else list(window.ranks)
        found["steps"] = [shot.rows[0], shot.rows[-1]] if shot.rows else None
        if shot.status != "recorded":
            status = f"{'was ' * (not shot.rows)}{shot.status}"
            self._say(f"window {window.name} {status}: the race ended after step {self._last_row}")
        if shot.saved is None:
            return found
        stem = shot.saved.path.with_name(shot.saved.path.name.split(".pt.trace")[0])
        facts = {"window": window.name, "rank": self._context.rank, "steps": found["steps"]}
        written = [] if shot.recording is None else tables.write(shot.recording, stem, **facts)
        found["files"] = [self._shown(path) for path in (shot.saved.path, *written)]
        found |= {
            "num_events": shot.saved.num_events,
            "num_bytes": shot.saved.num_bytes,
            "left_out": shot.saved.left_out,
        }
        found |= {"flush_ms": shot.flush_ms} | self._times.cost(shot.rows, self._flagged)
        if found["cost_pct"] is not None:
            profiled, other = format_ms(found["profiled_step_ms"]), format_ms(found["other_step_ms"])
            self._say(
                f"a recorded step of window {window.name} took {profiled}, another {other}: {found['cost_pct']:+.0f} %"
            )
        return found

    def close(self):
        for shot in self.shots:
            if shot.recording is not None:
                shot.recording.cancel()
        self._recording, self._current = None, []

    def _shown(self, path):
        return path.relative_to(self._context.folder).as_posix()

    def _say(self, text):
        self._context.say(f"profiler: {text}")
