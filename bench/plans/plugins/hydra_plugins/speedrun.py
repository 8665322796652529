"""This program's plugins for Hydra: `hydra/launcher=basic` replaces Hydra's, and `hydra/sweeper=optuna` is added.

Hydra looks for plugins only in the package hydra_plugins. This file has Hydra's interfaces: the launcher hands all
points to the runner, and the sweeper wraps search.py. The work is done in bench/plans/sweep/.

hydra-optuna-sweeper is not used: its release for Hydra 1.3 requires optuna below 3, cannot prune, because it shows no
run while it trains, and starts its trials again when it is restarted. If it is installed it keeps the name.
"""

import contextlib
import importlib.util
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from omegaconf import OmegaConf

from bench.config import typed
from bench.plans.sweep import search

OUR_LAUNCHER = "hydra_plugins.speedrun.Processes"


@dataclass
class ProcessesConf:
    """The settings hydra.launcher.*; docs/race.md explains them."""

    _target_: str = OUR_LAUNCHER
    parallel: Any = None


class Processes(Launcher):
    """Starts every run in a new process group, sequentially, or concurrently on separate cores or GPUs."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings

    def setup(self, *, hydra_context: Any, task_function: Any, config: Any) -> None:
        self.runner = task_function.runner

    def launch(self, job_overrides: Any, initial_job_idx: int) -> list[JobReturn]:
        """Returns JobReturns in order; return_value is the run's objective, None if it has none."""
        points = [list(overrides) for overrides in job_overrides]
        returns = []
        for overrides, objective in zip(points, self.runner.all(points, initial_job_idx, self.settings)):
            done = JobReturn(overrides=overrides, task_name="speedrun", status=JobStatus.COMPLETED)
            done.return_value = objective
            returns.append(done)
        return returns


@dataclass
class OptunaConf(search.Settings):
    """The settings hydra.sweeper.*; params is the search space stored in a yaml."""

    _target_: str = "hydra_plugins.speedrun.Optuna"
    params: dict[str, str] = field(default_factory=dict)


class Optuna(Sweeper):
    """Asks optuna for points, hands them to Hydra's launcher, and tells optuna the objectives."""

    def __init__(self, params: dict[str, str] | None = None, **settings: Any) -> None:
        self.params, self.settings = params or {}, settings

    def setup(self, *, hydra_context: Any, task_function: Any, config: Any) -> None:
        self.hydra_context, self.runner, self.config = hydra_context, task_function.runner, config
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> None:
        """Runs all trials. Called by Hydra."""
        settings = typed.build(search.Settings, self.settings, "hydra.sweeper.")
        is_ours = self.config.hydra.launcher._target_ == OUR_LAUNCHER
        if settings.pruner and not (is_ours and self.config.hydra.launcher.parallel is None):
            why = "it needs runs of hydra/launcher=basic, one after the other: omit it, or hydra.launcher.parallel"
            raise ValueError(f"hydra.sweeper.pruner={settings.pruner}: {why}")
        self.runner.objective = settings.objective
        parser = OverridesParser.create(config_loader=self.hydra_context.config_loader)
        overrides = parser.parse_overrides([*(f"{key}={value}" for key, value in self.params.items()), *arguments])
        study = search.opened(settings, overrides, self.runner.folder.parent)
        study.introduce()
        number = 0
        with self.runner.searching(study.num_left) if is_ours and study.num_left else contextlib.nullcontext():
            while study.num_left:
                number += self._run(study, min(settings.n_jobs, study.num_left), number)
        folder = Path(self.config.hydra.sweep.dir)
        folder.mkdir(parents=True, exist_ok=True)
        OmegaConf.save(OmegaConf.create(study.results()), folder / "optimization_results.yaml")

    def _run(self, study: search.Search, num_trials: int, number: int) -> int:
        """Runs num_trials trials, numbered from `number`, and returns how many they were."""
        trials = [study.propose() for _ in range(num_trials)]
        points = [overrides for _, overrides in trials]
        self.validate_batch_is_legal(points)
        self.runner.stops = {tuple(overrides): study.stop(trial) for trial, overrides in trials}
        try:
            returns = self.launcher.launch(points, initial_job_idx=number)
            for (trial, overrides), done in zip(trials, returns):
                study.conclude(trial, done.return_value, self.runner.was_stopped(overrides))
        finally:
            self.runner.stops = {}
        return num_trials


ConfigStore.instance().store(group="hydra/launcher", name="basic", node=ProcessesConf, provider="speedrun")
if importlib.util.find_spec("hydra_plugins.hydra_optuna_sweeper") is None:
    ConfigStore.instance().store(group="hydra/sweeper", name="optuna", node=OptunaConf, provider="speedrun")
