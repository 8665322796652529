"""Determines why a run failed: which rank, at which step, the cause, and what to try.

A rank that fails writes logs/rankN.failure.json; for one that is killed, the launcher has only its exit code
(logs/agent.json).  classify() combines both into run.json's "failure".
"""

import contextlib
import errno
import json
import re
import signal
import time
import traceback
from pathlib import Path
from typing import TypedDict

from bench.base import atomic, private, utc
from bench.base.paths import REPO
from bench.base.reading import json_file, plain_file
from bench.base.reading.damage import Damaged
from bench.config import user_code
from bench.record import run_folder, step_files
from bench.record.metrics import metrics
from bench.record.shape import Facts, Section

KILLED = (
    "look into the kernel log (dmesg): after its out-of-memory killer free memory or lower hardware.micro_batch_seqs; "
    "if it has no such line, somebody or the job's scheduler ended it: start it again"
)
MISSED = "missed_signal"  # key of launch()'s answer
ESCAPED = "processes_left"  # the run killed its guard to leave a process behind
HINTS = {  # {kind of failure: what to try}
    "out_of_memory": "lower hardware.micro_batch_seqs: the batch stays the same, in more micro-steps; for a script, "
    "make its own batch smaller (script.args)",
    "non_finite_loss": "lower optim.lr (or optim.muon_lr), or set optim.grad_clip_norm=1.0",
    "not_causal": "check that attention is causal and that logits are computed from tokens alone",
    "disk_full": "free space where results/ is, then run again",
    "disk_error": "look into the kernel log (dmesg) and at the disk or mount where results/ is, then run again",
    "rank_killed": KILLED,
    "not_started": "check with ./run.sh doctor, which starts ranks too; too many open files: raise ulimit -n; "
    "no module: remove .venv, ./run.sh makes it again; 127.0.0.1: bring the loopback up (ip link set lo up)",
    "folder_removed": "start it again, and do not touch the folder of a run until it ends",
    "agent_killed": KILLED,
    ESCAPED: "find what in its code kills other processes and runs on in a session of its own",
    "node_lost": "look at that node: its machine, its network, what the command there said last; start it again",
    "rank_crashed": "read the end of the rank's log: native code crashed, and says there what it can",
    "collective_timeout": "look into the other ranks' logs; if steps are long, raise hardware.collective_timeout_s",
    "gpu_error": "look into the kernel log (dmesg) for an Xid, and at nvidia-smi -q: reset a GPU that is lost or has "
    "uncorrected ECC errors, or leave it out with CUDA_VISIBLE_DEVICES; else CUDA_LAUNCH_BLOCKING=1 finds the call",
    "nccl_error": "read the other ranks' logs: one of them may have ended first; NCCL_DEBUG=INFO says more, and "
    "./run.sh doctor tries the connections",
    "stalled": "look where it hung: logs/ has each rank's stack; raise hardware.stall_timeout_s if it had to wait",
    "over_limit": "look at what it did, logs/ and work/: a sandbox holds it to what an honest run stays below",
    "wall_timeout": "raise hardware.wall_timeout_s or train fewer steps",
    "launcher_killed": "its launcher was killed from outside: start it again, in a terminal or job that outlives it",
    "interrupted": "start it again; a sweep skips what is complete",
    "preempted": "start it again with resume=auto, which goes on from its checkpoint",
    "stopped": "start it alone, without profile.stop_after_window, if you want its end: ./run.sh run",
    "bad_data": "check every file: ./run.sh data show NAME",
    "bad_setting": "change the setting that the message names; ./run.sh run --help KEY says what it takes",
    "no_metric_lines": "read logs/rank0.log; script.dialect=FILE.yaml names its lines' patterns (docs/scripts.md)",
    "no_gpu": "start it on a GPU with torch for CUDA (script.python), or with options for a CPU, if any (script.args)",
    "exception": "read the traceback at the end of the rank's log",
}
HINTS_BY_MESSAGE = {  # {what the message of an exception has: what to try}
    "No module named": "install it there; script.python=PATH names another Python, script.root=DIR a folder of modules",
    "environment variable": "pass it on: script.env={NAME: null} takes the shell's value, {NAME: VALUE} sets one",
    "FileNotFoundError": "prepare its data; pass on a variable that says where they are: script.env={NAME: null}",
}
# Kinds of failure that changed data may cause.
BY_CHANGED_DATA = ("rank_crashed", "exception", "gpu_error", "bad_setting", "non_finite_loss")
WINDOW_ENDED = "the profiler's window ended (profile.stop_after_window=true)"
GPU_ERROR = re.compile(r"^AcceleratorError|CUDA error|CUDNN_STATUS_|CUBLAS_STATUS_|CUDA driver error")
GPU_FAULTS = "gpus.log"  # in logs/: what telemetry's sampler observed of a GPU that failed, a sentence per line
GPU_SEEN_S = 1.0  # the sampler, which ends with rank 0, reads every GPU again within this time
BY_GPU = ("exception", "gpu_error", "nccl_error", "collective_timeout", "rank_crashed")  # kinds that a bad GPU causes
OWN_KINDS = {"NonFiniteLoss": "non_finite_loss", "NotCausal": "not_causal"}  # {exception of the trainer: kind}
KILL_SEEN_WITHIN_S = 5.0  # torchrun polls every half second, and its time stamps are whole seconds
SIGNALLED = re.compile(r"SignalException: Process \d+ got signal: (\d+)")  # torchrun's last line after a signal
OUT_OF_MEMORY = re.compile(
    r"out of memory|can(?:'|no)t allocate memory|ALLOC_FAILED|bad_alloc|MemoryError|failed to map segment", re.I
)
ERROR_LINE = re.compile(r"[\w.]*(Error|Exception|terminate called|what\(\))\b.*[^:]")  # in a traceback, or from C++
NCCL_TIMEOUT = "Watchdog caught collective operation timeout"  # in the log of a rank that NCCL's watchdog aborted
# Matches the message of a rank that fails only because another one did.
FOLLOWS_ANOTHER = re.compile(r"connection (reset|closed|refused)|broken pipe|peer|recvbytes|remote process", re.I)


