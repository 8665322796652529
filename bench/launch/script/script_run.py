"""Watches the run of a script from the launcher: its output, telemetry and progress, and its half of the record.

It does for a script what bench/training/ does for our own runs.  Use Watched(...).watching() around the ranks, tick()
twice a second, and conclude() once the ranks have ended.
"""

import contextlib
import os
import re
import time
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bench.base import atomic, private
from bench.base.reading.patterns import TooLong
from bench.base.text_table import some
from bench.launch import confined
from bench.launch.prepare import Job
from bench.launch.script import outcome, trace_files, work_folder
from bench.launch.script.output import Output
from bench.machine import processes, sandbox
from bench.machine.meters import CpuMeter, largest_rss_gib
from bench.machine.telemetry import samples as join
from bench.machine.telemetry.sampling import Sampling
from bench.record import failures, metrics, printed_times, run_folder, step_files
from bench.record.importers import dialects
from bench.record.importers.consoles import Form
from bench.record.shape import Section
from bench.record.step_files import StepRow
from bench.training import line_sampler

LOOK_S = 1.0  # interval of reading all that was printed, once the budget may be spent
# A script that has not printed its budget's time by so many budgets and seconds after the line of its first step,
# validations included, is ended (assumed); only hardware.wall_timeout_s limits how long it compiles before
OVERDUE_TIMES, OVERDUE_S = 3.0, 60.0
TWO_PATTERNS = "both patterns of {} match the line {!r}: make one of them stricter, e.g. anchored with ^ and $"
WORKER = "bench/training/script_worker.py"


class Confined(confined.Confined):
    """The ranks of a script in a sandbox (script.sandbox=true), which write only to work/ and to the launcher's pipes.

    Call work_folder.make() before command().
    """

    INPUTS = ()
    NOTES = re.compile(
        r"\.[\w-]+\.(facts|opened|profiled|raw)\.tmp"
        r"|logs/(rank\d+\.failure\.json|flight_rank\d+)|memory/oom_rank\d+\.pickle"
    )

    def _shards(self) -> dict[str, list[Path]]:
        return {}

    def _readable(self) -> list[Path | str]:
        assert self._job.script is not None
        work = self._folder / work_folder.WORK
        return [*work_folder.linked(self._job.script, work), *sandbox.python_files(self._job.script.python)]

    def _writable(self, env: Mapping[str, str]) -> dict[Path, Path]:
        folders = [work_folder.WORK, env[line_sampler.VARIABLE]] if line_sampler.VARIABLE in env else [work_folder.WORK]
        return {self._folder / name: self._folder / name for name in folders}


def _own_cpu_s() -> float:
    """Returns the CPU seconds of this process and all below it: the guard lives on and has reaped the ranks."""
    return sum(processes.cpu_s({os.getpid()} | processes.descendants(os.getpid()), with_reaped=True).values())


