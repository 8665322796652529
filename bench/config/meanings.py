"""Lists every setting that a run can have, with its meaning: the comment where the setting is declared.

A typed setting's meaning is the comment of its dataclass field (schema.py, models/optimizers/, models/schedules/), on
the field's line or above it. Instruments and exporters have their yamls as schemas, and so their meanings there; in any
other yaml a comment says why a value was chosen.
"""

import dataclasses
import functools
import inspect
import itertools
import re
import typing
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from bench.base.reading import plain_file
from bench.config import overrides, schema
from bench.config.groups import LISTS, choices, path_of, values_of
from bench.config.typed import KINDS, allowed, default_of, parts_of, row_class, variant, variant_of, variants
from bench.config.user_code import is_import_path

UNITS = {  # {the last part of a setting's name: its unit}
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

FIELD = re.compile(r"^((?: {4}#.*\n)*) {4}(\w+):.*?(?:  # (.*))?$", re.M)  # comments above, name, comment beside


@functools.cache
def class_comments(cls: Any) -> dict[str, str]:
    """Returns {field: its comment} of a dataclass, inherited fields included; "" for a field without a comment."""
    comments: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if fields := vars(base).get("__annotations__"):
            for above, name, beside in FIELD.findall(inspect.getsource(base)):
                if name in fields:
                    comments[name] = beside or " ".join(line.strip(" #") for line in above.splitlines())
    return comments


@functools.cache
def file_comments(path: Path) -> tuple[str, dict[str, str]]:
    """Returns what a yaml's first comment says, and {dotted key: the comment on its line, or ""}."""
    text, comments = plain_file.text(path), dict[str, str]()
    lines = text.splitlines()
    header = itertools.takewhile(lambda line: line.startswith("#"), lines)
    about = [line.removeprefix("#").strip() for line in header if not line.startswith("# @package")]
    _collect_comments(yaml.compose(text), "", lines, comments)
    return " ".join(about), comments


def _collect_comments(node: yaml.Node | None, path: str, lines: list[str], comments: dict[str, str]) -> None:
    if not isinstance(node, yaml.MappingNode):
        return
    for key, value in node.value:
        dotted = path + str(key.value)
        is_block = isinstance(value, yaml.CollectionNode) and not value.flow_style
        end = (key if is_block else value).end_mark
        _, mark, note = lines[end.line][end.column :].partition("#")
        comments[dotted] = note.strip() if mark else ""
        _collect_comments(value, f"{dotted}.", lines, comments)


@dataclass(frozen=True)
class Setting:
    """A setting, named by the key that a user types before the equals sign."""

    key: str
    meaning: str
    allowed: str  # allowed values, as text that follows "use"
    default: Any  # the schema's default; typed.MISSING if a yaml of conf/ must give it
    brought_by: tuple[str, ...] = ()  # the choices that have the setting, "optim=muon"; () if every run has it

    @property
    def unit(self) -> str | None:
        """The unit as text; None for a setting that has no unit or is no number."""
        last = self.key.rpartition(".")[2].removeprefix("val_every_").removeprefix("gc_every_")
        kind = "whole number" if last.endswith(("step", "steps")) else "number"
        has_one = kind in self.allowed and not re.match("num_|.*_per_", last)
        return UNITS.get(last.rpartition("_")[2]) if has_one else None


def settings(own: bool = False) -> dict[str, Setting]:
    """Returns {key: setting} of every setting that some run can have, in the schema's order.

    own: also of the user's own optimizers and schedules, which imports their files. Raises ValueError if one fails.
    """
    by_key: dict[str, Setting] = {}
    cluster_settings = _settings_of_class(overrides.Cluster, "cluster.", (overrides.CLUSTER_CHOICE,))
    for setting in [*_settings_of_class(schema.Config, "", own=own), *_settings_of_lists(), *cluster_settings]:
        if (before := by_key.setdefault(setting.key, setting)) is not setting:
            also = f"; with {' or '.join(setting.brought_by)}: "  # the user's own class may mean something else by it
            by_key[setting.key] = dataclasses.replace(
                before,
                meaning=before.meaning + f"{also}{setting.meaning}" * (setting.meaning != before.meaning),
                allowed=before.allowed + f"{also}{setting.allowed}" * (setting.allowed != before.allowed),
                brought_by=before.brought_by + setting.brought_by,
            )
    return by_key


def _settings_of_class(
    cls: Any, path: str, brought_by: tuple[str, ...] = (), omitted: Iterable[str] = (), own: bool = False
) -> Iterator[Setting]:
    """Yields the settings of a dataclass and of those in it. omitted: names of fields to omit."""
    hints, comments = typing.get_type_hints(cls, include_extras=True), class_comments(cls)
    for field in dataclasses.fields(cls):
        key, hint = path + field.name, parts_of(hints[field.name])[0]
        if field.name in omitted or key in LISTS:
            continue
        if not dataclasses.is_dataclass(hint):
            yield Setting(key, comments.get(field.name, ""), allowed(hints[field.name]), default_of(field), brought_by)
            if row := row_class(hints[field.name]):  # a table: its rows are those of the yaml that has it
                group, _, choice = brought_by[0].partition("=")
                rows = yaml.safe_load(path_of(group, choice).read_text())[field.name]
                for name, values in rows.items():
                    yield from _settings_of_class(variant(row, values["name"]), f"{key}.{name}.", brought_by)
            continue
        yield from _settings_of_class(hint, f"{key}.", own=own)
        shared, names = {field.name for field in dataclasses.fields(hint)}, {name: name for name in variants(hint)}
        group = key.replace(".", "/")
        if own and names:
            named = {choice: str(values_of(group, choice).get("name")) for choice in choices(group)}
            names |= {choice: name for choice, name in named.items() if is_import_path(name)}
        for choice, name in names.items():
            chosen = variant_of(hint, {"name": name}, f"{key}.")
            yield from _settings_of_class(chosen, f"{key}.", (f"{group}={choice}",), shared)


def of_class(cls: Any, path: str) -> dict[str, Setting]:
    """Returns {key: setting} of the fields of a dataclass, under a path such as "optim.", without nested ones."""
    hints, comments = typing.get_type_hints(cls, include_extras=True), class_comments(cls)
    plain = [field for field in dataclasses.fields(cls) if not dataclasses.is_dataclass(parts_of(hints[field.name])[0])]
    return {
        path + field.name: Setting(
            path + field.name, comments.get(field.name, ""), allowed(hints[field.name]), default_of(field)
        )
        for field in plain
    }


def _settings_of_lists() -> Iterator[Setting]:
    """Yields the settings of instruments and exporters; comments in their yamls end with the allowed values in []."""
    for group in LISTS:
        for name in choices(group):
            path = path_of(group, name)
            _, comments = file_comments(path)
            for key, value in (yaml.safe_load(path.read_text())[name] or {}).items():
                meaning, _, allowed_values = comments[f"{name}.{key}"].removesuffix("]").partition(" [")
                allowed_values = allowed_values or KINDS.get(type(value), "a value, or null")
                yield Setting(f"{group}.{name}.{key}", meaning, allowed_values, value, (f"{group}=[{name}]",))


def about(group: str, name: str) -> str:
    """Returns a choice's description: the first comment of its yaml, as one line."""
    return file_comments(path_of(group, name))[0]


def groups() -> dict[str, str]:
    """Returns {dotted key: description} of every group of settings, each instrument and each exporter."""
    about_groups = dict(_abouts_of_groups(schema.Config, ""))
    for group in LISTS:
        about_groups |= {group: class_comments(schema.Config)[group]}
        about_groups |= {f"{group}.{name}": about(group, name) for name in choices(group)}
    return about_groups | {"cluster": overrides.CLUSTER_ABOUT}


def _abouts_of_groups(cls: Any, path: str) -> Iterator[tuple[str, str]]:
    for name, hint in typing.get_type_hints(cls).items():
        if dataclasses.is_dataclass(hint):
            yield path + name, class_comments(cls)[name]
            yield from _abouts_of_groups(hint, f"{path}{name}.")
