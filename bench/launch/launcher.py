"""One run from a checked job to a finished record: start a fresh process group, watch it, finish the record.

The launcher owns the record's status.  It writes run.json as running, with a heartbeat, waits without spinning, and
finishes it however the workers ended (finish.py).  It never imports torch.
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
    of_nodes: Leader | None = None,
    audit: dict | None = None,
) -> dict:
    """Train once.  Returns the finished record (a dict) with its absolute folder as run["folder"]; a failed run raises
    nothing.

    command: what the user typed, a list of words; series: what the
    run belongs to, whose bars show it and who has seen to the preflight; race: the run's slot in a race, for
    run.json["race"] (bench/plans/race/runner.py); sweep_id: of the sweep that starts it (bench/record/sweep.py); stop:
    asked with each validation, [(step, val_loss)] so far, why the run is to end now, None: it is not; its status is
    "stopped" then; beside: where it runs beside others of its sweep, for run.json["beside"]
    (bench/plans/sweep/packing.py); of_nodes: ranks that other processes start too, which have gathered (None: those of
    a SLURM allocation are started here); audit: what of a run's own data was replaced, for run.json["audit"]
    (bench/plans/audit/auditing.py).
    ValueError where no record can be written at all.
    """
    with frozen(job) as job:
        if of_nodes is None and job.config.hardware.nodes:
            with of_allocation(job) as of_nodes:
                run = _launch(job, command, series, race, sweep_id, stop, beside, of_nodes, audit)
                of_nodes.bye(run)
                return run
        return _launch(job, command, series, race, sweep_id, stop, beside, of_nodes, audit)


def _launch(job, command, series, race, sweep_id, stop, beside, of_nodes, audit):
    clock = RunClock()
    carried.clear(results_root())
    meter = CpuMeter(own_s=lambda: sum(os.times()[:4]))  # with that of git, which it starts
    child_env = ranks.environment(job.config.hardware)
    if job.script:
        child_env = script.environment_of(job.script, child_env)
    env = environment.environment() | {"env": environment.env_variables(child_env)}
    run = initial_record.record_of(job, env, command) | ({"race": race} if race else {})
    run |= {"sweep": {"sweep_id": sweep_id}} if sweep_id else {}
    run |= {"beside": beside} if beside else {}
    run |= {"audit": audit} if audit else {}
    of_slurm = allocation.found()
    run |= of_nodes.record_facts() if of_nodes else {"launched_by": of_slurm.facts()} if of_slurm else {}
    for warning in run["warnings"]:
        if warning["instrument"] != "git":  # which the preflight shows, with its remedy
            head = "secret" if warning["instrument"] == "launcher" else "export"
            say(head, f"{warning['instrument']}: {warning['error']}", always=True)
    folder = guard = watched = edges = None
    with raise_interrupted() as signals, contextlib.ExitStack() as stack:
        try:
            with held():  # no signal leaves a folder whose run nobody ends
                folder = initial_record.folder_of(job.config, run, results_root())
            foreign_cores = meter.foreign_cpu_cores()
            guard = stack.enter_context(ranks.Guard(folder, job.code))
            watched = _watched(folder, job) if job.script else None
            edges = None if job.script else EdgePipe(folder)
            pipes = (watched.pipes, None) if watched else ((), edges.path)
            initial_record.write_inputs(folder, job, env, clock.started_s, run["code"], *pipes)
            checks = ready.checks(job, env, foreign_cores, run["code"])
            if series is None:  # else they were shown before the first
                ready.show_odd(checks)
            run["preflight"] = [private.redact_all(asdict(check), REPO) for check in checks]
            with edges or contextlib.nullcontext():
                exit_code, failure = _watch(
                    folder, job, run, child_env, guard, series, watched, stop, of_nodes, signals
                )
            signals.check()
        except Interrupted as error:
            if folder is None:
                raise
            exit_code, failure = None, _interrupted(folder, error)
        except OSError as error:
            is_start = error.errno == errno.EMFILE or isinstance(error, ranks.CannotStart)
            kind = "not_started" if is_start else failures.kind_of(error)
            exit_code, failure = None, failures.failure(kind, str(error))
        signals()  # the record is being finished, and once is enough
        if of_nodes:
            of_nodes.complete(run)
        if guard and guard.left:
            words = f"processes {guard.left} could not be ended: files of this record may still change"
            run["warnings"].append({"rank": None, "instrument": "launcher", "edge": "run end", "error": words})
        if watched:
            failure = watched.conclude(run, exit_code, failure)
        failure = _of_changed_data(folder, job, exit_code, failure)
        finish.finish(folder, run, exit_code, failure, clock, edges)
    if run["status"] != "aborted":
        dashboards.after_run(folder, job.config.exporters)
    run["folder"] = str(folder.absolute())
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


def _watched(folder, job):
    from bench.launch.script import script_run  # numpy, which a launcher of our own runs does not need

    return script_run.Watched(folder, job)


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


def _watch(folder, job, run, child_env, guard, series, watched, stop, of_nodes, signals):
    """Start the ranks and wait for them.  Returns (exit code, failure that the launcher itself decided on, or None)."""
    hardware = job.config.hardware
    program, more_env = (watched.program, {}) if watched else _program(folder, job.config)
    with (
        watched.watching() if watched else contextlib.nullcontext(),
        of_nodes.started(folder, child_env, guard)
        if of_nodes
        else ranks.started(guard, hardware.num_processes, folder, child_env | more_env, program) as group,
        contextlib.nullcontext(series.bars) if series else Bars() as bars,
        Progress(folder, job.config.goal.num_steps, bars, brief=series is not None) as progress,
    ):
        if watched:
            watched.started(group.pid)
        num_asked, beat_s = 0, time.monotonic()
        stall = Stall(_stall_s(hardware), guard.cpu_s, beat_s)
        deadline_s = None if hardware.wall_timeout_s is None else beat_s + hardware.wall_timeout_s
        while not group.has_ended(TICK_S):
            signals.check()
            if watched:
                watched.tick()
                if watched.has_seen_its_windows():
                    return None, failures.failure("stopped", failures.WINDOW_ENDED, step=watched.step)
            progress.show()
            if stop and len(progress.validations) > num_asked:
                num_asked = len(progress.validations)
                if why := stop(progress.validations):
                    return None, failures.failure("stopped", why, step=progress.validations[-1][0])
            if series:
                series.paced(progress.whole_s())
                series.tick()
            now_s = time.monotonic()
            if now_s - beat_s >= HEARTBEAT_S:
                beat_s = now_s
                run["heartbeat_at"] = utc.now()
                with contextlib.suppress(OSError):  # a full disk is the workers' to report; the reserve is for the end
                    atomic.write_json(folder / "run.json", run, durable=False)
            if stall.stands_still(progress.sign, now_s):
                return None, _stalled(hardware, progress)
            if deadline_s is not None and now_s > deadline_s:
                message = f"exceeded hardware.wall_timeout_s={hardware.wall_timeout_s}"
                return None, failures.failure("wall_timeout", message, step=progress.step)
        ranks.write_failures(folder, group.failures)
        return group.exit_code(), group.failure


def _program(folder, config):
    """(the words that start each rank, variables that it gets with them)."""
    around = registry.program(config.instruments, folder, config.hardware.device)
    return (*around, *ranks.WORKER), ({processes.WITHIN: around[0]} if around else {})


def _stall_s(hardware):
    """Ranks that wait for each other have a timeout of their own, which says more."""
    if hardware.stall_timeout_s is None or hardware.num_processes == 1:
        return hardware.stall_timeout_s
    return max(hardware.stall_timeout_s, hardware.collective_timeout_s + MARGIN_S)


def _stalled(hardware, progress):
    words = f"no step and no line for hardware.stall_timeout_s={hardware.stall_timeout_s:g}, and nothing computed"
    return failures.failure("stalled", words, step=progress.step)
