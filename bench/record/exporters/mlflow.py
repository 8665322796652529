"""A record -> a run in MLflow's store; without a tracking_uri that is results/mlflow.db, which all runs share.

mlflow ui --backend-store-uri sqlite:///results/mlflow.db shows them.  Only the client is used: MLflow itself adds
nothing about the user, the machine or the program.
"""

from typing import Any

from bench.base import private
from bench.base.paths import REPO, results_root
from bench.record.exporters.dashboards import Exported

DEFAULT_WORDS = "sqlite:///mlflow.db of the results folder"
RUN_ID_TAG = "speedrun.run_id"
BATCH = 500  # metrics in one call; MLflow takes 1000, and 100 settings
STATUS = {"complete": "FINISHED", "failed": "FAILED", "aborted": "KILLED", "stopped": "KILLED"}


def export(exported: Exported, settings: dict[str, Any]) -> dict[str, str]:
    """Returns {"tracking_uri", "run_id"}.  An export of before is deleted in the store."""
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Param, RunTag

    root = results_root()
    uri = settings["tracking_uri"] or f"sqlite:///{root.resolve() / 'mlflow.db'}"
    client = MlflowClient(tracking_uri=uri)
    name = settings["experiment"] or exported.run["track"]
    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        artifacts = root.resolve() / "mlflow-artifacts"  # nothing is put there; the default is where one stands
        experiment_id = client.create_experiment(name, artifact_location=artifacts.as_uri())
    else:
        experiment_id = experiment.experiment_id
    for old in client.search_runs([experiment_id], f"tags.`{RUN_ID_TAG}` = '{exported.run['run_id']}'"):
        client.delete_run(old.info.run_id)
    tags = {RUN_ID_TAG: exported.run["run_id"]} | {f"speedrun.{key}": value for key, value in exported.tags.items()}
    points = exported.points + [(*exported.points[-1][:2], exported.final)] if exported.points else []
    start_ms, end_ms = (round(1e3 * points[index][1]) if points else None for index in (0, -1))
    made = client.create_run(experiment_id, start_time=start_ms, run_name=exported.run["run_id"], tags=tags)
    run_id = made.info.run_id
    values_by_step = [
        Metric(key, value, round(1e3 * wall_s), step)
        for step, wall_s, values in points
        for key, value in values.items()
    ]
    params = [Param(key, str(value)) for key, value in exported.settings.items()]
    for start in range(0, max(len(values_by_step), len(params)), BATCH):
        client.log_batch(run_id, metrics=values_by_step[start : start + BATCH])
    for start in range(0, len(params), 100):
        client.log_batch(run_id, params=params[start : start + 100])
    if exported.run["failure"]:
        client.log_batch(run_id, tags=[RunTag("speedrun.failure", str(exported.run["failure"]["kind"]))])
    client.set_terminated(run_id, STATUS.get(exported.run["status"], "FAILED"), end_ms)
    return {"tracking_uri": private.redact(uri, REPO) if settings["tracking_uri"] else DEFAULT_WORDS, "run_id": run_id}
