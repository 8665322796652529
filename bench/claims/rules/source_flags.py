"""Which flags of inductor, dynamo and torch.compile a script's source sets, read from its syntax tree.

Names are followed through imports (import torch._inductor.config as c), and through assignments of a module to a name.
What a source sets by names that it computes is not seen.
"""

import ast
from collections.abc import Iterable, Iterator, Mapping

MODULES = ("inductor", "dynamo")
VARIABLES = ("TORCHINDUCTOR_", "TORCHDYNAMO_", "TORCH_COMPILE_")
COMPILE_OPTIONS = ("mode", "options", "backend")  # of torch.compile
Flag = tuple[str, int]  # (its name as bench/training/compile_flags.py has it, the line that sets it)


def flags_of(sources: Mapping[str, str]) -> dict[str, int] | None:
    """Returns {flag: line} of what these sources set; None if one cannot be parsed as Python."""
    line_of: dict[str, int] = {}
    for text in sources.values():
        try:
            nodes = list(ast.walk(ast.parse(text)))
        except (SyntaxError, ValueError, RecursionError):
            return None
        names = _Names(nodes)
        for node in nodes:
            line_of |= dict(_set_by(node, names))
    return line_of


class _Names:
    """The dotted path that each name of a source stands for, such as {"c": "torch._inductor.config"}."""

    def __init__(self, nodes: Iterable[ast.AST]):
        self._paths: dict[str, str] = {}
        aliases: list[tuple[ast.expr, ast.expr]] = []
        for node in nodes:
            if isinstance(node, ast.Import):
                self._paths |= {alias.asname: alias.name for alias in node.names if alias.asname}
            elif isinstance(node, ast.ImportFrom) and node.module:
                self._paths |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            elif isinstance(node, ast.Assign):
                aliases += [(target, node.value) for target in node.targets]
            elif isinstance(node, ast.NamedExpr):
                aliases.append((node.target, node.value))
        for _ in range(3):  # an alias of an alias
            for target, value in aliases:
                if isinstance(target, ast.Name) and (path := self.path(value)).startswith(("torch", "os.environ")):
                    self._paths.setdefault(target.id, path)

    def path(self, node: ast.AST) -> str:
        """Returns the dotted path of an expression such as torch.compile; "" for any other."""
        if isinstance(node, ast.Name):
            return self._paths.get(node.id, node.id)
        if isinstance(node, ast.NamedExpr):
            return self.path(node.value)
        inner = self.path(node.value) if isinstance(node, ast.Attribute) else ""
        return f"{inner}.{node.attr}" if inner and isinstance(node, ast.Attribute) else ""


def _set_by(node: ast.AST, names: _Names) -> Iterator[Flag]:
    """Yields the flags that one node sets."""
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        yield from _of_config(names.path(node), node.lineno)
    elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store) and _is_environ(node.value, names):
        yield from _of_environ([node.slice], node.lineno)
    elif isinstance(node, ast.AugAssign) and _is_environ(node.target, names):
        yield from _of_environ(_keys(node.value), node.lineno)
    elif isinstance(node, ast.Call):
        yield from _set_by_call(node, names)


def _set_by_call(call: ast.Call, names: _Names) -> Iterator[Flag]:
    function, first = names.path(call.func), call.args[0] if call.args else ast.Constant("")
    keywords: list[ast.expr] = []
    for keyword in call.keywords:
        keywords += [ast.Constant(keyword.arg)] if keyword.arg else _keys(keyword.value)
    if function == "os.putenv" or (_is_environ(getattr(call.func, "value", first), names) and "." in function):
        yield from _of_environ([first, *_keys(first), *keywords], call.lineno)
    elif function in ("setattr", "builtins.setattr") and len(call.args) > 1:
        yield from _of_config(f"{names.path(first)}.{_text(call.args[1])}", call.lineno)
    elif "torch.compile" in (function, names.path(first)):  # the latter as of functools.partial
        yield from ((f"compile.{name}", call.lineno) for name in map(_text, keywords) if name in COMPILE_OPTIONS)
    else:  # as config.patch(flag=...), config.patch({"flag": ...}), config.load_config(...)
        for key in [first, *_keys(first), *keywords]:
            yield from _of_config(f"{function.rpartition('.')[0]}.{_text(key)}", call.lineno)


def _of_config(path: str, line: int) -> Iterator[Flag]:
    for module in MODULES:
        before, found, name = path.partition(f"_{module}.config.")
        if found and name and before in ("torch.", ""):
            yield f"{module}.{name}", line


def _of_environ(keys: Iterable[ast.expr], line: int) -> Iterator[Flag]:
    yield from ((f"env.{name}", line) for name in map(_text, keys) if name.startswith(VARIABLES))


def _is_environ(node: ast.AST, names: _Names) -> bool:
    return names.path(node) == "os.environ"


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
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
