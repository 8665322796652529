"""Overrides -> a race that may start: composed, its data found or made, resolved, everything checked."""

from dataclasses import dataclass

from bench import private
from bench.config import compose, profiler_windows, resolve, schema
from bench.data import sources
from bench.machine import environment, gpus
from bench.paths import REPO, of_user


@dataclass(frozen=True)
class Job:
    """A race that may start: everything asked has been checked."""

    config: schema.Config  # resolved
    dataset: sources.Dataset
    overrides: list[str]
    deviations: list[str]

    @property
    def config_id(self):
        return schema.config_id(self.config)


def prepare(overrides, fetch=False, say=print):
    """list[str] -> Job.  Makes local data that is missing; fetches only if asked.  Raises ValueError for the user."""
    machine = schema.Machine(gpus.num_visible(), environment.usable_cpus())
    asked = compose.compose(overrides, machine)
    for name in ("train_glob", "val_glob"):
        pattern = getattr(asked.data, name)
        if pattern is not None:
            pattern = str(of_user(pattern))
            setattr(asked.data, name, pattern)
    dataset = sources.prepare(asked.data, fetch=fetch, say=say)
    sources.check_val_tokens(dataset, asked.goal.val_tokens)
    for name in ("train_glob", "val_glob"):  # found: from here on only for the record, where no home folder belongs
        if getattr(asked.data, name) is not None:
            setattr(asked.data, name, private.redact(getattr(asked.data, name), REPO))
    config = resolve.resolve(asked, machine, dataset.vocab_size)
    _check_names(config)
    profiler_windows.check_ranks(config.instruments, config.hardware.num_processes)
    return Job(config, dataset, list(overrides), compose.deviations(config))


def _check_names(config):
    """Names that a dict in models/ will look up; listed here by reading conf/, so that torch stays out."""
    for group, name in (("model", config.model.arch), ("optim", config.optim.name)):
        if name not in compose.choices(group):
            raise ValueError(
                f"{group}={name}: there is no such {group}; choose from {', '.join(compose.choices(group))}"
            )
    if config.optim.schedule not in ("constant", "cosine", "trapezoid"):
        raise ValueError(f"optim.schedule={config.optim.schedule}: use constant, cosine or trapezoid")
