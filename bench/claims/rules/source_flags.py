"""Which flags of inductor, dynamo and torch.compile a script's source sets, read from its syntax tree.

Names are followed through imports (import torch._inductor.config as c) and assignments, within each function.  Python
has more ways to set a flag than any reader of source can list, so what is found here is set, and what is not found may
be set all the same: a run shows it (bench/training/compile_flags.py).
"""

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

FLAG = re.compile(r"torch\._(inductor|dynamo)(?:\.\w+)*?\.config\.(.+)")  # torch._inductor.utils.config too
# In a statement that a reader of the source should look at.
COMPILERS = re.compile(
    r"(?<!re\.)\bcompile\b|\b_(inductor|dynamo|functorch)\b|\bcompiler\.|TORCH_?(INDUCTOR|DYNAMO|COMPILE)"
)
VARIABLES = ("TORCHINDUCTOR_", "TORCHDYNAMO_", "TORCH_COMPILE_")
ENVIRON = ("os.environ", "os.environb")
SETTERS = ("update", "setdefault", "__setitem__", "__ior__")  # of os.environ
COMPILE_OPTIONS = ("mode", "options", "backend")  # of torch.compile, and of a module's compile()
MAX_ALIASES = 20
SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
Place = tuple[str, int]  # (a flag as bench/training/compile_flags.py names it, or source text; its line)


class Found(NamedTuple):
    """What sources say of compilers."""

    flags: dict[str, int]  # {flag that is set: line}
    statements: dict[str, int]  # {the first line of a statement that names a compiler or sets a flag: its number}


def flags_of(sources: Mapping[str, str]) -> Found | None:
    """Returns what these sources set; None if one cannot be parsed as Python."""
    found = Found({}, {})
    for text in sources.values():
        try:
            tree = ast.parse(text)
            parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
            _visit(tree, {}, parents, found)
            for node in ast.walk(tree):
                if isinstance(node, ast.stmt):
                    head, line = _statement(node, parents)
                    found.statements.update({head: line} if COMPILERS.search(head) else {})
        except (SyntaxError, ValueError, RecursionError):
            return None
    return found


def _visit(scope: ast.AST, outer: Mapping[str, str], parents: Mapping[ast.AST, ast.AST], found: Found) -> None:
    """Adds what a module or a function sets.  outer: {name: dotted path that it stands for} around it."""
    nodes, inner = list(_own_nodes(scope)), list[ast.AST]()
    paths = dict(outer)
    for name in _bound(scope, nodes):
        paths.pop(name, None)
    for node in nodes:
        paths |= dict(_imported(node))
    assigned = [(target.id, value) for target, value in _assigned(nodes) if isinstance(target, ast.Name)]
    for _ in range(min(len(assigned), MAX_ALIASES)):  # an alias of an alias
        for name, value in assigned:
            if (path := _path(value, paths)).startswith(("torch", "os.environ")):
                paths[name] = path
    for node in nodes:
        for flag, line in _set_by(node, paths):
            found.flags[flag] = line
            found.statements.update([_statement(node, parents)])
        inner += [node] if isinstance(node, SCOPES) and node is not scope else []
    for function in inner:
        _visit(function, paths, parents, found)


def _statement(node: ast.AST, parents: Mapping[ast.AST, ast.AST]) -> Place:
    """Returns the first line of the statement that a node is part of, and its number."""
    while not isinstance(node, ast.stmt):
        node = parents[node]
    return ast.unparse(node).partition("\n")[0], node.lineno


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
    if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
        yield from _of_config(_path(node, paths), node.lineno)
    elif isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
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
    elif name in ("setattr", "__setattr__", "__delattr__", "delattr") and len(call.args) > 1:
        yield from _of_config(f"{of}.{_text(first)}", call.lineno)  # of the module's own __setattr__
        yield from _of_config(f"{_path(first, paths)}.{_text(call.args[1])}", call.lineno)
    elif getattr(call.func, "attr", function) == "compile" or "torch.compile" in (function, _path(first, paths)):
        yield from ((f"compile.{name}", call.lineno) for name in map(_text, keywords) if name in COMPILE_OPTIONS)
    elif function == "torch._dynamo.optimize":
        yield "dynamo.optimize", call.lineno
    else:  # as config.patch(flag=...), config.patch({"flag": ...}), config.load_config(...)
        for key in [first, *_keys(first), *keywords]:
            yield from _of_config(f"{of}.{_text(key)}", call.lineno)


def _of_config(path: str, line: int) -> Iterator[Place]:
    if match := FLAG.fullmatch(path):
        yield f"{match[1]}.{match[2]}", line


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
