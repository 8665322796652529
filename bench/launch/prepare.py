"""Turns overrides into a job that may start: composes and resolves them, prepares the data and checks everything."""

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
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
from bench.machine import code_copy, code_state, environment, gpus, sandbox
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
    script: Script | None = None  # the program that runs instead of our own training
    code: Path = CODE  # the folder from which its processes import; a copy in a frozen() job
    copied: Mapping[str, Path] | None = None  # copies of own_sources in a frozen() job
    secrets: Mapping[tuple[Any, ...], str] = dataclasses.field(default_factory=dict)  # {path in config: text as given}

    @property
    def config_id(self) -> str:
        return identity.config_id(self.config)

    @property
    def data_bytes(self) -> int:
        """Size of all shards in bytes."""
        return sum(shard.num_bytes for shard in self.dataset.train + self.dataset.val)

    @property
    def num_tokens(self) -> int:
        """Tokens on which goal.num_steps steps train; for a script, according to the settings."""
        return round(self.config.goal.num_steps * self.batch_tokens)

    @property
    def batch_tokens(self) -> int | float:
        """Tokens per step; the mean of all steps if the run has stages."""
        return self.config.data.batch_tokens if self.script else stages.mean_batch_tokens(self.config)

    @property
    def epochs(self) -> float:
        """Passes over the training data in goal.num_steps steps; above 1, tokens are repeated."""
        return self.num_tokens / sum(shard.num_tokens for shard in self.dataset.train)

    @property
    def is_profiled(self) -> bool:
        """Whether an instrument disturbs steps: such a run is not eligible for anything, so one of it is enough."""
        return bool(registry.flagging(self.config.instruments))

    def with_look(self, is_on: bool) -> "Job":
        """Returns the same job with or without a look after the race; one that cannot have a look stays without."""
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
        """The sources of `own` (user_code.sources()), or their copies; {} if there are none."""
        return self.copied if self.copied is not None else user_code.sources(self.own)

    @property
    def own_folder(self) -> str | None:
        """Folder from which a frozen() job imports the user's own classes (user_code.use_copies); None without any."""
        path = next((path for name, path in (self.copied or {}).items() if name.startswith("own/")), None)
        return str(next(folder for folder in path.parents if code_copy.is_copy(folder)) / "own") if path else None

    @property
    def source_sha256(self) -> str:
        """Fingerprint of the code that this run executes: of the copies of a frozen() job, else of the files now."""
        return code_state.source_sha256(self.code, own=self.own_sources)

    def with_seed(self, seed: int) -> "Job":
        """Returns the same job with another seed, 0 or more."""
        overrides = [override for override in self.overrides if not override.startswith("seed=")]
        config = dataclasses.replace(self.config, seed=seed)
        return dataclasses.replace(self, config=config, overrides=[*overrides, f"seed={seed}"])


@contextlib.contextmanager
def frozen(job: Job) -> Iterator[Job]:
    """Context that yields the job with read-only copies of all code that its run executes; they exist until it is left.

    Raises ValueError if a source cannot be read or a copy cannot be written.
    """
    if job.copied is not None:
        yield job
        return
    with code_copy.held(REPO) as code, code_copy.held_sources(job.own_sources) as copied:
        its_script = job.script and dataclasses.replace(job.script, copied=copied)
        yield dataclasses.replace(job, code=code, copied=copied, script=its_script)


def this_machine() -> schema.Machine:
    """Returns the machine for resolve(): the GPUs that this process sees and the CPUs that it may use."""
    sizes_gib = [gpu["memory_gib"] for gpu in gpus.visible()]
    smallest_gib = None if None in sizes_gib else min(sizes_gib, default=None)  # a driver may not report it
    return schema.Machine(len(sizes_gib), environment.usable_cpus(), smallest_gib)


