"""Searches with optuna's ask and tell: it proposes points, each becomes a run, and it is told the run's objective.

The study is a file, results/sweeps/STUDY.journal, so that the same command continues it. Only this file knows optuna,
an optional package, and imports it inside functions. The objective is the number that a search minimizes.
"""

import hashlib
import json
import math
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, cast

from bench.config.typed import AtLeast1
from bench.launch.console import say
from bench.record.rows import metric_of, row_of
from bench.record.shape import Record
from models.settings import one_of

DEFAULT_OBJECTIVE = "val_loss"
OBJECTIVES = {  # {value of hydra.sweeper.objective: its meaning}
    "val_loss": "nats per token of the last validation",
    "score": "value of the goal's metric; of one where higher is better its negative",
    "train_s": "seconds of timed training",
    "step_avg_ms": "milliseconds of a step",
    "target_s": "seconds of timed training to the first validation that reaches the target",
}
SAMPLERS = {  # {value of hydra.sweeper.sampler: its class in optuna.samplers}
    "tpe": "TPESampler",
    "random": "RandomSampler",
    "cmaes": "CmaEsSampler",
    "gp": "GPSampler",
    "qmc": "QMCSampler",
    "brute_force": "BruteForceSampler",
}
PRUNERS = {None: "NopPruner", "median": "MedianPruner", "hyperband": "HyperbandPruner"}  # classes in optuna.pruners
PRUNERS["successive_halving"] = "SuccessiveHalvingPruner"
ABSENT = "hydra/sweeper=optuna is not installed here: pip install optuna (docs/race.md)"


@dataclass
class Settings:
    """The settings hydra.sweeper.*, to be made by typed.build(); docs/race.md explains them."""

    objective: Annotated[str, one_of(*OBJECTIVES)] = DEFAULT_OBJECTIVE
    n_trials: AtLeast1 = 20
    n_jobs: AtLeast1 = 1
    sampler: Annotated[str, one_of(*SAMPLERS)] = "tpe"
    pruner: Annotated[str, one_of(*filter(None, PRUNERS))] | None = None
    seed: int | None = None
    study_name: str | None = None
    storage: str | None = None

    def __post_init__(self) -> None:
        if self.pruner and self.objective != "val_loss":
            raise ValueError(f"pruner={self.pruner}: it compares losses: use hydra.sweeper.objective=val_loss")


@dataclass(frozen=True)
class Search:
    """An open study: propose() overrides, run them, conclude() with the outcome."""

    name: str
    settings: Settings
    fixed: list[str]  # overrides of every run
    _space: dict[str, Any]  # optuna's distributions by setting
    _study: Any

    @property
    def num_left(self) -> int:
        """Trials to go, of n_trials in all; failed trials do not count."""
        return max(0, self.settings.n_trials - self._num_done())

    def introduce(self) -> None:
        """Prints what is searched for, and how many trials are known already."""
        objective = f"{self.settings.objective} ({OBJECTIVES[self.settings.objective]})"
        progress = f"; {self._num_done()} trials of {self.name} are known" if self._num_done() else ""
        say("search", f"the least {objective} in {self.settings.n_trials} trials{progress}")

    def propose(self) -> tuple[Any, list[str]]:
        """Returns (optuna's trial, the overrides of its run)."""
        trial = self._study.ask(self._space)
        return trial, [*self.fixed, *(f"{key}={value}" for key, value in trial.params.items())]

    def stop(self, trial: Any) -> Callable[[list[tuple[int, float]]], str | None] | None:
        """Returns launch()'s stop for a trial's run; None without a pruner."""
        if self.settings.pruner is None:
            return None

        def stop(validations: list[tuple[int, float]]) -> str | None:
            step, val_loss = validations[-1]
            if step == 0:
                return None
            trial.report(val_loss, step)
            if trial.should_prune():
                return f"val_loss {val_loss:.4f} at step {step}: hydra.sweeper.pruner={self.settings.pruner} prunes it"
            return None

        return stop

    def conclude(self, trial: Any, value: float | None, was_stopped: bool = False) -> None:
        """Tells optuna a trial's objective; None if its run failed, missed the target or was stopped."""
        if value is None:
            self._study.tell(trial, state=_state("PRUNED" if was_stopped else "FAIL"))
        else:
            self._study.tell(trial, value)
        best, summary = self._best_trial(), "none has a result yet"
        if best is not None:
            point = " ".join(f"{key}={value}" for key, value in best.params.items())
            summary = f"best {self.settings.objective} {best.value:.5g} by {point}"
        say("search", f"trial {self._num_done()} of {self.settings.n_trials}: {summary}")

    def results(self) -> dict[str, Any]:
        """Returns {"name", "study", "objective", "best_value", "best_params"} of the best point, None without one."""
        best = self._best_trial()
        return {
            "name": "optuna",
            "study": self.name,
            "objective": self.settings.objective,
            "best_value": best and best.value,
            "best_params": best and best.params,
        }

    def _best_trial(self) -> Any:
        done = self._study.get_trials(deepcopy=False, states=(_state("COMPLETE"),))
        return min(done, key=lambda trial: trial.value, default=None)

    def _num_done(self) -> int:
        return len(self._study.get_trials(deepcopy=False, states=(_state("COMPLETE"), _state("PRUNED"))))


