"""Exports finished records to TensorBoard, Weights & Biases and MLflow, from the run folder and never during a run.

An exporter is a function in EXPORT and a yaml of its settings in conf/exporters/, both named after its package.  The
packages are optional.  They get a copy, which may be rounded (TensorBoard keeps 32 bits); the record is the original.
"""

import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from bench.base import atomic, credentials, escape, private, utc
from bench.base.paths import REPO, results_root
from bench.config import groups
from bench.record import configs, run_folder, step_files
from bench.record.shape import Facts, Record
from bench.record.step_files import StepRow

FOLDER = "dashboards"  # in a run folder
TIMEOUT_S = 120.0
NAMES = {"train_loss": "loss/train", "val_loss": "loss/val", "lr": "optim/lr", "tokens": "progress/tokens"}
NOT_EXPORTED = ("step", "flags", "t_ns")
WANDB_MODES = ("offline", "online")
MLFLOW_BATCH = 500  # metrics in one call; MLflow allows 1000 metrics and 100 settings
MLFLOW_STATUS = {
    "complete": "FINISHED",
    "failed": "FAILED",
    "aborted": "KILLED",
    "stopped": "KILLED",
    "preempted": "KILLED",
}
MAX_TEXT = 250  # characters of a setting's value that all three programs accept


def names() -> list[str]:
    """Returns the names of the exporters, sorted."""
    return sorted(EXPORT)


def settings_of(name: str, changes: Iterable[str] = ()) -> dict[str, Any]:
    """Returns an exporter's settings: those of its yaml, then KEY=VALUE changes.  Raises ValueError for an unknown key.

    A record's own are not used: a stranger's would send it, with this user's credentials, to a server of its choice.
    """
    settings: dict[str, Any] = yaml.safe_load(groups.path_of("exporters", name).read_text())[name]
    for change in changes:
        key, equals, value = change.partition("=")
        if not equals or key not in settings:
            raise ValueError(f"--set {change}: {name} has {', '.join(settings) or 'no settings'}; write KEY=VALUE")
        settings[key] = yaml.safe_load(value)
    return settings


def missing(name: str) -> str | None:
    """Returns a sentence with the command that installs the exporter's package; None if it is installed."""
    if importlib.util.find_spec(name) is not None:
        return None
    return f"the package {name} is not installed: {private.redact(sys.executable, REPO)} -m pip install {name}"


def check(exporters: Mapping[str, dict[str, Any]]) -> None:
    """Raises ValueError before a run for settings that an exporter would refuse after it."""
    mode = exporters["wandb"]["mode"] if "wandb" in exporters else None
    if mode is not None and mode not in WANDB_MODES:
        raise ValueError(f"exporters.wandb.mode={mode}: use {' or '.join(WANDB_MODES)}")


def warnings(exporters: Iterable[str]) -> list[dict[str, Any]]:
    """Returns a record's warnings about exporters whose packages are missing."""
    lacking = [(name, sentence) for name in exporters if (sentence := missing(name))]
    return [{"rank": None, "instrument": name, "edge": "start", "error": message} for name, message in lacking]


def after_run(
    folder: Path | str, exporters: Mapping[str, dict[str, Any]], say: Callable[[str], object] = print
) -> None:
    """Exports a run, with a separate process for each exporter.  Never raises.  exporters: {name: settings}."""
    for name, settings in exporters.items():
        if missing(name):  # the record has a warning about it
            continue
        to = ["--to", name, *(f"--set={key}={json.dumps(value)}" for key, value in settings.items())]
        command = [sys.executable, "-m", "bench", "dashboard", os.path.abspath(folder), *to]
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
        if error:
            again = shlex.join(["./run.sh", "dashboard", os.path.basename(folder), *to])
            say(f"no export to {name}: {error}; to try again: {credentials.redacted(again)}")


# ---- what every exporter needs


@dataclass
class Exported:
    """A run as plain values: settings, series by step, and final metrics."""

    folder: Path
    run: Record
    settings: dict[str, Any]  # "optim.lr": 0.003, ...
    points: list[tuple[int, float, dict[str, float]]]  # [(step, seconds since 1970, {"loss/train": 4.2, ...})]
    final: dict[str, float]  # "final/val_loss": 2.7, ...
    tags: dict[str, str]  # "run_id", "track", "status", ...


