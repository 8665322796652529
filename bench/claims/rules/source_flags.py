"""Which flags of inductor, dynamo and torch.compile a script's source sets, read from its syntax tree.

Names are followed through imports (import torch._inductor.config as c) and assignments, within each function.  Where a
source passes such a module on, or writes variables that it computes, it may set flags that are not seen here.
"""

import ast
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

MODULES = ("inductor", "dynamo")
VARIABLES = ("TORCHINDUCTOR_", "TORCHDYNAMO_", "TORCH_COMPILE_")
ENVIRON = ("os.environ", "os.environb")
SETTERS = ("update", "setdefault", "__setitem__")  # of os.environ
COMPILE_OPTIONS = ("mode", "options", "backend")  # of torch.compile, and of a module's compile()
SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
Place = tuple[str, int]  # (a flag as bench/training/compile_flags.py names it, or source text; its line)


class Found(NamedTuple):
    """What sources set."""

    flags: dict[str, int]  # {flag: line}
    unseen: dict[str, int]  # {statement with which flags may be set that are not among these: line}


def flags_of(sources: Mapping[str, str]) -> Found | None:
    """Returns what these sources set; None if one cannot be parsed as Python."""
    found = Found({}, {})
    for text in sources.values():
        try:
            _visit(ast.parse(text), {}, found)
        except (SyntaxError, ValueError, RecursionError):
            return None
    return found


def _visit(scope: ast.AST, outer: Mapping[str, str], found: Found) -> None:
    """Adds what a module or a function sets.  outer: {name: dotted path that it stands for} around it."""
    nodes, inner = list(_own_nodes(scope)), list[ast.AST]()
    paths = dict(outer)
    for name in _bound(scope, nodes):
        paths.pop(name, None)
    for node in nodes:
        paths |= dict(_imported(node))
    for _ in range(3):  # an alias of an alias
        for target, value in _assigned(nodes):
            if isinstance(target, ast.Name) and (path := _path(value, paths)).startswith(("torch", "os.environ")):
                paths[target.id] = path
    for node in nodes:
        found.flags.update(_set_by(node, paths))
        found.unseen.update(_passed_on(node, paths))
        inner += [node] if isinstance(node, SCOPES) and node is not scope else []
    for function in inner:
        _visit(function, paths, found)


def _own_nodes(scope: ast.AST) -> Iterator[ast.AST]:
    """Yields the nodes of a scope, with the functions in it but without what is in these."""
    waiting = [scope]
    while waiting:
        node = waiting.pop()
        yield node
        if node is scope or not isinstance(node, SCOPES):
            waiting += reversed(list(ast.iter_child_nodes(node)))
        else:
            waiting += [*getattr(node, "decorator_list", ()), *node.args.defaults]


def _bound(scope: ast.AST, nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Yields the names of a function's parameters and variables."""
    if isinstance(scope, SCOPES):
        yield from (node.arg for node in nodes if isinstance(node, ast.arg))
        yield from (node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))


def _imported(node: ast.AST) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.Import):
        yield from ((alias.asname, alias.name) for alias in node.names if alias.asname)
        yield from ((top, top) for alias in node.names if not alias.asname for top in [alias.name.partition(".")[0]])
    elif isinstance(node, ast.ImportFrom) and node.module:
        yield from ((alias.asname or alias.name, f"{node.module}.{alias.name}") for alias in node.names)


