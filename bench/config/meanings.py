"""What each setting means, read from the one place where that is written: the comment beside it.

Of a typed setting that is the comment of its dataclass field (schema.py, models/optimizers/, models/schedules/): on its
line, or above it.  Of an instrument's or exporter's, whose yaml is its schema, the comment on its line there; in any
other yaml such a comment says why this value.
"""

import functools
import inspect
import io
import itertools
import tokenize
from pathlib import Path

import yaml


@functools.cache
def of_class(cls: type) -> dict[str, str]:
    """Dataclass -> {field: its comment, "" where there is none}, of inherited fields too."""
    result = {}
    for base in reversed(cls.__mro__):
        if "__annotations__" in vars(base):
            result |= _of_source(inspect.getsource(base), vars(base)["__annotations__"])
    return result


def _of_source(source, fields):
    """Comments by line; a field has that of its own line, or those of the lines above it."""
    lines, beside, alone = source.splitlines(), {}, {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            words, row = token.string.removeprefix("#").strip(), token.start[0]
            (alone if not lines[row - 1][: token.start[1]].strip() else beside)[row] = words
    result = {}
    for row, line in enumerate(lines, 1):
        name = line.partition(":")[0].strip()
        if name in fields and line.startswith("    ") and not line.startswith("     "):
            result[name] = beside.get(row) or _above(alone, row)
    return result


def _above(alone, row):
    words = []
    while row - 1 in alone:
        row -= 1
        words.insert(0, alone[row])
    return " ".join(words)


@functools.cache
def of_file(path: Path) -> tuple[str, dict[str, str]]:
    """A yaml -> (its first comment: what it is, {dotted key: the comment on its line, "" where there is none})."""
    text = path.read_text()
    lines, comments = text.splitlines(), {}
    head = itertools.takewhile(lambda line: line.startswith("#"), lines)
    about = [line.removeprefix("#").strip() for line in head if not line.startswith("# @package")]
    _of_node(yaml.compose(text), "", lines, comments)
    return " ".join(about), comments


def _of_node(node, path, lines, comments):
    if not isinstance(node, yaml.MappingNode):
        return
    for key, value in node.value:
        dotted = path + str(key.value)
        is_block = isinstance(value, yaml.CollectionNode) and not value.flow_style
        end = (key if is_block else value).end_mark
        _, mark, words = lines[end.line][end.column :].partition("#")
        comments[dotted] = words.strip() if mark else ""
        _of_node(value, f"{dotted}.", lines, comments)
