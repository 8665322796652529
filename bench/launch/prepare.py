"""Overrides -> a run that may start: composed, its data found or made, resolved, everything checked."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from bench import instruments, private
from bench.config import compose, resolve, schema, windows
from bench.data import sources
from bench.exporters import dashboards
from bench.machine import environment, gpus
from bench.paths import REPO, of_user

GLOBS = ("train_glob", "val_glob")


@dataclass(frozen=True)
class Job:
    """A run that may start: everything asked has been checked."""

    config: schema.Config  # resolved
    dataset: sources.Dataset
    overrides: list[str]
    deviations: list[str]  # from the track's rules; not empty: open division

    @property
    def config_id(self) -> str:
        return schema.config_id(self.config)

    def with_seed(self, seed: int) -> "Job":
        """The same run with another seed, 0 or more."""
        overrides = [override for override in self.overrides if not override.startswith("seed=")]
        config = dataclasses.replace(self.config, seed=seed)
        return dataclasses.replace(self, config=config, overrides=[*overrides, f"seed={seed}"])


def this_machine() -> schema.Machine:
    """What resolve() may ask: GPUs that this process sees, and CPUs that it may use."""
    return schema.Machine(gpus.num_visible(), environment.usable_cpus())


def asked(overrides: list[str]) -> schema.Config:
    """What is asked of this machine, not resolved.  Raises ValueError for the user."""
    config = compose.compose(overrides, this_machine())
    if config.model.arch not in compose.choices("model"):
        names = ", ".join(compose.choices("model"))
        raise ValueError(f"model.arch={config.model.arch}: unknown model; choose from {names}")
    instruments.check(config.instruments)
    dashboards.check(config.exporters)
    return config


def prepare(overrides: list[str], fetch: bool = False, say: Callable[[str], None] = print) -> Job:
    """Makes local data that is missing; fetches only if asked.  Raises ValueError for the user."""
    config = asked(overrides)
    data = config.data
    for name in GLOBS:
        if getattr(data, name) is not None:
            setattr(data, name, str(of_user(getattr(data, name))))
    dataset = sources.prepare(data, fetch=fetch, say=say)
    sources.check_val_tokens(dataset, config.goal.val_tokens)
    for name in GLOBS:  # from here on only for the record, where no home folder belongs
        if getattr(data, name) is not None:
            setattr(data, name, private.redact(getattr(data, name), REPO))
    config = resolve.resolve(config, this_machine(), dataset.vocab_size)
    windows.check_ranks(config.instruments, config.hardware.num_processes)
    return Job(config, dataset, list(overrides), compose.deviations(config))
