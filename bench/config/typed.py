"""Builds dataclasses from plain nested values of yaml and overrides; checks keys, types, ranges and missing values.

A dataclass with a PACKAGE has variants: the class Config of each file in that package, chosen by the value "name", or a
class of the user's own that extends it.
"""

import contextlib
import contextvars
import copy
import dataclasses
import importlib
import math
import pkgutil
import re
import types
import typing
from collections.abc import Iterator
from typing import Annotated

from bench.base.paths import CONF, shown
from bench.config import groups, user_code
from models.settings import NOT_NEGATIVE, Range

T = typing.TypeVar("T")
KINDS = {int: "a whole number", float: "a number", str: "a word", bool: "true or false", list: "a list"}
GROUP = "a group of settings, KEY: VALUE"
_loads_own = contextvars.ContextVar("loads_own", default=True)
MISSING = "???"  # Hydra's mark for a value that some yaml or override must give


def at_least(lowest: int) -> Range:
    """Returns the Range of numbers from `lowest` on."""
    return Range(lambda value: value >= lowest, f"of {lowest} or more")


def between(lowest: int, highest: int) -> Range:
    """Returns the Range of whole numbers from `lowest` to `highest`, both included."""
    return Range(lambda value: lowest <= value <= highest, f"from {lowest} to {highest}")


AtLeast1 = Annotated[int, at_least(1)]
Repository = Annotated[
    str, Range(lambda repo: re.fullmatch(r"[\w.-]+/[\w.-]+", repo), "OWNER/NAME as in kjj0/fineweb10B-gpt2")
]
ShardNumbers = Annotated[
    str, Range(lambda text: re.fullmatch(r"\d{1,6}(-\d{1,6})?", text), "a number as 3, or numbers as 9-12")
]
Name = Annotated[
    str,
    Range(
        lambda name: name[:1] not in ("", ".") and all(char.isalnum() or char in "._-" for char in name),
        "letters, digits, '-', '_' and '.', because it becomes part of a folder's name",
    ),
]


def build(cls: type[T], values: dict[str, typing.Any], path: str = "") -> T:
    """Builds a cls from a nested dict. Raises ValueError for an unknown or missing key, a wrong type or range."""
    check_names(cls, values, path)
    chosen = variant_of(cls, values, path)
    hints = typing.get_type_hints(chosen, include_extras=True)
    fields = {field.name: field for field in dataclasses.fields(chosen)}
    arguments = {}
    for name in fields:
        if values.get(name, MISSING) != MISSING:
            arguments[name] = checked(f"{path}{name}", values[name], hints[name])
        elif name in values or default_of(fields[name]) == MISSING:
            own = user_code.is_import_path(values.get("name"))
            other = "a line of its yaml or a default in its class" if own else "choose a track that sets it"
            raise ValueError(f"{path}{name} is not set: give {path}{name}=VALUE, or {other}")
    try:
        return typing.cast(T, chosen(**arguments))
    except ValueError as error:  # from __post_init__, which checks settings against each other
        raise ValueError(f"{path}{error}") from None


def check_names(cls: typing.Any, values: dict[str, typing.Any], path: str = "") -> None:
    """Raises ValueError for the first key that is no field of cls, or of the class that values["name"] chooses."""
    names = [field.name for field in dataclasses.fields(variant_of(cls, values, path))]
    for key in values:
        if key not in names:
            has = f"{path.rstrip('.') or 'the config'} has {', '.join(names)}"
            if user_code.is_import_path(str(values.get("name"))):
                takes = f"{groups.did_you_mean(key, names)}{path}name={values['name']} takes {', '.join(names)}"
                has = f"{takes}; {_yaml_with(key, path)} may set no other (docs/own.md)"
            raise ValueError(f"unknown setting {path}{key}={values[key]}: {has}")


def _yaml_with(key: str, path: str) -> str:
    """Returns the user's yaml that sets a key of a group, "its yaml" if none or several do."""
    group = path.rstrip(".").replace(".", "/")
    own = [name for name in groups.choices(group) if not groups.path_of(group, name).is_relative_to(CONF)]
    files = [groups.path_of(group, name) for name in own if key in groups.values_of(group, name)]
    return shown(files[0]) if len(files) == 1 else "its yaml"


