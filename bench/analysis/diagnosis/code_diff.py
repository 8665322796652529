"""Shows what changed in the source between two runs, rebuilt from their folders: commit, patch and untracked sources.

Nothing is checked out and nothing is written into the repository: trees are built in a separate index and object store.
To git, what a record holds is only data, and git refuses paths that lead outside.  The user's own classes and training
script, of which each record holds complete copies (code/own/, code/script/), are compared without git.
"""

import difflib
import functools
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypedDict

from bench.base import atomic
from bench.base.paths import REPO
from bench.base.reading import json_file, plain_file
from bench.base.reading.damage import Damaged
from bench.machine import code_state, git

MAX_PATCH_CHARS = 200_000
WHOLE = ("own", "script")  # folders of code/ that hold the user's files
SHOWN = ("--", ".", ":(exclude)results")


class Commit(TypedDict):
    """The fields of code/commit.json that are read here."""

    commit: str | None
    untracked: list[str] | None


class Unknown(Exception):
    """A run's source cannot be rebuilt; the message says why."""


def diff_folders(a_folder: Path | str, b_folder: Path | str, repo: Path | str = REPO) -> dict[str, Any]:
    """Compares two runs' source: {"files": [{"path", "added", "removed"}], "patch", "is_cut", "unknown"}.

    added and removed count lines, None for a binary file.  patch is cut at a line to MAX_PATCH_CHARS.  unknown says why
    there is no comparison, None if there is one.
    """
    try:
        own = _own_change(code_state.kept(a_folder), code_state.kept(b_folder))
    except Damaged as error:
        return _difference([], "", str(error))
    if own:  # perhaps only the user's files differ, according to the records
        codes = [atomic.read_json(Path(folder, "code/commit.json")) for folder in (a_folder, b_folder)]
        differing = code_state.differing_files(*codes) if all(codes) else None
        if differing is not None and all(name.partition("/")[0] in WHOLE for name in differing):
            return _difference(own, "", None)
    with tempfile.TemporaryDirectory(prefix="speedrun-code-") as scratch:
        try:
            ask = _git(repo, scratch)
            trees = [_tree(ask, Path(folder)) for folder in (a_folder, b_folder)]
            counts = ask("diff", "--numstat", "--no-renames", "-z", *trees, *SHOWN).split("\0")
            patch = ask("diff", "--no-color", "--no-ext-diff", "--no-textconv", *trees, *SHOWN)
        except (Unknown, git.Failed) as error:
            return _difference([], "", str(error))
    return _difference([*own, *({**_counted(line), "patch": ""} for line in counts if line)], patch, None)


def _difference(files: list[dict[str, Any]], patch: str, unknown: str | None) -> dict[str, Any]:
    patch = "".join(file.pop("patch") for file in files) + patch
    cut = patch[:MAX_PATCH_CHARS].rpartition("\n")[0] + "\n" if len(patch) > MAX_PATCH_CHARS else patch
    return {"files": files, "patch": cut, "is_cut": len(cut) < len(patch), "unknown": unknown}


def _own_change(a_code: Path, b_code: Path) -> list[dict[str, Any]]:
    """Returns the user's files that differ: [{"path", "added", "removed", "patch"}]."""
    a, b = _whole_files(a_code), _whole_files(b_code)
    files = []
    for name in sorted(a.keys() | b.keys()):
        before, after = (
            plain_file.text(side[name], errors="replace").splitlines() if name in side else [] for side in (a, b)
        )
        lines = list(difflib.unified_diff(before, after, f"a/{name}", f"b/{name}", lineterm=""))
        if lines:
            added, removed = (sum(line[0] == sign for line in lines[2:]) for sign in "+-")
            patch = "\n".join([*lines, ""])
            files.append({"path": name, "added": added, "removed": removed, "patch": patch})
    return files


def _whole_files(code: Path) -> dict[str, Path]:
    """Returns {"own/my_model.py": its path in the record} for the user's files."""
    paths = (path for part in WHOLE for path in (code / part).rglob("*") if path.is_file())
    return {path.relative_to(code).as_posix(): path for path in paths}


def _counted(line: str) -> dict[str, Any]:
    *counts, path = line.split("\t", 2)
    added, removed = (None if count == "-" else int(count) for count in counts)
    return {"path": path, "added": added, "removed": removed}


def _git(repo: Path | str, scratch: str) -> Callable[..., str]:
    """Returns git.run() with its index and object store in scratch, so that the repository's objects are only read."""
    os.mkdir(f"{scratch}/objects")
    objects = git.run(repo, "rev-parse", "--git-path", "objects").strip()
    return functools.partial(
        git.run,
        repo,
        errors="replace",
        GIT_INDEX_FILE=f"{scratch}/index",
        GIT_OBJECT_DIRECTORY=f"{scratch}/objects",
        GIT_ALTERNATE_OBJECT_DIRECTORIES=str(Path(repo, objects).resolve()),
    )


def _tree(ask: Callable[..., str], folder: Path) -> str:
    """Writes the run's source as a git tree and returns its name.  Raises Unknown if it cannot be rebuilt."""
    try:
        state = json_file.read(folder / "code" / "commit.json", Commit)
        patch = plain_file.content(folder / "code" / "diff.patch")
        commit, untracked = state["commit"], state["untracked"] or ()
    except Damaged:
        raise Unknown(f"{folder.name} does not say which code ran") from None
    if not commit:
        raise Unknown(f"{folder.name} ran outside of git")
    if set(commit) - set("0123456789abcdef"):
        raise Unknown(f"{folder.name} names no commit: {commit!r:.60}")
    try:
        ask("cat-file", "-e", f"{commit}^{{commit}}")
    except git.Failed:
        raise Unknown(f"commit {commit[:12]} is not in this repository: fetch it") from None
    ask("read-tree", commit)
    try:
        if patch.strip():
            ask("apply", "--cached", "--whitespace=nowarn", "-", stdin=patch)
    except git.Failed:
        raise Unknown(f"the patch of {folder.name} does not fit its commit") from None
    root = (folder / "code" / "untracked").resolve()
    for name in untracked:
        path = (root / str(name)).resolve()
        if not path.is_relative_to(root) or not path.is_file():
            raise Unknown(f"{folder.name} does not hold its untracked source {name}")
        blob = ask("hash-object", "-w", "--stdin", stdin=plain_file.content(path)).strip()
        ask("update-index", "--add", "--cacheinfo", f"100644,{blob},{name}")
    return ask("write-tree").strip()
