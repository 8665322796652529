"""Explains a run's settings, where each value comes from and what it means, for `--cfg job` and `run --help KEY`."""

import functools
import json
import shutil
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from bench.base.paths import CONF, project_folder
from bench.config import compose, groups, meanings, schema, typed
from bench.config.groups import LISTS, path_of
from bench.config.overrides import cluster_settings, split_cluster
from bench.config.typed import MISSING

WIDTH = 120


class Origins:
    """Where each value of a run comes from, including the settings of a job for SLURM."""

    def __init__(self, overrides: list[str], machine: schema.Machine | None = None) -> None:
        self.overrides, self.machine = overrides, machine
        self._cluster, self._run = split_cluster(overrides)
        self._override_of, self._files = compose.origins(self._run, machine)
        self._override_of |= {word.partition("=")[0]: word for word in self._cluster if word.startswith("cluster.")}

    def of(self, key: str) -> tuple[str, str] | None:
        """Returns (the override or file that sets the key, the file's comment on it); None if it has its default."""
        for overridden, word in self._override_of.items():
            if key == overridden or key.startswith(f"{overridden}."):
                return f"{word} on the command line", ""
        for group, name in self._files:
            path, place = path_of(group, name), group.replace("/", ".")
            first = path.read_text().partition("\n")[0]
            if first.startswith("# @package "):
                place = first.split()[-1].replace("_global_", "")
            prefix, comments = f"{place}." if place else "", meanings.file_comments(path)[1]
            if key.startswith(prefix) and (comment := comments.get(key.removeprefix(prefix))) is not None:
                return shown(path), "" if group in LISTS else comment
        return None

    @functools.cached_property
    def values(self) -> dict[str, Any]:
        """All settings of the run, nested."""
        run = schema.to_dict(compose.compose(self._run, self.machine))
        return run | {"cluster": cluster_settings(self._cluster)}

    def value(self, key: str) -> Any:
        """Returns the value of a setting, or MISSING if this run does not have it."""
        try:
            return typed.get(self.values, key)
        except KeyError:
            return MISSING

    def with_choice(self, choice: str) -> "Origins":
        """Returns the origins of the same run if it also chose this optimizer, schedule, instrument or exporter."""
        group, _, name = choice.partition("=")
        if group in LISTS:
            choice = f"{group}=[{','.join([*self.values[group], name.strip('[]')])}]"
        return Origins([*self.overrides, choice], self.machine)


def shown(path: Path) -> str:
    """Returns the path relative to this program or the user's project (conf/optim/adamw.yaml), else the whole path."""
    homes = [folder for folder in (CONF.parent, project_folder()) if path.is_relative_to(folder)]
    return path.relative_to(homes[0]).as_posix() if homes else str(path)


def commented(config: schema.Config, origins: Origins) -> str:
    """Returns the config as YAML, with each setting's meaning, allowed values and value's origin as a comment."""
    settings, group_meanings = meanings.settings(), meanings.groups()
    if config.optim is not None:  # a class of the user's own may mean something else by a name
        settings |= meanings.of_class(type(config.optim), "optim.")
        settings |= meanings.of_class(type(config.optim.schedule), "optim.schedule.")

    def comment(key: str) -> str:
        if key in group_meanings:
            return group_meanings[key]
        if key not in settings:
            return ""  # a setting of the user's own class
        setting, origin = settings[key], origins.of(key)
        facts = [setting.unit, setting.allowed, origin[0] if origin else "default"]
        if origin and setting.default not in (MISSING, None):
            facts.append(f"default {setting.default}")
        return f"{setting.meaning} [{'; '.join(filter(None, facts))}]"

    return "".join(f"{line}\n" for line in _lines(schema.to_dict(config), "", comment))


