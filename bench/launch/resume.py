"""Resumes runs from their checkpoints (resume=auto, resume=RUN_ID) and records checkpoints in the ledger.

A resumed run is one record in segments, run.json["segments"].  It continues from a checkpoint whose sha256 is in the
ledger, under the same config, seed, code, data and kind of machine; otherwise it is refused (RUN_ID), or a new run
begins (auto).  A checkpoint that was changed since it was written is refused in either case.

With track.rules.may_shrink a run also goes on with fewer ranks than it began with, if all ranks have the same state.
Each step still has the same tokens (bench/data/course.py), so that its loss differs only by rounding.
"""

import contextlib
import hashlib
import itertools
import json
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.base import atomic, utc
from bench.base.reading import plain_file
from bench.base.reading.damage import Damaged
from bench.config import identity, schema
from bench.launch import allocation
from bench.launch.console import say
from bench.launch.prepare import Job
from bench.machine import processes
from bench.record import ledger, run_folder
from bench.record.shape import Section

AUTO = "auto"
TURN = ".resume.turn"
GOES_ON = ("preempted", "aborted")
# Failures that are not the training's fault, after which the same steps may succeed
OF_MACHINE = ("rank_killed", "agent_killed", "collective_timeout", "gpu_error", "nccl_error", "disk_full", "disk_error")
# fields of the first segment's record; config.yaml describes the last three
KEPT = ("run_id", "name", "started_at", "command", "ledger_sha256", "sweep", "config_id", "world_size", "hardware")
OF_RANKS = ("num_processes", "nodes", "num_threads", "micro_batch_seqs", "reducer")  # what depends on how many they are
SAME = ("python", "torch", "cpu_model", "gpus")  # fields of run.json["environment"] that must not change


@dataclass(frozen=True)
class Earlier:
    """The run and the checkpoint from which a run is resumed."""

    folder: Path
    as_read: Any  # run.json
    run: dict[str, Any]  # run.json as the last segment left it, or would have if it was killed
    checkpoint: Path
    state: dict[str, Any]  # the checkpoint's state.json
    sha256: str  # of state.json

    def record(self, run: Section) -> Section:
        """Turns the record of a new run into the record of this run at the start of its next segment."""
        before = self.run.get("segments") or [{"from_step": 0, "started_at": self.run["started_at"]}]
        closed = before[-1] | self._end(before)
        begins = {"from_step": self.state["step"], "started_at": utc.now(), "world_size": run["world_size"]}
        begins["checkpoint_sha256"] = self.sha256
        kept = {name: self.run[name] for name in KEPT if name in self.run}
        before_it = self.run.get("warnings", [])
        warnings = before_it + [warning for warning in run["warnings"] if warning not in before_it]
        return run | kept | {"warnings": warnings, "segments": [*before[:-1], closed, begins]}

    def _end(self, segments: list[Section]) -> Section:
        failure, ended_at = self.run["failure"] or {}, self.run["ended_at"] or segments[-1]["started_at"]
        wall_s = self.run["measured"].get("wall_s")  # of all segments
        if wall_s is None:  # its launcher was killed: until its last heartbeat
            wall_s = utc.seconds(ended_at) - utc.seconds(segments[-1]["started_at"])
        else:
            wall_s -= sum(segment["wall_s"] for segment in segments[:-1])
        return {
            "to_step": self.state["step"],
            "train_s": self.state["train_s"] - sum(segment["train_s"] for segment in segments[:-1]),
            "wall_s": max(0.0, wall_s),
            "ended_at": ended_at,
            "status": self.run["status"],
            "reason": failure.get("message"),
            "clock": (self.run.get("referee") or {}).get("clock"),
            **{name: self.run.get(name) for name in ("session_id", "comparability_id", "launched_by")},
        }


def survives(config: schema.Config) -> bool:
    """Whether the ranks write checkpoints."""
    return config.checkpoint.every_min is not None or config.resume is not None


