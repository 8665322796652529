"""Finds the lines of a training script that run outside its own clock, from its source.  Nothing is executed.

modded-nanogpt, nanoGPT and similar scripts keep their own clock: a line such as `t0 = time.perf_counter()` starts it,
and a line that computes the difference and adds it to a total stops it.  So each statement of the script's main part
is, in the order of the source, before the first start, timed, in a pause, or after the last stop.  A function counts
as run where its name is used, together with everything that it uses.

This helps a reader and proves nothing: calls through getattr, a subprocess or a compiled extension are not seen.
./run.sh audit --only clock runs the script and measures it (off_clock.py).
"""

import ast
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

BEFORE, TIMED, PAUSE, AFTER = "before the clock starts", "timed", "in a pause of the clock", "after the clock"
UNTIMED = (BEFORE, PAUSE, AFTER)
CLOCKS = {"perf_counter", "perf_counter_ns", "time", "time_ns", "monotonic", "monotonic_ns"}
DEFINED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
FREE = (ast.Import, ast.ImportFrom, ast.Pass, ast.Break, ast.Continue, ast.Global)  # not reported: they do no work


class Line(NamedTuple):
    """A statement of a script."""

    phase: str  # one of BEFORE, TIMED, PAUSE, AFTER
    number: int  # its first line, counted from 1
    text: str  # as ast.unparse writes it, so that layout does not matter
    definition: str  # the function or class around it; "" for the main part
    main: str  # the name of the function that is the main part; <module> if that is the file itself


def lines_of(source: str) -> list[Line] | None:
    """Returns every statement with the phase in which it runs; None if it is not Python or there is no clock.

    A definition that several phases use counts as TIMED if it is also used while the clock runs.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _lines_of(ast.parse(source))
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # also numbers too long to be written again
        return None


def _lines_of(tree: ast.Module) -> list[Line] | None:
    parts = [("<module>", tree.body), *((node.name, node.body) for node in tree.body if isinstance(node, DEFINED[:2]))]
    keeping = [(name, body) for name, body in parts if _edges(_simple(_flat(body)))]
    if not keeping:
        return None
    main, body = keeping[-1]
    statements = list(_flat(body))
    definitions: dict[str, list[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]] = {}
    for node in ast.walk(tree):  # methods of different classes are not distinguished
        if isinstance(node, DEFINED):
            definitions.setdefault(node.name, []).append(node)
    if body is not tree.body:  # the top level of the file runs before its main function
        statements = [*_flat(tree.body), *statements]
    phases = _phases(statements)
    reached: dict[str, set[str]] = {}
    for statement, phase in zip(statements, phases, strict=True):
        _reach(_names(statement), phase, definitions, reached)
    lines = [Line(phase, stmt.lineno, _text(stmt), "", main) for stmt, phase in zip(statements, phases, strict=True)]
    for name, nodes in definitions.items():
        phases_of_name = reached.get(name, {TIMED})
        phase = next(phase for phase in (TIMED, PAUSE, BEFORE, AFTER) if phase in phases_of_name)
        inside = (stmt for node in nodes if node.body is not body for stmt in _flat(node.body, DEFINED))
        lines += [Line(phase, stmt.lineno, _text(stmt), name, main) for stmt in inside]
    return sorted((line for line in lines if line.text), key=lambda line: line.number)


def newly_untimed(candidate: Sequence[Line], baseline: Sequence[Line]) -> list[tuple[Line, bool]]:
    """Returns the statements that run outside the candidate's clock but not outside the baseline's.

    Each comes with whether the baseline times it.  A changed statement counts as new.
    """
    untimed = {line.text for line in baseline if line.phase in UNTIMED}
    timed = {line.text for line in baseline if line.phase == TIMED}
    new = (line for line in candidate if line.phase in UNTIMED and line.text not in untimed)
    return [(line, line.text in timed) for line in new]


def _simple(statements: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    return (node for node in statements if not hasattr(node, "body"))


def _flat(body: Sequence[ast.stmt], skipped: tuple[type[ast.stmt], ...] = DEFINED) -> Iterator[ast.stmt]:
    """Yields simple and compound statements (the latter for their headers) in source order, without definitions."""
    for node in body:
        if isinstance(node, (*skipped, *FREE)):
            continue
        yield node
        for part in ("body", "handlers", "orelse", "finalbody", "cases"):
            for inner in getattr(node, part, ()):
                statements = [inner] if isinstance(inner, ast.stmt) else getattr(inner, "body", [inner])
                yield from _flat(statements, skipped)


def _head(node: ast.stmt) -> list[ast.AST]:
    """Returns the expressions of a statement's header, without the statements in its body."""
    if not hasattr(node, "body"):
        return [node]
    parts = (getattr(node, name, None) for name in ("test", "iter", "target", "subject"))
    return [part for part in parts if part is not None] + [item.context_expr for item in getattr(node, "items", ())]


