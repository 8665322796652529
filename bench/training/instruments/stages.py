"""nanochat's four stages, each in a separate torch profile with its memory, as traces/<time>/stageN-PHASE_* files.

  stage1-model_init           building and initialising the weights; with compilation=true the warm-up too
  stage2-eval_bpb             the first validation
  stage3-training_microsteps  data, forward and backward of one training step
  stage4-optimizer_step       clipping, learning rate, update and zero_grad of the same step

Each gives _trace.json, _memory_timeline.html, _mem.pickle (CUDA's memory history; none on a CPU) and a table of
operators.  A stage's files are written when it ends; those of ranks above 0 have the rank in their names.
"""

import contextlib
import re
import time
from pathlib import Path
from typing import Any

from bench.base import atomic
from bench.base.units import MIB, format_bytes, ms_from_ns
from bench.config import window_settings, windows
from bench.training.instruments.base import Context
from bench.training.instruments.trace import Profiling
from bench.training.memory import History
from bench.training.profiling import files

STAGES = {"model_init": "stage1-", "eval_bpb": "stage2-", "training_microsteps": "stage3-", "optimizer_step": "stage4-"}


class Stages(Profiling):
    in_timed_region = "torch's profiler records one step, which is flagged and does not count."

    @staticmethod
    def profiler_windows(settings: dict[str, Any]) -> None:
        window_settings.build(window_settings.Stages, "instruments.stages", settings)

    @staticmethod
    def last_step(settings: dict[str, Any]) -> int | None:
        return int(settings["step"])

    def __init__(self, context: Context, **settings: Any):
        super().__init__(context)
        self._settings = settings
        self._mine = context.rank in (settings["ranks"] or range(context.world_size))
        # nanochat's %Y%m%d_%H%M%S, taken from the run's name so that all ranks write into one folder
        named = re.match(r"(\d{8})T(\d{6})Z", context.folder.name)
        timestamp = "_".join(named.groups()) if named else time.strftime("%Y%m%d_%H%M%S")
        self._folder = context.folder / "traces" / timestamp
        self._history: History | None = None  # CUDA's memory history of the current stage
        self._done: dict[str, dict[str, Any]] = {}  # {phase: facts for the record}
        self._traces: list[tuple[str, Path, str]] = []  # (phase, trace, stem); tables are written after training

    # ---- edges

    def on_build_start(self) -> None:
        self._begin("model_init")

    def on_build_end(self) -> None:
        if not self._settings["compilation"]:
            self._end("model_init")

    def on_warmup_end(self) -> None:
        self._end("model_init")

    def on_step_start(self, step: int) -> None:
        if step + 1 == self._settings["step"]:
            self._flagged[step + 1] = windows.FLAG
            self._flag_next(step + 1)
            self._begin("training_microsteps", f"{windows.STEP_RANGE}{step + 1}")

    def on_phase(self, name: str) -> None:
        if name == "validation":
            self._begin("eval_bpb", name)
        elif self._recording is not None:
            if name == "optimizer":
                self._end("training_microsteps")
                self._begin("optimizer_step", f"{windows.STEP_RANGE}{self._settings['step']}")
            self._recording.ranges.close(down_to=1)
            self._recording.ranges.open(name)

    def on_validation(self, steps_done: int, val_loss: float, train_s: float) -> None:
        self._end("eval_bpb")

    def on_step_end(self, step: int) -> None:
        if step + 1 == self._settings["step"]:
            self._end("optimizer_step")

    def on_run_end(self) -> None:
        for phase in STAGES:
            if self._mine and phase not in self._done:
                self._say(phase, f"was not reached: the run has no step {self._settings['step']}")

    def on_failure(self, error: BaseException) -> None:
        if self._recording is not None:
            self._end(self._recording.name)

    # ---- one stage

    def _begin(self, phase: str, *ranges: str) -> None:
        if not self._mine or phase in self._done or self._recording is not None:
            return
        recorded = {name: self._settings[name] for name in ("record_shapes", "profile_memory", "with_stack")}
        self._recording = self._recording_of(phase, windows.Options(**recorded), stage=phase)
        if self.context.device_type == "cuda":
            self._history = History(phase, self._settings["max_entries"], self._settings["stacks"])
            with contextlib.suppress(RuntimeError):  # another instrument keeps a history, which is dumped instead
                self._history.start()
        self._recording.start()
        for name in ranges:
            self._recording.ranges.open(name)
        self.context.emit("profile_start", window=phase)
        self._say(phase, "recording")

    def _end(self, phase: str) -> None:
        recording = self._recording
        if recording is None or recording.name != phase:
            return
        started_ns = time.perf_counter_ns()
        self._recording = None
        recording.stop()
        rank = f"_rank{self.context.rank}" if self.context.rank else ""
        stem = self._folder / f"{STAGES[phase]}{phase}{rank}"
        trace = stem.with_name(f"{stem.name}_trace.json{'.gz' * self._settings['gzip']}")
        self._say(phase, f"Exporting Chrome trace to {self._shown(trace)}")
        saved = files.save(recording.profile, trace, self._settings["max_mib"])
        facts = {"status": "recorded", **saved.facts(), "files": [self._shown(trace)]}
        if self._settings["profile_memory"]:
            self._write_timeline(phase, saved.path, stem, facts)
        self._write_snapshot(phase, stem, facts)
        facts["flush_ms"] = ms_from_ns(time.perf_counter_ns() - started_ns)
        self._done[phase] = facts
        self._traces.append((phase, saved.path, stem.name))
        self.context.emit("profile_stop", window=phase, flush_ms=facts["flush_ms"])
        self._say(phase, f"Trace export complete: {saved.num_events:,} events, {format_bytes(saved.num_bytes)}")

    def _write_timeline(self, phase: str, trace: Path, stem: Path, facts: dict[str, Any]) -> None:
        from bench.training.profiling import allocations

        path = stem.with_name(f"{stem.name}_memory_timeline.html")
        self._say(phase, f"Exporting memory timeline to {self._shown(path)}")
        where = f"{self.context.folder.name}, rank {self.context.rank}"
        about = f"{where}: memory while {phase} was recorded, as torch's profiler saw it."
        html, timelines = allocations.page_of_trace(trace, f"{stem.name}: memory", about)
        facts["peak_mib"] = {device: timeline.peak_bytes / MIB for device, timeline in timelines.items()}
        atomic.write_text(path, html, durable=False)
        facts["files"].append(self._shown(path))

    def _write_snapshot(self, phase: str, stem: Path, facts: dict[str, Any]) -> None:
        if self._history is None:
            facts["mem_pickle"] = "not available: torch keeps a memory history of CUDA only"
            return
        path = stem.with_name(f"{stem.name}_mem.pickle")
        self._say(phase, f"Dumping CUDA memory snapshot to {self._shown(path)}")
        self._history.dump(path, what=f"CUDA memory while {phase} was recorded", rank=self.context.rank)
        self._history.stop()
        facts["files"].append(self._shown(path))

    # ---- answers

    def summary(self) -> dict[str, Any]:
        for phase, trace, stem in self._traces:
            written = files.write_tables(trace, stem, stage=phase, rank=self.context.rank)
            self._done[phase]["files"] += [self._shown(path) for path in written]
        self._traces = []
        not_mine = "not reached" if self._mine else f"not this rank: ranks={self._settings['ranks']}"
        return {phase: self._done.get(phase, {"status": not_mine}) for phase in STAGES}

    def close(self) -> None:
        if self._recording is not None:
            self._recording.cancel()
            self._recording = None
        if self._history is not None:
            self._history.stop()

    def _say(self, phase: str, text: str) -> None:
        self.context.say(f"[PROFILER:{phase}] {text}")


INSTRUMENT = Stages
