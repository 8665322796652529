"""This program's plugins of Hydra: `hydra/launcher=basic` is ours here, and `hydra/sweeper=optuna` is added.

Hydra looks for plugins in the package hydra_plugins alone.  What they do is in bench/plans/sweep/; here is how Hydra
calls: the launcher hands all points to the runner, the sweeper is Hydra's interface around search.py.

Not hydra-optuna-sweeper: its release for Hydra 1.3 wants optuna below 3, shows no run while it trains, so that nothing
can be pruned, and begins its trials again when it is started again.  Where it is installed it keeps the name.
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

OUR_LAUNCHER = "hydra_plugins.speedrun.Processes"


@dataclass
class ProcessesConf:
    """Settings hydra.launcher.*; meanings in docs/race.md."""

    _target_: str = OUR_LAUNCHER
    parallel: Any = None
    cores_per_run: int | None = None
    max_slowdown_pct: float = 10.0
    stop_above_nats: float | None = None
    stop_from_frac: float = 0.25


class Processes(Launcher):
    """Every run in a fresh process group, one after the other, or side by side on cores or GPUs of their own."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings

    def setup(self, *, hydra_context: Any, task_function: Any, config: Any) -> None:
        self.runner = task_function.runner

    def launch(self, job_overrides: Any, initial_job_idx: int) -> list[JobReturn]:
        """-> JobReturns in order; return_value is the run's objective, None where it has none."""
        points = [list(overrides) for overrides in job_overrides]
        returns = []
        for overrides, objective in zip(points, self.runner.all(points, initial_job_idx, self.settings)):
            done = JobReturn(overrides=overrides, task_name="speedrun", status=JobStatus.COMPLETED)
            done.return_value = objective
            returns.append(done)
        return returns


@dataclass
class OptunaConf:
    """Settings hydra.sweeper.*; meanings in docs/race.md."""

    _target_: str = "hydra_plugins.speedrun.Optuna"
    objective: str = "val_loss"
    n_trials: int = 20
    n_jobs: int = 1
    sampler: str = "tpe"
    pruner: str | None = None
    seed: int | None = None
    study_name: str | None = None
    storage: str | None = None
    params: dict[str, str] = field(default_factory=dict)


class Optuna(Sweeper):
    """Asks optuna for points, hands them to Hydra's launcher, tells it the objectives."""

    def __init__(self, params: dict[str, str] | None = None, **settings: Any) -> None:
        self.params, self.settings = params or {}, settings

    def setup(self, *, hydra_context: Any, task_function: Any, config: Any) -> None:
        self.hydra_context, self.runner, self.config = hydra_context, task_function.runner, config
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> None:
        """Hydra's call: to the end of the trials."""
        from bench.plans.sweep.search import Settings, opened

        settings = Settings(**self.settings)
        is_ours = self.config.hydra.launcher._target_ == OUR_LAUNCHER
        if settings.pruner and not is_ours:
            why = "this launcher's runs cannot be seen while they train"
            raise ValueError(f"hydra.sweeper.pruner={settings.pruner}: {why}: use hydra/launcher=basic, or no pruner")
        self.runner.objective = settings.objective
        fixed, space = self._space(arguments)
        search = opened(settings, space, fixed, self.runner.folder.parent)
        search.introduce()
        number = 0
        with self.runner.searching(search.num_left) if is_ours and search.num_left else contextlib.nullcontext():
            while search.num_left:
                number += self._run(search, min(settings.n_jobs, search.num_left), number)
        folder = Path(self.config.hydra.sweep.dir)
        folder.mkdir(parents=True, exist_ok=True)
        OmegaConf.save(OmegaConf.create(search.results()), folder / "optimization_results.yaml")

    def _run(self, search: Any, num_trials: int, number: int) -> int:
        """So many trials as runs, the first of this number -> how many."""
        trials = [search.propose() for _ in range(num_trials)]
        points = [overrides for _, overrides in trials]
        self.validate_batch_is_legal(points)
        self.runner.stops = {tuple(overrides): search.stop(trial) for trial, overrides in trials}
        try:
            returns = self.launcher.launch(points, initial_job_idx=number)
            for (trial, overrides), done in zip(trials, returns):
                search.conclude(trial, done.return_value, self.runner.was_stopped(overrides))
        finally:
            self.runner.stops = {}
        return num_trials

    def _space(self, arguments: list[str]) -> tuple[list[str], dict[str, Any]]:
        """hydra.sweeper.params and the overrides typed -> (those of every run, {setting: what it may be})."""
        from bench.plans.sweep.search import Choice, Numbers

        parser = OverridesParser.create(config_loader=self.hydra_context.config_loader)
        overrides = [*(f"{key}={value}" for key, value in self.params.items()), *arguments]
        by_key = {override.get_key_element(): override for override in parser.parse_overrides(overrides)}
        fixed, space = list[str](), dict[str, Any]()
        for key, override in by_key.items():
            value = override.value()
            if not override.is_sweep_override():
                fixed.append(f"{key}={override.get_value_element_as_str()}")
            elif override.is_interval_sweep():
                space[key] = Numbers(value.start, value.end, log="log" in value.tags)
            elif override.is_range_sweep():
                numbers = sorted(value.range())
                space[key] = Numbers(numbers[0], numbers[-1], step=abs(value.step))
            else:
                space[key] = Choice(tuple(override.sweep_string_iterator()))
        if not space:
            raise ValueError("there is nothing to search: give a space, e.g. 'optim.lr=tag(log,interval(1e-4,1e-2))'")
        return fixed, space


ConfigStore.instance().store(group="hydra/launcher", name="basic", node=ProcessesConf, provider="speedrun")
if importlib.util.find_spec("hydra_plugins.hydra_optuna_sweeper") is None:
    ConfigStore.instance().store(group="hydra/sweeper", name="optuna", node=OptunaConf, provider="speedrun")
