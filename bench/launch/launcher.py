"""Makes one run, from a checked job to a finished record: it creates the folder, starts, watches and ends the ranks and
finishes the record.  The methods of _Launch follow each other in this order.

The launcher owns the record's status.  It writes run.json with the status running and a heartbeat, waits without
spinning, and finishes the record however the workers ended (finish.py).  It does not import torch unless several
launchers make the run together (nodes/).
"""

import contextlib
import errno
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.base import atomic, private, utc
from bench.base.paths import REPO, results_root
from bench.data.sources import datasets
from bench.launch import allocation, finish, initial_record, opened, ranks, ready, resume, summary
from bench.launch.confined import Confined
from bench.launch.console import Bars, say
from bench.launch.nodes import carried
from bench.launch.nodes.joining import leader_of_allocation
from bench.launch.nodes.leader import Leader
from bench.launch.prepare import Job, frozen
from bench.launch.progress import EdgePipe, Limits, Progress
from bench.launch.series import Series, earlier_s
from bench.machine import environment, leases, processes
from bench.machine.meters import CpuMeter, RunClock
from bench.machine.signals import Interrupted, Signals, held, raise_interrupted
from bench.record import failures, run_folder, validity
from bench.record.exporters import dashboards
from bench.record.shape import Section
from bench.training.instruments import registry

if TYPE_CHECKING:
    from bench.launch.script.script_run import Watched

HEARTBEAT_S = 10.0
TICK_S = 0.5
LEAST_CORES = 0.02  # CPU use of another program above which the record names it
Run = Section  # run.json, as bench/record/shape.py's Record has it when it is complete
Stop = Callable[[list[tuple[int, float]]], str | None]


def launch(
    job: Job,
    command: Sequence[str] = (),
    series: Series | None = None,
    plan: Mapping[str, Any] | None = None,
    stop: Stop | None = None,
    leader: Leader | None = None,
) -> Run:
    """Trains once.  Returns the finished record (a dict), even if it failed; run["folder"] is its absolute folder.

    command: the command line as typed; series: the series to which the run belongs, which has checked the machine and
    whose bars show the run; plan: the part of run.json that names the plan of the run, by the key "race"
    (bench/plans/race/runner.py), "sweep" (bench/record/sweep.py), "beside" (packing.py) or "audit"; stop: called after
    each validation with [(step, val_loss)] so far, returns why the run is to end now as "stopped", or None; leader: the
    leader of a run over several launchers, once all have joined (None: on a SLURM allocation it is started here).
    Raises ValueError if no record can be written at all, or another process has a GPU that the run needs.
    """
    hardware = job.config.hardware
    with leases.held_by_ranks(hardware), contextlib.ExitStack() as stack:
        job = stack.enter_context(frozen(job))
        if leader is None and job.config.hardware.nodes:
            leader = stack.enter_context(leader_of_allocation(job))
        run = _Launch(job, command, plan or {}, series, stop, leader).go()
        if leader:
            leader.bye(run)
        return run


def launch_each(
    jobs: Sequence[Job],
    command: Sequence[str],
    labels: Sequence[str],
    plan: Mapping[str, Any] | None = None,
    first_plan: Mapping[str, Any] | None = None,
    budget_s: float | None = None,
    stop_of: Callable[[Job], Stop | None] = lambda job: None,
    series: Series | None = None,
) -> Iterator[Run]:
    """Makes runs one after another, with bars, and yields each record until the last run or an interrupt.

    command, plan: as in launch(); first_plan: the plan of the first run; labels: for each run, the text of the line
    that announces it.  budget_s: no run is started that is expected to end later than this after the first one began.
    stop_of: returns launch()'s stop for a job; series: an open series to which these runs belong, in which another run
    replaces one that fails; None: these runs are a series of their own.
    """
    kinds = [job.config_id for job in jobs]
    has_looked = set()  # config ids: only the first run of each has a look
    with contextlib.ExitStack() as stack:
        shown = series
        if shown is None:
            known_s = earlier_s({job.config.track.name for job in jobs}, kinds)
            shown = stack.enter_context(Series(kinds, known_s, budget_s=budget_s))
        for number, job in enumerate(jobs):
            if not shown.fits():
                return
            shown.begin(labels[number])
            job = job.with_look(False) if job.config_id in has_looked else job
            run = launch(job, command, shown, plan if number else first_plan or plan, stop_of(job))
            has_looked.update([job.config_id] if "look" in run else [])
            shown.end(series is None or run["status"] in ("complete", "stopped"))
            say("run", summary.outcome_text(run), always=run["status"] != "complete")
            yield run
            if failures.interrupted_by(run):
                return