def read(folder: Path | str) -> Exported:
    """Reads a run folder for export.  Raises ValueError if it has no record, or the run has not ended."""
    folder = Path(folder)
    run = run_folder.read(folder)
    if run["status"] == "running":
        raise ValueError(f"{folder}: the run has not ended: export it afterwards")
    rows, events = step_files.read(folder), step_files.read_events(folder)
    both = (event for event in events if event.get("utc") and isinstance(event.get("t_ns"), int))
    offset_s = next((utc.seconds(event["utc"]) - event["t_ns"] / 1e9 for event in both), None)  # Unix time of t_ns 0
    points, last_s = [], utc.seconds(run["started_at"] or "")
    for row in rows:
        if row.get("t_ns") is not None and offset_s is not None:
            last_s = row["t_ns"] / 1e9 + offset_s
        points.append((row["step"], last_s, series_of(row)))
    final = {f"final/{name}": float(value) for name, value in run["metrics"].items() if isinstance(value, (int, float))}
    names = ("run_id", "name", "track", "status", "validity", "config_id", "comparability_id", "started_at")
    facts: Facts = run
    tags = {name: str(facts[name]) for name in (*names, "seed")} | {"commit": str(run["code"].get("commit"))}
    settings = configs.settings(configs.read(str(folder)))  # {} for an imported log
    settings = settings and {name: facts[name] for name in configs.OF_THE_ROW} | settings
    for key, value in settings.items():
        settings[key] = value if isinstance(value, (bool, int, float)) else str(value)[:MAX_TEXT]
    return Exported(folder, run, settings, points, final, tags)


def series_of(row: StepRow) -> dict[str, float]:
    """Returns {name: value} of a row of steps.csv; the times of a disturbed step have names under "disturbed/"."""
    series = {}
    for column, value in row.items():
        if column in NOT_EXPORTED or not isinstance(value, (int, float)):
            continue
        time_group = "disturbed" if row.get("flags") else "time"
        group = time_group if column.endswith("_ms") else "steps"
        series[NAMES.get(column, f"{group}/{column}")] = float(value)
    return series


# ---- one function per program, which returns where the export is; an earlier export of the run is replaced


def _to_tensorboard(exported: Exported, settings: dict[str, Any]) -> dict[str, str]:
    """Writes an event file in RUN/dashboards/tensorboard: scalars by step, the settings as hparams, and a text.

    tensorboard --logdir results shows all runs.  Neither torch nor tensorflow is needed, only tensorboard itself.
    """
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    folder = atomic.inner_folder(exported.folder, FOLDER) / "tensorboard"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    writer = EventFileWriter(str(folder))
    try:
        for summary, step, wall_s in _tensorboard_summaries(exported):
            writer.add_event(Event(wall_time=wall_s, step=step, summary=summary))
    finally:
        writer.close()
    for file in folder.iterdir():  # tensorboard puts the machine's name into the file's name
        file.rename(folder / f"events.out.tfevents.{file.name.split('.')[3]}.speedrun")
    return {"folder": f"{FOLDER}/tensorboard"}


def _tensorboard_summaries(exported: Exported) -> Iterator[tuple[Any, int, float]]:
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
    from tensorboard.compat.proto.types_pb2 import DT_STRING
    from tensorboard.plugins.hparams import summary_v2 as hparams

    points = exported.points or [(0, 0.0, {})]
    (_, start_s, _), (last_step, last_s, _) = points[0], points[-1]
    yield hparams.hparams_pb(exported.settings, trial_id=exported.run["run_id"], start_time_secs=start_s), 0, start_s
    for step, wall_s, values in [*points, (last_step, last_s, exported.final)]:
        if values:
            shown = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
            yield Summary(value=shown), step, wall_s
    rows = "".join(f"| {key} | {escape.markdown(value)} |\n" for key, value in exported.tags.items())
    tensor = TensorProto(
        dtype=DT_STRING,
        string_val=[f"| | |\n|---|---|\n{rows}".encode()],  # Markdown, as TensorBoard's text dashboard shows it
        tensor_shape=TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)]),
    )
    metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
    yield Summary(value=[Summary.Value(tag="run", metadata=metadata, tensor=tensor)]), last_step, last_s


