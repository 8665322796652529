"""One run from a checked job to a finished record: its folder begun, its ranks started, watched and ended, its record
finished.  class _Launch is that journey, its methods in their order.

The launcher owns the record's status.  It writes run.json as running, with a heartbeat, waits without spinning, and
finishes it however the workers ended (finish.py).  It imports no torch, unless several launchers make the run (nodes/).
"""

import contextlib
import errno
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict

from bench.base import atomic, private, utc
from bench.base.paths import REPO, results_root
from bench.data.sources import datasets
from bench.launch import allocation, finish, initial_record, ranks, ready, summary
from bench.launch.console import Bars, say
from bench.launch.nodes import carried
from bench.launch.nodes.joining import of_allocation
from bench.launch.nodes.leader import Leader
from bench.launch.prepare import Job, frozen
from bench.launch.progress import EdgePipe, Progress, Stall
from bench.launch.script import script
from bench.launch.series import Series, earlier_s
from bench.machine import environment, processes
from bench.machine.meters import CpuMeter, RunClock
from bench.machine.signals import Interrupted, held, raise_interrupted
from bench.record import failures
from bench.record.exporters import dashboards
from bench.training.instruments import registry

HEARTBEAT_S = 10.0
TICK_S = 0.5
MARGIN_S = 60.0  # for ranks to end after their own timeout


def launch(
    job: Job,
    command: Sequence[str] = (),
    series: Series | None = None,
    race: dict | None = None,
    sweep_id: str | None = None,
    stop: Callable[[list[tuple[int, float]]], str | None] | None = None,
    beside: dict | None = None,
    leader: Leader | None = None,
    audit: dict | None = None,
) -> dict:
    """Train once.  Returns the finished record (a dict) with its absolute folder as run["folder"]; a failed run raises
    nothing.

    command: what the user typed, a list of words; series: what the run belongs to, whose bars show it and who has seen
    to the preflight; race: the run's slot in a race, for run.json["race"] (bench/plans/race/runner.py); sweep_id: of
    the sweep that starts it (bench/record/sweep.py); stop: asked with each validation, [(step, val_loss)] so far, why
    the run is to end now, None: it is not; its status is "stopped" then; beside: where it runs beside others of its
    sweep, for run.json["beside"] (bench/plans/sweep/packing.py); leader: of ranks that other launchers start too, which
    have gathered (None: those of a SLURM allocation are started here); audit: what of a run's own data was replaced,
    for run.json["audit"] (bench/plans/audit/auditing.py).
    ValueError where no record can be written at all.
    """
    plan = {"race": race, "sweep": sweep_id and {"sweep_id": sweep_id}, "beside": beside, "audit": audit}
    with frozen(job) as job, contextlib.ExitStack() as stack:
        if leader is None and job.config.hardware.nodes:
            leader = stack.enter_context(of_allocation(job))
        run = _Launch(job, command, {name: facts for name, facts in plan.items() if facts}, series, stop, leader).go()
        if leader:
            leader.bye(run)
        return run


def launch_each(
    jobs: Sequence[Job],
    command: Sequence[str],
    words: Sequence[str],
    first_race: dict | None = None,
    sweep_id: str | None = None,
    budget_s: float | None = None,
    stop_of: Callable[[Job], Callable | None] = lambda job: None,
    series: Series | None = None,
) -> Iterator[dict]:
    """Runs that follow each other, with their bars: yields the record of each, to the last or to an interrupt.

    command, sweep_id: as of launch(); words: what each is, for the line that begins it; first_race: the first run's
    slot.  budget_s: no run begins that would end later than that after the first began, as far as that is known.
    stop_of: of a run that begins, launch()'s stop; series: an open one of which these runs are some, where one that
    fails is made up for by another; None: they are all.
    """
    kinds = [job.config_id for job in jobs]
    known_s = {} if series else earlier_s({job.config.track.name for job in jobs}, kinds)
    is_part = series is not None
    with contextlib.nullcontext(series) if is_part else Series(kinds, known_s, budget_s=budget_s) as series:
        for number, job in enumerate(jobs):
            if not series.fits():
                return
            series.begin(words[number])
            run = launch(job, command, series, None if number else first_race, sweep_id, stop_of(job))
            series.end(not is_part or run["status"] in ("complete", "stopped"))
            say("run", summary.last_words(run), always=run["status"] != "complete")
            yield run
            if failures.is_interrupt(run["failure"]):
                return


