"""This program's plugins of Hydra: `hydra/launcher=basic` is ours here, and `hydra/sweeper=optuna` is added.

Hydra looks for plugins in the package hydra_plugins alone.  What they do is in bench/plans/sweep/; here is how Hydra
calls.
"""

from dataclasses import dataclass
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher


@dataclass
class ProcessesConf:
    """Settings hydra.launcher.*; meanings in docs/SWEEPS.md."""

    _target_: str = "hydra_plugins.speedrun.Processes"
    parallel: Any = None
    cores_per_run: int | None = None
    max_slowdown_pct: float = 10.0
    stop_above_nats: float | None = None
    stop_from_frac: float = 0.25


class Processes(Launcher):
    """Every run in a fresh process group, one after the other, or side by side on cores or GPUs of their own."""

    def __init__(self, **settings: Any):
        self.settings = settings
        self.task_function = self.config = self.hydra_context = None

    def setup(self, *, hydra_context, task_function, config):
        self.hydra_context, self.task_function, self.config = hydra_context, task_function, config

    def launch(self, job_overrides, initial_job_idx):
        """-> JobReturns in order; return_value is the run's objective, None where it has none."""
        points = [list(overrides) for overrides in job_overrides]
        result = self.task_function.runner.all(points, initial_job_idx, self.settings)
        return [_returned(words, objective) for words, objective in zip(points, result)]


def _returned(words, objective):
    done = JobReturn(overrides=words, task_name="speedrun", status=JobStatus.COMPLETED)
    done.return_value = objective
    return done


ConfigStore.instance().store(group="hydra/launcher", name="basic", node=ProcessesConf, provider="speedrun")
