"""A sweep by Hydra's own machinery: its grammar makes the points, its sweeper orders them, its launcher starts them.

    multirun.go(["optim.lr=0.001,0.002", "hydra/launcher=joblib"], runner, folder, machine)

Any plugin of Hydra's for launching or searching works.  Ours are in bench/plans/plugins/: `hydra/launcher=basic`, the
default, and `hydra/sweeper=optuna`.  A sweep may also be stored, as hydra.sweeper.params of an experiment or a root.
"""

import contextlib
import functools
import logging
import os
import warnings
from collections.abc import Iterator, Mapping
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

# Hydra's own settings, unless the user's overrides and yamls change them: it writes into the sweep's folder alone, and
# this program decides what a person sees.
QUIET = {"hydra/job_logging": "none", "hydra/hydra_logging": "none"}
OUR_LAUNCHER = "hydra_plugins.speedrun.Processes"
BASIC_SWEEPER = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"


class SweepLoader(ConfigLoaderImpl):
    """machine: chooses the track where none is named; None: as on a CPU."""

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
        """Hydra's, but the settings of runs are only text in a sweep's own config, and values in a run's."""
        task = [word for word in overrides if not is_hydra_override(word)]
        hydra_overrides = [word for word in overrides if is_hydra_override(word)]
        choices = compose.group_overrides([word for word in task if plain(word)], self.machine)
        config = super().load_configuration(config_name, [*hydra_overrides, *choices], run_mode, from_shell)
        with read_write(config), open_dict(config):
            config.hydra.overrides.task = task
            if run_mode == RunMode.RUN:
                for key in [key for key in config if key != "hydra"]:  # what Hydra alone made of the run's groups
                    del config[key]
                config.merge_with(OmegaConf.create(schema.to_dict(compose.compose(task, self.machine))))
        return config


class Runner(Protocol):
    """What makes the runs."""

    budget_s: float | None  # of all of them; None: no limit

    def elsewhere(
        self, launcher: str, settings: Mapping[str, Any], refusals: type[Exception]
    ) -> contextlib.AbstractContextManager[None]:
        """Around the launcher of that name, not ours, which calls run_one().

        settings: hydra.launcher.*; refusals: the errors of Hydra that the user's overrides caused.
        """

    def run_one(self, overrides: list[str], number: int) -> float | None:
        """A point of the sweep, its number from 0, in whichever process Hydra's launcher calls it -> its objective."""

    def all(self, points: list[list[str]], first_number: int, launcher: dict[str, Any]) -> list[float | None]:
        """Several points, in the process of the sweep.  launcher: the settings hydra.launcher.*, ours."""


class Task:
    """What Hydra calls a task function: of one point, whose overrides Hydra keeps."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner

    def __call__(self, config: Any) -> float | None:
        """config: the run's, composed."""
        hydra = HydraConfig.get()
        return self.runner.run_one(OmegaConf.to_container(hydra.overrides.task), int(hydra.job.num))


def go(arguments: list[str], runner: Runner, folder: Path, machine: schema.Machine | None = None) -> None:
    """Run a sweep to its end.  folder: where Hydra and its plugins write.  Raises ValueError."""
    hydra_overrides, swept = overrides.split_sweep(arguments)
    given = {word.lstrip("+").partition("=")[0] for word in hydra_overrides}
    quiet = [f"{group}={choice}" for group, choice in QUIET.items() if group not in given]
    hydra_overrides = [*quiet, f"hydra.sweep.dir='{folder}'", "hydra.sweep.subdir=.", *hydra_overrides]
    with compose.refusals(arguments), _importable():
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
    """The overrides of every run of a sweep, in order; None where a search chooses them as it goes.  ValueError."""
    hydra_overrides, swept = overrides.split_sweep(arguments)
    with compose.refusals(arguments):
        hydra = _app(machine)
        config, stored = _checked(hydra_overrides, swept, machine)
        if config.hydra.sweeper._target_ != BASIC_SWEEPER:
            return None
        parser = OverridesParser.create(config_loader=hydra.config_loader)
        (combinations,) = BasicSweeper.split_arguments(parser.parse_overrides([*stored, *swept]), None)
    return [list(point) for point in combinations]


def show_cfg(arguments: list[str], what: str, machine: schema.Machine | None) -> None:
    """Print Hydra's own settings ("hydra"), or those with the run's ("all"), as Hydra does."""
    hydra_overrides, run_overrides = _split_one_run(arguments)
    with compose.refusals(arguments):
        _app(machine).show_cfg(groups.config_name(), [*hydra_overrides, *run_overrides], what, None, False)


def show_info(arguments: list[str], what: str) -> None:
    """Print what Hydra knows: compose.INFO."""
    hydra_overrides, run_overrides = _split_one_run(arguments)
    with compose.refusals(arguments), _logging_as_before():
        compose.app().show_info(what, groups.config_name(), [*hydra_overrides, *compose.group_overrides(run_overrides)])


def _split_one_run(arguments: list[str]) -> tuple[list[str], list[str]]:
    """(overrides of Hydra, those of every run of the sweep)."""
    hydra_overrides = [word for word in arguments if overrides.is_hydra_override(word)]
    return hydra_overrides, [word for word in arguments if word not in hydra_overrides and overrides.plain(word)]


@contextlib.contextmanager
def _logging_as_before() -> Iterator[None]:
    """Hydra prints its information through Python's root logger, which it sets up for that."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


def _checked(hydra_overrides: list[str], swept: list[str], machine: schema.Machine | None) -> tuple[Any, list[str]]:
    """-> (the sweep's config, its stored overrides).  Refuses a sweep of nothing, and of what it cannot go through."""
    hydra = _app(machine)
    config = hydra.compose_config(groups.config_name(), [*hydra_overrides, *swept], RunMode.MULTIRUN)
    stored = compose.stored_overrides(config.hydra)
    is_basic = config.hydra.sweeper._target_ == BASIC_SWEEPER
    if not stored and not swept:
        raise ValueError("there is nothing to sweep: give values, e.g. -m seed=0,1,2")
    for word in [*stored, *swept] if is_basic else ():
        overrides.check_points(word, hydra.config_loader)
    return config, stored


@contextlib.contextmanager
def _importable() -> Iterator[None]:
    """In this block processes that a launcher starts find this program's modules, wherever they stand."""
    python_path = os.pathsep.join(filter(None, [str(REPO), compose.OURS, os.environ.get("PYTHONPATH")]))
    ours = {"PYTHONPATH": python_path, CHECKOUT: str(REPO)}  # the latter for workers of a program that is a copy's
    with variables(ours), warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="hydra_plugins")  # other people's plugins, on today's Python
        yield


def _app(machine: schema.Machine | None) -> Any:
    return compose.app(functools.partial(SweepLoader, machine))
