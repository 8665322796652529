"""A record -> a run of Weights & Biases.  Offline (the default) it is in RUN/dashboards/wandb; `wandb sync` sends it.

wandb adds nothing of its own: no host name, no git remote, no console, no machine metrics.
"""

import shutil
from typing import Any

from bench.record.exporters.dashboards import FOLDER, Exported

MODES = ("offline", "online")


def check(settings: dict[str, Any]) -> None:
    """Raises ValueError for an unknown mode."""
    if settings["mode"] not in MODES:
        raise ValueError(f"exporters.wandb.mode={settings['mode']}: use {' or '.join(MODES)}")


def export(exported: Exported, settings: dict[str, Any]) -> dict[str, str]:
    """Returns {"folder", "run_id"}.  An offline export of before is replaced.  ValueError for an unknown mode."""
    check(settings)
    import wandb

    folder = exported.folder / FOLDER
    shutil.rmtree(folder / "wandb", ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
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
