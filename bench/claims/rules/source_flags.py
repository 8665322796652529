"""Which flags of inductor, dynamo and torch.compile a script's source sets, read from its syntax tree.

Names are followed through imports (import torch._inductor.config as c) and assignments, within each function.  Whatever
else a source does with such a module, torch.compile or the names of their variables is left to a reader (Found.unseen).
"""

import ast
import collections
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple, cast

FLAG = re.compile(r"torch\._(inductor|dynamo)(?:\.\w+)*?\.config\.(.+)")  # torch._inductor.utils.config too
# What nobody may be handed unseen: the modules, those of their flags, groups of flags, and compile itself.
GROUPS = "aot_inductor|cpp|cuda|rocm|trace|triton|halide"
BARE = re.compile(rf"torch(\.compile|\._(inductor|dynamo|functorch)((\.\w+)*?\.config(\.({GROUPS}))?)?)?|exec|eval")
COMPILERS = re.compile(r"torch\.(_inductor|_dynamo|_functorch|compiler)\b.*|(.*\.)?compile")  # more than the flags
HARMLESS = ("re.compile", *(f"torch.compiler.{name}" for name in ("is_compiling", "disable", "reset")))
HARMLESS += tuple(f"torch._dynamo.{name}" for name in ("disable", "reset", "mark_dynamic", "graph_break"))
OF_FLAGS = re.compile(r"torch\.(\w+\.)*config\.")
NAMED = re.compile(r"_inductor|_dynamo|_functorch|TORCH_?(INDUCTOR|DYNAMO|COMPILE)_")  # in a text
METHODS = ("patch", "load_config")  # of a module of flags, which set some
READS = ("getattr", "hasattr", "setattr", "__setattr__")  # whose second argument names one attribute
READERS = ("print", "os.getenv", "os.environ.get", "os.environ.pop", "logging.getLogger")  # to which a text is harmless
VARIABLES = ("TORCHINDUCTOR_", "TORCHDYNAMO_", "TORCH_COMPILE_")
ENVIRON = ("os.environ", "os.environb")
SETTERS = ("update", "setdefault", "__setitem__", "__ior__")  # of os.environ
COMPILE_OPTIONS = ("mode", "options", "backend")  # of torch.compile, and of a module's compile()
IMPORTS = ("import_module", "__import__")
MAX_ALIASES = 20
SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
Place = tuple[str, int]  # (a flag as bench/training/compile_flags.py names it, or source text; its line)


class Found(NamedTuple):
    """What sources set."""

    flags: dict[str, int]  # {flag: line}
    statements: dict[str, set[str]]  # {flag: the statements that set it}
    unseen: dict[str, int]  # {statement with which flags may be set that are not among these: line}


def flags_of(sources: Mapping[str, str]) -> Found | None:
    """Returns what these sources set; None if one cannot be parsed as Python."""
    found = Found({}, {}, {})
    for text in sources.values():
        try:
            tree = ast.parse(text)
            parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
            _visit(tree, {}, parents, found)
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
    shared = _of_several(nodes, assigned, paths)
    for node in nodes:
        for flag, line in _set_by(node, paths):
            found.flags[flag] = line
            found.statements.setdefault(flag, set()).add(_statement(node, parents)[0])
        inner += [node] if isinstance(node, SCOPES) and node is not scope else []
    for node in nodes:
        own = {getattr(node, "id", ""), *(node.names if isinstance(node, ast.Global | ast.Nonlocal) else ())}
        if own & shared or _is_unclear(node, paths, parents, found.flags):
            text, line = _statement(node, parents)
            found.unseen[text] = line
    for function in inner:
        _visit(function, paths, parents, found)


def _statement(node: ast.AST, parents: Mapping[ast.AST, ast.AST]) -> Place:
    """Returns the first line of the statement that a node is part of, and its number."""
    while not isinstance(node, ast.stmt):
        node = parents[node]
    return ast.unparse(node).partition("\n")[0], node.lineno


def _of_several(
    nodes: Iterable[ast.AST], assigned: Iterable[tuple[str, ast.expr]], paths: Mapping[str, str]
) -> set[str]:
    """Returns the names that stand for what is BARE and elsewhere, or in another function, for something else."""
    meanings: dict[str, list[str]] = {}
    named = [(name, _path(value, paths)) for name, value in assigned]
    for name, path in [*named, *(pair for node in nodes for pair in _imported(node))]:
        meanings.setdefault(name, []).append(path)
    num_stored = collections.Counter(node.id for node in nodes if isinstance(node, ast.Name) and _is_set(node))
    num_stored.update(name for node in nodes for name, _ in _imported(node))
    num_stored.update(name for node in nodes if isinstance(node, ast.Global | ast.Nonlocal) for name in node.names)
    bare = {name for name, texts in meanings.items() if any(map(BARE.fullmatch, texts))}
    return {name for name in bare if len({*meanings[name]}) > 1 or num_stored[name] > len(meanings[name])}


