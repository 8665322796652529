"""Peak memory of each phase (build, warm-up, train, validation), and the allocator's retries.

Peaks are read at the edges of phases, while the clock is paused.  On a CPU they are the process's resident set, which
seldom shrinks again; "what" in the summary names the kind.  A retry (cudaMalloc failed, the cache was emptied,
cudaMalloc was called again) stalls its step, so its counter is read only after a step that took the host long.
"""

import time
from typing import Any

from bench.base.units import gib_from_bytes
from bench.training.instruments.base import Context, Instrument
from bench.training.memory import COUNTS, peaks_for

SLOW_FRAC = 1.5  # a step above this multiple of the usual host time is slow
NEW_WEIGHT = 0.1  # weight of the newest step in the usual host time, a moving average
ALWAYS_STEPS = 3  # first steps, after each of which the counters are read: the usual time is not known yet


class Memory(Instrument):
    in_timed_region = (
        "On a GPU it reads the clock twice in each step, and the allocator's counters after a step that took the "
        "host long."
    )

    def __init__(self, context: Context):
        super().__init__(context)
        self._peaks = context.peaks or peaks_for(context.device_type, context.device_index)
        self._phase: str | None = None
        self._found: dict[str, dict[str, Any]] = {}  # phase -> {"peak_bytes": {kind: bytes}, counts}
        self._seen: dict[str, Any] = dict.fromkeys(COUNTS, 0)
        self._seen_retries = 0
        self._began_ns = 0
        self._usual_ns: float | None = None
        self._num_steps = 0
        self._on_gpu = context.device_type == "cuda"

    def on_build_start(self) -> None:
        self._enter("build")

    def on_build_end(self) -> None:
        self._enter(None)

    def on_warmup_start(self) -> None:
        self._enter("warmup")

    def on_warmup_end(self) -> None:
        self._enter(None)

    def on_run_start(self) -> None:
        self._enter("train")
        self._seen_retries = self._seen["num_alloc_retries"] or 0

    def on_phase(self, name: str) -> None:
        if name == "validation":
            self._enter("validation")

    def on_validation(self, steps_done: int, val_loss: float, train_s: float) -> None:
        self._enter("train")

    def on_run_end(self) -> None:
        self._enter(None)

    def on_step_start(self, step: int) -> None:
        if self._on_gpu:
            self._began_ns = time.perf_counter_ns()

    def on_step_end(self, step: int) -> None:
        if not self._on_gpu:
            return
        ns, self._num_steps = time.perf_counter_ns() - self._began_ns, self._num_steps + 1
        usual_ns = self._usual_ns or ns
        if self._num_steps <= ALWAYS_STEPS or ns > SLOW_FRAC * usual_ns:
            self._emit_retries(self._peaks.counts()["num_alloc_retries"], step + 1, max(0.0, (ns - usual_ns) / 1e6))
        self._usual_ns = usual_ns + NEW_WEIGHT * (min(ns, SLOW_FRAC * usual_ns) - usual_ns)

    def on_failure(self, error: BaseException) -> None:
        """Emits what each phase had needed until then, which explains running out of memory."""
        self._enter(None)
        self.context.emit("memory_at_failure", **self.summary())

    def _enter(self, phase: str | None) -> None:
        """Ends the previous phase and begins this one; None begins one that is not recorded."""
        now = self._peaks.split()
        if self._phase is not None:
            needed = self._found.setdefault(self._phase, {"peak_bytes": {}, **dict.fromkeys(COUNTS, 0)})
            for kind, num_bytes in now["peak_bytes"].items():
                needed["peak_bytes"][kind] = max(num_bytes, needed["peak_bytes"].get(kind, 0))
            for name in COUNTS:
                needed[name] = None if now[name] is None else needed[name] + now[name] - self._seen[name]
        if self._phase == "train":
            self._emit_retries(now["num_alloc_retries"], None, None)
        self._seen = {name: now[name] for name in COUNTS}
        self._phase = phase

    def _emit_retries(self, num_retries: int | None, row: int | None, ms: float | None) -> None:
        """Emits new retries; ms is the step's host time above the usual, of which the retry is a part."""
        if num_retries is not None and num_retries > self._seen_retries:
            self.context.emit("allocator_retry", step=row, count=num_retries - self._seen_retries, ms=ms)
            self._seen_retries = num_retries

    def summary(self) -> dict[str, Any]:
        """Returns {"what", "total_gib", PHASE_peak_KIND_gib, and on a GPU PHASE_num_alloc_retries, PHASE_num_ooms}."""
        summary: dict[str, Any] = {"what": self._peaks.source, "total_gib": self._peaks.total_gib()}
        for phase, needed in self._found.items():
            peaks = needed["peak_bytes"].items()
            summary |= {f"{phase}_peak_{kind}_gib": gib_from_bytes(num_bytes) for kind, num_bytes in peaks}
            if self._on_gpu:
                summary |= {f"{phase}_{name}": needed[name] for name in COUNTS}
        return summary

    def merge(self, summaries: list[dict[str, Any]]) -> dict[str, Any]:
        """Merges ranks: of a peak, the maximum keeps its name and the minimum is NAME_min; counts are summed."""
        reported = [(rank, summary) for rank, summary in enumerate(summaries) if summary]
        merged: dict[str, Any] = {}
        for name in dict.fromkeys(name for _, summary in reported for name in summary):
            values = [summary[name] for _, summary in reported if summary.get(name) is not None]
            if "_peak_" in name:
                merged |= {name: max(values), f"{name}_min": min(values)}
            elif name.endswith(COUNTS):
                merged[name] = sum(values)
            else:
                merged[name] = values[0] if values else None
        main = "train_peak_allocated_gib" if "train_peak_allocated_gib" in merged else "train_peak_rss_gib"
        if main in merged:
            merged["fullest_rank"] = max(reported, key=lambda rank_and_summary: rank_and_summary[1].get(main) or 0)[0]
        return merged


INSTRUMENT = Memory
