"""Creates the run folder of a job, its initial run.json and all input files of the run."""

import contextlib
import functools
import operator
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import yaml

from bench.base import atomic, credentials, private, utc
from bench.base.metric import goal_facts
from bench.base.paths import REPO
from bench.config import compose, groups, identity, schema, user_code
from bench.data.sources import datasets
from bench.data.sources.source import data_root
from bench.launch.prepare import Job
from bench.launch.script import script, work_folder
from bench.machine import code_state, environment, processes
from bench.record import ledger, run_folder, step_files
from bench.record.exporters import dashboards
from bench.record.shape import Record
from bench.training.instruments import registry
from bench.training.timing import clock
from bench.training.timing.clock import TIMING_PROTOCOL


def folder_of(config: schema.Config, run: dict[str, Any], results: Path) -> Path:
    """Creates a run folder.  Its ledger entry precedes its run.json, so that every run on disk is in the ledger.

    Raises ValueError if nothing can be written there.  No folder stays then, and a run that the ledger has is aborted.
    """
    folder = None
    try:
        folder = run_folder.new_folder(results, config.track.name, str(config.name), run["config_id"], config.seed)
        run["run_id"] = folder.name
        atomic.reserve(folder)  # first, because a disk without this much space takes no run
        run["ledger_sha256"] = ledger.started(results, folder, cast(Record, run), identity.shape(config))
        atomic.write_json(folder / "run.json", run)
    except OSError as error:
        with contextlib.suppress(OSError):
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)  # frees the space that the ledger needs
                if "ledger_sha256" in run:
                    name = ledger.name_of(results, folder)
                    ledger.append(results, "end", run=name, status="aborted", validity="invalid", run_json_sha256=None)
        remedy = "free space, make it writable, or name another folder with SPEEDRUN_RESULTS=/path"
        raise ValueError(f"{results}: no record can be written there ({error.strerror}): {remedy}") from None
    return folder


def record_of(job: Job, env: dict[str, Any], command: Sequence[str]) -> dict[str, Any]:
    """Returns run.json for a run that has not begun: running, and invalid until it is complete."""
    config = job.config

    def yamls() -> list[Path]:  # from which the config is composed
        return [groups.path_of(*choice) for choice in compose.origins(job.overrides, None)[1]]

    code = code_state.state(job.code, job.own_sources, REPO, yamls)
    warnings = dashboards.warnings(config.exporters)
    if "git_failure" in code:  # commit and local changes are unknown
        warnings.append({"rank": None, "instrument": "git", "edge": "start", "error": code["git_failure"]})
    optional: dict[str, Any] = {"script": job.script.facts()} if job.script else {}
    if job.secrets:  # settings whose values the record does not show
        optional["redacted"] = [".".join(map(str, path)) for path in job.secrets]
        seen = f"{', '.join(optional['redacted'])}: looks like a credential and is recorded as {credentials.SECRET}"
        remedy = "this run cannot be claimed: log in (wandb login, hf auth login) so that it needs none"
        warnings.append({"rank": None, "instrument": "launcher", "edge": "run start", "error": f"{seen}; {remedy}"})
    protocol = script.TIMING_PROTOCOL
    if not job.script:
        protocol = TIMING_PROTOCOL | clock.gc_protocol(config.hardware.gc, config.hardware.gc_every_steps)
    command = [_public(argument, job) for argument in [*command, *groups.as_typed()]]
    data = _data(job)
    session_id = environment.session_id(env)
    where = environment.summary(env, config.hardware)
    return {
        "schema_version": run_folder.SCHEMA_VERSION,
        "run_id": None,
        "name": config.name,
        "track": config.track.name,
        "deviations": job.deviations,
        "status": "running",
        "validity": "invalid",
        "validity_reasons": ["the run did not complete"],
        "failure": None,
        "started_at": utc.now(),
        "heartbeat_at": utc.now(),
        "ended_at": None,
        "launcher": processes.identity(os.getpid()),
        "command": command,
        "seed": config.seed,
        "config_id": job.config_id,
        "comparability_id": None,
        "session_id": session_id,
        "world_size": config.hardware.num_processes,
        "model": {"arch": job.script.title if job.script else config.model and config.model.arch},
        "optim": "unknown" if job.script else config.optim and config.optim.name,
        "goal": {
            **goal_facts(config.goal.of, config.goal.target, config.goal.budget),
            "target_val_loss": config.goal.target_val_loss,
            "target_gap_nats": config.goal.target_gap_nats,
            "stop_at_target": config.goal.stop_at_target and not job.script,  # a script decides when it ends
            "val_tokens": config.goal.val_tokens,
            "implausible_val_loss": config.track.rules.implausible_val_loss,
            **({"may_resume": True} if config.track.rules.may_resume else {}),
        },
        "hardware": schema.to_dict(config.hardware) | {"rendezvous": None},  # an address, not a property of the run
        "instruments": config.instruments,
        "exporters": private.redact_all(config.exporters, REPO),
        "timing_protocol": protocol | {"instruments": registry.in_timed_region(config.instruments)},
        "code": code | {"copy": job.code.name},
        "data": data,
        "environment": where,
        "warnings": warnings,
        "measured": {},
        "metrics": {},
        "artifacts": [],
    } | optional


