"""A run in a few words for a person, before it and after it, and as JSON for a script."""

from typing import Any

from bench.launch.console import duration
from bench.launch.prepare import Job
from bench.paths import shown

MAX_WARNINGS = 3  # shown after a run; the record has all
KEYS = (  # of run.json, and the folder that it is in, absolute
    "run_id",
    "folder",
    "track",
    "name",
    "seed",
    "config_id",
    "comparability_id",
    "session_id",
    "status",
    "validity",
    "validity_reasons",
    "deviations",
    "failure",
    "warnings",
    "started_at",
    "ended_at",
    "metrics",
)


def first_words(job: Job, known_s: float | None) -> str:
    """What is going to run, and about how long, known_s seconds; None: unknown."""
    config = job.config
    hardware = config.hardware
    processes = f"{hardware.num_processes} process{'es' * (hardware.num_processes != 1)}"
    about = "" if known_s is None else f", about {duration(known_s)}"
    where = f"on {hardware.device}, {processes}{about}"
    if job.script:
        words = [job.script.typed, *job.script.args]
        return f"script {' '.join(words)}, seed {config.seed}, track {config.track.name}, {where}"
    model = config.model
    what = f"{model.arch} ({model.num_layers} layers, width {model.width}), {config.optim.name}, seed {config.seed}"
    return f"{what}, track {config.track.name}, {config.goal.num_steps} steps {where}"


def last_words(run: dict) -> str:
    """The record that launch() returns -> how the run ended."""
    if run["status"] == "complete":
        metrics = run["metrics"]
        doubt = "" if run["validity"] == "valid" else f", {run['validity']}: {'; '.join(run['validity_reasons'])}"
        times = f"train {metrics['train_s']:.2f} s, step_avg {metrics['step_avg_ms']:.2f} ms"
        words = f"complete: val_loss {metrics['val_loss']:.4f}, {times}{doubt}"
    else:
        failure = run["failure"]
        where = "".join(f", {name} {failure[name]}" for name in ("rank", "step") if failure[name] is not None)
        words = f"{run['status']}: {failure['kind']}{where}: {failure['message']}\n       try: {failure['hint']}"
    return f"{words}\n       {shown(run['folder'])}{_warned(run)}"


def _warned(run):
    """What an instrument could not do, a line each: the run went on, and its author should know."""
    known = list(dict.fromkeys(f"{warning['instrument']}: {warning['error']}" for warning in run.get("warnings") or ()))
    more = [f"and {len(known) - MAX_WARNINGS} more warnings in run.json"] if len(known) > MAX_WARNINGS else []
    return "".join(f"\n       warning: {words}" for words in known[:MAX_WARNINGS] + more)


def as_json(run: dict) -> dict[str, Any]:
    """The record that launch() returns -> what --json prints of it: KEYS."""
    return {key: run.get(key) for key in KEYS}
