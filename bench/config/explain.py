"""What every setting means, what it may be, and where a run's value comes from: for `run --help KEY` and `--cfg job`.

Nothing is said here that is not read elsewhere: meanings are comments (meanings.py), what is allowed are types
(typed.py), defaults are fields and yamls, origins are the files of the composition (compose.py).
"""

import dataclasses
import textwrap
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from bench.config import cluster, compose, meanings, schema
from bench.config.typed import KINDS, MISSING, allowed, default_of, plain_of, row_class, variant, variants
from bench.paths import CONF, project_folder

UNITS = {  # the last part of a setting's name: its unit
    "s": "seconds",
    "ms": "milliseconds",
    "mib": "MiB, 2**20 bytes",
    "nats": "nats per token",
    "loss": "nats per token",
    "pct": "per cent",
    "tokens": "tokens",
    "steps": "optimizer steps",
    "step": "optimizer steps, the first is 1",
    "seqs": "sequences",
    "frac": "a part of 1",
    "len": "tokens",
}
WIDTH = 120


@dataclass(frozen=True)
class Setting:
    """One setting, as a user types it before the equals sign."""

    key: str
    meaning: str
    allowed: str  # in words that follow "use"
    default: Any  # of the schema; typed.MISSING: some yaml of conf/ gives it
    brought_by: tuple[str, ...] = ()  # choices that have it, "optim=muon"; (): every run does

    @property
    def unit(self) -> str | None:
        """In words; None for what has none, or no number."""
        last = self.key.rpartition(".")[2].removeprefix("val_every_").removeprefix("gc_every_")
        return UNITS.get(last.rpartition("_")[2]) if "number" in self.allowed and not last.startswith("num_") else None


def settings() -> dict[str, Setting]:
    """Every setting that some run can have, by its key, in the schema's order."""
    result = {}
    of_cluster = _of_class(cluster.Cluster, "cluster.", (cluster.CHOICE,))
    for one in [*_of_class(schema.Config, ""), *_of_lists(), *of_cluster]:
        before = result.setdefault(one.key, one)
        if before is not one:
            result[one.key] = dataclasses.replace(before, brought_by=before.brought_by + one.brought_by)
    return result


def _of_class(cls, path, brought_by=(), known=()):
    """Of a dataclass and of those within; known: names of fields that another class has shown already."""
    hints, comments = typing.get_type_hints(cls, include_extras=True), meanings.of_class(cls)
    for one in dataclasses.fields(cls):
        key, hint = path + one.name, plain_of(hints[one.name])
        if one.name in known or key in compose.LISTS:
            continue
        if not dataclasses.is_dataclass(hint):
            yield Setting(key, comments[one.name], allowed(hints[one.name]), default_of(one), brought_by)
            if row := row_class(hints[one.name]):  # of a table: the rows that it has in the yaml which brings it
                group, _, choice = brought_by[0].partition("=")
                rows = yaml.safe_load(compose.path_of(group, choice).read_text())[one.name]
                for name, values in rows.items():
                    yield from _of_class(variant(row, values["name"]), f"{key}.{name}.", brought_by)
            continue
        yield from _of_class(hint, f"{key}.")
        shared = {field.name for field in dataclasses.fields(hint)}
        for name in variants(hint):
            choice = f"{key.replace('.', '/')}={name}"
            yield from _of_class(variant(hint, name), f"{key}.", (choice,), shared)


def _of_lists():
    """Of instruments and exporters: their yaml is their schema, what is allowed stands in [] behind the meaning."""
    for group in compose.LISTS:
        for name in compose.choices(group):
            path = compose.path_of(group, name)
            _, comments = meanings.of_file(path)
            for key, value in (yaml.safe_load(path.read_text())[name] or {}).items():
                meaning, _, words = comments[f"{name}.{key}"].removesuffix("]").partition(" [")
                words = words or KINDS.get(type(value), "a value, or null")
                yield Setting(f"{group}.{name}.{key}", meaning, words, value, (f"{group}=[{name}]",))


def about(group: str, name: str) -> str:
    """What a choice is: the first comment of its yaml, in one line."""
    return meanings.of_file(compose.path_of(group, name))[0]


def groups() -> dict[str, str]:
    """What each group of settings is for, by its dotted key; of an instrument or exporter what it is."""
    result = dict(_of_groups(schema.Config, ""))
    for group in compose.LISTS:
        result |= {group: meanings.of_class(schema.Config)[group]}
        result |= {f"{group}.{name}": about(group, name) for name in compose.choices(group)}
    return result | {"cluster": cluster.ABOUT}


def _of_groups(cls, path):
    for name, hint in typing.get_type_hints(cls).items():
        if dataclasses.is_dataclass(hint):
            yield path + name, meanings.of_class(cls)[name]
            yield from _of_groups(hint, f"{path}{name}.")


class Origins:
    """Where the values of a run come from."""

    def __init__(self, overrides: list[str], machine: schema.Machine | None = None):
        self._typed, self._files = compose.origins(overrides, machine)

    def of(self, key: str) -> tuple[str, str] | None:
        """(the override or the file that sets it, the file's comment on it); None: nothing does, it is the default."""
        for typed, word in self._typed.items():
            if key == typed or key.startswith(f"{typed}."):
                return f"{word} on the command line", ""
        for group, name in self._files:
            path = compose.path_of(group, name)
            inner = _within(path, group.replace("/", "."), key)
            comments = meanings.of_file(path)[1]
            if inner in comments:
                return shown(path), "" if group in compose.LISTS else comments[inner]
        return None


def _within(path, place, key):
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
    known, of_groups = settings(), groups()

    def comment(key):
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


def _lines(values, path, comment):
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
