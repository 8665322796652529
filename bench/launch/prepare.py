"""Overrides -> a run that may start: composed, its data found or made, resolved, everything checked."""

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench.base import credentials, private
from bench.base.metric import VAL_BPB
from bench.base.paths import CODE, REPO, user_path
from bench.config import compose, identity, resolve, schema, stages, user_code
from bench.config.resolve import deviations_of
from bench.data.sources import datasets
from bench.launch import own_model
from bench.launch.script import script
from bench.launch.script.script import Script
from bench.machine import code_copy, code_state, environment, gpus
from bench.record.exporters import dashboards
from bench.training.instruments import registry

GLOBS = ("train_glob", "val_glob")


@dataclass(frozen=True)
class Job:
    """A run that may start: every setting has been checked."""

    config: schema.Config  # resolved
    dataset: datasets.Dataset
    overrides: list[str]
    deviations: list[str]  # from the track's rules; not empty: open division
    script: Script | None = None  # what runs in place of our own training
    code: Path = CODE  # the folder that its processes import from; of frozen() a copy
    copied: Mapping[str, Path] | None = None  # of frozen(): own_sources' copies
    secrets: Mapping[tuple[Any, ...], str] = dataclasses.field(default_factory=dict)  # {where in config: as given}

    @property
    def config_id(self) -> str:
        return identity.config_id(self.config)

    @property
    def data_bytes(self) -> int:
        """Bytes of all shards."""
        return sum(shard.num_bytes for shard in self.dataset.train + self.dataset.val)

    @property
    def num_tokens(self) -> int:
        """Tokens that goal.num_steps train on; for a script, as far as the settings say."""
        return round(self.config.goal.num_steps * self.batch_tokens)

    @property
    def batch_tokens(self) -> int | float:
        """Tokens of a step; of a run with stages the mean."""
        return self.config.data.batch_tokens if self.script else stages.mean_batch_tokens(self.config)

    @property
    def epochs(self) -> float:
        """How often goal.num_steps go through the training data; above 1 tokens are seen again."""
        return self.num_tokens / sum(shard.num_tokens for shard in self.dataset.train)

    @property
    def is_profiled(self) -> bool:
        """Whether an instrument disturbs steps: the run counts nowhere, so that one of it is enough."""
        return bool(registry.flagging(self.config.instruments))

    def with_look(self, is_on: bool) -> "Job":
        """The same run with or without a look after the race, as far as it can have one."""
        is_on = is_on and _hinders_look(self.config) is None
        look = dataclasses.replace(self.config.look, enabled=is_on)
        return dataclasses.replace(self, config=dataclasses.replace(self.config, look=look))

    @property
    def own(self) -> list[str]:
        """Import paths of the user's own classes in the config, or of the script."""
        if self.script:
            return [self.script.own]
        return user_code.import_paths(schema.to_dict(self.config))

    @property
    def own_sources(self) -> Mapping[str, Path]:
        """user_code.sources() of those classes, or their copies; {} without any."""
        return self.copied if self.copied is not None else user_code.sources(self.own)

    @property
    def own_folder(self) -> str | None:
        """Where a frozen() job's own classes are imported from (user_code.use_copies); None without any."""
        path = next((path for name, path in (self.copied or {}).items() if name.startswith("own/")), None)
        return str(next(folder for folder in path.parents if code_copy.is_copy(folder)) / "own") if path else None

    @property
    def source_sha256(self) -> str:
        """The identity of the code that this run races: of its copies, else as it is now."""
        return code_state.source_sha256(self.code, own=self.own_sources)

    def with_seed(self, seed: int) -> "Job":
        """The same run with another seed, 0 or more."""
        overrides = [override for override in self.overrides if not override.startswith("seed=")]
        config = dataclasses.replace(self.config, seed=seed)
        return dataclasses.replace(self, config=config, overrides=[*overrides, f"seed={seed}"])


@contextlib.contextmanager
def frozen(job: Job) -> Iterator[Job]:
    """A context that yields the job with read-only copies of all the code that its run executes, there until its end.

    ValueError: a source cannot be read, or no copy can be written.
    """
    if job.copied is not None:
        yield job
        return
    with code_copy.held(REPO) as code, code_copy.held_sources(job.own_sources) as copied:
        its_script = job.script and dataclasses.replace(job.script, copied=copied)
        yield dataclasses.replace(job, code=code, copied=copied, script=its_script)


def this_machine() -> schema.Machine:
    """What resolve() may ask: GPUs that this process sees, and CPUs that it may use."""
    sizes_gib = [gpu["memory_gib"] for gpu in gpus.visible()]
    smallest_gib = None if None in sizes_gib else min(sizes_gib, default=None)  # one may not say
    return schema.Machine(len(sizes_gib), environment.usable_cpus(), smallest_gib)


