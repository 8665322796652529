"""Plain nested values of yaml and overrides -> dataclasses: keys, types and ranges checked, missing values refused.

A dataclass with a PACKAGE has variants: the class Config of each file in that package, chosen by the value "name".
"""

import dataclasses
import importlib
import math
import pkgutil
import types
import typing

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
        elif name in values or _is_required(fields[name]):
            raise ValueError(f"{path}{name} is not set: give {path}{name}=VALUE or choose a track that does")
    try:
        return cls(**made)
    except ValueError as error:  # of __post_init__: what two settings together cannot be
        raise ValueError(f"{path}{error}") from None


def filled(cls, values):
    """A copy of values (nested, of a yaml) with all settings of cls: the default, or MISSING, of those it lacks."""
    cls = _variant(cls, values)
    whole = {}
    for name, hint in typing.get_type_hints(cls, include_extras=True).items():
        default = next(one for one in dataclasses.fields(cls) if one.name == name)
        if dataclasses.is_dataclass(hint):
            whole[name] = filled(hint, values.get(name) or {})
        elif default.default_factory is not dataclasses.MISSING:
            whole[name] = values.get(name, default.default_factory())
        else:
            whole[name] = values.get(name, MISSING if _is_required(default) else default.default)
    return {key: values[key] for key in values if key not in whole} | whole


def _variant(cls, values, path=""):
    """The Config in the file values["name"] of the PACKAGE of cls; cls itself without a PACKAGE or a name."""
    package, name = getattr(cls, "PACKAGE", None), values.get("name", MISSING)
    if package is None or name == MISSING:
        return cls
    names = [module.name for module in pkgutil.iter_modules(importlib.import_module(package).__path__)]
    if name not in names:
        folder = package.replace(".", "/")
        raise ValueError(f"{path}name={name}: there is no {folder}/{name}.py; choose from {', '.join(sorted(names))}")
    return importlib.import_module(f"{package}.{name}").Config


def _is_required(one):
    return one.default is dataclasses.MISSING and one.default_factory is dataclasses.MISSING


def _checked(where, value, hint):
    """The value as hint wants it (an int becomes a float, a number a word, a dict its dataclass), or ValueError."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        if value is None:
            return None
        hint = next(one for one in typing.get_args(hint) if one is not type(None))
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
        raise ValueError(f"{where}={value}: it must be a finite number; null leaves it out")
    if kind is list:
        value = [_checked(where, one, *typing.get_args(hint)) for one in value]
    for one in ranges:
        if not one.holds(value):
            raise ValueError(f"{where}={value}: {one.words}")
    return value
