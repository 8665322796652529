"""Finished records -> TensorBoard, Weights & Biases, MLflow.  Never during a race: they read the run folder afterwards.

Their packages are optional.  What they are given is a copy, often rounded (TensorBoard keeps 32 bits): the record stays
the source.
"""

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from bench import atomic, private
from bench.paths import REPO

PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow"}  # exporter: what pip calls its package
FOLDER = "dashboards"  # of a run
OUTCOMES = "dashboards.json"
TIMEOUT_S = 120.0


def require(name):
    """ImportError with the command that helps, where the exporter's package is not installed."""
    if importlib.util.find_spec(name) is None:
        python = private.redact(sys.executable, REPO)
        raise ImportError(f"the package {PACKAGES[name]} is not installed: {python} -m pip install {PACKAGES[name]}")


def after_race(folder, run, say=print):
    """Export a run to whatever its instruments name, each in a process of its own.  Never raises: the record is complete."""
    for name in [name for name in PACKAGES if name in (run["instruments"] or {})]:
        if importlib.util.find_spec(name) is None:  # the instrument has said so in the record
            continue
        command = [sys.executable, "-m", "bench", "dashboard", os.path.abspath(folder), "--to", name]
        try:
            done = subprocess.run(
                command,
                cwd=REPO,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=TIMEOUT_S,
                stdin=subprocess.DEVNULL,
            )
            error = (
                None
                if done.returncode == 0
                else (done.stdout + done.stderr).strip().rpartition("\n")[2] or "it ended without a word"
            )
        except (OSError, subprocess.TimeoutExpired) as failed:
            error = f"{type(failed).__name__}: {failed}"
            note(folder, name, error)
        if error:
            say(f"no export to {name}: {error}; ./run.sh dashboard {os.path.basename(folder)} --to {name} tries again")


def note(run_folder, name, error=None, **facts):
    """Write down in the run's dashboards/dashboards.json what became of an export; a full disk is no reason to fail."""
    path = Path(run_folder) / FOLDER / OUTCOMES
    try:
        told = json.loads(path.read_text())
    except (OSError, ValueError):
        told = {}
    told[name] = {"at_s": round(time.time(), 3), "error": error, **facts}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic.write_json(path, told, durable=False)
    except OSError:
        pass