class Reported(TypedDict):
    """logs/rankN.failure.json: what failure() returns, and the time of the failure."""

    kind: str
    message: str
    rank: int | None
    step: int | None
    signal: str | None
    exit_code: int | None
    failed_at_s: float


class Ended(TypedDict):
    rank: int
    exit_code: int
    failed_at_s: float


class AgentsFacts(TypedDict):
    """logs/agent.json, which the process that starts the ranks writes."""

    failures: list[Ended]


def failure(
    kind: str,
    message: str,
    rank: int | None = None,
    step: int | None = None,
    signal_name: str | None = None,
    exit_code: int | None = None,
) -> Section:
    """Returns run.json's "failure", with the hint for its kind.  step: the one that failed, or the last one known."""
    where = {"rank": rank, "step": step, "signal": signal_name, "exit_code": exit_code}
    return {"kind": kind, **where, "message": message, "hint": HINTS[kind]}


def bad_data(changed: list[str], led_to: Section | None) -> Section:
    """Returns the failure of a run whose data changed.  changed: sentences; led_to: the failure that this caused."""
    message = "; ".join(changed)
    if led_to is None:
        return failure("bad_data", message)
    cause = {"kind": "bad_data", "message": f"{message}; then: {led_to['message']}", "hint": HINTS["bad_data"]}
    return led_to | cause


def is_interrupt(failure_of_run: Section | None) -> bool:
    """Whether a run failed because it was interrupted or preempted, so that the runs after it must not start."""
    return failure_of_run is not None and failure_of_run["kind"] in ("interrupted", "preempted")


def interrupted_by(run: Facts) -> str | None:
    """Returns the signal that interrupted a run, its look after the race or, in launch()'s answer, its last moments;
    None if nothing did."""
    if is_interrupt(run["failure"]):
        signal_name: str | None = run["failure"]["signal"]
        return signal_name
    return (run.get("look") or {}).get("interrupted_by") or run.get(MISSED)


def write(folder: Path | str, rank: int, step: int | None, error: BaseException) -> str:
    """Writes the failure file of a rank that handles an exception.  Returns its kind.  step: None if not training."""
    kind = kind_of(error)
    message = private.excerpt(f"{type(error).__name__}: {error}", 2000) + user_code.line_of(error)
    facts = failure(kind, message, rank, getattr(error, "step", step))
    facts["failed_at_s"] = time.monotonic()  # by this node's clock; on_own_clock() in bench/launch/nodes/ converts it
    facts["traceback"] = traceback.format_exc()
    path = Path(folder) / "logs" / f"rank{rank}.failure.json"
    try:
        path.write_text(json.dumps(facts))
    except OSError:
        atomic.release(folder)  # the disk is full: this file matters more than the reserve
        path.write_text(json.dumps(facts))
    if kind == "non_finite_loss":
        event = {"t_ns": time.perf_counter_ns(), "utc": utc.now(), "event": kind}
        with contextlib.suppress(OSError):
            step_files.append_event(folder, event | {key: facts[key] for key in ("rank", "step", "message")})
    return kind


