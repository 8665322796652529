"""Which nn.Module asked for memory: the chain of modules in whose forward, or whose construction, an allocation lies.

A stack has functions and lines, no objects.  torch calls every module's forward through Module._call_impl, so the frame
just inside it is that of a forward; its class is read from the source where that is this repository's and still has
such a function at that line, else the file stands for it.  Modules that share a class share a name.
"""

import ast
import functools
import re

from bench.analysis.memory.lives import Life
from bench.analysis.memory.sites import INSIDE_TORCH
from bench.base.paths import REPO
from bench.base.reading import plain_file
from bench.base.reading.damage import Damaged

CALLS = ("_call_impl", "_wrapped_call_impl")
MODULE_FILE = re.compile(r"(^|/)torch/nn/modules/module\.py$")
MAX_DEPTH = 3  # the innermost ones of a chain
OUTSIDE, UNKNOWN = "outside of modules", "before the recording"


def of(life: Life) -> str:
    """Life -> "GPT > Block > MLP"."""
    if life.frames is None:
        return UNKNOWN
    chain = _chain(tuple((str(f.get("filename")), f.get("line"), str(f.get("name"))) for f in life.frames))
    return " > ".join(chain[-MAX_DEPTH:]) if chain else OUTSIDE


@functools.lru_cache(maxsize=4096)
def _chain(frames):
    """Frames, innermost first -> names of modules, outermost first; torch's own (Linear) are not listed."""
    result = []
    for inner, (filename, _, name) in zip(frames, frames[1:]):
        is_call = name in CALLS and MODULE_FILE.search(filename) and inner[2] not in CALLS
        if (is_call or inner[2] == "__init__") and not INSIDE_TORCH.search(inner[0]):
            result.append(_class_at(*inner))
    if frames and frames[-1][2] == "__init__" and not INSIDE_TORCH.search(frames[-1][0]):
        result.append(_class_at(*frames[-1]))
    return [name for name in reversed(result) if name]


def _class_at(filename, line, function):
    """Name of the class whose function holds the line; without its source the file's name, None for no Python."""
    for first, last, class_name, name in _methods(filename):
        if name == function and isinstance(line, int) and first <= line <= last:
            return class_name
    return filename.rpartition("/")[2] if filename.endswith(".py") else None


@functools.lru_cache(maxsize=256)
def _methods(filename):
    """[(first line, last line, class, function)] of a file of this repository, () for any other."""
    path = (REPO / filename).resolve()
    if filename.startswith("/") or not path.is_relative_to(REPO.resolve()) or path.suffix != ".py":
        return ()
    try:
        tree = ast.parse(plain_file.text(path))
    except (Damaged, SyntaxError, ValueError, RecursionError):
        return ()
    return [
        (node.lineno, node.end_lineno, owner.name, node.name)
        for owner in ast.walk(tree)
        if isinstance(owner, ast.ClassDef)
        for node in owner.body
        if isinstance(node, ast.FunctionDef)
    ]
