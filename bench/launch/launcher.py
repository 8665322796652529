"""One race from a checked job to a finished record: start a fresh process group, watch, finish.

The launcher owns the record's status.  It writes run.json as running, with a heartbeat, waits without spinning, and
finishes it however the workers ended.  It never imports torch.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

from bench import atomic, private, utc
from bench.diagnosis import event_costs
from bench.exporters import dashboards
from bench.launch import initial_record
from bench.launch.progress import Progress, say
from bench.machine import environment, preflight
from bench.machine.processes import die_with_parent, has_ended
from bench.paths import REPO, project_folder, results_root
from bench.record import failures, ledger, run_folder, step_files, validity
from bench.record.metrics import metrics
from bench.training import flight_recorder

HEARTBEAT_S = 10.0
TICK_S = 0.5
GRACE_S = 5.0  # for workers to end after SIGTERM


class Interrupted(Exception):
    def __init__(self, number):
        super().__init__(signal.Signals(number).name)


def launch(job, command=(), results=None, brief=False, race=None):
    """Race once.  Returns the finished record (a dict); its folder is run["folder"].  Never raises for a failed race.

    race: the run's place in a race of several runs, for run.json["race"] (bench/race/runner.py).

    Raises ValueError where no record can be written at all.
    """
    started_s, meter = (
        time.time(),
        environment.CpuMeter(own_s=lambda: sum(os.times()[:4])),
    )  # git's too, which it starts
    results = Path(results or results_root())
    child_env = _child_env(job.config.hardware)
    env = environment.environment() | {"env": environment.env_variables(child_env)}
    run = initial_record.record_of(job, env, command) | ({"race": race} if race else {})
    for warning in run["warnings"]:
        say("export", f"{warning['instrument']}: {warning['error']}")
    with _signals_raise() as deaf:
        folder = initial_record.folder_of(job.config, run, results)
        try:
            initial_record.write_inputs(folder, job, env, started_s)
            run["preflight"] = _preflight(job, env, results, meter, brief)
            exit_code, stopped = _watch(folder, job, run, child_env, brief)
        except Interrupted as error:
            exit_code, stopped = None, _interrupted(folder, error)
        except OSError as error:
            exit_code, stopped = None, failures.failure(failures.kind_of(error), str(error))
        deaf()  # what follows is the clean end, and once is enough
        _finish(folder, run, exit_code, stopped, time.time() - started_s)
    if run["status"] != "aborted":
        dashboards.after_run(folder, run)
    base = project_folder()
    run["folder"] = os.path.relpath(folder, base) if folder.is_relative_to(base) else str(folder)
    return run


def _preflight(job, env, results, meter, brief):
    """The quick checks, for the record; what is not well is also told at once, unless the caller has done so."""
    num_bytes = sum(shard.num_bytes for shard in job.dataset.train + job.dataset.val)
    found = preflight.checks(job.config.hardware, num_bytes, env, results, meter.foreign_cpu_cores())
    odd = [check for check in found if check.status != "ok"]
    if odd and not brief:
        print(preflight.report(odd), flush=True)
    return [asdict(check) for check in found]


def _interrupted(folder, error):
    return failures.failure("interrupted", f"the launcher got {error}", None, failures.last_step(folder), str(error))


def _watch(folder, job, run, child_env, brief):
    """Start the agent and wait for it.  Returns (exit code, failure that the launcher itself decided on, or None)."""
    hardware = job.config.hardware
    progress = Progress(folder, job.config.goal.num_steps, brief)
    with (
        open(folder / "logs" / "agent.log", "wb") as log,
        _child(folder, hardware, child_env, log) as process,
        progress,
    ):
        beat_s = time.monotonic()
        deadline_s = None if hardware.wall_timeout_s is None else beat_s + hardware.wall_timeout_s
        while not has_ended(process.pid, TICK_S):
            progress.show()
            now_s = time.monotonic()
            if now_s - beat_s >= HEARTBEAT_S:
                beat_s = now_s
                run["heartbeat_at"] = utc.now()
                with contextlib.suppress(OSError):  # a full disk is the workers' to report; the reserve is for the end
                    atomic.write_json(folder / "run.json", run, durable=False)
            if deadline_s is not None and now_s > deadline_s:
                message = f"hardware.wall_timeout_s={hardware.wall_timeout_s} is over"
                return None, failures.failure("wall_timeout", message, step=progress.step)
        return process.wait(), None


def _child_env(hardware):
    """What the ranks run with: environment.json records this and not the launcher's own."""
    env = dict(os.environ)
    env["OMP_NUM_THREADS"] = str(hardware.num_threads)
    if hardware.device == "cpu":
        env.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning threads beside a busy core: steps 10 to 90 times slower
        env["CUDA_VISIBLE_DEVICES"] = ""
    for name, value in flight_recorder.variables(hardware.num_processes).items():
        env.setdefault(name, value)
    if hardware.deterministic:
        env.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    return env