def kind_of(error: BaseException) -> str:
    """Returns the kind of failure, a key of HINTS, of an exception."""
    text, name = str(error), type(error).__name__
    if name in OWN_KINDS:
        return OWN_KINDS[name]
    if isinstance(error, MemoryError) or OUT_OF_MEMORY.search(f"{name}: {text}"):
        return "out_of_memory"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "disk_full"
    if isinstance(error, OSError) and error.errno in (errno.EIO, errno.EROFS, errno.ESTALE):
        return "disk_error"
    if isinstance(error, Damaged) and "run.json: " in text:  # only the launcher writes it: somebody removed or cut it
        return "folder_removed"
    if isinstance(error, ValueError):
        raised_by_user = "exception" if user_code.line_of(error) else "bad_setting"
        return "bad_data" if ".bin" in text else raised_by_user
    if re.search("timed out|timeout", text, re.I):
        return "collective_timeout"
    if name == "DistBackendError":
        return "nccl_error"
    return "gpu_error" if GPU_ERROR.search(f"{name}: {text}") else "exception"


def classify(folder: Path, exit_code: int | None) -> Section | None:
    """Returns why the ranks failed, from the files in the run folder and the exit code; None if they succeeded."""
    failed = _ranks_failure(folder, exit_code)
    faults = "; ".join(dict.fromkeys(_log(folder, GPU_FAULTS).splitlines()))
    if failed is None or not faults or failed["kind"] not in BY_GPU:
        return failed
    return failed | {"kind": "gpu_error", "message": f"{faults}; then: {failed['message']}", "hint": HINTS["gpu_error"]}


def _ranks_failure(folder: Path, exit_code: int | None) -> Section | None:
    files = [_facts(path, Reported) for path in sorted((folder / "logs").glob("rank*.failure.json"))]
    reported = [rank for rank in files if rank and rank["kind"] in HINTS]
    ended = (_facts(folder / "logs" / "agent.json", AgentsFacts) or {"failures": []})["failures"]
    if exit_code == 0 and not reported:
        return None
    follows = [
        rank["kind"] in ("exception", "nccl_error") and FOLLOWS_ANOTHER.search(rank["message"]) for rank in reported
    ]
    first_cause = [rank for rank, is_later in zip(reported, follows, strict=True) if not is_later]
    killed = [rank for rank in ended if rank["exit_code"] < 0 and -rank["exit_code"] != signal.SIGTERM]
    if first_cause:
        cause = min(first_cause, key=lambda rank: rank["failed_at_s"])
        # A much later kill is torchrun's own, which ends the ranks that do not end by themselves.
        killed = [rank for rank in killed if rank["failed_at_s"] <= cause["failed_at_s"] + KILL_SEEN_WITHIN_S]
        if not (killed and cause["kind"] in ("exception", "nccl_error", "collective_timeout")):
            return _explained(folder, cause)
    if killed:
        return _killed(folder, min(killed, key=lambda rank: rank["failed_at_s"]))
    if reported:
        return _explained(folder, min(reported, key=lambda rank: rank["failed_at_s"]))
    if ended:
        rank, code = ended[0]["rank"], ended[0]["exit_code"]
        return failure("exception", f"rank {rank} ended with exit code {code}", rank, exit_code=code)
    if exit_code == -signal.SIGKILL:
        message = "the launching agent was ended by SIGKILL"
        return failure("agent_killed", message, None, last_step(folder), "SIGKILL", exit_code)
    number = int(signal.SIGTERM) if exit_code in (-signal.SIGTERM, 128 + signal.SIGTERM) else 0
    if signalled := SIGNALLED.search(_log(folder, "agent.log")):  # torchrun then ends with exit code 1
        number = int(signalled[1])
    if number in set(signal.Signals):
        name = signal.Signals(number).name
        message = f"what starts the ranks was ended from outside by {name}"
        return failure("interrupted", message, None, last_step(folder), name, exit_code)
    return _not_started(folder, exit_code)


