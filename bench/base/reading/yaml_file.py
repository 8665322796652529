"""Reading YAML that others may have written: the parser's events are checked before anything is built from them.

Building recurses, so that deep nesting overflows the C stack, which ends the process; aliases and merge keys can expand
to more than memory holds.
"""

import functools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bench.base.reading.damage import BAD, Damaged, kind_name
from bench.base.reading.json_file import MAX_DEPTH
from bench.base.reading.plain_file import text
from bench.base.units import MIB

MAX_BYTES = MIB // 4  # a config.yaml has 0.002 MiB
MAX_NODES = 100_000  # with each alias counted as often as it is used


def read(path: Path | str, max_bytes: int = MAX_BYTES) -> dict[str, Any]:
    """A YAML file that holds a mapping, {} where it holds nothing.  Missing, Damaged."""
    values = parsed(text(path, max_bytes), path)
    if values is not None and not isinstance(values, dict):
        raise Damaged(f"{path}: is not a mapping but {kind_name(values)}: restore it")
    return values or {}


def parsed(data: str, where: object) -> Any:
    """The value of plain YAML text; tags of Python are refused, never executed.  where: as in json_file.parsed().

    Damaged also for aliases that multiply, merge keys ("<<"), deep nesting and numbers that take long to convert.
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
    """Events of yaml.parse().  ValueError: what they would build is refused, and nothing has been built yet."""
    import yaml

    sizes: dict[str | None, int] = {}  # of anchors
    num_nodes, open_parts = 0, []  # of what is open: its anchor, the nodes before it
    for event in events:
        if isinstance(event, yaml.CollectionStartEvent):
            open_parts.append((event.anchor, num_nodes))
            num_nodes += 1
            if len(open_parts) >= MAX_DEPTH:
                raise ValueError(f"it is nested more than {MAX_DEPTH} deep")
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
