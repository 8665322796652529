"""One race from overrides to a finished record: compose, resolve, start a fresh process group, watch, finish.

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
from dataclasses import asdict, dataclass
from pathlib import Path

import yaml

from bench import (
    atomic,
    codestate,
    collector,
    compose,
    costs,
    dashboards,
    environment,
    failures,
    flight,
    gpus,
    ledger,
    places,
    preflight,
    private,
    record,
    sources,
    steps,
    verdict,
)
from bench import config as schema
from bench.clock import TIMING_PROTOCOL
from bench.metrics import metrics
from bench.progress import Progress
from bench.watchdog import die_with_parent, has_ended

REPO = Path(__file__).resolve().parent.parent
HEARTBEAT_S = 10.0
TICK_S = 0.5
GRACE_S = 5.0  # for workers to end after SIGTERM


class Interrupted(Exception):
    def __init__(self, number):
        super().__init__(signal.Signals(number).name)


@dataclass(frozen=True)
class Job:
    """A race that may start: everything asked has been checked."""

    config: schema.Config  # resolved
    dataset: sources.Dataset
    overrides: list[str]
    deviations: list[str]

    @property
    def config_id(self):
        return schema.config_id(self.config)


def prepare(overrides, fetch=False, say=print):
    """list[str] -> Job.  Makes local data that is missing; fetches only if asked.  Raises ValueError for the user."""
    machine = schema.Machine(gpus.num_visible(), environment.usable_cpus())
    asked = compose.compose(overrides, machine)
    for name in ("train_glob", "val_glob"):
        pattern = getattr(asked.data, name)
        if pattern is not None:
            pattern = str(places.of_user(pattern))
            setattr(asked.data, name, pattern)
    dataset = sources.prepare(asked.data, fetch=fetch, say=say)
    sources.check_val_tokens(dataset, asked.goal.val_tokens)
    for name in ("train_glob", "val_glob"):  # found: from here on only for the record, where no home folder belongs
        if getattr(asked.data, name) is not None:
            setattr(asked.data, name, private.redact(getattr(asked.data, name), REPO))
    config = schema.resolve(asked, machine, dataset.vocab_size)
    _check_names(config)
    return Job(config, dataset, list(overrides), compose.deviations(config))


def _check_names(config):
    """Names that a dict in models/ will look up; listed here by reading conf/, so that torch stays out."""
    for group, name in (("model", config.model.arch), ("optim", config.optim.name)):
        if name not in compose.choices(group):
            raise ValueError(f"{group}={name}: there is no such {group}; choose from {', '.join(compose.choices(group))}")
    if config.optim.schedule not in ("constant", "cosine", "trapezoid"):
        raise ValueError(f"optim.schedule={config.optim.schedule}: use constant, cosine or trapezoid")


def launch(job, command=(), results=None, brief=False, race=None):
    """Race once.  Returns the finished record (a dict); its folder is run["folder"].  Never raises for a failed race.

    race: the run's place in a race of several runs, for run.json["race"] (bench/race.py).

    Raises ValueError where no record can be written at all.
    """
    started_s, meter = time.time(), environment.CpuMeter(own_s=lambda: sum(os.times()[:4]))  # git's too, which it starts
    results = Path(results or record.results_root())
    child_env = _child_env(job.config.hardware, started_s)
    env = environment.environment() | {"env": environment.env_variables(child_env)}
    run = _opening_record(job, env, command) | ({"race": race} if race else {})
    with _signals_raise() as deaf:
        folder = _open_folder(job.config, run, results)
        try:
            _write_inputs(folder, job, env)
            run["preflight"] = _preflight(job, env, results, meter, brief)
            exit_code, stopped = _watch(folder, job, run, child_env, brief)
        except Interrupted as error:
            exit_code, stopped = None, _interrupted(folder, error)
        except OSError as error:
            exit_code, stopped = None, failures.failure(failures.kind_of(error), str(error))
        deaf()  # what follows is the clean end, and once is enough
        _finish(folder, run, exit_code, stopped, time.time() - started_s)
    if run["status"] != "aborted":
        dashboards.after_race(folder, run)
    run["folder"] = os.path.relpath(folder, REPO) if folder.is_relative_to(REPO) else str(folder)
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


def _open_folder(config, run, results):
    """A new run folder with its first run.json; the ledger is told before, so that no run is there which it does not know."""
    try:
        folder = record.new_folder(results, config.track.name, config.name, run["config_id"], config.seed)
        run["run_id"] = folder.name
        run["ledger_sha256"] = ledger.started(results, folder, run)
        atomic.write_json(folder / "run.json", run)
        atomic.reserve(folder)
    except OSError as error:
        raise ValueError(f"{results}: no record can be written there ({error.strerror}): free space, or name another "
                         "folder with SPEEDRUN_RESULTS=/path") from None
    return folder


def _opening_record(job, env, command):
    config = job.config
    return {
        "schema_version": record.SCHEMA_VERSION,
        "run_id": None,
        "name": config.name,
        "track": config.track.name,
        "deviations": job.deviations,
        "status": "running",
        "validity": "invalid",
        "validity_reasons": ["the run did not complete"],
        "failure": None,
        "started_at": atomic.utc_now(),
        "heartbeat_at": atomic.utc_now(),
        "ended_at": None,
        "launcher": environment.this_process(),
        "command": [private.redact(word, REPO) for word in command],
        "seed": config.seed,
        "config_id": job.config_id,
        "comparability_id": None,
        "session_id": environment.session_id(env),
        "world_size": config.hardware.num_processes,
        "model": {"arch": config.model.arch},
        "optim": config.optim.name,
        "goal": {
            "target_val_loss": config.goal.target_val_loss,
            "target_gap_nats": config.goal.target_gap_nats,
            "stop_at_target": config.goal.stop_at_target,
            "val_tokens": config.goal.val_tokens,
        },
        "hardware": schema.to_dict(config.hardware),
        "instruments": config.instruments,
        "timing_protocol": TIMING_PROTOCOL
        | collector.protocol(config.hardware.gc, config.hardware.gc_every_steps)
        | {"instruments": sorted(config.instruments)},
        "code": codestate.state(REPO),
        "data": _data(job),
        "environment": environment.summary(env, config.hardware),
        "measured": {},
        "metrics": {},
        "artifacts": [],
    }


def _data(job):
    dataset, config = job.dataset, job.config
    root = sources.data_root()

    def files(shards):
        found = []
        for shard in shards:
            inside = shard.path.is_relative_to(root)
            name = str(shard.path.relative_to(root)) if inside else private.redact(str(shard.path), REPO)
            found.append({"file": name, "num_tokens": shard.num_tokens, "num_bytes": shard.num_bytes, "sha256": shard.sha256})
        return found

    return {
        "source": dataset.name,
        "vocab_size": dataset.vocab_size,
        "floor_nats": sources.floor_nats(config.data, dataset, config.goal.val_tokens),
        "train": files(dataset.train),
        "val": files(dataset.val),
    }


def _write_inputs(folder, job, env):
    (folder / "logs").mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump(schema.to_dict(job.config), sort_keys=False))
    overrides = [private.redact(override, REPO) for override in job.overrides]
    (folder / "overrides.yaml").write_text(yaml.safe_dump(overrides))
    atomic.write_json(folder / "environment.json", env)
    codestate.write(REPO, folder / "code")
    paths = {split: [str(file.path) for file in getattr(job.dataset, split)] for split in ("train", "val")}
    atomic.write_json(folder / record.SHARDS, paths, durable=False)
    steps.append_event(folder, {"t_ns": time.perf_counter_ns(), "utc": atomic.utc_now(), "event": "init_start"})


def _watch(folder, job, run, child_env, brief):
    """Start the agent and wait for it.  Returns (exit code, failure that the launcher itself decided on, or None)."""
    hardware = job.config.hardware
    progress = Progress(folder, job.config.goal.num_steps, brief)
    with open(folder / "logs" / "agent.log", "wb") as log, _child(folder, hardware, child_env, log) as process, progress:
        beat_s = time.monotonic()
        deadline_s = None if hardware.wall_timeout_s is None else beat_s + hardware.wall_timeout_s
        while not has_ended(process.pid, TICK_S):
            progress.show()
            now_s = time.monotonic()
            if now_s - beat_s >= HEARTBEAT_S:
                beat_s = now_s
                run["heartbeat_at"] = atomic.utc_now()
                with contextlib.suppress(OSError):  # a full disk is the workers' to report; the reserve is for the end
                    atomic.write_json(folder / "run.json", run, durable=False)
            if deadline_s is not None and now_s > deadline_s:
                message = f"hardware.wall_timeout_s={hardware.wall_timeout_s} is over"
                return None, failures.failure("wall_timeout", message, step=progress.step)
        return process.wait(), None


def _child_env(hardware, started_s):
    """What the ranks run with: environment.json records this and not the launcher's own."""
    env = dict(os.environ)
    env["SPEEDRUN_LAUNCHER_PID"] = str(os.getpid())
    env["SPEEDRUN_LAUNCHED_S"] = repr(started_s)
    env["OMP_NUM_THREADS"] = str(hardware.num_threads)
    if hardware.device == "cpu":
        env.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning threads beside a busy core: steps 10 to 90 times slower
        env["CUDA_VISIBLE_DEVICES"] = ""
    for name, value in flight.variables(hardware.num_processes).items():
        env.setdefault(name, value)
    if hardware.deterministic:
        env.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    return env