def survival(config: schema.Config, folder: Path, earlier: Earlier | None) -> Section:
    """Returns what the ranks need to know of checkpoints.  folder: the run's, which another node may see elsewhere."""
    rules = {"every_min": config.checkpoint.every_min, "may_shrink": config.track.rules.may_shrink}
    begins = {"step": None} if earlier is None else {name: earlier.state[name] for name in ("step", "files")}
    return {"folder": str(folder.resolve()), **rules, **begins, "settings": _settings_of_ranks(config)}


def _settings_of_ranks(config: schema.Config) -> list[tuple[list[Any], Any]]:
    """Returns (path, value) of the settings that depend on the number of ranks."""
    batches = [(["stages", at, "micro_batch_seqs"], row.micro_batch_seqs) for at, row in enumerate(config.stages or ())]
    return [(["hardware", name], getattr(config.hardware, name)) for name in OF_RANKS] + batches


def find(job: Job, run: Section, results: Path) -> Earlier | None:
    """Returns the run that this job resumes, whose checkpoint it has read; None for a new run.

    run: the record with which a new run would begin.  Raises ValueError if the run that was named cannot be resumed.
    """
    resume = job.config.resume
    for folder in _candidates(results, job, str(resume)):
        try:
            before: Any = (as_read := run_folder.read_raw(folder))
        except Damaged as error:
            _refuse(job, folder, str(error))
            continue
        if before["status"] == "running" and _is_over(before, folder):
            before = run_folder.killed(before, "its launcher was killed")
        if before["status"] == "complete" and resume == AUTO:
            return None
        newest = None
        if not (why := _hindrance(before, run, folder, job.config)):
            newest = _newest(folder, results)  # which reads all its files
            why = newest and _hindrance_of_ranks(before, newest[1], job.config)
        if newest is not None and not why:
            return Earlier(folder, as_read, before, *newest)
        _refuse(job, folder, why or "it has no checkpoint that the ledger knows")
    if resume != AUTO:
        raise ValueError(f"resume={resume}: no such run of track {job.config.track.name} in {results}: give its run_id")
    return None


def go_on(earlier: Earlier, job: Job, run: Section, results: Path) -> Section | None:
    """Begins the next segment of a run.  Returns its record, None for a new run.  Raises ValueError as find() does."""
    folder, record = earlier.folder, earlier.record(run)
    with atomic.locked(folder.parent / TURN):  # only one of two launchers resumes a run
        if run_folder.read_raw(folder) == earlier.as_read:
            _begin(earlier, record, results)
            say("resume", f"{folder.name} continues after step {earlier.state['step']}", always=True)
            return record
    _refuse(job, folder, "another launcher has resumed it")
    return None


def _refuse(job: Job, folder: Path, why: str) -> None:
    """Says why a run is not resumed.  Raises ValueError if it was named."""
    if job.config.resume != AUTO:
        raise ValueError(f"resume={job.config.resume}: {why}: start another run without resume=")
    say("resume", f"not {folder.name}: {why}")


def wait_for_signs(job: Job, results: Path) -> None:
    """Waits until it is known whether the launcher of a running record on another machine lives: a minute at most."""
    for folder in _candidates(results, job, AUTO) if job.config.resume == AUTO else ():
        with contextlib.suppress(Damaged, FileNotFoundError):  # find() says so; the folder was removed
            run, path = run_folder.read_raw(folder), folder / "run.json"
            if run["status"] != "running" or processes.is_of_this_boot(run.get("launcher")) or _is_over(run, folder):
                continue
            say("resume", f"{folder.name}: waiting for a sign of life of its launcher on another machine", always=True)
            beat_ns = path.stat().st_mtime_ns
            while path.stat().st_mtime_ns == beat_ns and not _is_over(run, folder):
                time.sleep(1.0)


