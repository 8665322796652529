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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from bench.base import atomic, private, utc
from bench.base.paths import REPO
from bench.base.reading import yaml_file
from bench.base.reading.damage import Damaged
from bench.config import groups, schema
from bench.config.typed import leaves
from bench.record import run_folder, step_files
from bench.record.shape import Facts, Record
from bench.record.step_files import StepRow

FOLDER = "dashboards"  # of a run
OUTCOMES = "dashboards.json"
TIMEOUT_S = 120.0
NAMES = {"train_loss": "loss/train", "val_loss": "loss/val", "lr": "optim/lr", "tokens": "progress/tokens"}
NOT_EXPORTED = ("step", "flags", "t_ns")
MAX_TEXT = 250  # characters of a setting's value: what all three take


def names() -> list[str]:
    """Names of the exporters, sorted."""
    return groups.choices("exporters")


def chosen(run: Record) -> dict[str, dict[str, Any]]:
    """A record -> {exporter: its settings} that the run chose.  The first records have them among the instruments."""
    of_old = {name: settings for name, settings in (run["instruments"] or {}).items() if name in names()}
    return of_old | (run.get("exporters") or {})


def settings_of(run: Record, name: str, changes: Iterable[str] = ()) -> dict[str, Any]:
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


def check(exporters: Mapping[str, dict[str, Any]]) -> None:
    """{name: settings} -> ValueError, before a run, for settings that its exporter would refuse after it."""
    for name, settings in exporters.items():
        module = importlib.import_module(f"bench.record.exporters.{name}")
        if hasattr(module, "check"):
            module.check(settings)


def warnings(exporters: Iterable[str]) -> list[dict[str, Any]]:
    """Chosen exporters -> a record's warnings of the packages that are missing."""
    lacking = [(name, sentence) for name in exporters if (sentence := missing(name))]
    return [{"rank": None, "instrument": name, "edge": "start", "error": words} for name, words in lacking]


def after_run(
    folder: Path | str, exporters: Mapping[str, dict[str, Any]], say: Callable[[str], object] = print
) -> None:
    """Export a run, to each in a process of its own.  Never raises.  exporters: {name: settings}."""
    for name, settings in exporters.items():
        if missing(name):  # the record has a warning
            continue
        command = [sys.executable, "-m", "bench", "dashboard", os.path.abspath(folder), "--to", name]
        command += [f"--set={key}={json.dumps(value)}" for key, value in settings.items()]
        error = None
        try:
            done = subprocess.run(
                command,
                cwd=REPO,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=TIMEOUT_S,
                text=True,
                errors="replace",
            )
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


# ---- what every exporter needs


@dataclass
class Exported:
    """A run in plain values: settings, series by step, and the final numbers."""

    folder: Path
    run: Record
    settings: dict[str, Any]  # "optim.lr": 0.003, ...
    points: list[tuple[int, float, dict[str, float]]]  # [(step, seconds since 1970, {"loss/train": 4.2, ...})]
    final: dict[str, float]  # "final/val_loss": 2.7, ...
    tags: dict[str, str]  # words about the run


def read(folder: Path | str) -> Exported:
    """A run folder.  Raises ValueError for one that holds no record, or one of a run that has not ended."""
    folder = Path(folder)
    run = run_folder.read(folder)
    if run["status"] == "running":
        raise ValueError(f"{folder}: the run has not ended: export it afterwards")
    rows, events = step_files.read(folder), step_files.read_events(folder)
    both = (event for event in events if event.get("utc") and isinstance(event.get("t_ns"), int))
    offset_s = next((utc.seconds(event["utc"]) - event["t_ns"] / 1e9 for event in both), None)  # to seconds since 1970
    points, last_s = [], utc.seconds(run["started_at"] or "")
    for row in rows:
        if row.get("t_ns") is not None and offset_s is not None:
            last_s = row["t_ns"] / 1e9 + offset_s
        points.append((row["step"], last_s, series_of(row)))
    final = {f"final/{name}": float(value) for name, value in run["metrics"].items() if isinstance(value, (int, float))}
    names = ("run_id", "name", "track", "status", "validity", "config_id", "comparability_id", "started_at")
    facts: Facts = run
    tags = {name: str(facts[name]) for name in (*names, "seed")} | {"commit": str(run["code"].get("commit"))}
    return Exported(folder, run, _settings(folder), points, final, tags)


def series_of(row: StepRow) -> dict[str, float]:
    """A row of steps.csv -> {name: value}; the times of a step that an instrument disturbed are under "disturbed/"."""
    series = {}
    for column, value in row.items():
        if column in NOT_EXPORTED or not isinstance(value, (int, float)):
            continue
        of_time = "disturbed" if row.get("flags") else "time"
        group = of_time if column.endswith("_ms") else "steps"
        series[NAMES.get(column, f"{group}/{column}")] = float(value)
    return series


def _settings(folder: Path) -> dict[str, Any]:
    """config.yaml, flat; a list or None as its words."""
    try:
        settings = leaves(schema.upgraded(yaml_file.read(folder / "config.yaml")))
    except Damaged:  # verify says so
        return {}
    plain = (bool, int, float)
    return {key: value if isinstance(value, plain) else str(value)[:MAX_TEXT] for key, value in settings if value != {}}