class Watched:
    """The run of a job with a script, in its folder."""

    def __init__(self, folder: Path, job: Job):
        assert job.script is not None
        self._folder, self._job, self._script = folder, job, job.script
        self._num_ranks = job.config.hardware.num_processes or 1
        self._output = Output(folder, self._num_ranks, job.script.dialect)
        self.pipes = self._output.pipes
        self.confined = Confined(folder, job, self.pipes) if job.script.sandbox else None
        self.program = (job.script.python, str(job.code / WORKER))  # the program of each rank
        self._reader: Form | None = None  # the reader of the dialect, once that is known
        self._num_read = 0
        self._last: StepRow = {}
        self._foreign_cores: float | None = None
        self._peak_rss_gib = 0.0  # the largest resident set of a process, as the launcher saw it
        self._sampling: Sampling | None = None
        self._started: Section | None = None
        self._stopped: Section | None = None
        self._warnings: list[Section] = []
        self._guard_pid = os.getpid()
        self._waits_ns: list[tuple[int, int]] = []  # as in PrintedTimes.clock()
        self.look: Section | None = None  # set by script_look.py, for .result.tmp
        self._began_s = time.monotonic()
        self._may_be_spent_s = job.config.goal.time_budget_s or 0.0  # seconds after the start
        self._stepped_s: float | None = None  # time.monotonic() at the line of its first step
        self._ended_by: str | None = None  # whose clock reached the budget, script or launcher; None: neither
        self._doubts: list[Section] = []
        self._given: dict[str, list[str]] = {"train": [], "val": []}  # as in OpenedFiles
        self._linked: dict[str, Any] = {}  # as in work_folder.linked_stamps()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Context around the ranks."""
        step_files.write(self._folder, [], step_files.RUN_COLUMNS)
        work = self._folder.absolute() / work_folder.WORK
        for split in self._given:  # now, because the script may change its links, and anybody the shards
            links = work_folder.shard_links(self._script, self._job.dataset, split, work)
            self._given[split] = list(map(os.path.realpath, links))
        self._linked = work_folder.linked_stamps(work)
        meter = CpuMeter(own_s=_own_cpu_s)
        try:
            with self._output:
                yield
        finally:
            self._foreign_cores = meter.foreign_cpu_cores()
            if self._sampling is not None:
                if self._started is not None:
                    self._stopped = self._sampling.stop()
                self._sampling.close()

    def started(self, guard_pid: int) -> None:
        """Starts to sample.  The ranks run below this process."""
        self._guard_pid = guard_pid
        if self.confined:
            self.confined.watch(guard_pid)
        settings = self._job.config.instruments.get("telemetry")
        if settings is None:
            return
        num_devices = self._num_ranks if self._job.config.hardware.device == "cuda" else 0
        try:
            path = self._folder / "telemetry.csv"
            self._sampling = Sampling(path, settings, [], num_devices, guard_pid, self._job.code)
            self._sampling.wait()
            self._started = self._sampling.start()
        except (OSError, RuntimeError, TimeoutError) as error:
            message = f"{type(error).__name__}: {error}"
            self._warnings.append({"rank": None, "instrument": "telemetry", "edge": "start", "error": message})

    def tick(self) -> None:
        """Updates steps.csv and .progress.tmp from the output.  Raises OSError on a full disk, which ends the run."""
        pids = processes.descendants(self._guard_pid)
        if self._num_ranks > 1:  # without torchrun itself
            wrappers = sandbox.WRAPPERS if self.confined else 0
            pids -= processes.inside(self._guard_pid, 1 + wrappers)
        self._peak_rss_gib = max(self._peak_rss_gib, largest_rss_gib(pids) or 0.0)
        waited_ns = processes.waited_ns(pids)
        if waited_ns is not None:
            self._waits_ns.append((time.perf_counter_ns(), waited_ns))
        rows = self._new_rows()
        if rows:
            columns = ("step", "train_loss", "val_loss", "step_ms")
            kept = [{"flags": "", **{name: row.get(name) for name in columns}} for row in rows]
            step_files.append(self._folder, kept)
            step = self._last["step"]
            progress = {"step": step, "num_steps": self._last.get("total") or self._job.config.goal.num_steps}
            average_ms = self._last.get("step_avg_ms") or metrics.step_avg_ms(self._last.get("train_time_ms"), step)
            if average_ms:
                progress["step_avg_ms"] = average_ms
            atomic.write_json(self._folder / run_folder.PROGRESS, progress, durable=False)

    def _new_rows(self) -> list[StepRow]:
        new = self._output.lines[self._num_read :]
        self._num_read += len(new)
        if self._reader is None:
            name = self._script.dialect or dialects.detect(text for _, text in new)
            if name is None:
                return []
            self._reader = dialects.reader_of(name)
        rows = [row for _, text in new if (row := self._reader.row(text))]
        if self._stepped_s is None and any(row["step"] for row in rows):
            self._stepped_s = time.monotonic()
        for row in rows:
            self._last |= row
        return rows

    @property
    def printed(self) -> list[str]:
        """Lines of rank 0 that may be of steps."""
        return [text for _, text in self._output.lines]

    @property
    def step(self) -> int | None:
        """The last step that the script has printed."""
        return self._last.get("step")

    def has_seen_its_windows(self) -> bool:
        """Whether the run may end now: profile.stop_after_window is set and every rank has written all its traces."""
        config = self._job.config
        return config.profile.stop_after_window and trace_files.are_done(
            self.confined.notes if self.confined else self._folder, config.instruments, self._num_ranks
        )

    def must_end(self) -> bool:
        """Returns whether its lines cannot be read, or it trains on after its budget is spent by its record's clock.

        The launcher's clock ends it too, long after, whatever times the script prints.
        """
        if self._ambiguous_line() is not None:
            return True
        goal, since_s = self._job.config.goal, time.monotonic() - self._began_s
        if self._stepped_s is not None and goal.time_budget_s is not None:
            lasted_s, named_s = time.monotonic() - self._stepped_s, (self._last.get("train_time_ms") or 0.0) / 1e3
            if named_s < goal.time_budget_s and lasted_s > OVERDUE_TIMES * goal.time_budget_s + OVERDUE_S:
                self._ended_by = "launcher"
                why = f"its clock named {named_s:.2f} of the {goal.time_budget_s:g} s of its budget"
                doubt = f"{why} in the {lasted_s:.0f} s since its first step: it was ended by the launcher's clock"
                self._doubts.append({"rank": 0, "instrument": "script", "doubt": doubt})
                return True
        if not goal.budget or self._reader is None or since_s < self._may_be_spent_s:
            return False  # no clock can have reached the budget yet
        name = self._script.dialect or dialects.detect(text for _, text in self._output.lines)
        try:
            printed = outcome.read(name, list(self._output.lines), goal)
        except TooLong:  # as in conclude(), which reports it
            return True
        if printed is None:
            return False
        self._ended_by = "script" if printed.ended_at_step(goal) is not None else None
        left_s = (goal.time_budget_s or 0.0) - max(printed.measured().get("train_s_by_rank") or (0.0,))
        self._may_be_spent_s = since_s + max(LOOK_S, left_s)
        return self._ended_by is not None

    def _ambiguous_line(self) -> str | None:
        """Returns the first line that both patterns of its dialect match, None while there is none."""
        return None if self._reader is None else self._reader.ambiguous

    def conclude(self, run: Section, exit_code: int | None, failure: Section | None) -> Section | None:
        """Writes the script's half of the record, as bench/training/ does for our own runs.  Returns any failure."""
        if self.confined:
            run["script"]["sandbox"] = self.confined.kind
        if self._ended_by:  # SIGTERM was the launcher's: what a rank reports of it is no failure
            run["script"]["ended_by"] = self._ended_by
            for path in (self._folder / "logs").glob("rank*.failure.json"):
                path.unlink(missing_ok=True)
        failure = failure or failures.classify(self._folder, exit_code)
        try:
            self._new_rows()  # lines printed while it was being ended
            changed = [name for name, (path, before) in self._linked.items() if work_folder.stamp(path) != before]
            if changed:
                why = f"{some(changed)} beside it changed while it ran, perhaps by it, through a link: "
                why += "let it save into out/ or logs/, which are not linked"
                self._warnings.append({"rank": None, "instrument": "script", "edge": "run end", "error": why})
            facts = self._output, self._telemetry, self._waits_ns, self._given
            lines_failure = outcome.write(self._folder, self._job, run, *facts)
            if (line := self._ambiguous_line()) is not None:
                why = TWO_PATTERNS.format(run["script"]["dialect"], private.excerpt(line, 80))
                lines_failure = failures.failure("no_metric_lines", why)
            run["script"] |= work_folder.tidy(self._script, self._folder / work_folder.WORK)
            if self.look and lines_failure is None:
                measured = atomic.read_json(self._folder / run_folder.RESULT)
                atomic.write_json(self._folder / run_folder.RESULT, measured | {"look": self.look})
        except OSError as error:
            lines_failure = failures.failure(failures.kind_of(error), str(error))
        except TooLong as error:
            lines_failure = failures.failure("bad_setting", f"goal.metric_pattern or script.dialect: {error}")
        except Exception as error:  # unforeseen lines: the record says so, and is kept
            with contextlib.suppress(OSError):
                atomic.write_text(self._folder / "logs" / "reading.log", traceback.format_exc(), durable=False)
            why = f"what the script printed cannot be read: {type(error).__name__}: {error}"
            lines_failure = failures.failure("exception", why)
        if lines_failure and self._ended_by == "launcher":
            lines_failure["message"] += f"; {self._doubts[-1]['doubt']}"
        if failure and failure["step"] is None:
            failure["step"] = self.step
        return failure or lines_failure

    def _telemetry(self, rows: list[StepRow]) -> Section:
        """Returns what outcome.write() gets from the sampler.  rows: of all steps, with the times of their lines."""
        telemetry: Section = {"summary": {}, "foreign_cpu_cores": self._foreign_cores}
        telemetry |= {"peak_rss_gib": self._peak_rss_gib}
        telemetry |= {"doubts": self._doubts, "warnings": self._warnings}
        if self._started is None or self._stopped is None:
            return telemetry
        timed = printed_times.events(rows)
        spans = [(a[0], b[0]) for a, b in zip(timed, timed[1:], strict=False) if not b[2]]
        samples = join.read(self._folder / "telemetry.csv")
        summary = join.summary(samples, spans, self._started, self._stopped)
        warnings = [
            {"rank": None, "instrument": "telemetry", "edge": "run end", "error": warning}
            for warning in join.warnings(summary, self._stopped["report"])
        ]
        by_gpu = join.by_device(samples).values() if self._job.config.hardware.device == "cuda" else ()
        used_gib = [[row["mem_gib"] for row in rows if row.get("mem_gib") is not None] for rows in by_gpu]
        return telemetry | {
            "device_peak_mem_gib": [max(used, default=None) for used in used_gib],
            "summary": summary,
            "doubts": self._doubts
            + [{"rank": 0, "instrument": "telemetry", "doubt": doubt} for doubt in join.doubts(summary)],
            "warnings": self._warnings + warnings,
        }