def _candidates(results: Path, job: Job, resume: str) -> list[Path]:
    """Returns the folders of runs that may be resumed, the newest first."""
    track = job.config.track
    if resume != AUTO:
        folder = results / track.name / resume
        return [folder] if "/" not in resume and (folder / "run.json").exists() else []
    names = f"*-{job.config_id}-s{job.config.seed}*"
    folders = {path.parent for path in (results / track.name).glob(f"{names}/run.json")}
    if track.rules.may_shrink:  # those of other ranks have another config_id
        runs = {line["run"] for line in ledger.read(results).own_lines if line["event"] == "checkpoint"}
        saved = [results / run for run in runs if run.startswith(f"{track.name}/")]
        folders |= {path for path in saved if run_folder.checkpoints(path) and _has_settings_of(path, job.config)}
    return sorted(folders, key=lambda folder: folder.name, reverse=True)


def _has_settings_of(folder: Path, config: schema.Config) -> bool:
    """Whether a run has the settings and the seed of config, except for what depends on the number of ranks."""
    with contextlib.suppress(ValueError):
        its = schema.read(folder, _settings_of_ranks(config))
        return its.seed == config.seed and identity.config_id(its) == identity.config_id(config)
    return False


def _is_over(run: Any, folder: Path) -> bool:
    """Whether the launcher of a running record is gone: one of this machine that has ended; one of an earlier start of
    this SLURM job, as starts do not overlap; or one that is silent by the file system's clock, as machines' differ."""
    own, by = allocation.current(), run.get("launched_by") or {}
    if own and by.get("job_id") == own.job_id and by.get("num_restarts", 0) < own.num_restarts:
        return True
    if processes.is_of_this_boot(run.get("launcher")):
        return not processes.is_there(run["launcher"])
    return atomic.clock_s(folder) - (folder / "run.json").stat().st_mtime > run_folder.STALE_HEARTBEAT_S


def _hindrance(before: Section, run: Section, folder: Path, config: schema.Config) -> str | None:
    """Returns why the run `before` cannot be resumed by `run`, or None if it can."""
    kind = (before["failure"] or {}).get("kind")
    if before["status"] not in GOES_ON and not (before["status"] == "failed" and kind in OF_MACHINE):
        return f"it is {before['status']}{f' ({kind})' if kind else ''}"
    if before.get("race") or before.get("audit"):
        return "it belongs to a race or an audit, whose runs cannot be resumed"
    pairs = {name: (before[name], run[name]) for name in ("seed", "world_size", "config_id")}
    num_ranks, most = run["world_size"], before["world_size"]
    if config.track.rules.may_shrink and num_ranks < most and _has_settings_of(folder, config):
        pairs = {"seed": pairs["seed"]}
    pairs["code"] = before["code"]["source_sha256"], run["code"]["source_sha256"]
    for split in ("train", "val"):
        then, now = ([file["sha256"] for file in of["data"][split]] for of in (before, run))
        pairs[f"{split} data"] = then, now
    for name in SAME:
        facts = (of["environment"].get(name) for of in (before, run))
        then, now = (sorted({gpu["name"] for gpu in fact}) if isinstance(fact, list) else fact for fact in facts)
        pairs[name] = then, now
    differing = [name for name, (then, now) in pairs.items() if then != now]
    if not differing:
        return None
    name = differing[0]
    return f"another {name.replace('_', ' ')}, {str(pairs[name][1])[:60]} instead of {str(pairs[name][0])[:60]}"


def _hindrance_of_ranks(before: Section, state: dict[str, Any], config: schema.Config) -> str | None:
    """Returns why a checkpoint of other ranks cannot be resumed, None if it can or is of as many."""
    saved, num_ranks = len(state["files"]), config.hardware.num_processes
    if saved == num_ranks:
        return None
    if not config.track.rules.may_shrink:
        return f"its checkpoint is of {saved} ranks, not {num_ranks}, and its track has no rules.may_shrink"
    if before["hardware"]["reducer"] == "shard":
        return f"hardware.reducer=shard: each of its {saved} ranks has only its share of the optimizer's state"
    if not state.get("replicated"):
        return f"optim={before['optim']}: its {saved} ranks do not have the same state, as they do with optim=adamw"
    return None


