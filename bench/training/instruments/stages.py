"""nanochat's four stages, each a torch profile of its own with its memory: traces/<time>/stageN-PHASE_*.

  stage1-model_init           weights made and initialised; with compilation=true also the warm-up, which compiles
  stage2-eval_bpb             the first validation
  stage3-training_microsteps  data, forward and backward of one training step
  stage4-optimizer_step       clipping, learning rate, update, gradients dropped, of the same step

Each gives _trace.json, _memory_timeline.html, _mem.pickle (CUDA's memory history; there is none of a CPU) and the
operators.  A stage is written when it is left; files of ranks above 0 have the rank in their names.
"""

import contextlib
import re
import time

from bench.base import atomic
from bench.base.units import MIB, format_bytes, ms_from_ns
from bench.config import windows
from bench.training.instruments.base import Context, Instrument
from bench.training.memory import recording as memory_recording

STAGES = {"model_init": "stage1-", "eval_bpb": "stage2-", "training_microsteps": "stage3-", "optimizer_step": "stage4-"}


class Stages(Instrument):
    in_timed_region = "torch's profiler over one step, which is flagged and does not count"
    flags_steps = True

    @staticmethod
    def profiler_windows(settings: dict):
        windows.check("instruments.stages", settings)
        return None

    @staticmethod
    def last_step(settings: dict) -> int | None:
        return settings["step"]

    def __init__(self, context: Context, **settings):
        super().__init__(context)
        self._settings = settings
        self._mine = context.rank in (settings["ranks"] or range(context.world_size))
        self._folder = context.folder / "traces" / _timestamp(context.folder.name)
        self._recording = self._memory = None  # a profile and CUDA's memory history
        self._flagged: dict[int, str] = {}
        self._done: dict[str, dict] = {}  # phase: what the record says of it
        self._tables: list[tuple] = []  # (phase, recording, stem): written after training

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
            self._flag(step + 1)
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

    def _begin(self, phase, *ranges):
        if not self._mine or phase in self._done or self._recording is not None:
            return
        from bench.training.profiling.recording import Recording

        context = self.context
        options = windows.stage_options(self._settings)
        self._recording = Recording(phase, options, context.device_type, context.rank, context.world_size, stage=phase)
        if context.device_type == "cuda":
            self._memory = memory_recording.Recording(phase, self._settings["max_entries"], self._settings["stacks"])
            with contextlib.suppress(RuntimeError):  # another instrument keeps a history: that one is written
                self._memory.start()
        self._recording.start()
        for name in ranges:
            self._recording.ranges.open(name)
        context.emit("profile_start", window=phase)
        self._say(phase, "recording")

    def _end(self, phase):
        recording = self._recording
        if recording is None or recording.name != phase:
            return
        from bench.training.profiling import files, tables

        started_ns = time.perf_counter_ns()
        self._recording = None
        recording.stop()
        rank = f"_rank{self.context.rank}" if self.context.rank else ""
        stem = self._folder / f"{STAGES[phase]}{phase}{rank}"
        trace = stem.with_name(f"{stem.name}_trace.json{'.gz' * self._settings['gzip']}")
        self._say(phase, f"Exporting Chrome trace to {self._shown(trace)}")
        saved = files.save(recording.profile, trace, self._settings["max_mib"])
        facts = {"status": "recorded", **saved.facts(), "files": [self._shown(trace)]}
        self._write_timeline(phase, recording, stem, facts)
        self._write_snapshot(phase, stem, facts)
        facts["flush_ms"] = ms_from_ns(time.perf_counter_ns() - started_ns)
        self._done[phase] = facts
        if tables.readable(saved):
            self._tables.append((phase, recording, stem))
        self.context.emit("profile_stop", window=phase, flush_ms=facts["flush_ms"])
        self._say(phase, f"Trace export complete: {saved.num_events:,} events, {format_bytes(saved.num_bytes)}")

    def _write_timeline(self, phase, recording, stem, facts):
        path = stem.with_name(f"{stem.name}_memory_timeline.html")
        if not self._settings["profile_memory"]:
            return
        from bench.training.profiling import allocations

        self._say(phase, f"Exporting memory timeline to {self._shown(path)}")
        timelines, phases = allocations.read(recording.profile, recording.start_mem_bytes)
        facts["peak_mib"] = {device: timeline.peak_bytes / MIB for device, timeline in timelines.items()}
        where = f"{self.context.folder.name}, rank {self.context.rank}"
        about = f"{where}: memory while {phase} was recorded, as torch's profiler saw it."
        html = allocations.of_timelines(f"{stem.name}: memory", about, timelines, phases)
        atomic.write_text(path, html, durable=False)
        facts["files"].append(self._shown(path))

    def _write_snapshot(self, phase, stem, facts):
        if self.context.device_type != "cuda":
            facts["mem_pickle"] = "not available: torch keeps a memory history of CUDA only"
            return
        path = stem.with_name(f"{stem.name}_mem.pickle")
        self._say(phase, f"Dumping CUDA memory snapshot to {self._shown(path)}")
        self._memory.dump(path, what=f"CUDA memory while {phase} was recorded", rank=self.context.rank)
        self._memory.stop()
        facts["files"].append(self._shown(path))

    # ---- answers

    def flags(self) -> dict[int, str]:
        return self._flagged

    def summary(self) -> dict:
        from bench.training.profiling import tables

        for phase, recording, stem in self._tables:
            written = tables.write(recording, stem, stage=phase, rank=self.context.rank)
            self._done[phase]["files"] += [self._shown(path) for path in written]
        self._tables = []
        not_mine = "not reached" if self._mine else f"not this rank: ranks={self._settings['ranks']}"
        return {phase: self._done.get(phase, {"status": not_mine}) for phase in STAGES}

    def merge(self, summaries: list[dict]) -> dict:
        from bench.training.profiling.shots import merged

        return merged(summaries)

    def close(self) -> None:
        if self._recording is not None:
            self._recording.cancel()
            self._recording = None
        if self._memory is not None:
            self._memory.stop()

    def _flag(self, row):
        self._flagged[row] = windows.FLAG
        if self.context.world_size > 1 or self.context.device_type == "cuda":
            self._flagged[row + 1] = windows.FLAG  # others waited while this was written

    def _shown(self, path):
        return path.relative_to(self.context.folder).as_posix()

    def _say(self, phase, text):
        self.context.say(f"[PROFILER:{phase}] {text}")


def _timestamp(run_id):
    """nanochat's %Y%m%d_%H%M%S, from the run's own name, so that all ranks write into one folder."""
    match = re.match(r"(\d{8})T(\d{6})Z", run_id)
    return "_".join(match.groups()) if match else time.strftime("%Y%m%d_%H%M%S")


INSTRUMENT = Stages