class _Launch:
    """A run in progress; the arguments are those of launch()."""

    _folder: Path  # set by go()
    _place: os.stat_result

    def __init__(
        self,
        job: Job,
        command: Sequence[str],
        plan: Mapping[str, Any],
        series: Series | None,
        stop: Stop | None,
        leader: Leader | None,
    ):
        self._job, self._series, self._stop, self._leader = job, series, stop, leader
        self._clock = RunClock()
        carried.clear(results_root())
        self._meter = CpuMeter(own_s=lambda: sum(os.times()[:4]))  # includes git, which the launcher starts
        env = ranks.environment(job.config.hardware)
        # a script gets the recorded variables, those of environment.PASSED and its own, but no secrets of the shell
        self._env_of_ranks = environment.passed(env) if job.script or job.config.hardware.sandbox else env
        self._env_of_ranks |= dict(job.script.env) if job.script else {}
        self._env = environment.environment() | {"env": environment.env_variables(self._env_of_ranks)}
        self._run: Run = initial_record.record_of(job, self._env, command) | dict(plan)
        if leader:
            self._run |= leader.record_facts()
        elif slurm := allocation.current():
            self._run |= {"launched_by": slurm.facts()}
        self._guard: ranks.Guard | None = None
        self._watched: Watched | None = None
        self._confined: Confined | None = None
        self._edges: EdgePipe | None = None
        self._survival: Section | None = None  # resume.survival()
        self._saved: resume.Watch | None = None  # only if the run can be resumed
        self._warned_by: str | None = None
        self._others: tuple[float, Mapping[int, float]] | None = None  # (time.monotonic(), CPU seconds by pid)

    def go(self) -> Run:
        """Makes the run and returns its record."""
        for warning in self._run["warnings"]:
            if warning["instrument"] != "git":  # the preflight shows git's, with the remedy
                topic = "secret" if warning["instrument"] == "launcher" else "export"
                say(topic, f"{warning['instrument']}: {warning['error']}", always=True)
        with raise_interrupted() as signals, contextlib.ExitStack() as stack:
            exit_code, failure = None, None
            try:
                self._begin(stack)
                with self._edges or contextlib.nullcontext():
                    exit_code, failure = self._train(signals)
                signals.check()
                failure = failure or self._preempted(exit_code)
                if self._watched and self._job.config.look.enabled and exit_code == 0 and failure is None:
                    self._look(self._watched, signals)
            except (Interrupted, OSError) as error:
                if self._run["run_id"] is None:  # no folder has been created, or that of resume= cannot be written
                    raise
                name = str(error)
                if isinstance(error, OSError):
                    is_start = error.errno == errno.EMFILE or isinstance(error, ranks.CannotStart)
                    failure = failures.failure("not_started" if is_start else failures.kind_of(error), name)
                else:
                    step = failures.last_step(self._folder)
                    failure = failures.failure("interrupted", f"the launcher got {name}{_why(name)}", None, step, name)
            signals()  # ignored from now on: the record is being finished
            self._finish(exit_code, failure, signals)
        if self._run["status"] == "preempted":
            self._ask_for_requeue()
        elif self._run["status"] != "aborted":
            dashboards.after_run(self._folder, self._job.config.exporters)
        # a signal that came while the record was finished ends what made this run, not the run
        return self._run | {"folder": str(self._folder.absolute()), failures.MISSED: signals.missed()}

    def _begin(self, stack: contextlib.ExitStack) -> None:
        """Creates the folder, the guard and the ranks' inputs, and checks the machine."""
        job, run = self._job, self._run
        survives = resume.survives(job.config) and not {"race", "audit"} & run.keys()  # these start from scratch
        if survives:
            resume.wait_for_signs(job, results_root())
        earlier = resume.find(job, run, results_root()) if survives and job.config.resume else None
        with held():  # so that no signal leaves a folder behind whose run nobody finishes
            if earlier and (resumed := resume.go_on(earlier, job, run, results_root())):
                self._run, run, self._folder = resumed, resumed, earlier.folder
            else:
                earlier = None
                self._folder = initial_record.folder_of(job.config, run, results_root())
            self._place = os.lstat(self._folder)
        folder = self._folder
        foreign_cores = self._meter.foreign_cpu_cores()
        self._others = time.monotonic(), processes.everyones_cpu_s()
        self._guard = stack.enter_context(ranks.Guard(folder, job.code))
        if job.script:
            from bench.launch.script import script_run  # imports numpy, which launchers of our own runs do not need

            self._watched = script_run.Watched(folder, job)
            self._confined = self._watched.confined
        else:
            self._edges = EdgePipe(folder)
            if job.config.hardware.sandbox:
                self._confined = Confined(folder, job, [self._edges.path] if self._edges.path else [])
        pipes = self._watched.pipes if self._watched else []
        edge_pipe = self._edges.path if self._edges else None
        if survives:
            self._survival = resume.survival(job.config, folder, earlier)
            self._saved = resume.Watch(folder, results_root())
        facts = self._env, self._clock.started_s, run["code"], pipes, edge_pipe, self._survival
        initial_record.write_inputs(folder, job, *facts, goes_on=earlier is not None)
        checks = ready.checks(job, self._env, foreign_cores, run["code"])
        if self._series is None:  # a series has shown them before its first run
            ready.show_odd(checks)
        run["preflight"] = [private.redact_all(asdict(check), REPO) for check in checks]

    def _train(self, signals: Signals) -> tuple[int | None, Section | None]:
        """Starts the ranks and waits for them.  Returns (exit code, the failure known to the launcher or None)."""
        config, series, guard = self._job.config, self._series, self._guard
        assert guard is not None
        shown = self._confined.notes if self._confined and not self._watched else self._folder
        with (
            self._watched.watching() if self._watched else contextlib.nullcontext(),
            allocation.signalled_when_preempted() if self._saved else contextlib.nullcontext(),
            self._started(guard) as group,
            contextlib.nullcontext(series.bars) if series else Bars() as bars,
            Progress(shown, config.goal.num_steps, bars, brief=series is not None) as progress,
        ):
            if self._watched:
                self._watched.started(guard.pid)
            elif self._confined:
                self._confined.watch(guard.pid)
            limits = Limits(config.hardware, guard.cpu_s)
            if self._run.get("segments"):
                progress.read()
            num_asked, beat_s = 0, time.monotonic()
            while not self._has_ended(group, signals):
                if gone := finish.removed(self._folder, self._place):
                    return None, gone
                if self._watched:
                    self._watched.tick()
                    if self._watched.has_seen_its_windows():
                        return None, failures.failure("stopped", failures.WINDOW_ENDED, step=self._watched.step)
                    if self._watched.must_end():
                        return 0, None  # what it reached within the budget counts
                progress.show()
                if why := self._confined and self._confined.exceeded():
                    return None, failures.failure("over_limit", why, step=progress.step)
                if self._stop and len(progress.validations) > num_asked:
                    num_asked = len(progress.validations)
                    if why := self._stop(progress.validations):
                        return None, failures.failure("stopped", why, step=progress.validations[-1][0])
                if series:
                    series.tick()
                beat_s = self._beat(beat_s)
                if failure := limits.exceeded(progress):
                    return None, failure
            if group.failures:
                with contextlib.suppress(OSError):  # failures.classify() reads it
                    atomic.write_json(self._folder / "logs/agent.json", {"failures": group.failures}, durable=False)
            if guard.strays:
                why = f"its guard was killed, and {', '.join(guard.strays)} went on: it has been ended"
                return group.exit_code(), failures.failure(failures.ESCAPED, why, step=failures.last_step(self._folder))
            return group.exit_code(), group.failure

    def _has_ended(self, group: ranks.Group | Leader, signals: Signals) -> bool:
        """Waits at most TICK_S; returns whether the ranks have ended.  A warning signal is passed on to them."""
        try:
            with held():  # so that a warning loses no message of another launcher
                has_ended = group.has_ended(TICK_S)
            if self._saved:
                self._saved.tick()
            if not has_ended:
                signals.check()
            return has_ended
        except Interrupted as error:
            if not self._saved or str(error) not in run_folder.WARNING_SIGNALS:
                raise
            self._warned_by = str(error)
            signals.heed()
            (self._folder / run_folder.WARNED).write_text(str(error))
            say("run", f"{error}: the ranks write a checkpoint and end", always=True)
            return False

    def _preempted(self, exit_code: int | None) -> Section | None:
        """Returns the failure of a run that was warned and ended early; None if it was not, or had finished."""
        saved, name = self._saved, self._warned_by
        if saved is None or atomic.read_json(self._folder / run_folder.RESULT, {}):
            return None
        if saved.ended_by:
            name = name or saved.ended_by
            message = f"the run got {name}{_why(name)}, and wrote a checkpoint after step {saved.step}"
            return failures.failure("preempted", message, None, saved.step, name)
        if name and exit_code is not None:  # before its ranks could react
            return failures.failure("interrupted", f"the launcher got {name}{_why(name)}", None, None, name)
        return None

    def _ask_for_requeue(self) -> None:
        """Asks SLURM to requeue a job that it preempts or warns, which would otherwise end as failed."""
        own, ending, signal_name = allocation.current(), allocation.ending(), self._run["failure"]["signal"]
        warned = ending.is_preempted or signal_name in ("SIGUSR1", "SIGUSR2")
        if own and warned and ending.can_requeue and self._job.config.resume == resume.AUTO:
            say("slurm", f"job {own.job_id} starts again, and resumes {self._run['run_id']}", always=True)
            if why := allocation.scontrol("requeue", own.job_id)[1]:
                say("slurm", f"job {own.job_id} does not start again by itself: {why}", always=True)

    def _beat(self, beat_s: float) -> float:
        """Refreshes the heartbeat if it is due.  Takes and returns the time.monotonic() of the last refresh."""
        if time.monotonic() - beat_s < HEARTBEAT_S:
            return beat_s
        self._run["heartbeat_at"] = utc.now()
        with contextlib.suppress(OSError):  # workers report a full disk; the reserved space is for the final record
            atomic.write_json(self._folder / "run.json", self._run, durable=False)
        return time.monotonic()

    def _look(self, watched: "Watched", signals: Signals) -> None:
        """Runs a script once more under the profiler; a failure there is only a warning."""
        from bench.launch.script.script_look import ScriptLook

        look, beat_s = ScriptLook(self._folder, self._job, watched), time.monotonic()
        try:
            for _ in look.steps(self._env_of_ranks, self._run, most_s=2 * self._clock.lasted_s() + 60):
                signals.check()
                beat_s = self._beat(beat_s)
        except (OSError, ValueError) as error:
            look.failed(f"{type(error).__name__}: {error}")
        self._run["warnings"] += look.warnings

    def _started(self, guard: ranks.Guard) -> AbstractContextManager[ranks.Group | Leader]:
        """Returns a context that yields the ranks: of all nodes, of a script, or our own, perhaps below nsys."""
        config, env, survives = self._job.config, self._env_of_ranks, self._survival is not None
        if self._leader:
            return self._leader.started(self._folder, env, guard, survives)
        program = self._watched.program if self._watched else ranks.WORKER
        around = () if self._watched else registry.program(config.instruments, self._folder, config.hardware.device)
        env = env | ({processes.WITHIN: around[0]} if around else {})
        is_bare = self._job.script is not None and not self._job.script.torchrun
        num_ranks = config.hardware.num_processes or 1
        argv = (*around, *program)
        return ranks.started(guard, num_ranks, self._folder, env, argv, is_bare, survives, self._confined)

    def _finish(self, exit_code: int | None, failure: Section | None, signals: Signals) -> None:
        """Finishes the record with what is known only at the end."""
        folder, run = self._folder, self._run
        if self._leader:
            self._leader.complete(run)
        if self._guard and self._guard.left:
            error = f"processes {self._guard.left} could not be ended: files of this record may still change"
            run["warnings"].append({"rank": None, "instrument": "launcher", "edge": "run end", "error": error})
        others = list[tuple[str, int, float]]()
        if self._others and self._job.config.hardware.device == "cpu":
            since_s, before_s = self._others
            lasted_s = time.monotonic() - since_s
            others = [(name, pid, spent_s / lasted_s) for name, pid, spent_s in processes.busiest_others(before_s)]
            others = [other for other in others if other[2] > LEAST_CORES]
            run["foreign_programs"] = [
                {"name": processes.public_name(name), "cpu_cores": round(cores, 2)} for name, _, cores in others
            ]
        gone = finish.removed(folder, self._place)
        if self._confined and not gone:
            self._confined.collect()
        if not gone:
            run["doubts"] = [*run.get("doubts", ()), *opened.doubts_about_memory(self._clock.began_s)]
        if self._job.own_folder and not gone:
            run["doubts"] = [*run.get("doubts", ()), *opened.doubts_about_own(folder, self._job, self._clock.began_s)]
        if self._watched and not gone:
            failure = self._watched.conclude(run, exit_code, failure)
        failure = gone or failure or failures.classify(folder, exit_code)
        may_be_of_data = failure is None or failure["kind"] in failures.BY_CHANGED_DATA
        if may_be_of_data and (changed := datasets.changed(self._job.dataset, gone_too=failure is not None)):
            failure = failures.bad_data(changed, failure)
        finish.finish(folder, run, failure, self._clock, self._edges, signals.late, self._place)
        if others and validity.is_busy(run):  # by their names and pids, which a record does not have
            named = ", ".join(f"{name} (pid {pid}) {cores:.2f} cores" for name, pid, cores in others)
            say("machine", f"busiest other programs: {named}")


def _why(signal_name: str) -> str:
    """Returns SLURM's reason for a signal, as text that follows its name."""
    is_warning = signal_name in ("SIGUSR1", "SIGUSR2")
    sender = ", as sbatch --signal and submitit send it before a time limit or a preemption" if is_warning else ""
    return allocation.ending().why or sender