def filled(cls: typing.Any, values: dict[str, typing.Any], path: str = "") -> dict[str, typing.Any]:
    """Returns a copy of a yaml's nested values with all settings of cls; missing ones have their default or MISSING."""
    cls, whole = variant_of(cls, values, path), dict(values)
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        plain, _, _ = parts_of(hints[field.name])
        if dataclasses.is_dataclass(plain):
            group = checked(field.name, values.get(field.name) or {}, dict)
            whole[field.name] = filled(plain, group, f"{path}{field.name}.")
        elif (row := row_class(hints[field.name])) and isinstance(values.get(field.name), dict):
            rows = values[field.name].items()
            whole[field.name] = {key: filled(row, group) if isinstance(group, dict) else group for key, group in rows}
        else:
            whole.setdefault(field.name, default_of(field))
    return whole


def get(config: typing.Any, dotted: str) -> typing.Any:
    """Returns the value of a dotted key of a dataclass with groups or of its dict; None within a group that is None."""
    for part in dotted.split("."):
        if config is None:  # a group that the run does not have: script, or model and optim with a script
            return None
        config = config[part] if isinstance(config, dict) else getattr(config, part)
    return config


def leaves(values: dict[str, typing.Any], path: str = "") -> Iterator[tuple[str, typing.Any]]:
    """Yields (dotted key, value) of each leaf of a nested dict. An empty dict is a leaf."""
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{path}{key}.")
        else:
            yield path + key, value


def fill_like(own: dict[str, typing.Any], where: str, settings: typing.Any) -> None:
    """Checks settings against a yaml's own values: no other keys or types. Adds missing ones in place."""
    for key, value in checked(where, settings, dict).items():
        if key not in own:
            raise ValueError(f"unknown setting {where}.{key}={value}: it has {', '.join(own) or 'no settings'}")
        kind = type(own[key])  # the type in the yaml, any if that has null
        hint = Annotated[kind, NOT_NEGATIVE] if key.endswith("_ms") else kind
        is_any = own[key] is None or (value is None and hint is kind)
        as_typed = value if is_any else checked(f"{where}.{key}", value, hint)
        settings[key] = as_typed if isinstance(as_typed, str) else value  # 5 is not recorded as 5.0: config_id
    settings |= {key: copy.deepcopy(value) for key, value in own.items() if key not in settings}


def variants(cls: typing.Any) -> list[str]:
    """Returns the names of the files in the PACKAGE of a dataclass, sorted; [] if it has none."""
    package = getattr(cls, "PACKAGE", None)
    if not package:
        return []
    return sorted(module.name for module in pkgutil.iter_modules(importlib.import_module(package).__path__))


def variant(cls: typing.Any, name: str) -> typing.Any:
    """Returns the class Config of the file with that name, one of variants(cls)."""
    return importlib.import_module(f"{cls.PACKAGE}.{name}").Config


def variant_of(cls: typing.Any, values: dict[str, typing.Any], path: str = "") -> typing.Any:
    """Returns the variant that values["name"] chooses; cls itself without variants or a name."""
    name = values.get("name", MISSING)
    names = variants(cls) if name != MISSING else []
    if not names:
        return cls
    if user_code.is_import_path(name):
        if not _loads_own.get():
            added = [(key, object) for key in values if key not in {field.name for field in dataclasses.fields(cls)}]
            return dataclasses.make_dataclass(cls.__name__, added, bases=(cls,), kw_only=True)
        own = user_code.load(f"{path}name", name, cls)
        if vars(own).get("__annotations__") and "__dataclass_fields__" not in vars(own):
            raise ValueError(f"{path}name={name}: {own.__name__} needs @dataclass(kw_only=True) above it")
        return own
    return variant(cls, groups.known(f"{path}name", name, names))


