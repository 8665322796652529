"""A script's run as the launcher sees it: its output, its telemetry, its progress, and what is made of them at the end.

In the place of what bench/training/ does for our own runs: with Watched(...) around the agent, tick() twice a second,
conclude() once the ranks have ended.
"""

import contextlib
import os
import time
import traceback
from pathlib import Path

from bench.base import atomic
from bench.launch.script import outcome, trace_files, work_folder
from bench.launch.script.output import Output
from bench.machine import processes
from bench.machine.meters import CpuMeter
from bench.machine.telemetry import samples as join
from bench.machine.telemetry.sampling import Sampling
from bench.record import failures, metrics, printed_times, run_folder, step_files
from bench.record.importers import dialects

WORKER = "bench/training/script_worker.py"
NO_TELEMETRY = {"summary": {}, "doubts": [], "warnings": []}


class Watched:
    """The run of a job with a script, in its folder."""

    def __init__(self, folder: Path, job):
        self._folder, self._job = folder, job
        self._output = Output(folder, job.config.hardware.num_processes, job.script.dialect)
        self.pipes = self._output.pipes
        self.program = (job.script.python, str(job.code / WORKER))  # that the agent starts as each rank
        self._reader = None  # of the dialect, once it is known
        self._num_read, self._last, self._foreign = 0, {}, None
        self._sampling = self._started = self._stopped = None
        self._warnings = []
        self._agent_pid, self._waits_ns = None, []  # as in printed_times.clock()

    @contextlib.contextmanager
    def watching(self):
        """Around the agent."""
        step_files.write(self._folder, [], step_files.RUN_COLUMNS)
        self._meter = CpuMeter(own_s=lambda: sum(os.times()[:4]))
        try:
            with self._output:
                yield
        finally:
            self._foreign = self._meter.foreign_cpu_cores()
            self._stop_sampling()

    def started(self, agent_pid):
        """The agent runs: begin to sample."""
        self._agent_pid = agent_pid
        settings = self._job.config.instruments.get("telemetry")
        if settings is None:
            return
        hardware = self._job.config.hardware
        num_devices = hardware.num_processes if hardware.device == "cuda" else 0
        try:
            path = self._folder / "telemetry.csv"
            self._sampling = Sampling(path, settings, [], num_devices, agent_pid, self._job.code)
            self._sampling.wait()
            self._started = self._sampling.start()
        except (OSError, RuntimeError, TimeoutError) as error:
            words = f"{type(error).__name__}: {error}"
            self._warnings.append({"rank": None, "instrument": "telemetry", "edge": "start", "error": words})

    def _stop_sampling(self):
        sampling, self._sampling = self._sampling, None
        if sampling is not None:
            if self._started is not None:
                self._stopped = sampling.stop()
            sampling.close()

    def tick(self):
        """steps.csv and .progress.tmp as far as the script has printed.  OSError on a full disk: it ends the run."""
        waited_ns = processes.waited_ns(self._agent_pid)
        if waited_ns is not None:
            self._waits_ns.append((time.perf_counter_ns(), waited_ns))
        rows = self._new_rows()
        if rows:
            columns = ("step", "train_loss", "val_loss", "step_ms")
            kept = [{"flags": "", **{name: row.get(name) for name in columns}} for row in rows]
            step_files.append(self._folder, kept)
            self._write_progress()

    def _new_rows(self):
        new = self._output.lines[self._num_read :]
        self._num_read += len(new)
        if self._reader is None:
            name = self._job.script.dialect or dialects.detect(text for _, text in new)
            if name is None:
                return []
            self._reader = dialects.of_name(name)
        rows = [row for _, text in new if (row := self._reader.row(text))]
        for row in rows:
            self._last |= row
        return rows

    @property
    def step(self) -> int | None:
        """The last that it has printed."""
        return self._last.get("step")

    def has_seen_its_windows(self) -> bool:
        """Whether the run may end now: profile.stop_after_window, and every rank has written the last of its traces."""
        config = self._job.config
        return config.profile.stop_after_window and trace_files.are_done(
            self._folder, config.instruments, config.hardware.num_processes
        )

    def _write_progress(self):
        step = self._last["step"]
        progress = {"step": step, "num_steps": self._last.get("total") or self._job.config.goal.num_steps}
        average_ms = self._last.get("step_avg_ms") or metrics.step_avg_ms(self._last.get("train_time_ms"), step)
        if average_ms:
            progress["step_avg_ms"] = average_ms
        atomic.write_json(self._folder / run_folder.PROGRESS, progress, durable=False)

    def conclude(self, run: dict, exit_code: int | None, failure: dict | None) -> dict | None:
        """The run's half of the record, as bench/training/ leaves it for our own.  Returns the failure, or None."""
        failure = failure or failures.classify(self._folder, exit_code)
        try:
            self._new_rows()  # what it printed while it was ended
            result = outcome.write(self._folder, self._job, run, self._output, self._telemetry(), self._waits_ns)
            run["script"]["files_written"] = work_folder.tidy(self._job.script, self._folder / work_folder.WORK)
        except OSError as error:
            result = failures.failure(failures.kind_of(error), str(error))
        except Exception as error:  # of lines that nobody has thought of: the record says so, and is kept
            with contextlib.suppress(OSError):
                (self._folder / "logs" / "reading.log").write_text(traceback.format_exc())
            words = f"what the script printed cannot be read: {type(error).__name__}: {error}"
            result = failures.failure("exception", words)
        if failure and failure["step"] is None:
            failure["step"] = self.step
        return failure or result

    def _telemetry(self):
        result = NO_TELEMETRY | {"foreign_cpu_cores": self._foreign, "warnings": self._warnings}
        if self._stopped is None:
            return result
        timed = printed_times.events(outcome.rows_of_output(self._output, self._job.script.dialect))
        spans = [(a[0], b[0]) for a, b in zip(timed, timed[1:], strict=False) if not b[2]]
        rows = join.read(self._folder / "telemetry.csv")
        joined = join.summary(rows, spans, self._started, self._stopped)
        summary = join.whole(joined, self._started, self._stopped)
        said = [
            {"rank": None, "instrument": "telemetry", "edge": "run end", "error": words}
            for words in join.warnings(joined, self._stopped["report"])
        ]
        doubts = [{"rank": 0, "instrument": "telemetry", "doubt": one} for one in join.doubts(summary)]
        peaks = (
            [max(used, default=None) for used in _used_gib(rows)] if self._job.config.hardware.device == "cuda" else []
        )
        return result | {
            "device_peak_mem_gib": peaks,
            "summary": summary,
            "doubts": doubts,
            "warnings": self._warnings + said,
        }


def _used_gib(rows):
    """GiB in use at every sample, of each GPU."""
    return [
        [row["mem_gib"] for row in of_one if row.get("mem_gib") is not None] for of_one in join.by_device(rows).values()
    ]