@contextlib.contextmanager
def _child(folder, hardware, env, log):
    """The agent in a session of its own, ended with all its workers when this block is left in any way."""
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.launch.agent", str(folder), str(hardware.num_processes)],
        cwd=REPO,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
        preexec_fn=die_with_parent,
    )
    try:
        yield process
    finally:
        _end(process)


def _end(process):
    """SIGTERM lets the agent end its workers; after GRACE_S it is killed, and the workers end because it is gone."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _finish(folder, run, exit_code, stopped, wall_s):
    """Write the last word: status, failure, validity, metrics, artifacts."""
    failure = stopped or failures.classify(folder, exit_code)
    result = _result(folder)
    if failure is None and not result:
        failure = failures.failure("exception", "the workers ended well but left no result")
    run["status"] = "complete" if failure is None else "aborted" if failure["kind"] == "interrupted" else "failed"
    if failure:
        failure["message"] = private.redact(failure["message"], REPO)
    run["failure"] = failure
    run["ended_at"] = run["heartbeat_at"] = utc.now()
    run["model"] = result.get("model", run["model"])
    run["environment"] |= result.get("torch_facts", {})
    run["measured"] = result.get("measured", {}) | {
        "wall_s": wall_s,
        "launcher_peak_mem_gib": environment.peak_rss_gib(),
    }
    run["instrument_summaries"] = result.get("instrument_summaries", {})
    run["doubts"] = result.get("doubts", [])
    run["warnings"] += result.get("warnings", [])
    run["comparability_id"] = environment.comparability_id(run)
    rows = step_files.read(folder)
    lost = _costs(folder, run, rows)
    run["warnings"] = [one | {"error": private.redact(one["error"], REPO)} for one in run["warnings"]]
    with contextlib.suppress(OSError):  # on a full disk only run.json has space set aside
        if failure and rows:
            step_files.write(folder, rows)  # the scribe's lines, made one a step
        for event in lost:
            step_files.append_event(folder, event)
        event = {"t_ns": time.perf_counter_ns(), "utc": utc.now(), "event": "run_end", "status": run["status"]}
        step_files.append_event(folder, event)
    run["metrics"] = metrics(run, rows)
    run["validity"], run["validity_reasons"] = validity.validity(run)
    private.redact_logs(folder, REPO)
    atomic.release(folder)
    run["artifacts"] = run_folder.artifacts(folder)
    try:
        atomic.write_json(folder / "run.json", run)
    except OSError as error:
        print(f"{folder}/run.json could not be finished ({error.strerror}): it still says running", file=sys.stderr)
    try:
        ledger.ended(folder.parent.parent, folder, run)
    except OSError as error:
        print(f"{folder.parent.parent}: the ledger lacks the end of {folder.name} ({error.strerror})", file=sys.stderr)
    run_folder.remove_temporary(folder)


def _costs(folder, run, rows):
    """Say in run what the events of the race cost, and give back those found only now.  A diagnosis: it spoils no record."""
    try:
        found = event_costs.of(folder, run, rows)
    except Exception as error:
        what = {
            "rank": None,
            "instrument": "costs",
            "edge": "after the race",
            "error": f"{type(error).__name__}: {error}",
        }
        run["warnings"].append(what)
        return []
    run["costs"], run["skew"] = found["costs"], found["skew"]
    return found["events"]


def _result(folder):
    try:
        return json.loads((folder / run_folder.RESULT).read_text())
    except (OSError, ValueError):
        return {}


@contextlib.contextmanager
def _signals_raise():
    """SIGTERM, SIGHUP and Ctrl-C raise Interrupted here, so that the record is finished; afterwards as before.

    Gives a function that makes this process deaf to them, until the block is left.
    """

    def deaf():
        for number in before:
            signal.signal(number, signal.SIG_IGN)

    def handler(number, frame):
        deaf()
        raise Interrupted(number)

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    for number in before:
        signal.signal(number, handler)
    try:
        yield deaf
    finally:
        for number, old in before.items():
            signal.signal(number, old)