def requested_config(overrides: list[str], machine: schema.Machine | None = None) -> schema.Config:
    """Returns the composed config, not yet resolved; machine: None for this one.  Raises ValueError for the user."""
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
    """Prepares a run.  Missing local data is made; it is downloaded only with fetch.  Raises ValueError for the user.

    check_own: whether to try the user's own model first, which takes seconds; machine: what the run may use, None for
    all of this machine.
    """
    config = requested_config(overrides, machine)
    its_script = script.from_config(config, overrides)
    machine = machine or this_machine()
    if its_script is None and gpus.torch_build() is None:
        raise ValueError(f"torch: {sys.executable} has none: pip install torch, or speedrun-bench[cpu] or [cuda]")
    uses_gpus = its_script is None and config.hardware.device != "cpu" and machine.num_gpus
    if uses_gpus and (fault := gpus.torch_fault()):
        raise ValueError(f"hardware.device={config.hardware.device}: {': '.join(fault)}")
    if config.hardware.sandbox:
        _check_sandbox(config)
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
    for name in GLOBS:  # from here on only for the record, which must not name a home folder
        if getattr(data, name) is not None:
            setattr(data, name, private.redact(getattr(data, name), REPO))
    config = resolve.resolve(config, machine, dataset.vocab_size)
    registry.program(config.instruments, Path(), config.hardware.device)
    _resolve_look(config)
    _check_survival(config)
    config, secrets = _recorded(config)
    return Job(config, dataset, list(overrides), deviations_of(config), its_script, secrets=secrets)


def _resolve_look(config: schema.Config) -> None:
    """Decides whether the run has a look if the settings leave it open.  Raises ValueError if it cannot have one."""
    why = _hinders_look(config)
    if config.look.enabled and why:
        raise ValueError(f"look.enabled=true: {why}: leave it out, or use look=off")
    if config.look.enabled is None:
        # a script is started again for it: only in its audit, or on request
        config.look.enabled = config.hardware.device == "cuda" and not why and config.script is None


def _check_sandbox(config: schema.Config) -> None:
    """Raises ValueError if the ranks of this run cannot be put into a sandbox."""
    kind, why = sandbox.kind(), None
    if config.script is not None:
        why = "a script has script.sandbox=true instead"
    elif config.hardware.nodes or config.checkpoint.every_min is not None or config.resume:
        why = f"{kind} has no network for hardware.nodes, and no checkpoints to resume from"
    elif absolute := [path for path in user_code.import_paths(schema.to_dict(config)) if path[0] in "/~"]:
        why = f"{absolute[0]}: {user_code.RELATIVE}"  # a rank would refuse it only after it has imported torch
    if why:
        raise ValueError(f"hardware.sandbox=true: {why}")


def _check_survival(config: schema.Config) -> None:
    """Raises ValueError if checkpoints or resume= are set for a run that cannot be resumed."""
    survives = {"checkpoint.every_min": config.checkpoint.every_min, "resume": config.resume}
    for name, value in survives.items():
        if value is None:
            continue
        if config.script is not None:
            raise ValueError(f"{name}={value}: a script saves and resumes by itself: remove it")
        if flagging := registry.flagging(config.instruments):
            raise ValueError(f"{name}={value}: instruments.{flagging[0]} disturbs the run: use one or the other")


def _hinders_look(config: schema.Config) -> str | None:
    """Returns why a run cannot have a look after the race, or None if it can."""
    if config.script is not None and (config.script.command or config.hardware.nodes):
        return "a script.command, or a run over several nodes, cannot be started again for its look"
    if config.profile.stop_after_window:
        return "profile.stop_after_window=true ends the run before its goal"
    if profiling := registry.profiling(config.instruments, config.hardware.device):
        return f"instruments.{profiling[0]} already profiles this run"
    return None


def _recorded(config: schema.Config) -> tuple[schema.Config, dict[tuple[Any, ...], str]]:
    """Returns the config as recorded and as hashed for config_id, and {path: text as given} of each credential in it.

    Exporters and their settings are not part of the run; they are redacted where they are written.
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