def _newest(folder: Path, results: Path) -> tuple[Path, dict[str, Any], str] | None:
    """Returns the newest checkpoint that is in the ledger: its folder, its state.json and the sha256 of that; or None.

    A run that was collected, perhaps a stranger's, is not continued here.  Raises ValueError if the checkpoint was
    changed since it was written.
    """
    name = ledger.name_of(results, folder)
    recorded = {
        line["step"]: line["checkpoint_sha256"]
        for line in ledger.read(results).own_lines
        if line["event"] == "checkpoint" and line.get("run") == name
    }
    for checkpoint in run_folder.checkpoints(folder):
        sha256 = ledger.sha256_of(checkpoint / run_folder.CHECKPOINT_STATE)
        step = int(checkpoint.name.removeprefix("step"))
        if step not in recorded:  # its launcher was killed before it could record it
            continue
        state, changed = dict[str, Any](), [run_folder.CHECKPOINT_STATE]
        if sha256 == recorded[step]:
            state, changed = json.loads((checkpoint / run_folder.CHECKPOINT_STATE).read_text()), []
        for file, facts in state.get("files", {}).items():
            with contextlib.suppress(OSError), open(checkpoint / file, "rb", opener=plain_file.open_now) as opened:
                if hashlib.file_digest(opened, "sha256").hexdigest() == facts["sha256"]:
                    continue
            changed.append(file)
        if changed:
            raise ValueError(f"{checkpoint / changed[0]} is not what the ledger says was written: omit resume=")
        return checkpoint, state, sha256
    return None


def _begin(earlier: Earlier, run: Section, results: Path) -> None:
    """Writes the segment to the ledger, then run.json; removes what the earlier one left: failures, and checkpoints
    that a killed launcher has not put into the ledger, which would count as this segment's newest."""
    folder = earlier.folder
    run_folder.remove_temporary(folder)
    atomic.reserve(folder)
    for path in [*folder.glob("logs/rank*.failure.json"), folder / "logs" / "agent.json"]:
        path.unlink(missing_ok=True)
    for checkpoint in itertools.takewhile(lambda newer: newer != earlier.checkpoint, run_folder.checkpoints(folder)):
        shutil.rmtree(checkpoint, ignore_errors=True)
    name, facts = ledger.name_of(results, folder), {"step": earlier.state["step"], "checkpoint_sha256": earlier.sha256}
    ledger.append(results, "resume", run=name, segment=len(run["segments"]), **facts)
    atomic.write_json(folder / "run.json", run)


class Watch:
    """Records the checkpoints that the ranks write in the ledger, at each tick().

    .step: of the last checkpoint, 0 without any; .ended_by: the signal that caused it, None if it was a periodic one.
    """

    def __init__(self, folder: Path, results: Path):
        self._folder, self._results = folder, results
        self._seen = set(run_folder.checkpoints(folder))
        self.step, self.ended_by = 0, None

    def tick(self) -> None:
        for checkpoint in reversed(run_folder.checkpoints(self._folder)):
            if checkpoint in self._seen:
                continue
            self._seen.add(checkpoint)
            path, step = checkpoint / run_folder.CHECKPOINT_STATE, int(checkpoint.name.removeprefix("step"))
            state = atomic.read_json(path, {})
            if state.get("step") != step:  # no rank has written it
                continue
            facts = {"step": step, "checkpoint_sha256": ledger.sha256_of(path)}
            ledger.append(self._results, "checkpoint", run=ledger.name_of(self._results, self._folder), **facts)
            self.step, self.ended_by = step, state.get("warned_by")
