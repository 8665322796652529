"""Runs a sweep with Hydra: its grammar makes the points, its sweeper orders them, its launcher starts them.

    multirun.go(["optim.lr=0.001,0.002", "hydra/launcher=joblib"], runner, folder, machine)

Any of Hydra's launcher and sweeper plugins works. Ours are in bench/plans/plugins/: `hydra/launcher=basic`, the
default, and `hydra/sweeper=optuna`. A sweep may also be stored, as hydra.sweeper.params of an experiment or a root.
"""

import contextlib
import functools
import logging
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import OmegaConf, open_dict, read_write

from bench.base.paths import CHECKOUT, REPO, variables
from bench.config import compose, groups, overrides, schema
from bench.config.overrides import is_hydra_override, plain

# Settings of Hydra that the user's overrides may replace: without logs of Hydra's, this program decides what is shown.
QUIET = {"hydra/job_logging": "none", "hydra/hydra_logging": "none"}
OUR_LAUNCHER = "hydra_plugins.speedrun.Processes"
BASIC_SWEEPER = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"


class SweepLoader(ConfigLoaderImpl):
    """Loads the configs of a sweep. machine chooses the track where none is named; None chooses as on a CPU."""

    def __init__(self, machine: schema.Machine | None, config_search_path: Any) -> None:
        super().__init__(config_search_path)
        self.machine = machine

    def load_configuration(
        self,
        config_name: str | None,
        overrides: list[str],
        run_mode: RunMode,
        from_shell: bool = True,
        validate_sweep_overrides: bool = True,
    ) -> Any:
        """Extends Hydra's: a sweep's own config keeps the settings of its runs as text, a run's has their values."""
        task = [word for word in overrides if not is_hydra_override(word)]
        hydra_overrides = [word for word in overrides if is_hydra_override(word)]
        choices = compose.group_overrides([word for word in task if plain(word)], self.machine)
        config = super().load_configuration(config_name, [*hydra_overrides, *choices], run_mode, from_shell)
        with read_write(config), open_dict(config):
            config.hydra.overrides.task = task
            if run_mode == RunMode.RUN:
                for key in [key for key in config if key != "hydra"]:  # what Hydra composed without our checks
                    del config[key]
                config.merge_with(OmegaConf.create(schema.to_dict(compose.compose(task, self.machine))))
        return config


class Runner(Protocol):
    """Makes the runs of a sweep."""

    budget_s: float | None  # budget of all runs together; None: no limit

    def elsewhere(
        self, launcher: str, settings: Mapping[str, Any], refusals: type[Exception]
    ) -> contextlib.AbstractContextManager[None]:
        """Returns a context around a launcher that is not ours and calls run_one().

        launcher is its name, settings are hydra.launcher.*, and refusals are Hydra's errors about the user's overrides.
        """

    def run_one(self, overrides: list[str], number: int) -> float | None:
        """Runs a point of the sweep, counted from 0, in a process chosen by Hydra's launcher. Returns its objective."""

    def all(self, points: list[list[str]], first_number: int, launcher: dict[str, Any]) -> list[float | None]:
        """Runs several points in the sweep's process. launcher holds the settings hydra.launcher.* of our launcher."""


class Task:
    """A task function, as Hydra calls it, for one point; Hydra keeps the point's overrides."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner

    def __call__(self, config: Any) -> float | None:
        """Runs the point. config is the composed config of its run."""
        hydra = HydraConfig.get()
        return self.runner.run_one(OmegaConf.to_container(hydra.overrides.task), int(hydra.job.num))


def _literal(path: Path) -> str:
    """Returns a path as text between single quotes in Hydra's grammar, without interpolation."""
    return str(path).replace("\\", "\\\\").replace("'", "\\'").replace("${", "\\${")


