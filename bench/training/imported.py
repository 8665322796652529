"""Checks that a rank's modules, the harness's and the user's, were imported from the run's copies of the code.

Done at the end of a run, off the clock.  It does not see what a class does to other modules once it runs.
"""

import marshal
import os
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

from bench.base.paths import CODE, working_folder
from bench.config import user_code
from bench.machine import code_copy

OURS = ("bench", "models")
MAX_NAMES = 20
PYC_HEADER_BYTES = 16  # before the marshalled code: PEP 552


def facts(hashes: bool) -> dict[str, Any]:
    """Returns what this rank has imported: {"copy", "num_modules", "elsewhere"}.

    "copy" is the name of the copy that it imports from (None for the checkout), "num_modules" counts the modules of the
    harness and the user, and "elsewhere" has the sorted names of those that came from anywhere else; with hashes, which
    take 0.1 s, also of modules whose bytecode does not match their source, and of copies whose files have changed.
    """
    own, num_modules = user_code.copies(), 0
    elsewhere: set[str] = set()
    for name, module in list(sys.modules.items()):
        imported_as = getattr(getattr(module, "__spec__", None), "name", "")  # __main__ has its real name there
        if name.partition(".")[0] in OURS or (name == "__main__" and imported_as.partition(".")[0] in OURS):
            folder = CODE
        elif own is not None and _is_of_user(own, name, module):
            folder = own
        else:
            continue
        num_modules += 1
        if not _is_within(folder, module) or (hashes and _has_other_bytecode(module)):
            elsewhere.add(imported_as or name)
    if hashes:
        copies = [CODE] * code_copy.is_copy(CODE) + ([own.parent] if own else [])
        elsewhere |= {folder.name for folder in copies if not code_copy.is_whole(folder)}
    copy = CODE.name if code_copy.is_copy(CODE) else None
    return {"copy": copy, "num_modules": num_modules, "elsewhere": sorted(elsewhere)[:MAX_NAMES]}


def merged(by_rank: list[dict[str, Any]]) -> dict[str, Any]:
    """Merges every rank's facts() into run.json's referee.code, with sorted "copies" and the largest num_modules."""
    return {
        "copies": sorted({str(rank["copy"]) for rank in by_rank}),
        "num_modules": max(rank["num_modules"] for rank in by_rank),
        "elsewhere": sorted({name for rank in by_rank for name in rank["elsewhere"]})[:MAX_NAMES],
    }


def _is_of_user(own: Path, name: str, module: ModuleType) -> bool:
    """Whether a module is in the copies of the user's code, or where its name is imported from in their folder."""
    path = getattr(module, "__file__", None)
    if not isinstance(path, str):
        return False
    if os.path.abspath(path).startswith(f"{own}{os.sep}"):
        return True
    start = os.path.join(working_folder(), *name.split("."))
    return os.path.abspath(path) in (f"{start}.py", os.path.join(start, "__init__.py"))


def _is_within(folder: Path, module: ModuleType) -> bool:
    """Whether a module's source, or a namespace package's folders, are in folder and are not links to elsewhere.

    A compiled module would be imported in place of the source beside it.
    """
    paths = getattr(module, "__file__", None) or list(getattr(module, "__path__", ()))
    if isinstance(paths, str):
        paths = [paths] if paths.endswith(".py") else []
    start = os.path.realpath(folder) + os.sep
    return bool(paths) and all(os.path.realpath(path).startswith(start) for path in paths)


def _has_other_bytecode(module: ModuleType) -> bool:
    """Whether the .pyc of a module differs from its source.  Python reads neither again once it is imported."""
    path, cached = getattr(module, "__file__", None), getattr(getattr(module, "__spec__", None), "cached", None)
    if not path or not cached or not os.path.exists(cached):
        return False  # compiled from the source
    try:
        code = marshal.loads(Path(cached).read_bytes()[PYC_HEADER_BYTES:])
        with warnings.catch_warnings(action="ignore"):
            return bool(code != compile(Path(path).read_bytes(), path, "exec", dont_inherit=True))
    except (OSError, ValueError, EOFError, TypeError, SyntaxError):
        return True