def _text(node: ast.stmt) -> str:
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)  # such as a docstring
    return "" if is_text else " ".join(ast.unparse(part) for part in _head(node))


def _names(node: ast.stmt | Sequence[ast.stmt]) -> set[str]:
    nodes = [part for stmt in ([node] if isinstance(node, ast.stmt) else node) for part in _head(stmt)]
    inner = [child for part in nodes for child in ast.walk(part)]
    names = {child.id for child in inner if isinstance(child, ast.Name)}
    return names | {child.attr for child in inner if isinstance(child, ast.Attribute)}


def _reach(
    names: set[str], phase: str, definitions: Mapping[str, Sequence[ast.stmt]], reached: dict[str, set[str]]
) -> None:
    waiting = [name for name in names if name in definitions]
    while waiting:
        name = waiting.pop()
        if phase in reached.setdefault(name, set()):
            continue
        reached[name].add(phase)
        for node in definitions[name]:
            inner = _names(list(_flat(getattr(node, "body"))))  # noqa: B009
            if isinstance(node, ast.ClassDef):  # an instance runs __init__; other methods run where they are named
                inner = {"__init__"} & {part.name for part in node.body if isinstance(part, DEFINED)}
            waiting += [other for other in inner if other in definitions]


def _edges(statements: Iterable[ast.stmt]) -> dict[int, bool]:
    """Returns {line: whether it starts the clock (True) or stops it (False)}.

    A difference of two readings of a clock shows both: the clock starts at the line of the earlier reading and stops
    at that of the later one.  A difference that is only printed, or assigned to an approx_ time, does not count.
    """
    reads: dict[str, list[int]] = {}
    differences: list[tuple[ast.stmt, ast.BinOp]] = []
    for node in statements:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if not isinstance(node, (ast.Assign, ast.AugAssign)) or target is None:
            continue
        if isinstance(target, ast.Name) and (_is_reading(node.value) or getattr(node.value, "id", None) in reads):
            reads.setdefault(target.id, []).append(node.lineno)
        elif "approx" not in ast.unparse(target):
            inner = (
                part for part in ast.walk(node.value) if isinstance(part, ast.BinOp) and isinstance(part.op, ast.Sub)
            )
            differences += [(node, part) for part in inner]
    starts, stops = set[int](), set[int]()
    for node, difference in differences:
        earlier, later = getattr(difference.right, "id", None), getattr(difference.left, "id", None)
        if earlier in reads and (later in reads or _is_reading(difference.left)):
            starts |= {*reads[earlier]}
            stops |= {*reads[later]} if later in reads else {node.lineno}
    return dict.fromkeys(stops, False) | dict.fromkeys(starts - stops, True)


def _is_reading(node: ast.AST) -> bool:
    func = getattr(node, "func", None)
    return getattr(func, "attr", getattr(func, "id", None)) in CLOCKS


def _phases(statements: Sequence[ast.stmt]) -> list[str]:
    """Returns the phase of each statement, in source order; the body of a loop counts once."""
    edges = _edges(_simple(statements))
    last = max((line for line, is_start in edges.items() if not is_start), default=0)
    loops = (node for node in statements if isinstance(node, (ast.For, ast.While)) and node.lineno < last)
    ends = (loop.end_lineno or 0 for loop in loops)
    end = max((end for end in ends if end >= last), default=last)  # the end of the loop with the last stop of the clock
    phases, phase = [], BEFORE
    for node in statements:
        phases.append(AFTER if last and node.lineno > end else phase)
        if (is_start := None if hasattr(node, "body") else edges.get(node.lineno)) is not None:
            phase = TIMED if is_start else PAUSE
    return phases
