"""Reading JSON that others may have written: bounded nesting and numbers, and fields of the requested types."""

import json
import math
from pathlib import Path
from typing import Any, NoReturn

from bench.base.reading.damage import Damaged, kind_name
from bench.base.reading.plain_file import MAX_BYTES, content

MAX_DEPTH = 64  # objects and lists inside each other; a run.json has 6
MAX_DIGITS = 30  # of a whole number: none that is converted to a float or printed takes long, or overflows
NO_NUMBER = bytes(byte for byte in range(256) if byte not in b"[]{}")
DIGITS = bytes.maketrans(b"123456789", b"000000000")
LONG_RUN = b"0" * (MAX_DIGITS + 1)  # in a number, or in a string, which _check() tells apart


def read(path: Path | str, kind: Any = None, max_bytes: int = MAX_BYTES) -> dict[str, Any]:
    """A JSON file that holds an object.  kind: as of parsed()."""
    value = parsed(content(path, max_bytes), path, kind)
    if not isinstance(value, dict):
        raise Damaged(f"{path}: is not a JSON object but {kind_name(value)}: the file was damaged, restore it")
    return value


def parsed(data: bytes | str, where: object, kind: Any = None) -> Any:
    """The value of JSON text.  where: its name in errors, a path or a path and a line.

    kind: a type of msgspec's (TypedDict, dict[str, int], ...) that it must have; keys that the type lacks are allowed
    and kept.  Raises Damaged: no JSON, a field of another type, too deep, a number that is too long, NaN.
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


def check_kind(value: Any, kind: Any, where: object) -> Any:
    """Returns the plain value if it has this msgspec type; else Damaged with where and the wrong field."""
    import msgspec

    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise Damaged(f"{where}: {_field(error)}: the file was damaged, restore it") from None
    return value


def _decoded(data: bytes) -> Any:
    """Decodes with msgspec, which is fast, else with json, which accepts lone surrogates and reports the position."""
    import msgspec

    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        value = json.loads(data, parse_constant=_refuse_constant)
        _check(value)
        return value


def _refuse_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is not a number in JSON")


def _is_deep(data: bytes) -> bool:
    """Whether brackets may be nested too deeply; brackets inside of strings can only cause a false alarm."""
    brackets = data.translate(None, NO_NUMBER)
    for _ in range(MAX_DEPTH):
        if not brackets:
            return False
        brackets = brackets.replace(b"{}", b"").replace(b"[]", b"")
    return bool(brackets)


def _check(value: Any, depth: int = 0) -> None:
    """RecursionError if a value is nested too deeply, ValueError if a number is too large."""
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


def _field(error: Exception) -> str:
    """msgspec's "Expected `str`, got `int` - at `$.name`" as "name: expected str, got int"."""
    what, _, field = str(error).partition(" - at ")
    why = (what[0].lower() + what[1:]).replace("`", "").replace("object missing required field", "lacks")
    field = field.strip("`").removeprefix("$").removeprefix(".")
    return f"{field}: {why}" if field else why
