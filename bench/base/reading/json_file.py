"""Reads JSON that others may have written: nesting and numbers are bounded, and the types of fields are checked."""

import json
import math
from pathlib import Path
from typing import Any

from bench.base.reading.damage import Damaged
from bench.base.reading.plain_file import MAX_BYTES, content

MAX_DEPTH = 64  # levels of nested objects and lists; a run.json has 6
MAX_DIGITS = 30  # longer whole numbers are refused: they overflow a float, or take long to convert and print
NO_NUMBER = bytes(byte for byte in range(256) if byte not in b"[]{}")
DIGITS = bytes.maketrans(b"123456789", b"000000000")
LONG_RUN = b"0" * (MAX_DIGITS + 1)  # digits of a number or in a string; _check() finds out which


def read(path: Path | str, kind: Any = None, max_bytes: int = MAX_BYTES) -> dict[str, Any]:
    """Returns the object in a JSON file.  kind: see parsed().  Raises Missing or Damaged."""
    value: dict[str, Any] = parsed(content(path, max_bytes), path, kind or dict)
    return value


def parsed(data: bytes | str, where: object, kind: Any = None) -> Any:
    """Returns the value of JSON text.  where: its name in errors, such as a path or a path and a line.

    kind: a type that msgspec knows (TypedDict, dict[str, int], ...) and the value must have; keys that the type lacks
    are kept.  Raises Damaged for invalid JSON, a wrong type, deep nesting, a number that is too long, and NaN.
    """
    data = data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data
    try:
        is_plain = not _is_deep(data) and LONG_RUN not in data.translate(DIGITS)
        value = _decoded(data)
        if not is_plain:
            _check(value)
    except RecursionError:
        raise Damaged(f"{where}: is nested more than {MAX_DEPTH} deep: the file was damaged, restore it") from None
    except ValueError as error:
        raise Damaged(f"{where}: is not valid JSON ({error}): the file was damaged, restore it") from None
    return value if kind is None else check_kind(value, kind, where)


def check_kind(value: Any, kind: Any, where: object, remedy: str = "the file was damaged, restore it") -> Any:
    """Returns the value unchanged if it has this msgspec type; else raises Damaged, which names the wrong field."""
    import msgspec

    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        # "Expected `str`, got `int` - at `$.name`" becomes "name: expected str, got int"
        problem, _, field = str(error).partition(" - at ")
        why = (problem[0].lower() + problem[1:]).replace("`", "").replace("object missing required field", "lacks")
        if field := field.strip("`").removeprefix("$").removeprefix("."):
            why = f"{field}: {why}"
        raise Damaged(f"{where}: {why}: {remedy}") from None
    return value


def _decoded(data: bytes) -> Any:
    """Decodes with msgspec, which is fast, or else with json, which accepts lone surrogates and reports positions."""
    import msgspec

    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        value = json.loads(data)
        _check(value)
        return value


def _is_deep(data: bytes) -> bool:
    """Whether brackets may be nested too deeply; brackets inside strings can only cause a false alarm."""
    brackets = data.translate(None, NO_NUMBER)
    for _ in range(MAX_DEPTH):
        if not brackets:
            return False
        brackets = brackets.replace(b"{}", b"").replace(b"[]", b"")
    return bool(brackets)


def _check(value: Any, depth: int = 0) -> None:
    """Raises RecursionError if a value is nested too deeply, ValueError if a number is too large or not finite."""
    if depth > MAX_DEPTH:
        raise RecursionError
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list):
        if isinstance(value, int) and not -(10**MAX_DIGITS) < value < 10**MAX_DIGITS:
            raise ValueError(f"a whole number of more than {MAX_DIGITS} digits")
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError("a number that is not finite")
        return
    for part in value:
        _check(part, depth + 1)