class _Launch:
    """A run on its way.  plan: what of run.json says what the run belongs to; the others as of launch()."""

    def __init__(self, job, command, plan, series, stop, leader):
        self._job, self._series, self._stop, self._leader = job, series, stop, leader
        self._clock = RunClock()
        carried.clear(results_root())
        self._meter = CpuMeter(own_s=lambda: sum(os.times()[:4]))  # with that of git, which it starts
        env = ranks.environment(job.config.hardware)
        self._env_of_ranks = script.environment_of(job.script, env) if job.script else env
        self._env = environment.environment() | {"env": environment.env_variables(self._env_of_ranks)}
        self._run = initial_record.record_of(job, self._env, command) | plan
        if leader:
            self._run |= leader.record_facts()
        elif of_slurm := allocation.found():
            self._run |= {"launched_by": of_slurm.facts()}
        self._folder = self._guard = self._watched = self._edges = None

    def go(self) -> dict:
        """The whole journey -> the record."""
        self._say_warnings()
        with raise_interrupted() as signals, contextlib.ExitStack() as stack:
            try:
                self._begin(stack)
                with self._edges or contextlib.nullcontext():
                    exit_code, failure = self._train(signals)
                signals.check()
            except Interrupted as error:
                if self._folder is None:
                    raise
                exit_code, failure = None, _interrupted(self._folder, error)
            except OSError as error:
                is_start = error.errno == errno.EMFILE or isinstance(error, ranks.CannotStart)
                kind = "not_started" if is_start else failures.kind_of(error)
                exit_code, failure = None, failures.failure(kind, str(error))
            signals()  # the record is being finished, and once is enough
            self._finish(exit_code, failure)
        if self._run["status"] != "aborted":
            dashboards.after_run(self._folder, self._job.config.exporters)
        return self._run | {"folder": str(self._folder.absolute())}

    def _say_warnings(self):
        for warning in self._run["warnings"]:
            if warning["instrument"] != "git":  # which the preflight shows, with its remedy
                topic = "secret" if warning["instrument"] == "launcher" else "export"
                say(topic, f"{warning['instrument']}: {warning['error']}", always=True)

    def _begin(self, stack):
        """The folder, the guard of all that is going to be started, what the ranks read, the preflight."""
        job, run = self._job, self._run
        with held():  # no signal leaves a folder whose run nobody ends
            self._folder = folder = initial_record.folder_of(job.config, run, results_root())
        foreign_cores = self._meter.foreign_cpu_cores()
        self._guard = stack.enter_context(ranks.Guard(folder, job.code))
        if job.script:
            from bench.launch.script import script_run  # numpy, which a launcher of our own runs does not need

            self._watched = script_run.Watched(folder, job)
            pipes = self._watched.pipes, None
        else:
            self._edges = EdgePipe(folder)
            pipes = (), self._edges.path
        initial_record.write_inputs(folder, job, self._env, self._clock.started_s, run["code"], *pipes)
        checks = ready.checks(job, self._env, foreign_cores, run["code"])
        if self._series is None:  # else they were shown before the first
            ready.show_odd(checks)
        run["preflight"] = [private.redact_all(asdict(check), REPO) for check in checks]

    def _train(self, signals):
        """Start the ranks and wait for them -> (exit code, failure that the launcher itself decided on, or None)."""
        config, series = self._job.config, self._series
        with (
            self._watched.watching() if self._watched else contextlib.nullcontext(),
            self._started() as group,
            contextlib.nullcontext(series.bars) if series else Bars() as bars,
            Progress(self._folder, config.goal.num_steps, bars, brief=series is not None) as progress,
        ):
            if self._watched:
                self._watched.started(group.pid)
            limits = _Limits(config.hardware, self._guard.cpu_s)
            num_asked, beat_s = 0, time.monotonic()
            while not group.has_ended(TICK_S):
                signals.check()
                if self._watched:
                    self._watched.tick()
                    if self._watched.has_seen_its_windows():
                        return None, failures.failure("stopped", failures.WINDOW_ENDED, step=self._watched.step)
                progress.show()
                if self._stop and len(progress.validations) > num_asked:
                    num_asked = len(progress.validations)
                    if why := self._stop(progress.validations):
                        return None, failures.failure("stopped", why, step=progress.validations[-1][0])
                if series:
                    series.paced(progress.whole_s())
                    series.tick()
                now_s = time.monotonic()
                if now_s - beat_s >= HEARTBEAT_S:
                    beat_s = now_s
                    self._beat()
                if failure := limits.exceeded(progress, now_s):
                    return None, failure
            ranks.write_failures(self._folder, group.failures)
            return group.exit_code(), group.failure

    def _started(self):
        """A context that yields the ranks: of all nodes, of a script, or our own, which nsys may run."""
        config, env = self._job.config, self._env_of_ranks
        if self._leader:
            return self._leader.started(self._folder, env, self._guard)
        program = self._watched.program if self._watched else ranks.WORKER
        around = () if self._watched else registry.program(config.instruments, self._folder, config.hardware.device)
        env = env | ({processes.WITHIN: around[0]} if around else {})
        return ranks.started(self._guard, config.hardware.num_processes, self._folder, env, (*around, *program))

    def _beat(self):
        self._run["heartbeat_at"] = utc.now()
        with contextlib.suppress(OSError):  # a full disk is the workers' to report; the reserve is for the end
            atomic.write_json(self._folder / "run.json", self._run, durable=False)

    def _finish(self, exit_code, failure):
        """The record, with what is known only now."""
        folder, run = self._folder, self._run
        if self._leader:
            self._leader.complete(run)
        if self._guard and self._guard.left:
            error = f"processes {self._guard.left} could not be ended: files of this record may still change"
            run["warnings"].append({"rank": None, "instrument": "launcher", "edge": "run end", "error": error})
        if self._watched:
            failure = self._watched.conclude(run, exit_code, failure)
        failure = _of_changed_data(folder, self._job, exit_code, failure)
        finish.finish(folder, run, exit_code, failure, self._clock, self._edges)