def _to_wandb(exported: Exported, settings: dict[str, Any]) -> dict[str, str]:
    """Creates a run in Weights & Biases.  Offline (the default) it is in RUN/dashboards/wandb; `wandb sync` uploads it.

    wandb adds nothing itself: no host name, no git remote, no console output, no machine metrics.
    """
    check({"wandb": settings})
    import wandb

    folder = atomic.inner_folder(exported.folder, FOLDER, "wandb").parent
    shutil.rmtree(folder / "wandb", ignore_errors=True)
    quiet = wandb.Settings(
        silent=True,
        console="off",
        disable_git=True,
        save_code=False,
        host="",
        x_disable_stats=True,
        x_disable_meta=True,
        x_disable_machine_info=True,
    )
    run = wandb.init(
        project=settings["project"],
        entity=settings["entity"],
        mode=settings["mode"],
        dir=str(folder),
        settings=quiet,
        id=exported.run["run_id"],
        resume="allow" if settings["mode"] == "online" else None,
        name=exported.run["run_id"],
        group=exported.run["config_id"],
        tags=[exported.run["track"], exported.run["status"], exported.run["validity"]],
        config={**exported.settings, "record": exported.tags},
    )
    for step, _, values in exported.points:
        if values:
            run.log(values, step=step)
    run.summary.update(exported.final)
    run.finish(exit_code=0 if exported.run["status"] == "complete" else 1)
    return {"folder": f"{FOLDER}/wandb", "run_id": exported.run["run_id"]}


def _to_mlflow(exported: Exported, settings: dict[str, Any]) -> dict[str, str]:
    """Creates a run in MLflow's store; without a tracking_uri that is results/mlflow.db, which all runs share.

    mlflow ui --backend-store-uri sqlite:///results/mlflow.db shows them.  Only the client is used, so that MLflow adds
    nothing about the user, the machine or the program.
    """
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Param, RunTag

    root = results_root()
    uri = settings["tracking_uri"] or f"sqlite:///{root.resolve() / 'mlflow.db'}"
    client = MlflowClient(tracking_uri=uri)
    name = settings["experiment"] or exported.run["track"]
    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        artifacts = root.resolve() / "mlflow-artifacts"  # stays empty; the default is in the working folder
        experiment_id = client.create_experiment(name, artifact_location=artifacts.as_uri())
    else:
        experiment_id = experiment.experiment_id
    for old in client.search_runs([experiment_id], f"tags.`speedrun.run_id` = '{exported.run['run_id']}'"):
        client.delete_run(old.info.run_id)
    tags = {f"speedrun.{key}": value for key, value in exported.tags.items()}
    points = exported.points + [(*exported.points[-1][:2], exported.final)] if exported.points else []
    start_ms, end_ms = (round(1e3 * points[index][1]) if points else None for index in (0, -1))
    mlflow_run = client.create_run(experiment_id, start_time=start_ms, run_name=exported.run["run_id"], tags=tags)
    run_id = mlflow_run.info.run_id
    values = [(key, value, round(1e3 * at_s), step) for step, at_s, by_key in points for key, value in by_key.items()]
    for start in range(0, len(values), MLFLOW_BATCH):
        client.log_batch(run_id, metrics=[Metric(*value) for value in values[start : start + MLFLOW_BATCH]])
    params = [Param(key, str(value)) for key, value in exported.settings.items()]
    for start in range(0, len(params), 100):
        client.log_batch(run_id, params=params[start : start + 100])
    if exported.run["failure"]:
        client.log_batch(run_id, tags=[RunTag("speedrun.failure", str(exported.run["failure"]["kind"]))])
    client.set_terminated(run_id, MLFLOW_STATUS.get(exported.run["status"], "FAILED"), end_ms)
    shown = private.redact(uri, REPO) if settings["tracking_uri"] else "sqlite:///mlflow.db of the results folder"
    return {"tracking_uri": shown, "run_id": run_id}


EXPORT = {"mlflow": _to_mlflow, "tensorboard": _to_tensorboard, "wandb": _to_wandb}
