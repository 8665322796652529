"""Which configs are tries of the same thing: those that differ in numbers alone, and by little."""

import re
from typing import Any

from bench.config import schema

NEAR_FRAC = 0.01  # of a setting: configs that differ by no more are tries of the same thing (assumed)
FLOAT = re.compile(r"(?<![\w.])[-+]?(?:\d+\.\d*|\.\d+|\d+(?=[eE]))(?:[eE][-+]?\d+)?(?![\w.])")  # within a word


def shape(config: schema.Config) -> dict[str, Any]:
    """{"shape_id", "floats"}: config_id without the floats, and these in the order of their settings' names.

    Configs of one shape differ in floats alone; a number within a script's arguments is one too, and how long is
    waited for something is none.
    """
    floats: dict[str, float] = {}
    values = _without_floats(schema.hashed(config), "", floats)
    return {"shape_id": schema.hash_of(values), "floats": [floats[key] for key in sorted(floats)]}


def are_near(shape: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two of shape() differ in floats alone, each by no more than NEAR_FRAC of the larger."""
    if shape["shape_id"] != other["shape_id"] or len(shape["floats"]) != len(other["floats"]):
        return False
    return all(abs(a - b) <= NEAR_FRAC * max(abs(a), abs(b)) for a, b in zip(shape["floats"], other["floats"]))


def _without_floats(value: Any, path: str, floats: dict[str, float]) -> Any:
    """The value with None for every float in it, which goes to floats under its path."""
    if isinstance(value, dict):
        kept = {key: inner for key, inner in value.items() if not key.endswith("_timeout_s")}
        return {key: _without_floats(inner, f"{path}.{key}", floats) for key, inner in kept.items()}
    if isinstance(value, list):
        return [_without_floats(inner, f"{path}.{number:04}", floats) for number, inner in enumerate(value)]
    if isinstance(value, str):
        for number, found in enumerate(FLOAT.findall(value)):
            floats[f"{path}.{number:04}"] = float(found)
        return FLOAT.sub("", value)
    if isinstance(value, float):
        floats[path] = value
        return None
    return value