@contextlib.contextmanager
def _child(folder, hardware, env, log):
    """The agent in a session of its own, ended with all its workers when this block is left in any way."""
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.agent", str(folder), str(hardware.num_processes)],
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
    run["ended_at"] = run["heartbeat_at"] = atomic.utc_now()
    run["model"] = result.get("model", run["model"])
    run["environment"] |= result.get("torch_facts", {})
    run["measured"] = result.get("measured", {}) | {"wall_s": wall_s, "launcher_peak_mem_gib": environment.peak_rss_gib()}
    run["instrument_summaries"] = result.get("instrument_summaries", {})
    run["doubts"] = result.get("doubts", [])
    run["warnings"] = result.get("warnings", [])
    run["comparability_id"] = environment.comparability_id(run)
    rows = steps.read(folder)
    lost = _costs(folder, run, rows)
    with contextlib.suppress(OSError):  # on a full disk only run.json has space set aside
        if failure and rows:
            steps.write(folder, rows)  # the scribe's lines, made one a step
        for event in lost:
            steps.append_event(folder, event)
        event = {"t_ns": time.perf_counter_ns(), "utc": atomic.utc_now(), "event": "run_end", "status": run["status"]}
        steps.append_event(folder, event)
    run["metrics"] = metrics(run, rows)
    run["validity"], run["validity_reasons"] = verdict.validity(run)
    private.redact_logs(folder, REPO)
    atomic.release(folder)
    run["artifacts"] = record.artifacts(folder)
    try:
        atomic.write_json(folder / "run.json", run)
    except OSError as error:
        print(f"{folder}/run.json could not be finished ({error.strerror}): it still says running", file=sys.stderr)
    try:
        ledger.ended(folder.parent.parent, folder, run)
    except OSError as error:
        print(f"{folder.parent.parent}: the ledger lacks the end of {folder.name} ({error.strerror})", file=sys.stderr)
    record.remove_passing(folder)


def _costs(folder, run, rows):
    """Say in run what the events of the race cost, and give back those found only now.  A diagnosis: it spoils no record."""
    try:
        found = costs.of(folder, run, rows)
    except Exception as error:
        what = {"rank": None, "instrument": "costs", "edge": "after the race", "error": f"{type(error).__name__}: {error}"}
        run["warnings"].append(what)
        return []
    run["costs"], run["skew"] = found["costs"], found["skew"]
    return found["events"]


def _result(folder):
    try:
        return json.loads((folder / record.RESULT).read_text())
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