class _Limits:
    """How long a run may last, and stand still."""

    def __init__(self, hardware, cpu_s):
        self._hardware, began_s = hardware, time.monotonic()
        stall_s = hardware.stall_timeout_s
        if stall_s is not None and hardware.num_processes > 1:  # ranks that wait have a timeout that says more
            stall_s = max(stall_s, hardware.collective_timeout_s + MARGIN_S)
        self._stall = Stall(stall_s, cpu_s, began_s)
        self._end_s = None if hardware.wall_timeout_s is None else began_s + hardware.wall_timeout_s

    def exceeded(self, progress, now_s):
        """The failure of a run that has to be ended, None where it goes on."""
        hardware = self._hardware
        if self._stall.stands_still(progress.sign, now_s):
            why = f"no step and no line for hardware.stall_timeout_s={hardware.stall_timeout_s:g}, and nothing computed"
            return failures.failure("stalled", why, step=progress.step)
        if self._end_s is not None and now_s > self._end_s:
            why = f"exceeded hardware.wall_timeout_s={hardware.wall_timeout_s}"
            return failures.failure("wall_timeout", why, step=progress.step)
        return None


def _of_changed_data(folder, job, exit_code, failure):
    """-> failure: of a run that ended well, or in a way that data may have caused, by the data if they changed."""
    failure = failure or failures.classify(folder, exit_code)
    may_be = failure is None or failure["kind"] in failures.BY_CHANGED_DATA
    if may_be and (changed := datasets.changed(job.dataset, gone_too=failure is not None)):
        return failures.of_data(changed, failure)
    return failure


def _interrupted(folder, error):
    name = str(error)
    of_submitit = name in ("SIGUSR1", "SIGUSR2")
    why = ", submitit's word for a time limit or a preemption" if of_submitit else allocation.ending().words
    return failures.failure("interrupted", f"the launcher got {name}{why}", None, failures.last_step(folder), name)
