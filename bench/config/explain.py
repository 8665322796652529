"""A run's settings explained: where each value comes from and what it means, for `--cfg job` and `run --help KEY`."""

import json
import shutil
import textwrap
from collections.abc import Callable, Iterable, Iterator
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
    """Where the values of a run come from."""

    def __init__(self, overrides: list[str], machine: schema.Machine | None = None) -> None:
        self._overrides, self._files = compose.origins(overrides, machine)

    def of(self, key: str) -> tuple[str, str] | None:
        """(the override or the file that sets it, the file's comment on it); None: nothing does, it is the default."""
        for given, word in self._overrides.items():
            if key == given or key.startswith(f"{given}."):
                return f"{word} on the command line", ""
        for group, name in self._files:
            path = path_of(group, name)
            inner = _within(path, group.replace("/", "."), key)
            comments = meanings.file_comments(path)[1]
            if inner in comments:
                return shown(path), "" if group in LISTS else comments[inner]
        return None


def _within(path: Path, place: str, key: str) -> str | None:
    """The key as a yaml at that place writes it, or at its own @package; None for one that it cannot set."""
    first = path.read_text().partition("\n")[0]
    if first.startswith("# @package "):
        place = first.split()[-1].replace("_global_", "")
    prefix = f"{place}." if place else ""
    return key.removeprefix(prefix) if key.startswith(prefix) else None


def shown(path: Path) -> str:
    """conf/optim/adamw.yaml, of this program or of the user's project; the whole path of a yaml that lies elsewhere."""
    homes = [folder for folder in (CONF.parent, project_folder()) if path.is_relative_to(folder)]
    return path.relative_to(homes[0]).as_posix() if homes else str(path)


def commented(config: schema.Config, origins: Origins) -> str:
    """The config as YAML; each setting has its meaning, what it may be, and where its value is from, as a comment."""
    known, of_groups = meanings.settings(), meanings.groups()

    def comment(key: str) -> str:
        if key in of_groups:
            return of_groups[key]
        if key not in known:
            return ""  # of the user's own class
        setting, origin = known[key], origins.of(key)
        facts = [setting.unit, setting.allowed, origin[0] if origin else "default"]
        if origin and setting.default not in (MISSING, None):
            facts.append(f"default {setting.default}")
        return f"{setting.meaning} [{'; '.join(filter(None, facts))}]"

    return "".join(f"{line}\n" for line in _lines(schema.to_dict(config), "", comment))


