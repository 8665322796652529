"""run.schema.json as a type of msgspec's: which fields a record has, and of what kind each is.

Whatever reads a record checks this, in microseconds; patterns and ranges are for ./run.sh verify to check.
"""

import functools
import json
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict

SCHEMA = Path(__file__).with_name("run.schema.json")
KINDS = {"string": str, "integer": int, "number": int | float, "boolean": bool, "null": type(None)}
FREE = {"array": list, "object": dict[str, Any]}  # where the schema does not say what is inside


def schema() -> dict:
    """run.schema.json."""
    return json.loads(SCHEMA.read_text())


@functools.cache
def record() -> Any:
    """The type of a whole record, for json_file.read()."""
    whole = schema()
    return _object("record", whole, whole["required"])


def _object(name, one, required=()):
    """Inside of the record nothing is required: a log does not know everything, an older record has less."""
    fields = {key: _kind(key, part) for key, part in one["properties"].items()}
    fields = {key: kind if key in required else NotRequired[kind | None] for key, kind in fields.items()}
    return TypedDict(name, fields)


def _kind(name, one):
    """A part of the schema -> a type."""
    if "enum" in one:
        return Literal[tuple(one["enum"])]
    if "anyOf" in one:
        return _any([_kind(name, other) for other in one["anyOf"]])
    kinds = one.get("type", [])
    return _any([_of(kind, name, one) for kind in ([kinds] if isinstance(kinds, str) else kinds)])


def _any(kinds):
    return functools.reduce(lambda left, right: left | right, kinds) if kinds else Any


def _of(kind, name, one):
    if kind == "object" and one.get("properties"):
        return _object(name, one)
    if kind == "object" and isinstance(one.get("additionalProperties"), dict):
        return dict[str, _kind(name, one["additionalProperties"])]
    if kind == "array" and "items" in one:
        return list[_kind(name, one["items"])]
    return (KINDS | FREE)[kind]
