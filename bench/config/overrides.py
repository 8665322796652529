"""Parses key=value arguments in Hydra's grammar: those of a run, the points of a sweep, and a job's for SLURM.

Every mistake becomes a ValueError that names what is wrong, the value, and what to try.

cluster=slurm cluster.KEY=VALUE are settings of a command that is sent to SLURM as a job (bench/launch/cluster.py). They
belong to the command, not to its runs: no config.yaml and no config_id has them.
"""

import dataclasses
import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from bench.base.reading import plain_file
from bench.config import groups, typed, window_settings
from models.settings import PositiveInt

PATH_KEYS = ("data.train_glob", "data.val_glob", "script", *(f"script.{key}" for key in ("path", "root", "python")))
PATH_KEYS += ("script.dialect",)
WORDS_KEYS = ("script.args", "script.command")  # lists, or text that is split as a shell would
PLAIN_ELEMENT = re.compile(r"[\w./+@-]+")  # text that the grammar reads without quotes within a list
NUMBER = re.compile(r"[\d.]+(e\d+)?")
PLAIN_PATHS = re.compile(r"[\w./,-]+")  # paths that the grammar reads without quotes, also several of a sweep
SWEEP_KEYS = ("hydra.launcher", "hydra.sweeper", "hydra.callbacks", "hydra.job.name", "hydra.verbose", "hydra.mode")
WORDS = {"null": None, "true": True, "false": False}
NOISE = re.compile(r" expecting {.*}|Config search path:.*", re.DOTALL)  # noise in Hydra's messages
HIDDEN_SECOND = re.compile(r"\s+([A-Za-z_][\w./]*=.*)")  # another setting within one word
CLUSTER_CHOICE = "cluster=slurm"
CLUSTER_ABOUT = (
    f"{CLUSTER_CHOICE} sends run, speedrun, race, ladder, calibrate or doctor to SLURM as a job, "
    "over hardware.nodes nodes"
)


def spelled(overrides: list[str]) -> list[str]:
    """Returns the user's overrides with profile=stages in place of nanochat's --enable_profiling=True."""
    spelled_out = []
    for word in overrides:
        key, _, value = word.partition("=")
        if key.lstrip("-").replace("-", "_") != "enable_profiling":
            spelled_out.append(word)
        elif value.lower() in ("", "true", "1"):
            other = [
                override for override in overrides if override.startswith("profile=") and override != "profile=stages"
            ]
            if other:
                raise ValueError(f"{word}: it means profile=stages, and {other[0]} is given too: keep one of them")
            spelled_out.append("profile=stages")
        elif value.lower() not in ("false", "0"):
            raise ValueError(f"{word}: use True or False")
    return spelled_out


def with_schedule(overrides: Iterable[str]) -> list[str]:
    """Replaces profile.schedule={wait:5,...} and profile.every=500 (or 60s) by the settings of the instrument trace."""
    spelled = []
    for word in overrides:
        key, _, value = word.partition("=")
        steps: dict[str, Any] = {}
        if key == "profile.every":
            seconds = value.removesuffix("s")
            steps = {"every_steps": value} if seconds == value else {"first_s": seconds, "every_s": seconds}
        elif key == "profile.schedule":
            steps = window_settings.steps_of_schedule(parsed(word).value())
        else:
            spelled.append(word)
            continue
        settings = {f"instruments.trace.{name}": number for name, number in steps.items()}
        for other in overrides:
            if other.partition("=")[0] in settings:
                raise ValueError(f"{word}: {other} is given too, which it sets: keep one of them")
        spelled += ["+instruments=trace", *(f"{name}={number}" for name, number in settings.items())]
    return spelled


def parsed(word: str) -> Any:
    """Returns an override as Hydra's parser reads it. Raises ValueError if the word is no override, or is a sweep."""
    override = _parsed(word)
    if override.is_sweep_override():
        values = ["...", "..."]
        if override.is_discrete_sweep() and not hasattr(override.value(), "filter"):
            values = [*itertools.islice(override.sweep_string_iterator(), 2), "..."][:2]
        first, second = (f"{override.key_or_group}={value}" for value in values)
        in_a_race = f"; a race gives each value an arm: A={first} B={second}" * (word.partition("=")[0] != "seed")
        raise ValueError(f"{word}: several values are a sweep, which ./run.sh run -m makes{in_a_race}")
    return override