def _lines(values: dict[str, Any], path: str, comment: Callable[[str], str]) -> Iterator[str]:
    """Nested values -> lines of YAML; a comment beside its line where it fits, else above it."""
    indent = "  " * path.count(".")
    for key, value in values.items():
        nested = isinstance(value, dict) and value
        first, *others = [f"{key}:"] if nested else yaml.safe_dump({key: value}, sort_keys=False).splitlines()
        words = comment(path + key)
        if len(indent) + len(first) + len(words) + 4 > WIDTH:
            yield from textwrap.wrap(words, WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")
            words = ""
        yield f"{indent}{first}" + (f"  # {words}" if words else "")
        yield from (indent + line for line in others)
        if nested:
            yield from _lines(value, f"{path}{key}.", comment)


def help_text(argv: list[str], machine_of: Callable[[], schema.Machine]) -> str | None:
    """The words of a verb that takes key=value -> text, where there is a KEY beside --help; else None.

    machine_of: asks the machine, which takes longer than most answers need.
    """
    keys = [word for word in argv if "=" not in word and not word.startswith("-")]
    if not {"-h", "--help"} & set(argv) or not keys:
        return None
    overrides = [word for word in argv if "=" in word and not word.startswith("-")]
    return "\n\n".join(help_of(key, overrides, machine_of()) for key in keys)


def help_of(word: str, overrides: list[str], machine: schema.Machine | None = None) -> str:
    """A setting's or group's key, or the last part of it -> text.  Raises ValueError for a word that is neither."""
    keys = _named(word, [*meanings.settings(), *meanings.groups(), *groups.GROUPS])
    now = _Composition(overrides, machine)
    return "\n\n".join(_of_group(key, now) if key not in meanings.settings() else _of_setting(key, now) for key in keys)


def _named(word: str, known: Iterable[str]) -> list[str]:
    """The keys that a word names: itself, or all that end in it."""
    wanted = word.replace("/", ".")
    keys = list(dict.fromkeys(key.replace("/", ".") for key in known))
    named = [wanted] if wanted in keys else [key for key in keys if key.endswith(f".{wanted}")]
    if named:
        return named
    guess = groups.did_you_mean(wanted, keys)
    raise ValueError(f"--help {word}: there is no such setting or group; {guess}groups are {', '.join(groups.GROUPS)}")


class _Composition:
    """What the words beside --help make, and what they would make with a choice added."""

    def __init__(self, overrides: list[str], machine: schema.Machine | None) -> None:
        self.overrides, self.machine = overrides, machine
        self._of_cluster, of_run = split_cluster(overrides)
        self.config = schema.to_dict(compose.compose(of_run, machine))
        self.config["cluster"] = cluster_settings(self._of_cluster)
        self._origins = Origins(of_run, machine)

    def with_choice(self, choice: str) -> "_Composition":
        """The same with an optimizer, schedule, instrument or exporter more."""
        group, _, name = choice.partition("=")
        if group in groups.LISTS:
            choice = f"{group}=[{','.join([*self.config[group], name.strip('[]')])}]"
        return _Composition([*self.overrides, choice], self.machine)

    def value(self, key: str) -> Any:
        """MISSING for a setting that this run does not have."""
        try:
            return typed.get(self.config, key)
        except KeyError:
            return MISSING

    def origin(self, key: str) -> str:
        """ ", from conf/...: why", or that it is the default."""
        if key.startswith("cluster."):
            typed = [word for word in self._of_cluster if word.startswith(f"{key}=")]
            return f"from {typed[-1]} on the command line" if typed else "the default"
        origin = self._origins.of(key)
        if origin is None:
            return "the default"
        source, comment = origin
        return f"from {source}" + (f": {comment}" if comment else "")


def _of_setting(key: str, now: "_Composition") -> str:
    setting = meanings.settings()[key]
    value, lacks = now.value(key), ""
    if value == MISSING:
        lacks = f"not a setting of this run; with {setting.brought_by[0]} it is "
        now = now.with_choice(setting.brought_by[0])
        value = now.value(key)
    rows = {
        "use": setting.allowed,
        "unit": setting.unit,
        "default": "none, a file of conf/ gives it" if setting.default == MISSING else _yaml(setting.default),
        "only with": " or ".join(setting.brought_by),
        "now": f"{lacks}{_yaml(value)}, {now.origin(key)}",
    }
    lines = [_wrapped(f"{name:<11}{text}", 2, 13) for name, text in rows.items() if text]
    return "\n".join([key, _wrapped(setting.meaning, 2, 2), *lines])


def _of_group(key: str, now: "_Composition") -> str:
    about, group = meanings.groups().get(key, ""), key.replace(".", "/")
    lines = [_wrapped(f"{key}: {about}" if about else key, 0, 2)]
    if group in groups.GROUPS:
        names = groups.choices(group)
        words = [f"{group}=[{name}]" if group in groups.LISTS else f"{group}={name}" for name in names]
        width = max(map(len, words)) + 2
        for name, word in zip(names, words):
            about = meanings.about(group, name).split(". ")[0].rstrip(".")
            lines.append(_wrapped(f"{word:<{width}}{about}", 2, width + 2))
    inside = [key_inside for key_inside in meanings.settings() if key_inside.startswith(f"{key}.")]
    if key in groups.LISTS:  # those of the others are shown with their name: --help trace
        inside = [key_inside for key_inside in inside if now.value(key_inside) != MISSING]
    if inside:
        lines += ["", "settings, as this run has them (./run.sh run --help KEY says more of one):"]
    for key_inside in inside:
        setting, value = meanings.settings()[key_inside], now.value(key_inside)
        shown = f", only with {' or '.join(setting.brought_by)}" if value == MISSING else f" = {_yaml(value)}"
        lines.append(_wrapped(key_inside + shown, 2, 6))
        lines.append(_wrapped(f"{setting.meaning} [{setting.allowed}]", 6, 6))
    return "\n".join(lines)


def _yaml(value: Any) -> str:
    """As one types it."""
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


def _wrapped(text: str, first: int, later: int) -> str:
    width = min(WIDTH, shutil.get_terminal_size().columns)
    return textwrap.fill(text, max(width, 60), initial_indent=" " * first, subsequent_indent=" " * later)