@contextlib.contextmanager
def without_own_code() -> Iterator[None]:
    """Within the block no class of the user's own is loaded: a dataclass with its name accepts any other settings."""
    token = _loads_own.set(False)
    try:
        yield
    finally:
        _loads_own.reset(token)


def default_of(field: dataclasses.Field[typing.Any]) -> typing.Any:
    """Returns a field's default, or MISSING if it has none; calls its default_factory."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return MISSING if field.default is dataclasses.MISSING else field.default


def checked(where: str, value: typing.Any, hint: typing.Any) -> typing.Any:
    """Converts the value to its hint: an int to float, a number to text, a dict to its dataclass. Raises ValueError."""
    plain, ranges, may_be_none = parts_of(hint)
    if value is None and may_be_none:
        return None
    if dataclasses.is_dataclass(plain) and isinstance(value, dict):
        return build(typing.cast(type, plain), value, f"{where}.")
    kind, original = typing.get_origin(plain) or plain, value
    if (kind, type(value)) in ((float, int), (str, int), (str, float)):
        value = kind(value)
    is_kind = isinstance(value, kind) and not (kind is int and isinstance(value, bool))
    if not is_kind or (kind is float and not math.isfinite(value)) or not all(limit.holds(value) for limit in ranges):
        is_range = re.fullmatch(r"\d+(:|-|\.\.)\d+", str(original))
        several = f"; for several runs: run -m {where}=range(1,4) or {where}=1,2" if is_range and kind is int else ""
        raise ValueError(f"{where}={original}: use {allowed(hint)}{several}")
    if kind is list and typing.get_args(plain):
        (item,) = typing.get_args(plain)
        is_group = dataclasses.is_dataclass(item)
        return [checked(f"{where}[{number}]" if is_group else where, entry, item) for number, entry in enumerate(value)]
    if kind is dict and typing.get_args(plain) and typing.get_args(plain)[1] is not typing.Any:
        return {key: checked(f"{where}.{key}", entry, typing.get_args(plain)[1]) for key, entry in value.items()}
    return value


def row_class(hint: typing.Any) -> type | None:
    """Returns the dataclass of the rows of a table, a field of type dict[str, DATACLASS]; None for another field."""
    plain = parts_of(hint)[0]
    row = parts_of(typing.get_args(plain)[1])[0] if typing.get_origin(plain) is dict else None
    return row if isinstance(row, type) and dataclasses.is_dataclass(row) else None


def allowed(hint: typing.Any) -> str:
    """Returns what a field of that type accepts, as text that follows "use": "a whole number above 0, or null"."""
    plain, ranges, may_be_none = parts_of(hint)
    kind = typing.get_origin(plain) or plain
    parts = [] if kind is str and ranges else [KINDS.get(kind, GROUP)]
    if kind is list and typing.get_args(plain) and not ranges:
        item = typing.get_args(plain)[0]
        is_plain = item in KINDS
        parts = [f"a list of {KINDS[item].removeprefix('a ')}s" if is_plain else f"a list, each {allowed(item)}"]
    return " ".join(parts + [limit.phrase for limit in ranges]) + (", or null" if may_be_none else "")


def parts_of(hint: typing.Any) -> tuple[typing.Any, list[Range], bool]:
    """Splits a field's type into its plain type, its Ranges, and whether it may be None."""
    may_be_none = typing.get_origin(hint) in (typing.Union, types.UnionType)
    if may_be_none:
        hint = next(part for part in typing.get_args(hint) if part is not type(None))
    if typing.get_origin(hint) is typing.Annotated:
        hint, *ranges = typing.get_args(hint)
        return hint, ranges, may_be_none
    return hint, [], may_be_none


def host_and_port(rendezvous: str | None) -> tuple[str, int]:
    """Splits hardware.rendezvous into (host, port). Raises ValueError if it is not HOST:PORT."""
    host, _, port = (rendezvous or "").rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        remedy = "use HOST:PORT, an address of the node that makes the record and a free port there, 10.0.0.1:29600"
        raise ValueError(f"hardware.rendezvous={rendezvous}: {remedy}")
    return host.strip("[]"), int(port)