def _public(argument: str, job: Job) -> str:
    """Returns an argument as typed, without private paths, addresses and credentials."""
    key = argument.partition("=")[0]
    for path, text in job.secrets.items():
        if ".".join(map(str, path)).startswith(key.lstrip("+")):
            shown: Any = functools.reduce(operator.getitem, path, schema.to_dict(job.config))
            argument = argument.replace(text, shown)
    return f"{key}=HOST:PORT" if key == "hardware.rendezvous" else private.redact(argument, REPO)


def _data(job: Job) -> dict[str, Any]:
    dataset, config = job.dataset, job.config
    root = data_root()

    def facts(shard: datasets.ShardFile) -> dict[str, Any]:
        inside = shard.path.is_relative_to(root)
        name = str(shard.path.relative_to(root)) if inside else private.redact(str(shard.path), REPO)
        return {"file": name} | {key: getattr(shard, key) for key in ("num_tokens", "num_bytes", "sha256")}

    return {
        "source": dataset.name,
        "vocab_size": dataset.vocab_size,
        "epochs": job.epochs,
        "floor_nats": datasets.floor_nats(dataset, config.goal.val_tokens),
        "train": [facts(shard) for shard in dataset.train],
        "val": [facts(shard) for shard in dataset.val],
    } | ({"origin": dataset.origin} if dataset.origin else {})


def write_inputs(
    folder: Path,
    job: Job,
    env: dict[str, Any],
    started_s: float,
    code: dict[str, Any],
    pipes: Sequence[str] = (),
    edge_pipe: str | None = None,
    survival: dict[str, Any] | None = None,
    goes_on: bool = False,
) -> None:
    """Writes the inputs of the run: config, overrides, environment, code, and the launch file, which only workers read.

    started_s: time.monotonic() when the launcher began; code: record_of()["code"]; pipes: into which a script's ranks
    print; edge_pipe: into which rank 0 of our own runs reports its clock; survival: resume.survival(); goes_on: the
    folder has the inputs of an earlier segment.  Only the launch file, which is removed at the end of the run, holds
    the true paths of the shards: run.json holds no private path.
    """
    atomic.write_json(folder / "environment.json", env, durable=False)  # the reserve is for run.json
    if not goes_on:
        _write_settings(folder, job, code)
    paths = {split: [str(file.path) for file in getattr(job.dataset, split)] for split in ("train", "val")}
    launched: dict[str, Any] = {
        "folder": str(folder.resolve()),
        "launcher_pid": os.getpid(),
        "started_s": started_s,
        "shards": paths,
    }
    if job.secrets and not job.script:  # the credentials, which config.yaml does not show
        launched["secrets"] = [[list(path), text] for path, text in job.secrets.items()]
    launched |= {"edge_pipe": edge_pipe} if edge_pipe else {}
    launched |= {"survival": survival} if survival else {}
    if job.own_folder:
        launched["own"] = job.own_folder
    if job.config.hardware.nodes:
        launched["t_offset_ns"] = 0  # this node's clock times the run
    if job.script:
        from bench.launch.script import trace_files  # imports numpy, as script_run does

        work = work_folder.make(folder, job.script, job.dataset, job.config.goal.val_tokens)
        profile = trace_files.profile_of(job.config.instruments, job.script.dialect)
        launched["script"] = script.dumped(job.script, work, job.config.seed, list(pipes), profile)
    atomic.write_json(folder / run_folder.LAUNCH, launched, durable=False)
    step_files.append_event(folder, {"t_ns": time.perf_counter_ns(), "utc": utc.now(), "event": "init_start"})


def _write_settings(folder: Path, job: Job, code: dict[str, Any]) -> None:
    (folder / "logs").mkdir()
    config = schema.to_dict(job.config)
    config["exporters"] = private.redact_all(config["exporters"], REPO)
    config["hardware"]["rendezvous"] = None
    (folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    typed = [override for override in job.overrides if not override.startswith("hardware.rendezvous=")]
    (folder / "overrides.yaml").write_text(yaml.safe_dump([_public(override, job) for override in typed]))
    own = job.own_sources
    if job.script:  # the sources that it uses according to their text
        sources = job.script.sources
        own = {name: sources[name] for name in user_code.used_by_script(job.script.starts, sources)}
    code_state.write(job.code, folder / "code", own, code, REPO)