def _is_set(node: ast.Attribute | ast.Subscript | ast.Name) -> bool:
    return not isinstance(node.ctx, ast.Load)


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


def _is_unclear(
    node: ast.AST, paths: Mapping[str, str], parents: Mapping[ast.AST, ast.AST], flags: Mapping[str, int]
) -> bool:
    """Returns whether flags that are not among `flags` may be set by this use of a module, of compile or of a name."""
    parent = parents.get(node, node)
    calls = _path(parent.func, paths) if isinstance(parent, ast.Call) else ""
    if isinstance(node, ast.Constant) and isinstance(node.value, str | bytes):
        of_subscript = _path(parent.value, paths) if isinstance(parent, ast.Subscript) else ""
        if _text(node) == "torch":
            return calls.endswith(IMPORTS) or of_subscript == "sys.modules"
        if _text(node) == "compile" and isinstance(parent, ast.Call):  # getattr(model, "compile")
            return calls not in READERS
        return bool(NAMED.search(_text(node))) and not (
            f"env.{_text(node)}" in flags
            or isinstance(parent, ast.Expr | ast.JoinedStr | ast.Compare)
            or (of_subscript in ENVIRON and not _is_set(cast(ast.Subscript, parent)))
            or calls in READERS
        )
    if isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Load):
        path = _path(node, paths)
        of, _, name = path.rpartition(".")
        is_method = bool(OF_FLAGS.fullmatch(f"{of}.")) and (name.startswith("__") or name in METHODS)
        if isinstance(parent, ast.Attribute):
            return False
        if not (BARE.fullmatch(path) or is_method):
            is_called = name == "compile" and isinstance(parent, ast.Call) and node is parent.func  # with its keywords
            is_known = is_called or path in HARMLESS or FLAG.fullmatch(path)  # a flag that is read
            return bool(COMPILERS.fullmatch(path)) and not is_known
        if path in ("exec", "eval"):
            return True
        if isinstance(parent, ast.Call):
            text = _text(parent.args[1]) if calls.rpartition(".")[2] in READS and len(parent.args) > 1 else ""
            return node is not parent.func and (not text or text == "compile" or bool(NAMED.search(text)))
        if isinstance(parent, ast.Subscript):
            return not _text(parent.slice)
        is_alias = any(value is node and isinstance(target, ast.Name) for target, value in _assigned([parent]))
        is_alias = is_alias and not isinstance(parents.get(parent), ast.ClassDef)  # whose names are attributes
        return not (is_alias or isinstance(parent, ast.Expr) or node in getattr(parent, "decorator_list", ()))
    if isinstance(node, ast.keyword):  # of a call that is not os.environ.update()
        return bool(NAMED.search(node.arg or "")) and f"env.{node.arg}" not in flags
    if isinstance(node, ast.ImportFrom):
        return bool(NAMED.search(node.module or "")) and any(alias.name == "*" for alias in node.names)
    if isinstance(node, ast.Subscript) and _is_set(node):
        return _path(node.value, paths) in ENVIRON and not _text(node.slice)
    if isinstance(node, ast.Attribute):  # set: of torch._functorch.config
        path = _path(node, paths)
        return bool(OF_FLAGS.match(path) or COMPILERS.fullmatch(path)) and not FLAG.fullmatch(path)
    if isinstance(node, ast.AugAssign):
        return _path(node.target, paths) in ENVIRON and not _is_whole(node.value)
    return isinstance(node, ast.Call) and _is_unclear_call(node, paths)


def _is_unclear_call(call: ast.Call, paths: Mapping[str, str]) -> bool:
    function = _path(call.func, paths)
    of, _, name = function.rpartition(".")
    spread = [keyword.value for keyword in call.keywords if keyword.arg is None]
    is_first_known = bool(call.args) and (bool(_text(call.args[0])) or _is_whole(call.args[0]))
    if function == "os.putenv" or function.endswith(IMPORTS):
        return not is_first_known
    if of in ENVIRON and name in SETTERS:
        return not (all(map(_is_whole, spread)) and (is_first_known or not call.args))
    if name == "compile" or getattr(call.func, "attr", "") == "compile":
        return not all(map(_is_whole, spread))
    if OF_FLAGS.fullmatch(f"{of}."):  # load_config(file), patch(**flags)
        return not (all(map(_is_whole, spread)) and (is_first_known or (not call.args and bool(call.keywords))))
    return False


def _is_whole(node: ast.expr) -> bool:
    """Returns whether all keys of a dict are known: of {"a": 1}, dict(a=1) and of one | another."""
    if isinstance(node, ast.Dict):
        return all(key is not None and bool(_text(key)) for key in node.keys)
    if isinstance(node, ast.Call):
        return getattr(node.func, "id", "") == "dict" and not node.args and all(each.arg for each in node.keywords)
    return isinstance(node, ast.BinOp) and _is_whole(node.left) and _is_whole(node.right)


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
