"""Reads YAML that others may have written: the parser's events are checked before anything is built from them.

Building is recursive, so that deep nesting would overflow the C stack and end the process; aliases and merge keys can
expand to more than fits into memory.
"""

import functools
import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bench.base.reading import json_file
from bench.base.reading.damage import BAD, Damaged
from bench.base.reading.plain_file import text
from bench.base.units import MIB

MAX_BYTES = MIB // 4  # a config.yaml has 0.002 MiB
MAX_NODES = 100_000  # an alias counts as the nodes that it stands for, each time it is used


def read(path: Path | str, max_bytes: int = MAX_BYTES) -> dict[str, Any]:
    """Returns the mapping in a YAML file, {} if the file is empty.  Raises Missing or Damaged."""
    return _mapping(text(path, max_bytes), path)


def recorded(path: Path | str) -> dict[str, Any]:
    """Returns the mapping in a YAML file of a record, as read() and with recorded_text()'s check of a link."""
    return _mapping(recorded_text(path), path)


def recorded_text(path: Path | str) -> str:
    """Returns the text of a YAML file of a record.  Raises Missing, or Damaged for a link that was put in its place.

    A link, such as git-annex makes, is followed only to the content that run.json lists.  Any other link may lead to a
    private file of the reader, of which nothing may be shown.
    """
    content = text(path, MAX_BYTES)
    if os.path.islink(path):
        files = json_file.read(os.path.join(os.path.dirname(path), "run.json")).get("artifacts") or ()
        sha256 = hashlib.sha256(content.encode()).hexdigest()
        if sha256 not in [file.get("sha256") for file in files if isinstance(file, dict)]:
            raise Damaged(f"{path}: is a link to a file that run.json does not list: restore it")
    return content


def _mapping(content: str, path: Path | str) -> dict[str, Any]:
    values: dict[str, Any] | None = json_file.check_kind(parsed(content, path), dict[Any, Any] | None, path)
    return values or {}


def parsed(data: str, where: object) -> Any:
    """Returns the value of plain YAML text; Python tags are refused, never executed.  where: see json_file.parsed().

    Raises Damaged, also for aliases that multiply, merge keys ("<<"), deep nesting and very long numbers.
    """
    import yaml

    try:
        _check(yaml.parse(data, _loader()))
        return yaml.load(data, _loader())
    except (yaml.YAMLError, *BAD) as error:
        why = " ".join(str(error).split())[:200] or type(error).__name__
        raise Damaged(f"{where}: is not valid YAML of plain settings ({why}): restore it") from None


@functools.cache
def _loader() -> Any:
    import yaml

    return getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def _check(events: Iterable[Any]) -> None:
    """Raises ValueError if the events of yaml.parse() would build something too deep, too large or with merge keys."""
    import yaml

    sizes: dict[str | None, int] = {}  # the number of nodes of each anchor
    num_nodes, open_parts = 0, []  # for each open collection: (anchor, number of nodes before it)
    for event in events:
        if isinstance(event, yaml.CollectionStartEvent):
            open_parts.append((event.anchor, num_nodes))
            num_nodes += 1
            if len(open_parts) >= json_file.MAX_DEPTH:
                raise ValueError(f"it is nested more than {json_file.MAX_DEPTH} deep")
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, num_before = open_parts.pop()
            sizes[anchor] = num_nodes - num_before
        elif isinstance(event, yaml.AliasEvent):
            if event.anchor not in sizes:
                raise ValueError(f"the alias {str(event.anchor)[:40]} names nothing before it")
            num_nodes += sizes[event.anchor]
        elif isinstance(event, yaml.ScalarEvent):
            sizes[event.anchor] = 1
            num_nodes += 1
            _check_scalar(event)
        if num_nodes > MAX_NODES:
            raise ValueError(f"its aliases stand for more than {MAX_NODES:,} values")


def _check_scalar(event: Any) -> None:
    is_plain = event.implicit[0]
    if is_plain and event.value == "<<":
        raise ValueError("it has a merge key")
    if event.tag is None and is_plain and len(event.value) > 100 and event.value.lstrip("+-.")[:1].isdigit():
        raise ValueError(f"a number of {len(event.value)} characters")
    if event.tag is not None and len(event.value) > 100 and "str" not in event.tag:
        raise ValueError(f"{event.tag[:60]} of {len(event.value)} characters")
