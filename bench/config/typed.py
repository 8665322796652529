"""Plain nested values of yaml and overrides -> dataclasses: keys, types and ranges checked, missing values refused.

A dataclass with a PACKAGE has variants: the class Config of each file in that package, chosen by the value "name", or
a class of the user's own that extends it.
"""

import copy
import dataclasses
import importlib
import math
import pkgutil
import types
import typing
from collections.abc import Iterator

from bench import own_code

MISSING = "???"  # Hydra's mark for a value that some yaml or override must give


def build(cls, values, path=""):
    """Plain nested dict -> cls.  Raises ValueError for a key, type, range or missing value that cls does not have."""
    cls = _variant(cls, values, path)
    hints = typing.get_type_hints(cls, include_extras=True)
    fields = {one.name: one for one in dataclasses.fields(cls)}
    for key in values:
        if key not in fields:
            where = path.rstrip(".") or "the config"
            raise ValueError(f"unknown setting {path}{key}={values[key]}: {where} has {', '.join(fields)}")
    made = {}
    for name in fields:
        if values.get(name, MISSING) != MISSING:
            made[name] = _checked(f"{path}{name}", values[name], hints[name])
        elif name in values or _default(fields[name]) == MISSING:
            raise ValueError(f"{path}{name} is not set: give {path}{name}=VALUE or choose a track that does")
    try:
        return cls(**made)
    except ValueError as error:  # of __post_init__: what two settings together cannot be
        raise ValueError(f"{path}{error}") from None


def filled(cls, values):
    """A copy of values (nested, of a yaml) with all settings of cls: the default, or MISSING, of those it lacks."""
    cls, whole = _variant(cls, values), dict(values)
    hints = typing.get_type_hints(cls)
    for one in dataclasses.fields(cls):
        hint = _not_none(hints[one.name])
        if dataclasses.is_dataclass(hint):
            whole[one.name] = filled(hint, values.get(one.name) or {})
        else:
            whole.setdefault(one.name, _default(one))
    return whole


def leaves(values: dict[str, typing.Any], path: str = "") -> Iterator[tuple[str, typing.Any]]:
    """A nested dict -> (dotted key, value) of each leaf; an empty dict is one."""
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{path}{key}.")
        else:
            yield path + key, value


def fill_like(known, where, settings):
    """Settings whose schema is a yaml's own values: no other keys or types; those not named are added in place."""
    if not isinstance(settings, dict):
        raise ValueError(f"{where}={settings}: give KEY: VALUE of {', '.join(known) or 'no settings: it has none'}")
    for key, value in settings.items():
        if key not in known:
            raise ValueError(f"unknown setting {where}.{key}={value}: it has {', '.join(known) or 'no settings'}")
        if known[key] is not None and value is not None and not _is_like(known[key], value):
            raise ValueError(f"{where}.{key}={value!r}: it must be a {type(known[key]).__name__}")
        if key.endswith("_ms") and (value is None or value < 0):
            raise ValueError(f"{where}.{key}={value}: give a number of milliseconds, 0 or more")
    settings |= {key: copy.deepcopy(value) for key, value in known.items() if key not in settings}


def _is_like(known, value):
    """Whether value has the type that the yaml's own has; a whole number is a float too, and true is not a number."""
    if isinstance(value, bool) or isinstance(known, bool):
        return type(value) is type(known)
    return isinstance(value, (int, float) if isinstance(known, float) else type(known))


def _variant(cls, values, path=""):
    """The Config in the file values["name"] of the PACKAGE of cls; cls itself without a PACKAGE or a name."""
    package, name = getattr(cls, "PACKAGE", None), values.get("name", MISSING)
    if package is None or name == MISSING:
        return cls
    if own_code.is_import_path(name):
        own = own_code.load(f"{path}name", name)
        if not issubclass(own, cls):
            raise ValueError(f"{path}name={name}: {own.__name__} must extend the dataclass Config of {package}")
        return own
    names = [module.name for module in pkgutil.iter_modules(importlib.import_module(package).__path__)]
    if name not in names:
        folder = package.replace(".", "/")
        raise ValueError(f"{path}name={name}: there is no {folder}/{name}.py; choose from {', '.join(sorted(names))}")
    return importlib.import_module(f"{package}.{name}").Config


def _not_none(hint):
    """T | None -> T; another type as it is."""
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return next(one for one in typing.get_args(hint) if one is not type(None)) if is_union else hint


def _default(one):
    if one.default_factory is not dataclasses.MISSING:
        return one.default_factory()
    return MISSING if one.default is dataclasses.MISSING else one.default


def _checked(where, value, hint):
    """The value as hint wants it (an int becomes a float, a number a word, a dict its dataclass), or ValueError."""
    if value is None and _not_none(hint) is not hint:
        return None
    hint = _not_none(hint)
    ranges = ()
    if typing.get_origin(hint) is typing.Annotated:
        hint, *ranges = typing.get_args(hint)
    if dataclasses.is_dataclass(hint) and isinstance(value, dict):
        return build(hint, value, f"{where}.")
    kind = typing.get_origin(hint) or hint
    if (kind, type(value)) in ((float, int), (str, int), (str, float)):
        value = kind(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        wanted = "a group of settings" if dataclasses.is_dataclass(hint) else f"of type {kind.__name__}"
        raise ValueError(f"{where}={value}: it must be {wanted}, not {type(value).__name__}")
    if kind is float and not math.isfinite(value):
        raise ValueError(f"{where}={value}: it must be a finite number, or null for none")
    if kind is list:
        value = [_checked(where, one, *typing.get_args(hint)) for one in value]
    for one in ranges:
        if not one.holds(value):
            raise ValueError(f"{where}={value}: {one.words}")
    return value