def go(arguments: list[str], runner: Runner, folder: Path, machine: schema.Machine | None = None) -> None:
    """Runs a sweep to its end. Hydra and its plugins write into folder. Raises ValueError if an argument is wrong."""
    hydra_overrides, swept = overrides.split_sweep(arguments)
    typed_keys = {word.lstrip("+").partition("=")[0] for word in hydra_overrides}
    quiet = [f"{group}={choice}" for group, choice in QUIET.items() if group not in typed_keys]
    hydra_overrides = [*quiet, f"hydra.sweep.dir='{_literal(folder)}'", "hydra.sweep.subdir=.", *hydra_overrides]
    # for processes that a launcher starts, wherever they are, and for workers that run from a copy
    python_path = os.pathsep.join(filter(None, [str(REPO), compose.OURS, os.environ.get("PYTHONPATH")]))
    own = {"PYTHONPATH": python_path, CHECKOUT: str(REPO)}
    with compose.refusals(arguments), variables(own), warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="hydra_plugins")  # plugins of others may warn on a new Python
        config, _ = _checked(hydra_overrides, swept, machine)
        settings = config.hydra.launcher
        is_ours = settings._target_ == OUR_LAUNCHER
        if runner.budget_s is not None and not is_ours:
            raise ValueError("--budget: this launcher's jobs have their own limits: use hydra.launcher.timeout_min")
        name = config.hydra.runtime.choices["hydra/launcher"]
        with contextlib.nullcontext() if is_ours else runner.elsewhere(name, settings, HydraException):
            _app(machine).multirun(
                groups.config_name(), Task(runner), [*hydra_overrides, "hydra.output_subdir=null", *swept]
            )


def points(arguments: list[str], machine: schema.Machine | None = None) -> list[list[str]] | None:
    """Returns the overrides of each run of a sweep, in order; None if a search chooses them. Raises ValueError."""
    hydra_overrides, swept = overrides.split_sweep(arguments)
    with compose.refusals(arguments):
        hydra = _app(machine)
        config, stored = _checked(hydra_overrides, swept, machine)
        if config.hydra.sweeper._target_ != BASIC_SWEEPER:
            return None
        parser = OverridesParser.create(config_loader=hydra.config_loader)
        (combinations,) = BasicSweeper.split_arguments(parser.parse_overrides([*stored, *swept]), None)
    return [list(point) for point in combinations]


def show_cfg(arguments: list[str], part: str, machine: schema.Machine | None) -> None:
    """Prints Hydra's own settings ("hydra"), or those with the run's ("all"), as Hydra does."""
    hydra_overrides, run_overrides = _split_one_run(arguments)
    with compose.refusals(arguments):
        _app(machine).show_cfg(groups.config_name(), [*hydra_overrides, *run_overrides], part, None, False)


def show_info(arguments: list[str], name: str) -> None:
    """Prints what Hydra knows about `name`, one of compose.INFO."""
    hydra_overrides, run_overrides = _split_one_run(arguments)
    root = logging.getLogger()  # Hydra prints its information through it and sets it up for that
    handlers, level = root.handlers[:], root.level
    words = [*hydra_overrides, *compose.group_overrides(run_overrides)]
    try:
        with compose.refusals(arguments):
            compose.app().show_info(name, groups.config_name(), words)
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


def _split_one_run(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Returns (Hydra's overrides, those that every run of the sweep has)."""
    hydra_overrides = [word for word in arguments if overrides.is_hydra_override(word)]
    return hydra_overrides, [word for word in arguments if word not in hydra_overrides and overrides.plain(word)]


def _checked(hydra_overrides: list[str], swept: list[str], machine: schema.Machine | None) -> tuple[Any, list[str]]:
    """Returns (the sweep's config, its stored overrides). Raises ValueError if there are no points to sweep."""
    hydra = _app(machine)
    config = hydra.compose_config(groups.config_name(), [*hydra_overrides, *swept], RunMode.MULTIRUN)
    stored = compose.stored_overrides(config.hydra)
    is_basic = config.hydra.sweeper._target_ == BASIC_SWEEPER
    if not stored and not swept:
        raise ValueError("there is nothing to sweep: give values, e.g. -m seed=0,1,2")
    for word in [*stored, *swept] if is_basic else ():
        overrides.check_points(word, hydra.config_loader)
    return config, stored


def _app(machine: schema.Machine | None) -> Any:
    return compose.app(functools.partial(SweepLoader, machine))
