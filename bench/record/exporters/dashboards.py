"""Finished records -> TensorBoard, Weights & Biases, MLflow: read from the run folder, never during a run.

An exporter is a file here and a yaml of its settings in conf/exporters/, both of its package's name.  The packages are
optional.  They get a copy, often rounded (TensorBoard keeps 32 bits): the record stays the source.
"""

import contextlib
import importlib
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import yaml

from bench.base import atomic, private
from bench.base.paths import REPO
from bench.config import groups

FOLDER = "dashboards"  # of a run
OUTCOMES = "dashboards.json"
TIMEOUT_S = 120.0


def names() -> list[str]:
    """Names of the exporters, sorted."""
    return groups.choices("exporters")


def chosen(run: dict) -> dict[str, dict]:
    """A record -> {exporter: its settings} that the run chose.  The first records have them among the instruments."""
    of_old = {name: settings for name, settings in (run["instruments"] or {}).items() if name in names()}
    return of_old | (run.get("exporters") or {})


def settings_of(run: dict, name: str, changes: Iterable[str] = ()) -> dict:
    """Settings of an exporter: its yaml's, the run's own, then KEY=VALUE words.  ValueError for an unknown key."""
    settings = yaml.safe_load(groups.path_of("exporters", name).read_text())[name] | chosen(run).get(name, {})
    for change in changes:
        key, equals, value = change.partition("=")
        if not equals or key not in settings:
            raise ValueError(f"--set {change}: {name} has {', '.join(settings) or 'no settings'}; write KEY=VALUE")
        settings[key] = yaml.safe_load(value)
    return settings


def missing(name: str) -> str | None:
    """None, or where the exporter's package is not installed a sentence with the command that installs it."""
    if importlib.util.find_spec(name) is not None:
        return None
    return f"the package {name} is not installed: {private.redact(sys.executable, REPO)} -m pip install {name}"


def check(exporters: Mapping[str, dict]) -> None:
    """{name: settings} -> ValueError, before a run, for settings that its exporter would refuse after it."""
    for name, settings in exporters.items():
        module = importlib.import_module(f"bench.record.exporters.{name}")
        if hasattr(module, "check"):
            module.check(settings)


def warnings(exporters: Iterable[str]) -> list[dict]:
    """Chosen exporters -> a record's warnings of the packages that are missing."""
    lacking = [(name, sentence) for name in exporters if (sentence := missing(name))]
    return [{"rank": None, "instrument": name, "edge": "start", "error": words} for name, words in lacking]


def after_run(folder: Path | str, exporters: Mapping[str, dict], say: Callable[[str], object] = print) -> None:
    """Export a run, to each in a process of its own.  Never raises.  exporters: {name: settings}."""
    for name, settings in exporters.items():
        if missing(name):  # the record has a warning
            continue
        command = [sys.executable, "-m", "bench", "dashboard", os.path.abspath(folder), "--to", name]
        command += [f"--set={key}={json.dumps(value)}" for key, value in settings.items()]
        error = None
        try:
            as_text = {"capture_output": True, "text": True, "errors": "replace"}
            done = subprocess.run(command, cwd=REPO, stdin=subprocess.DEVNULL, timeout=TIMEOUT_S, **as_text)
            if done.returncode:
                error = (done.stdout + done.stderr).strip().rpartition("\n")[2] or f"exit code {done.returncode}"
        except (OSError, subprocess.TimeoutExpired) as failed:
            error = f"{type(failed).__name__}: {failed}"
            note(folder, name, error)
        if error:
            say(f"no export to {name}: {error}; ./run.sh dashboard {os.path.basename(folder)} --to {name} tries again")


def note(run_folder: Path | str, name: str, error: str | None = None, **facts: object) -> None:
    """Record the outcome of an export in the run's dashboards/dashboards.json; a full disk is not a failure."""
    path = Path(run_folder) / FOLDER / OUTCOMES
    outcomes = atomic.read_json(path, {})
    outcomes[name] = {"at_s": round(time.time(), 3), "error": error, **facts}
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic.write_json(path, outcomes, durable=False)