def _lines(values: dict[str, Any], path: str, comment: Callable[[str], str]) -> Iterator[str]:
    """Yields the lines of YAML of nested values; a comment stands beside its line if it fits, else above it."""
    indent = "  " * path.count(".")
    for key, value in values.items():
        nested = isinstance(value, dict) and value
        first, *others = [f"{key}:"] if nested else yaml.safe_dump({key: value}, sort_keys=False).splitlines()
        note = comment(path + key)
        if len(indent) + len(first) + len(note) + 4 > WIDTH:
            yield from textwrap.wrap(note, WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")
            note = ""
        yield f"{indent}{first}" + (f"  # {note}" if note else "")
        yield from (indent + line for line in others)
        if nested:
            yield from _lines(value, f"{path}{key}.", comment)


def help_text(argv: list[str], machine_of: Callable[[], schema.Machine]) -> str | None:
    """Returns the help of each KEY given with --help, as in `run --help optim.lr`; None without --help or a KEY.

    Without a KEY, of each setting that is given (`run --help track=cpu_nano`).  machine_of describes this machine; it
    is called only if there is a KEY, because it takes time.
    """
    keys = [word for word in argv if "=" not in word and not word.startswith("-")]
    overrides = [word for word in argv if "=" in word and not word.startswith("-")]
    keys = keys or [word.lstrip("+~").partition("=")[0] for word in overrides]
    if not {"-h", "--help"} & set(argv) or not keys:
        return None
    return "\n\n".join(help_of(key, overrides, machine_of()) for key in keys)


def help_of(word: str, overrides: list[str], machine: schema.Machine | None = None) -> str:
    """Returns the help of a setting or group, given its key or the key's last part. Raises ValueError if unknown."""
    wanted = word.replace("/", ".")
    for own in (False, True):  # the files of the user's own optimizers are imported only where they may matter
        settings = meanings.settings(own)
        names = [*settings, *meanings.groups(), *groups.GROUPS, *(key.rpartition(".")[0] for key in settings)]
        keys = dict.fromkeys(name.replace("/", ".") for name in names if name)
        meant = [wanted] if wanted in keys else [key for key in keys if key.endswith(f".{wanted}")]
        if meant and not any(key.startswith("optim") for key in meant):
            break
    if not meant:
        choices = [f"{group}={word}" for group in groups.GROUPS if word in groups.choices(group)]
        guess, known = groups.did_you_mean(wanted, keys), ", ".join(groups.GROUPS)
        guess = f"did you mean {' or '.join(choices)}? " if choices else guess
        raise ValueError(f"--help {word}: there is no such setting or group; {guess}groups are {known}")
    now = Origins(overrides, machine)
    texts = (_setting_text(settings[key], now) if key in settings else _group_text(key, settings, now) for key in meant)
    return "\n\n".join(texts)


def _setting_text(setting: meanings.Setting, now: Origins) -> str:
    key = setting.key
    value, lacks = now.value(key), ""
    if value == MISSING:
        lacks = f"not a setting of this run; with {setting.brought_by[0]} it is "
        now = now.with_choice(setting.brought_by[0])
        value = now.value(key)
    origin = now.of(key)
    source = "the default" if origin is None else f"from {': '.join(filter(None, origin))}"
    rows = {
        "use": setting.allowed,
        "unit": setting.unit,
        "default": "none, set in conf/" if setting.default == MISSING else _yaml(setting.default),
        "only with": " or ".join(setting.brought_by),
        "now": f"{lacks}{_yaml(value)}, {source}",
    }
    lines = [_wrapped(f"{name:<11}{text}", 2, 13) for name, text in rows.items() if text]
    return "\n".join([key, _wrapped(setting.meaning, 2, 2), *lines])


def _group_text(key: str, settings: dict[str, meanings.Setting], now: Origins) -> str:
    about, group = meanings.groups().get(key, ""), key.replace(".", "/")
    lines = [_wrapped(f"{key}: {about}" if about else key, 0, 2)]
    if group in groups.GROUPS:
        names = groups.choices(group)
        choices = [f"{group}=[{name}]" if group in groups.LISTS else f"{group}={name}" for name in names]
        width = max(map(len, choices)) + 2
        for name, choice in zip(names, choices):
            about = meanings.about(group, name).split(". ")[0].rstrip(".")
            lines.append(_wrapped(f"{choice:<{width}}{about}", 2, width + 2))
    inside = [(setting, now.value(name)) for name, setting in settings.items() if name.startswith(f"{key}.")]
    if key in groups.LISTS:  # `--help NAME` shows the settings of those that the run does not have
        inside = [(setting, value) for setting, value in inside if value != MISSING]
    if inside:
        lines += ["", "settings, as this run has them (./run.sh run --help KEY says more of one):"]
    others: dict[str, list[str]] = {}
    is_of_run = any(value != MISSING for _, value in inside)  # else those of a choice are all that there is to show
    for setting, value in inside:
        shown = f", only with {' or '.join(setting.brought_by)}" if value == MISSING else f" = {_yaml(value)}"
        if value == MISSING and is_of_run:
            others.setdefault(" or ".join(setting.brought_by), []).append(setting.key.removeprefix(f"{key}."))
            continue
        lines.append(_wrapped(setting.key + shown, 2, 6))
        lines.append(_wrapped(f"{setting.meaning} [{setting.allowed}]", 6, 6))
    lines += [_wrapped(f"only with {choices}: {', '.join(names)}", 2, 6) for choices, names in others.items()]
    return "\n".join(lines)


def _yaml(value: Any) -> str:
    """Returns the value as a user would type it."""
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


def _wrapped(text: str, first: int, later: int) -> str:
    width = min(WIDTH, shutil.get_terminal_size().columns)
    return textwrap.fill(text, max(width, 60), initial_indent=" " * first, subsequent_indent=" " * later)
