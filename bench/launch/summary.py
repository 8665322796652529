"""Summarizes a run in a few words for a person, before and after it, and as JSON for a script."""

from collections.abc import Mapping
from typing import Any

from bench.base import credentials
from bench.base.paths import shown
from bench.base.text_table import counted
from bench.base.units import format_about_s
from bench.launch import after_race
from bench.launch.prepare import Job
from bench.record.metrics import score_text
from bench.training.instruments import registry

MAX_WARNINGS = 3  # shown after a run; the record has all
# fmt: off
KEYS = (  # fields of run.json, and the absolute folder
    "run_id", "folder", "track", "name", "seed", "config_id", "comparability_id", "session_id", "status", "validity",
    "validity_reasons", "deviations", "failure", "warnings", "started_at", "ended_at", "metrics",
)
# fmt: on


def announcement(job: Job, known_s: float | None) -> str:
    """Returns what is going to run and about how long it takes.  known_s: expected seconds, None if unknown."""
    config = job.config
    hardware = config.hardware
    about = "" if known_s is None else f", {format_about_s(known_s)}"
    where = f"on {hardware.device}, {counted(hardware.num_processes or 1, 'process')}{about}"
    if job.script:
        command = credentials.redacted(" ".join([job.script.typed, *job.script.args]))
        return f"script {command}, seed {config.seed}, track {config.track.name}, {where}"
    model, optim = config.model, config.optim
    assert model is not None and optim is not None
    training = f"{model.arch} ({model.num_layers} layers, width {model.width}), {optim.name}, seed {config.seed}"
    return f"{training}, track {config.track.name}, {config.goal.num_steps} steps {where}"


def outcome_text(run: Mapping[str, Any]) -> str:
    """Returns how a run ended, as text.  run: the record that launch() returns."""
    log = ""
    if run["status"] == "complete":
        doubt = "" if run["validity"] == "valid" else f", {run['validity']}: {'; '.join(run['validity_reasons'])}"
        times = f", {_times(run)}{doubt}"
        if run.get("beside") and run["validity"] == "suspect":  # only for its times, as its sweep has reported
            times = ""
        at_step = (run.get("script") or {}).get("ended_at_step")
        past = "" if at_step is None else f", ended at step {at_step}, past its budget"
        ended = f"complete: {score_text(run)}{past}{times}"
    elif run["status"] == "stopped":
        ended = f"stopped at step {run['failure']['step']}: {run['failure']['message']}"
    else:
        failure = run["failure"]
        where = "".join(f", {name} {failure[name]}" for name in ("rank", "step") if failure[name] is not None)
        ended = f"{run['status']}: {failure['kind']}{where}: {failure['message']}\n       try: {failure['hint']}"
        log = "" if failure["rank"] is None else f"/logs/rank{failure['rank']}.log"
    # what instruments could not do, one line each: the run went on, and its author should know
    lines = list(dict.fromkeys(f"{warning['instrument']}: {warning['error']}" for warning in run.get("warnings") or ()))
    omitted = [f"and {len(lines) - MAX_WARNINGS} more warnings in run.json"] if len(lines) > MAX_WARNINGS else []
    warned = "".join(f"\n       warning: {warning}" for warning in lines[:MAX_WARNINGS] + omitted)
    looked = f"\n       {line}" if (line := after_race.line(run)) else ""
    return f"{ended}\n       {shown(run['folder'])}{log}{looked}{warned}"


def _times(run: Mapping[str, Any]) -> str:
    """Returns the clock's times, and which steps step_avg excludes."""
    metrics, names = run["metrics"], " and ".join(registry.flagging(run["instruments"]))
    train, avg_ms = f"train {metrics['train_s']:.2f} s", metrics["step_avg_ms"]
    if avg_ms is None:
        return f"{train}, no step_avg: {names or 'a validation'} disturbed every step"
    timed = f"{train}, step_avg {avg_ms:.2f} ms"
    if not metrics["num_flagged_steps"]:
        return timed
    which = f"that {names} disturbed" if names else "whose time holds a validation"
    return f"{timed} without the {counted(metrics['num_flagged_steps'], 'step')} {which}"


def as_json(run: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what --json prints of the record that launch() returns: KEYS."""
    return {key: run.get(key) for key in KEYS}
