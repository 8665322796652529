"""The one way in for files that somebody else may have written: records, logs, plans, claims.

What is read is a regular file (never a pipe, a device or a link to one), of a bounded size, with bounded nesting and
numbers of a bounded length.  Anything else is Damaged, a ValueError: file, field, what is wrong, what to try.
"""

import contextlib
import errno
import functools
import io
import json
import math
import os
import stat
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from bench.reading import yaml_events
from bench.units import MIB

MAX_BYTES = 16 * MIB  # of a file of facts: a record, a race, a plan.  The largest of ours is 0.1 MiB
MAX_LINES_BYTES = 512 * MIB  # of a file with a line a step or a sample
MAX_LINE_CHARS = 100_000  # of a table: csv takes no cell that is longer
MAX_YAML_BYTES = MIB // 4  # a config.yaml has 0.002 MiB
MAX_DEPTH = 64  # objects and lists inside each other; a run.json has 6
MAX_DIGITS = 30  # of a whole number: none that is converted to a float or printed takes long, or overflows
NO_NUMBER = bytes(byte for byte in range(256) if byte not in b"[]{}")
DIGITS = bytes.maketrans(b"123456789", b"000000000")
LONG_RUN = b"0" * (MAX_DIGITS + 1)
BEFORE_A_NUMBER = b" \t\r\n:,[-"
BAD = (ArithmeticError, AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError)


class Damaged(ValueError):
    """The file cannot be used: a sentence that names it."""


class Missing(Damaged):
    """There is no such file."""


def opened(path: Path | str, max_bytes: float = math.inf, buffering: int = -1) -> BinaryIO:
    """A regular file, opened to be read as bytes; neither a pipe nor a device is waited for.

    Raises Missing or Damaged, also for more than max_bytes.  buffering: as of open().
    """
    try:
        file = open(path, "rb", buffering, opener=_open_now)  # noqa: SIM115 - the caller's to close
    except (FileNotFoundError, NotADirectoryError) as error:
        raise Missing(f"{path}: cannot be read ({error.strerror}): is the path right?") from None
    except OSError as error:
        raise Damaged(f"{path}: cannot be read ({error.strerror}): restore it") from None
    except ValueError as error:  # a NUL in the name
        raise Damaged(f"{path!r}: cannot be read ({error}): name a file") from None
    num_bytes = os.fstat(file.fileno()).st_size
    if num_bytes > max_bytes:
        file.close()
        raise Damaged(f"{path}: has {num_bytes:,} bytes, more than {max_bytes:,} are not read: restore it")
    return file


def _open_now(path, flags):
    fd = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(fd).st_mode
    if stat.S_ISREG(mode):
        return fd
    os.close(fd)
    raise OSError(errno.EINVAL, "it is a folder" if stat.S_ISDIR(mode) else "it is no regular file")


def is_own(file: BinaryIO) -> bool:
    """Whether nobody but this user (and root) can have written an open file: it is theirs, and nobody else's to write.

    For what is believed: caches beside data and records that others may write beside, too.
    """
    found = os.fstat(file.fileno())
    return found.st_uid == os.geteuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def content(path: Path | str, max_bytes: int = MAX_BYTES) -> bytes:
    """The bytes of a regular file.  Missing, Damaged: as opened()."""
    with opened(path, max_bytes, buffering=0) as file:
        try:
            return file.readall()
        except OSError as error:
            raise Damaged(f"{path}: cannot be read ({error.strerror}): restore it") from None


def text(path: Path | str, max_bytes: int = MAX_BYTES, errors: str = "strict") -> str:
    """UTF-8 with any line ends, as "\\n".  errors: as of bytes.decode; strict is Damaged, naming the byte."""
    found = content(path, max_bytes)
    try:
        return found.decode(errors=errors).replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise Damaged(f"{path}: byte {error.start} is damaged ({error.reason}): restore it") from None


@contextlib.contextmanager
def lines(path: Path | str, max_bytes: int = MAX_LINES_BYTES) -> Iterator[Iterator[str]]:
    """with lines(path) as found: ...   The lines of a table, one after the other, each of at most MAX_LINE_CHARS.

    What is not UTF-8, and NUL, becomes "\N{REPLACEMENT CHARACTER}".  Missing, Damaged: as opened(), or a longer line.
    """
    with opened(path, max_bytes) as raw, io.TextIOWrapper(raw, errors="replace", newline="") as file:
        yield _bounded(path, file)


def _bounded(path, file):
    while line := file.readline(MAX_LINE_CHARS):
        if len(line) == MAX_LINE_CHARS:
            raise Damaged(f"{path}: has a line of {MAX_LINE_CHARS:,} characters: restore it")
        yield line.replace("\0", "\N{REPLACEMENT CHARACTER}")


# ---- JSON


def json_object(path: Path | str, kind: Any = None, max_bytes: int = MAX_BYTES) -> dict:
    """A JSON file that holds an object.  kind: as of json_value()."""
    found = json_value(content(path, max_bytes), path, kind)
    if not isinstance(found, dict):
        raise Damaged(f"{path}: is not a JSON object but {_name(found)}: the file was damaged, restore it")
    return found