def _state(name: str) -> Any:
    from optuna.trial import TrialState

    return TrialState[name]


def opened(settings: Settings, overrides: Iterable[Any], folder: Path) -> Search:
    """Opens the study of these settings, new or continued; trials of a killed search are marked as failed.

    overrides: Hydra's Override objects, some of them sweeps; folder: of the studies. Raises ValueError if optuna is not
    installed, or nothing is swept.
    """
    swept = {override.get_key_element(): override for override in overrides}
    fixed = [
        f"{key}={swept.pop(key).get_value_element_as_str()}"
        for key in list(swept)
        if not swept[key].is_sweep_override()
    ]
    if not swept:
        raise ValueError("there is nothing to search: give a space, e.g. 'optim.lr=tag(log,interval(1e-4,1e-2))'")
    try:
        import optuna
    except ImportError:
        raise ValueError(ABSENT) from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    content = json.dumps([settings.objective, sorted(fixed), sorted(str(space.input_line) for space in swept.values())])
    name = settings.study_name or f"search-{hashlib.sha256(content.encode()).hexdigest()[:8]}"
    storage: Any = settings.storage
    if storage is None:
        folder.mkdir(parents=True, exist_ok=True)
        journal = optuna.storages.journal
        storage = optuna.storages.JournalStorage(journal.JournalFileBackend(str(folder / f"{name}.journal")))
    own: dict[str, dict[str, Any]] = {"tpe": {"constant_liar": settings.n_jobs > 1}, "median": {"n_startup_trials": 3}}
    try:
        sampler = getattr(optuna.samplers, SAMPLERS[settings.sampler])
        study = optuna.create_study(
            storage=storage,
            sampler=sampler(seed=settings.seed, **own.get(settings.sampler, {})),
            pruner=getattr(optuna.pruners, PRUNERS[settings.pruner])(**own.get(settings.pruner or "", {})),
            study_name=name,
            load_if_exists=True,
        )
    except ImportError as error:
        raise ValueError(f"hydra.sweeper.sampler={settings.sampler}: {error}") from None
    for trial in study.get_trials(states=(_state("RUNNING"),)):
        study.tell(trial.number, state=_state("FAIL"))
    return Search(name, settings, fixed, {key: _distribution(override) for key, override in swept.items()}, study)


def _distribution(override: Any) -> Any:
    """Returns optuna's distribution of the values of an Override that is a sweep."""
    from optuna import distributions

    sweep: Any = override.value()
    if override.is_interval_sweep():
        low, high, step, is_log = sweep.start, sweep.end, None, "log" in sweep.tags
    elif override.is_range_sweep():
        numbers = sorted(sweep.range())
        low, high, step, is_log = numbers[0], numbers[-1], abs(sweep.step), False
    else:
        return distributions.CategoricalDistribution(tuple(override.sweep_string_iterator()))
    if isinstance(low, int) and isinstance(high, int):
        return distributions.IntDistribution(low, high, log=is_log, step=step or 1)
    return distributions.FloatDistribution(low, high, log=is_log, step=step)


def objective_of(run: dict[str, Any] | None, name: str) -> float | None:
    """Returns the objective of a record; None if it did not complete, was not measured, or missed the target."""
    if run is None or run["status"] != "complete":
        return None
    value = run["metrics"].get(name)
    if name in ("target_s", "score"):
        row = row_of(cast(Record, run))
        metric, score = metric_of([row]), row["score"]
        value = score if score is None else metric.sign * score
    if name == "target_s":
        from bench.compare import same_loss  # imported here, because other objectives do not need it
        from bench.report import curves

        if row["target"] is None:
            raise ValueError("hydra.sweeper.objective=target_s: runs have no target: give goal.target_val_loss=NUMBER")
        value = same_loss.way(curves.validations(run["folder"], metric), row["target"], metric)[1]
    return None if value is None or not math.isfinite(value) else float(value)