def requested_config(overrides: list[str], machine: schema.Machine | None = None) -> schema.Config:
    """The config that these overrides request of a machine, not resolved; None: this one.  ValueError for the user."""
    config = compose.compose(overrides, machine or this_machine())
    registry.check(config.instruments)
    if config.profile.stop_after_window:
        registry.last_step(config.instruments)
    dashboards.check(config.exporters)
    return config


def prepare(
    overrides: list[str],
    fetch: bool = False,
    say: Callable[[str], None] = print,
    check_own: bool = True,
    machine: schema.Machine | None = None,
) -> Job:
    """Makes local data that is missing; downloads only with fetch.  Raises ValueError for the user.

    check_own: whether a model of the user's own is tried first, which takes seconds; machine: what the run may use,
    None: all of this one.
    """
    config = requested_config(overrides, machine)
    its_script = script.from_config(config, overrides)
    if its_script is None and find_spec("torch") is None:
        raise ValueError(f"torch: {sys.executable} has none: pip install torch, or speedrun-bench[cpu] or [cuda]")
    if check_own and its_script is None:
        own_model.check(config)
    data = config.data
    for name in GLOBS:
        if getattr(data, name) is not None:
            setattr(data, name, str(user_path(getattr(data, name))))
    dataset = datasets.prepare(data, fetch=fetch, say=say)
    datasets.check_val_tokens(dataset, config.goal.val_tokens)
    if its_script is None and config.goal.of == VAL_BPB:
        try:
            datasets.chosen(data).token_bytes()
        except ValueError as error:
            raise ValueError(f"goal.metric=val_bpb: {error}; or use goal.metric=val_loss") from None
    for name in GLOBS:  # from here on only for the record, where no home folder belongs
        if getattr(data, name) is not None:
            setattr(data, name, private.redact(getattr(data, name), REPO))
    config = resolve.resolve(config, machine or this_machine(), dataset.vocab_size)
    registry.program(config.instruments, Path(), config.hardware.device)
    _resolve_look(config)
    _check_survival(config)
    config, secrets = _recorded(config)
    return Job(config, dataset, list(overrides), deviations_of(config), its_script, secrets=secrets)


def _resolve_look(config: schema.Config) -> None:
    """Whether the run looks at itself, where that was left to the machine.  ValueError: it cannot."""
    why = _hinders_look(config)
    if config.look.enabled and why:
        raise ValueError(f"look.enabled=true: {why}: leave it out, or use look=off")
    if config.look.enabled is None:
        # of a script it is a second start: in its audit, or where it is asked for
        config.look.enabled = config.hardware.device == "cuda" and not why and config.script is None


def _check_survival(config: schema.Config) -> None:
    """ValueError where a run that shall go on after its end cannot."""
    survives = {"checkpoint.every_min": config.checkpoint.every_min, "resume": config.resume}
    for name, value in survives.items():
        if value is None:
            continue
        if config.script is not None:
            raise ValueError(f"{name}={value}: a script saves and resumes by itself: remove it")
        if config.hardware.nodes:
            what = f"hardware.nodes={config.hardware.nodes}, each of which has the checkpoints of its own ranks"
            raise ValueError(f"{name}={value}: {what}: only runs on one node can be resumed: remove it")
        if flagging := registry.flagging(config.instruments):
            raise ValueError(f"{name}={value}: instruments.{flagging[0]} disturbs the run: use one or the other")


def _hinders_look(config: schema.Config) -> str | None:
    """Why a run cannot be looked at after the race; None: it can."""
    if config.script is not None and (config.script.command or config.hardware.nodes):
        return "a command's processes, and those of several nodes, are not started once more to be profiled"
    if config.profile.stop_after_window:
        return "profile.stop_after_window=true ends the run before its goal"
    if profiling := registry.profiling(config.instruments, config.hardware.device):
        return f"instruments.{profiling[0]} has a profiler of its own in the run"
    return None


def _recorded(config: schema.Config) -> tuple[schema.Config, dict[tuple[Any, ...], str]]:
    """-> the config as a record has it and as config_id names it, {path: text as given} of each credential in it.

    What is exported, and how, is no part of the run, and is redacted where it is written.
    """
    values = schema.to_dict(config) | {"exporters": {}}
    clean, secrets = credentials.hidden(values)
    for text in secrets.values():
        credentials.remember(text)
    if config.script is not None:  # an argument may also be a path
        clean["script"] = private.redact_all(clean["script"], REPO)
    if clean == values:
        return config, secrets
    return dataclasses.replace(schema.build(schema.Config, clean), exporters=config.exporters), secrets