def _facts(path: Path, kind: type) -> Section | None:
    """Returns the content of a failure file; None if missing or malformed, as the trained code can write it too."""
    with contextlib.suppress(Damaged):
        return json_file.read(path, kind)
    return None


def _not_started(folder: Path, exit_code: int | None) -> Section:
    """Returns the failure for an agent that ended before any rank started, from what it printed last."""
    message = f"no rank could be started (exit code {exit_code}, logs/agent.log): {_last_words(folder, 'agent.log')}"
    if OUT_OF_MEMORY.search(_log(folder, "agent.log")):  # before the first batch, so that a smaller one would not help
        hint = "free memory of this machine, or raise its limit (ulimit -v), and start it again"
        return failure("out_of_memory", message, exit_code=exit_code) | {"hint": hint}
    return failure("not_started", message, exit_code=exit_code)


def _killed(folder: Path, ended: Section) -> Section:
    number = -ended["exit_code"]
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    kind = "rank_killed" if number in (signal.SIGKILL, signal.SIGINT, signal.SIGHUP) else "rank_crashed"
    if number == signal.SIGABRT and NCCL_TIMEOUT in _log(folder, f"rank{ended['rank']}.log"):
        kind = "collective_timeout"
    step = last_step(folder)
    return failure(kind, f"rank {ended['rank']} was ended by {name}", ended["rank"], step, name, ended["exit_code"])


def _log(folder: Path, name: str) -> str:
    return plain_file.text_or_empty(folder / "logs" / name, plain_file.MAX_LINES_BYTES)


def _last_words(folder: Path, name: str) -> str:
    """Returns the last line of a log that names an error, without a rank before it, or else its last line."""
    lines = [re.sub(r"^\[\w+\]:\s*", "", line.strip()) for line in _log(folder, name).splitlines()]
    lines = [line for line in lines if line] or ["it said nothing"]
    return private.excerpt(next((line for line in reversed(lines) if ERROR_LINE.match(line)), lines[-1]), 500)


def last_step(folder: Path) -> int | None:
    """Returns the last step that rank 0 wrote, which lags behind the ranks by at most half a second; None before it."""
    return run_folder.progress(folder).get("step")


def write_launcher_killed(folder: Path | str, message: str = "the launcher ended before its workers") -> None:
    """Finishes the record of a run whose launcher and processes are gone.

    If the launcher died during the look after the race, what was measured before is kept.  The run still counts as
    aborted: the second clock and the last checks were the launcher's, and a contestant could kill it to avoid them.
    """
    folder = Path(folder)
    run = run_folder.read_raw(folder)
    if run["status"] == "running":
        last = atomic.read_json(folder / run_folder.RESULT, {})
        if "look" in last:
            message += ", in the look after the race: what was measured is kept, and nobody has checked it"
            run["measured"] = private.redact_all(last["measured"], REPO)
            run["model"], run["environment"] = last.get("model", run["model"]), run["environment"] | last["torch_facts"]
            run["metrics"] = metrics(run, step_files.read(folder))
        run = {**run_folder.killed(run, message), "ended_at": utc.now()}
        run["failure"] = failure("launcher_killed", message, step=last_step(folder))
        atomic.release(folder)
        private.redact_logs(folder, REPO)
        if run.get("script") and not (work := folder / "work").is_symlink():
            run_folder.remove_links(work)  # links to its data and to files beside its sources
        run["artifacts"], not_kept = run_folder.kept(folder)
        if not_kept:
            run["not_kept"] = not_kept
        atomic.write_json(folder / "run.json", run)
        run_folder.remove_temporary(folder)


def _explained(folder: Path, facts: Section) -> Section:
    """Returns what a rank reported without what is private, with a hint, and its last words if it has only a code."""
    kept = {key: value for key, value in facts.items() if key not in ("failed_at_s", "traceback")}
    if kept["message"].startswith("the script ended with exit code "):
        kept["message"] += f": {_last_words(folder, 'rank{}.log'.format(kept['rank']))}"
    hints = (hint for phrase, hint in HINTS_BY_MESSAGE.items() if phrase in kept["message"])
    return kept | {"hint": next(hints, HINTS[kept["kind"]]) if kept["kind"] == "exception" else HINTS[kept["kind"]]}
