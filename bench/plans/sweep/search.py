"""A search by optuna's ask and tell: it proposes points, each becomes a run, and the search gets the run's objective.

The study is a file, so that the same search goes on where it stood: results/sweeps/STUDY.journal.  Only this file knows
optuna, and only inside functions: it is an optional package.  The objective is the number that a search makes small.
"""

import hashlib
import json
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from bench.launch.console import say
from bench.record import step_files
from bench.record.rows import row_of
from bench.record.shape import Record

DEFAULT_OBJECTIVE = "val_loss"
OBJECTIVES = {  # what hydra.sweeper.objective may be: what it is
    "val_loss": "nats per token of the last validation",
    "train_s": "seconds of timed training",
    "step_avg_ms": "milliseconds of a step",
    "target_s": "seconds of timed training to the first validation that reaches the target",
}
SAMPLERS = ("tpe", "random", "cmaes", "gp", "qmc", "brute_force")
PRUNERS = ("median", "hyperband", "successive_halving")
ABSENT = "hydra/sweeper=optuna: it is not installed here: pip install optuna (docs/SWEEPS.md)"


@dataclass(frozen=True)
class Choice:
    """One of some values, as words."""

    values: tuple[str, ...]


@dataclass(frozen=True)
class Numbers:
    """Between low and high, both included.  step: None is any; log: small ones as likely as large ones."""

    low: float
    high: float
    step: float | None = None
    log: bool = False


@dataclass(frozen=True, kw_only=True)
class Settings:
    """hydra.sweeper.*: meanings in docs/SWEEPS.md."""

    objective: str
    n_trials: int
    n_jobs: int
    sampler: str
    pruner: str | None
    seed: int | None
    study_name: str | None
    storage: str | None

    def __post_init__(self) -> None:
        for name, allowed in (("objective", OBJECTIVES), ("sampler", SAMPLERS), ("pruner", (None, *PRUNERS))):
            value = getattr(self, name)
            if value not in allowed:
                names = ", ".join(str(one or "null") for one in allowed)
                raise ValueError(f"hydra.sweeper.{name}={value}: choose from {names}")
        for name in ("n_trials", "n_jobs"):
            if getattr(self, name) < 1:
                raise ValueError(f"hydra.sweeper.{name}={getattr(self, name)}: use a whole number of 1 or more")
        if self.pruner and self.objective != "val_loss":
            raise ValueError(
                f"hydra.sweeper.pruner={self.pruner}: it compares losses while runs are trained, and the objective is "
                f"{self.objective}: use hydra.sweeper.objective=val_loss, or no pruner"
            )


class Search:
    """A study: propose() words, run them, conclude() with what came of it."""

    def __init__(self, settings: Settings, space: dict[str, Choice | Numbers], fixed: list[str], folder: Path) -> None:
        """space: by setting; fixed: words of every run; folder: of the studies.  ValueError: optuna is absent."""
        try:
            import optuna
        except ImportError:
            raise ValueError(ABSENT) from None
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
        self._optuna, self._settings, self._fixed = optuna, settings, fixed
        self._space = {key: _distribution(optuna, one) for key, one in space.items()}
        asked = json.dumps([settings.objective, sorted(fixed), sorted((key, repr(one)) for key, one in space.items())])
        self.name = settings.study_name or f"search-{hashlib.sha256(asked.encode()).hexdigest()[:8]}"
        self._study = optuna.create_study(
            storage=_storage(optuna, settings.storage, folder / f"{self.name}.journal"),
            sampler=_sampler(optuna, settings),
            pruner=_pruner(optuna, settings.pruner),
            study_name=self.name,
            load_if_exists=True,
        )
        for trial in self._study.get_trials(states=(optuna.trial.TrialState.RUNNING,)):  # of a search that was killed
            self._study.tell(trial.number, state=optuna.trial.TrialState.FAIL)

    @property
    def num_left(self) -> int:
        """Trials to go, of n_trials in all; those that failed do not count."""
        return max(0, self._settings.n_trials - self._num_done())

    def introduce(self) -> None:
        """Say what is searched for, and what is known already."""
        what = f"{self._settings.objective} ({OBJECTIVES[self._settings.objective]})"
        known = f"; {self._num_done()} trials of {self.name} are known" if self._num_done() else ""
        say("search", f"the least {what} in {self._settings.n_trials} trials{known}")

    def propose(self) -> tuple[Any, list[str]]:
        """-> (optuna's trial, the words of its run)."""
        trial = self._study.ask(self._space)
        return trial, [*self._fixed, *(f"{key}={value}" for key, value in trial.params.items())]

    def stop(self, trial: Any) -> Callable[[list[tuple[int, float]]], str | None] | None:
        """launch()'s stop for a trial's run; None: there is no pruner."""
        if self._settings.pruner is None:
            return None

        def stop(validations: list[tuple[int, float]]) -> str | None:
            step, val_loss = validations[-1]
            if step == 0:
                return None
            trial.report(val_loss, step)
            if trial.should_prune():
                return f"val_loss {val_loss:.4f} at step {step}: hydra.sweeper.pruner={self._settings.pruner} prunes it"
            return None

        return stop

    def conclude(self, trial: Any, value: float | None, was_stopped: bool = False) -> None:
        """value: the objective; None: the run has none, because it failed, missed the target or was stopped."""
        states = self._optuna.trial.TrialState
        if value is None:
            self._study.tell(trial, state=states.PRUNED if was_stopped else states.FAIL)
        else:
            self._study.tell(trial, value)
        say("search", f"trial {self._num_done()} of {self._settings.n_trials}: {self._best()}")

    def results(self) -> dict[str, Any]:
        """The best point so far: {"name", "study", "objective", "best_value", "best_params"}, None without one."""
        best = self._best_trial()
        return {
            "name": "optuna",
            "study": self.name,
            "objective": self._settings.objective,
            "best_value": best and best.value,
            "best_params": best and best.params,
        }

    def _best(self) -> str:
        best = self._best_trial()
        if best is None:
            return "none has a result yet"
        words = " ".join(f"{key}={value}" for key, value in best.params.items())
        return f"best {self._settings.objective} {best.value:.5g} by {words}"

    def _best_trial(self) -> Any:
        done = self._study.get_trials(deepcopy=False, states=(self._optuna.trial.TrialState.COMPLETE,))
        return min(done, key=lambda trial: trial.value, default=None)

    def _num_done(self) -> int:
        states = self._optuna.trial.TrialState
        return len(self._study.get_trials(deepcopy=False, states=(states.COMPLETE, states.PRUNED)))


