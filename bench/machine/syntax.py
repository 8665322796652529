"""A Python source -> what of it can matter when it runs: its syntax tree, as text that no Python version changes.

Python's own ast.dump and ast.unparse write one tree in different words from version to version (3.12 added type_params,
3.13 leaves empty fields out), so the tree is written here:
1. Dropped: comments, blanks, line numbers, the docstrings of modules, classes and functions, the "u" of u"text".
2. A node is its name and its fields in alphabetical order; a field that is None or an empty list is not written, so a
   field that a later Python adds changes nothing where it is not used.  An item None of a list (** in a dict) is.
3. Constants and names are written in ASCII, because which characters repr() escapes follows the Unicode tables.
4. Neighbouring text parts of an f-string are one, empty ones none: 3.11 and 3.12 split them differently.
No recursion of Python functions, whose limit would depend on the caller's depth.
"""

import ast
import functools
import warnings

DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
ODD = (*DOCUMENTED, ast.JoinedStr, ast.FormattedValue)  # nodes of which not every field is written as it is


def normalised(source):
    """bytes -> bytes.  A source that this Python cannot parse, or print (an integer of 5000 digits), stays as it is."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "\d": a SyntaxWarning, which -W error makes a SyntaxError
            return "".join(_words(ast.parse(source))).encode()
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return source


def _words(tree):
    words, open_nodes = [], [iter((tree,))]  # of each node that is begun, the parts that are left
    while open_nodes:
        for part in open_nodes[-1]:
            if type(part) is not str:
                open_nodes.append(iter(_parts(part)))
                break
            words.append(part)
        else:
            open_nodes.pop()
    return words


def _parts(node):
    """A node -> words and the nodes between them."""
    kind = type(node)
    parts = [f"{kind.__name__}("]
    for name in _names(kind):
        value = _field(node, name) if kind in ODD else getattr(node, name, None)
        if value is None or value == []:
            continue
        if type(value) is list:
            parts += [f"{name}=[", *(part for item in value for part in (_part(item), ",")), "],"]
        else:
            parts += [f"{name}=", _part(value), ","]
    return [*parts, ")"]


@functools.cache
def _names(kind):
    return sorted(kind._fields)


def _part(value):
    """A value, or a node with nodes below it, which waits for its turn."""
    if not isinstance(value, ast.AST):
        return ascii(value)
    if type(value) is ast.Constant:
        return f"Constant({ascii(value.value)})"
    if type(value) is ast.Name:  # every third node: written as _parts would
        return f"Name(ctx={type(value.ctx).__name__}(),id={ascii(value.id)},)"
    return value if value._fields else f"{type(value).__name__}()"


def _field(node, name):
    """Of a kind in ODD."""
    value = getattr(node, name, None)
    if name == "body" and isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
        return value[1:]
    if name == "values" and isinstance(node, ast.JoinedStr):
        return _joined(value)
    if name == "format_spec" and value is not None and not _joined(value.values):
        return None  # f"{x:}": 3.11 has an empty one
    return value


def _joined(values):
    """The parts of an f-string, neighbouring texts as one."""
    parts = []
    for value in values:
        if not isinstance(value, ast.Constant):
            parts.append(value)
        elif parts and isinstance(parts[-1], ast.Constant):
            parts[-1] = ast.Constant(parts[-1].value + value.value)
        elif value.value:
            parts.append(value)
    return parts