def value_of(text: str) -> Any:
    """Returns the value of an override as config.yaml has it: a number, true or false, null or text."""
    if text.lower() in WORDS:
        return WORDS[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text.strip("'\"")


def literal(value: Any) -> str:
    """Formats a value for Hydra's command line: {first_window_tokens:8,window_tokens:224}.  A text stays as it is."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_element(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(_element, value)) + "]"
    return "null" if value is None else str(value)


def _element(value: Any) -> str:
    """Formats a value within a list or dict, where a text with a sign of Hydra's grammar has to be quoted."""
    return _in_quotes(value) if isinstance(value, str) and not PLAIN_ELEMENT.fullmatch(value) else literal(value)


def _in_quotes(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def names_code(word: str) -> bool:
    """Returns whether an override names code of the user's own: a script, or a class by its import path."""
    return word.lstrip("+").startswith("script") or ":" in word


def is_hydra_override(word: str) -> bool:
    """Returns whether a word sets something of Hydra's: hydra/launcher=joblib, hydra.launcher.n_jobs=2."""
    return bool(re.match(r"[+~]*hydra[./]", word))


def split_sweep(overrides: list[str]) -> tuple[list[str], list[str]]:
    """Splits a sweep's overrides into Hydra's and those of its runs, quoted for Hydra's grammar. Raises ValueError."""
    hydra_overrides = [word for word in overrides if is_hydra_override(word)]
    for word in hydra_overrides:
        key, allowed = word.lstrip("+~").partition("=")[0].replace("/", "."), ", ".join(SWEEP_KEYS)
        if not key.startswith(SWEEP_KEYS):
            raise ValueError(f"{word}: of Hydra's settings a sweep takes only {allowed}; output folders are fixed")
    run_overrides = [word for word in overrides if word not in hydra_overrides]
    for word in run_overrides:
        _parsed(word)
    return hydra_overrides, [_quoted(word) for word in run_overrides]


def plain(word: str) -> bool:
    """Returns whether a word gives a single value, which every run of a sweep then has."""
    return not _parsed(word).is_sweep_override()


def check_points(word: str, loader: Any) -> None:
    """Raises ValueError for a word without points: an interval, an empty range, a glob(...) that matches no choice.

    loader is Hydra's, which knows the choices.
    """
    override, key = _parsed(word), word.partition("=")[0]
    if override.is_interval_sweep():
        raise ValueError(
            f"{word}: an interval has infinitely many values: list some, {key}=0.001,0.002, or give a step, "
            f"{key}=range(0.001,0.003,0.001), or search in it: hydra/sweeper=optuna"
        )
    pattern = override.value()
    names = loader.get_group_options(key) if hasattr(pattern, "filter") else None
    if names is None and override.is_sweep_override() and not any(True for _ in override.sweep_string_iterator()):
        raise ValueError(f"{word}: it has no value: range(3) is 0, 1, 2 and range(1,4) is 1, 2, 3")
    if names is not None and not pattern.filter(names):
        has = f"none of {', '.join(names)}" if names else f"nothing: {key} is not a group of files, as model is"
        raise ValueError(f"{word}: it matches {has}")


def _parsed(word: str) -> Any:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    _refuse(word)
    try:
        return OverridesParser.create().parse_override(_quoted(word))
    except HydraException as error:
        problem = f"{one_line(error)}; quote a value with spaces or signs: key='\"a value\"'"
        if any(word.count(opening) > word.count(closing) for opening, closing in ("()", "[]", "{}")):
            problem = f"a bracket is not closed; quote the word for the shell: '{word}...'"
        elif second := HIDDEN_SECOND.search(word):
            problem = f"two settings are in one word: separate them, {word[: second.start()]} {second[1]}"
        raise ValueError(f"{word}: {problem}") from None


def _quoted(override: str) -> str:
    """Quotes a path for Hydra's grammar, because it may hold ~, spaces, brackets and quotes."""
    key, _, value = override.partition("=")
    if key in ("script.rev", "name") and NUMBER.fullmatch(value):  # a hash, or a name as 1.10
        return f"{key}='{value}'"
    plain_values = PLAIN_PATHS if key in PATH_KEYS else re.compile(r"(\w+\(|\[).*")  # a list, or choice(...)
    is_plain = key.startswith("script") and plain_values.fullmatch(value)
    if key not in PATH_KEYS + WORDS_KEYS or is_plain or value in ("", "null") or value[0] in "'\"":
        return override
    return f"{key}={_in_quotes(value)}"


def _refuse(override: str) -> None:
    if (shown := plain_file.name_in_utf8(override)) != override:
        raise ValueError(f"{shown}: has bytes that are not UTF-8, which no record can hold: write it in UTF-8")
    if is_hydra_override(override):
        raise ValueError(f"{override}: settings of Hydra are for sweeps: use ./run.sh run -m")
    if override[:1] in ("+", "~") and not re.match(r"(\+|~)(instruments|exporters)=", override):
        sign, key, value = override[0], *override.lstrip("+~").partition("=")[::2]
        example = f"{sign}{key}=NAME" if key in ("instruments", "exporters") else f"{key}={value or 'VALUE'}"
        example += f", or {key}=null where it may be off" if sign == "~" and "NAME" not in example else ""
        raise ValueError(f"{override}: + and ~ work on lists only, as +instruments=memory_history: write {example}")
    if override in ("-m", "--multirun"):
        raise ValueError(f"{override}: only ./run.sh run makes sweeps: omit it")
    if override.startswith("-") and "=" in override:
        raise ValueError(f"{override}: settings are key=value, not flags: write {override.lstrip('-')}")
    if "=" not in override:
        choices = [f"{group}={override}" for group in groups.GROUPS if override in groups.choices(group)]
        example = " or ".join(choices) or "e.g. seed=3 or model=modern"
        raise ValueError(f"{override!r} is not a setting: write key=value, {example}")


def one_line(error: Exception) -> str:
    """Returns an error's message as one line, without noise, or the error's type if it has no message."""
    lines = [line.strip() for line in NOISE.sub("", str(error)).splitlines() if line.strip(" ^")]
    ends = ["" if line[-1] in ".,:;" else "," for line in lines[:-1]] + [""]
    return " ".join(line + end for line, end in zip(lines, ends)) or type(error).__name__


@dataclass(kw_only=True)
class Cluster:
    partition: str | None = None  # where the job goes, sbatch --partition; null: the cluster's default
    account: str | None = None  # account that is charged, sbatch --account; null: your default
    nodes: PositiveInt | None = None  # sbatch --nodes; null: the most that hardware.nodes=N asks for
    time_min: PositiveInt | None = None  # minutes until SLURM ends the job, sbatch --time; null: the partition's limit
    gpus_per_node: str | None = None  # GPUs of each node, 8 or h100:8, sbatch --gpus-per-node; null: not asked for
    cpus_per_node: PositiveInt | None = None  # CPUs of each node, sbatch --cpus-per-task; null: SLURM's default
    requeue: bool | None = None  # begin again after a preemption or a lost node, sbatch --requeue; null: as SLURM does
    name: str = "speedrun"  # name of the job, as squeue shows it, sbatch --job-name
    options: str | None = None  # other options of sbatch, in quotes: '--exclusive --constraint=h100'; null: none


def split_cluster(overrides: Iterable[str]) -> tuple[list[str], list[str]]:
    """Splits a command's overrides into those of the cluster and all others."""
    overrides = list(overrides)
    cluster_overrides = [word for word in overrides if word.startswith(("cluster=", "cluster."))]
    return cluster_overrides, [word for word in overrides if word not in cluster_overrides]


def cluster_of(cluster_overrides: Iterable[str]) -> Cluster:
    """Checks the cluster's overrides and returns them as a Cluster. Raises ValueError if one is wrong."""
    words = list(cluster_overrides)
    clusters = [word for word in words if word.startswith("cluster=")]
    if words and set(clusters) != {CLUSTER_CHOICE}:
        raise ValueError(f"{' '.join(clusters or words)}: write {CLUSTER_CHOICE}, or remove it to run on this machine")
    pairs = [word.removeprefix("cluster.").partition("=") for word in words if word not in clusters]
    return typed.build(Cluster, {key: value_of(value) for key, _, value in pairs}, "cluster.")


def cluster_settings(cluster_overrides: Iterable[str]) -> dict[str, Any]:
    """Returns the cluster's settings by name; {} if the overrides choose no cluster."""
    return dataclasses.asdict(cluster_of(cluster_overrides)) if CLUSTER_CHOICE in cluster_overrides else {}
