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
import warnings

DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def normalised(source):
    """bytes -> bytes.  A source that this Python cannot parse, or print (an integer of 5000 digits), stays as it is."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "\d": a SyntaxWarning, which -W error makes a SyntaxError
            return "".join(_words(ast.parse(source))).encode()
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return source


def _words(tree):
    waiting = [tree]  # nodes, and words that are ready; the next one is last
    while waiting:
        item = waiting.pop()
        if isinstance(item, str):
            yield item
        else:
            waiting.extend(reversed(_parts(item)))


def _parts(node):
    """A node -> words and the nodes between them."""
    if isinstance(node, ast.Constant):
        return [f"Constant({ascii(node.value)})"]
    parts = [type(node).__name__, "("]
    for name, value in sorted(_fields(node).items()):
        parts.append(f"{name}=")
        if isinstance(value, list):
            parts += ["[", *(part for item in value for part in (_part(item), ",")), "]"]
        else:
            parts.append(_part(value))
        parts.append(",")
    return [*parts, ")"]


def _part(value):
    return value if isinstance(value, ast.AST) else ascii(value)


def _fields(node):
    fields = dict(ast.iter_fields(node))
    if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
        fields["body"] = node.body[1:]
    if isinstance(node, ast.JoinedStr):
        fields["values"] = _joined(node.values)
    if isinstance(node, ast.FormattedValue) and node.format_spec is not None and not _joined(node.format_spec.values):
        del fields["format_spec"]  # f"{x:}": 3.11 has an empty one
    return {name: value for name, value in fields.items() if value is not None and value != []}


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
