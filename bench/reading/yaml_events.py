"""YAML as the events of its parser, checked before anything is built of them.

Building recurses, so that deep nesting overflows C's stack, which ends the process; aliases and merge keys can stand
for more than memory holds.
"""

from collections.abc import Iterable

MAX_YAML_NODES = 100_000  # with each alias counted as often as it is used


def check(events: Iterable, max_depth: int) -> None:
    """Events of yaml.parse().  ValueError: what they would build is refused, and nothing has been built yet."""
    import yaml

    sizes, stack = {}, [[None, 0]]  # of anchors; of what is open: its anchor, its nodes so far
    for event in events:
        if isinstance(event, yaml.CollectionStartEvent):
            stack.append([event.anchor, 1])
            if len(stack) > max_depth:
                raise ValueError(f"it is nested more than {max_depth} deep")
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, size = stack.pop()
            sizes[anchor] = size
            stack[-1][1] += size
        elif isinstance(event, yaml.AliasEvent):
            if event.anchor not in sizes:
                raise ValueError(f"the alias {event.anchor[:40]} names nothing before it")
            stack[-1][1] += sizes[event.anchor]
        elif isinstance(event, yaml.ScalarEvent):
            sizes[event.anchor] = 1
            stack[-1][1] += 1
            _check_scalar(event)
        if stack[-1][1] > MAX_YAML_NODES:
            raise ValueError(f"its aliases stand for more than {MAX_YAML_NODES:,} values")


def _check_scalar(event):
    is_plain = event.implicit[0]
    if is_plain and event.value == "<<":
        raise ValueError("it has a merge key")
    if event.tag is None and is_plain and len(event.value) > 100 and event.value.lstrip("+-.")[:1].isdigit():
        raise ValueError(f"a number of {len(event.value)} characters")
    if event.tag is not None and len(event.value) > 100 and "str" not in event.tag:
        raise ValueError(f"{event.tag[:60]} of {len(event.value)} characters")