def json_value(data: bytes | str, where: object, kind: Any = None) -> Any:
    """What JSON text says, whole.  where: what the error calls it, a path or a path and a line.

    kind: a type of msgspec's (TypedDict, dict[str, int], ...) that it must have; keys that the type lacks are allowed
    and kept.  Raises Damaged: no JSON, a field of another type, too deep, a number that is too long, NaN.
    """
    data = data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data
    try:
        is_plain = not _is_deep(data) and not _has_long_number(data)
        found = _decoded(data)
        if not is_plain:
            _check(found)
    except RecursionError:
        raise Damaged(f"{where}: is nested more than {MAX_DEPTH} deep: the file was damaged, restore it") from None
    except ValueError as error:
        raise Damaged(f"{where}: is not valid JSON ({error}): the file was damaged, restore it") from None
    return found if kind is None else check_kind(found, kind, where)


def check_kind(found: Any, kind: Any, where: object) -> Any:
    """The same plain value, if it has this type of msgspec's.  Damaged names where and the field that has not."""
    import msgspec

    try:
        msgspec.convert(found, kind)
    except msgspec.ValidationError as error:
        raise Damaged(f"{where}: {_field(error)}: the file was damaged, restore it") from None
    return found


def _decoded(data):
    """By msgspec, which is fast; what it refuses by json, which takes half a surrogate and says where it failed."""
    import msgspec

    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        found = json.loads(data, parse_constant=_refuse_constant)
        _check(found)
        return found


def _refuse_constant(word):
    raise ValueError(f"{word} is not a number in JSON")


def _is_deep(data):
    """Whether brackets may lie too deep in each other; brackets in strings may say so wrongly, never the other way."""
    brackets = data.translate(None, NO_NUMBER)
    for _ in range(MAX_DEPTH):
        if not brackets:
            return False
        brackets = brackets.replace(b"{}", b"").replace(b"[]", b"")
    return bool(brackets)


def _has_long_number(data):
    """A hash may be digits alone: it is a string, and what stands before its first digit says so."""
    digits = data.translate(DIGITS)
    at = digits.find(LONG_RUN)
    while at >= 0:
        if at == 0 or digits[at - 1] in BEFORE_A_NUMBER:
            return True
        at = digits.find(LONG_RUN, at + len(LONG_RUN))
    return False


def _check(found, depth=0):
    """RecursionError, ValueError for what is too deep or too large."""
    if depth > MAX_DEPTH:
        raise RecursionError
    if isinstance(found, dict):
        found = found.values()
    elif not isinstance(found, list):
        if isinstance(found, int) and not -(10**MAX_DIGITS) < found < 10**MAX_DIGITS:
            raise ValueError(f"a whole number of more than {MAX_DIGITS} digits")
        if isinstance(found, float) and not math.isfinite(found):
            raise ValueError("a number that is not finite")
        return
    for one in found:
        _check(one, depth + 1)


def _field(error):
    """msgspec's "Expected `str`, got `int` - at `$.name`" as "name: expected str, got int"."""
    what, _, field = str(error).partition(" - at ")
    words = (what[0].lower() + what[1:]).replace("`", "").replace("object missing required field", "lacks")
    field = field.strip("`").removeprefix("$").removeprefix(".")
    return f"{field}: {words}" if field else words


def _name(found):
    return {list: "a list", str: "text", type(None): "null"}.get(type(found), "a number")


# ---- YAML


def yaml_mapping(path: Path | str, max_bytes: int = MAX_YAML_BYTES) -> dict:
    """A YAML file that holds a mapping, {} where it holds nothing.  Missing, Damaged."""
    found = yaml_value(text(path, max_bytes), path)
    if found is not None and not isinstance(found, dict):
        raise Damaged(f"{path}: is not a mapping but {_name(found)}: restore it")
    return found or {}


def yaml_value(data: str, where: object) -> Any:
    """What YAML text of plain values says; tags of Python's are refused and never run.  where: as of json_value().

    Damaged also for aliases that multiply, merge keys ("<<"), deep nesting and numbers that take long to convert.
    """
    import yaml

    try:
        yaml_events.check(yaml.parse(data, _loader()), MAX_DEPTH)
        return yaml.load(data, _loader())
    except (yaml.YAMLError, *BAD) as error:
        words = " ".join(str(error).split())[:200] or type(error).__name__
        raise Damaged(f"{where}: is not valid YAML of plain settings ({words}): restore it") from None


@functools.cache
def _loader():
    import yaml

    return getattr(yaml, "CSafeLoader", yaml.SafeLoader)


# ---- one record among many


def one_line(text: object) -> str:
    """Without what a terminal would obey: a control character as \\x1b, line ends too."""
    text = str(text)
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape", "replace").decode() for char in text)


@contextlib.contextmanager
def of_record(where: object) -> Iterator[None]:
    """with of_record(folder): ...   What a damaged record makes fail inside is one Damaged that names it.

    For the place where one record is turned into a row, a page or a line, so that the next one is still shown.  What
    the types of the fields did not catch ends here, with the line of code that stumbled, as it may also be our fault.
    """
    try:
        yield
    except Damaged:
        raise
    except BAD as error:
        words = str(error)
        if type(error) is ValueError:
            raise Damaged(words if str(where) in words else f"{where}: {words}") from None
        last = traceback.extract_tb(error.__traceback__)[-1]
        at = f"{Path(last.filename).name}:{last.lineno}"
        raise Damaged(f"{where}: the record lacks something or is damaged ({error!r:.200}, {at})") from None