def _distribution(optuna: Any, values: Choice | Numbers) -> Any:
    kinds = optuna.distributions
    if isinstance(values, Choice):
        return kinds.CategoricalDistribution(values.values)
    if isinstance(values.low, int) and isinstance(values.high, int):
        return kinds.IntDistribution(values.low, values.high, log=values.log, step=values.step or 1)
    return kinds.FloatDistribution(values.low, values.high, log=values.log, step=values.step)


def _storage(optuna: Any, url: str | None, path: Path) -> Any:
    if url is not None:
        return url
    path.parent.mkdir(parents=True, exist_ok=True)
    journal = optuna.storages.journal
    return optuna.storages.JournalStorage(journal.JournalFileBackend(str(path)))


def _sampler(optuna: Any, settings: Settings) -> Any:
    kinds, seed = optuna.samplers, settings.seed
    made = {
        "tpe": lambda: kinds.TPESampler(seed=seed, constant_liar=settings.n_jobs > 1),
        "random": lambda: kinds.RandomSampler(seed=seed),
        "cmaes": lambda: kinds.CmaEsSampler(seed=seed),
        "gp": lambda: kinds.GPSampler(seed=seed),
        "qmc": lambda: kinds.QMCSampler(seed=seed),
        "brute_force": lambda: kinds.BruteForceSampler(seed=seed),
    }
    try:
        return made[settings.sampler]()
    except ImportError as error:
        raise ValueError(f"hydra.sweeper.sampler={settings.sampler}: {error}") from None


def _pruner(optuna: Any, name: str | None) -> Any:
    kinds = optuna.pruners
    made = {
        "median": lambda: kinds.MedianPruner(n_startup_trials=3),
        "hyperband": kinds.HyperbandPruner,
        "successive_halving": kinds.SuccessiveHalvingPruner,
        None: kinds.NopPruner,
    }
    return made[name]()


def objective_of(run: dict[str, Any] | None, name: str) -> float | None:
    """A record with its folder -> the number; None: it did not complete, was not measured, or missed the target."""
    if run is None or run["status"] != "complete":
        return None
    value = _target_s(run) if name == "target_s" else run["metrics"].get(name)
    return None if value is None or not math.isfinite(value) else float(value)


def _target_s(run: dict[str, Any]) -> float | None:
    target = row_of(cast(Record, run))["target_val_loss"]
    if target is None:
        raise ValueError("hydra.sweeper.objective=target_s: the runs have no target: give goal.target_val_loss=NUMBER")
    train_ms = 0.0
    for row in step_files.read(run["folder"]):
        train_ms += row["step_ms"] or 0.0
        if row["val_loss"] is not None and row["val_loss"] <= target:
            return train_ms / 1e3
    return None