def _assigned(nodes: Iterable[ast.AST]) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yields each target and its value, those of a, b = c, d one by one."""
    for node in nodes:
        if isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is not None:
            yield node.target, node.value
        elif isinstance(node, ast.Assign):
            values = node.value.elts if isinstance(node.value, ast.Tuple | ast.List) else []
            for target in node.targets:
                targets = target.elts if isinstance(target, ast.Tuple | ast.List) else []
                is_paired = targets and len(targets) == len(values)
                yield from zip(targets, values, strict=True) if is_paired else [(target, node.value)]


def _path(node: ast.AST, paths: Mapping[str, str]) -> str:
    """Returns the dotted path of an expression such as torch.compile; "" for any other."""
    if isinstance(node, ast.Name):
        return paths.get(node.id, node.id)
    if isinstance(node, ast.NamedExpr):
        return _path(node.value, paths)
    if isinstance(node, ast.Attribute) and (inner := _path(node.value, paths)):
        return f"{inner}.{node.attr}"
    return ""


def _set_by(node: ast.AST, paths: Mapping[str, str]) -> Iterator[Place]:
    """Yields the flags that one node sets."""
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        yield from _of_config(_path(node, paths), node.lineno)
    elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
        path = _path(node.value, paths)
        yield from _of_environ([node.slice] if path in ENVIRON else [], node.lineno)
        yield from _of_config(f"{path.removesuffix('.__dict__')}.{_text(node.slice)}", node.lineno)
    elif isinstance(node, ast.AugAssign) and _path(node.target, paths) in ENVIRON:
        yield from _of_environ(_keys(node.value), node.lineno)
    elif isinstance(node, ast.Call):
        yield from _set_by_call(node, paths)


def _set_by_call(call: ast.Call, paths: Mapping[str, str]) -> Iterator[Place]:
    function, first = _path(call.func, paths), call.args[0] if call.args else ast.Constant("")
    of, _, name = function.rpartition(".")
    keywords: list[ast.expr] = []
    for keyword in call.keywords:
        keywords += [ast.Constant(keyword.arg)] if keyword.arg else _keys(keyword.value)
    if function == "os.putenv" or (of in ENVIRON and name in SETTERS):
        yield from _of_environ([first, *_keys(first), *keywords], call.lineno)
    elif name in ("setattr", "__setattr__") and len(call.args) > 1:
        yield from _of_config(f"{_path(first, paths)}.{_text(call.args[1])}", call.lineno)
    elif getattr(call.func, "attr", function) == "compile" or "torch.compile" in (function, _path(first, paths)):
        yield from ((f"compile.{name}", call.lineno) for name in map(_text, keywords) if name in COMPILE_OPTIONS)
    elif function == "torch._dynamo.optimize":
        yield "dynamo.optimize", call.lineno
    else:  # as config.patch(flag=...), config.patch({"flag": ...}), config.load_config(...)
        for key in [first, *_keys(first), *keywords]:
            yield from _of_config(f"{of}.{_text(key)}", call.lineno)


def _passed_on(node: ast.AST, paths: Mapping[str, str]) -> Iterator[Place]:
    """Yields statements that hand a module of flags to something else, or set variables by names that are computed."""
    values: list[ast.AST] = []
    if isinstance(node, ast.Call):
        values = [*node.args, *(keyword.value for keyword in node.keywords)]
        of, _, name = _path(node.func, paths).rpartition(".")
        if name in ("setattr", "__setattr__", "getattr", "hasattr") and len(node.args) > 1 and _text(node.args[1]):
            values = []
        if of in ENVIRON and name in SETTERS and node.args and not (_keys(node.args[0]) or _text(node.args[0])):
            yield ast.unparse(node), node.lineno
    elif isinstance(node, (ast.Tuple, ast.List, ast.Dict, ast.Return, ast.For, ast.Starred)):
        values = list(ast.iter_child_nodes(node))
    elif isinstance(node, ast.AugAssign) and _path(node.target, paths) in ENVIRON and not _keys(node.value):
        yield ast.unparse(node), node.lineno
    for target, value in _assigned([node]):
        values += [] if isinstance(target, ast.Name) else [value]
    if any(_path(value, paths) in [f"torch._{module}.config" for module in MODULES] for value in values):
        yield ast.unparse(node).partition("\n")[0], getattr(node, "lineno", 0)


def _of_config(path: str, line: int) -> Iterator[Place]:
    for module in MODULES:
        before, found, name = path.partition(f"_{module}.config.")
        if found and name and before == "torch.":
            yield f"{module}.{name}", line


def _of_environ(keys: Iterable[ast.expr], line: int) -> Iterator[Place]:
    yield from ((f"env.{name}", line) for name in map(_text, keys) if name.startswith(VARIABLES))


def _keys(node: ast.expr) -> list[ast.expr]:
    """Returns the keys of {...}, dict(...) or of one | another."""
    if isinstance(node, ast.Dict):
        return [key for key in node.keys if key is not None]
    if isinstance(node, ast.Call):
        return [ast.Constant(keyword.arg) for keyword in node.keywords if keyword.arg]
    if isinstance(node, ast.BinOp):
        return _keys(node.left) + _keys(node.right)
    return []


def _text(node: ast.expr) -> str:
    value = node.value if isinstance(node, ast.Constant) else ""
    return value.decode(errors="replace") if isinstance(value, bytes) else value if isinstance(value, str) else ""
