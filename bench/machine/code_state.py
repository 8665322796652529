"""Which code ran: commit, difference, sources that git does not know, and one hash over what is raced.

History of the identity, source_sha256:
  1  every *.py of bench/ and models/, byte by byte
  2  the sources that RACED names: of Python the syntax tree without docstrings and comments (normalised()),
     of a kernel that is built while it trains (OTHER_SOURCES) every byte
Hashes of two versions are never equal, and that says nothing: whether the code is the same is then unknown.
"""

import ast
import contextlib
import functools
import glob
import hashlib
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from bench.base import atomic, credentials, private
from bench.base.paths import CODE, INSTALLED, REPO
from bench.base.units import MIB
from bench.config import user_code
from bench.machine import code_copy, git

Code = dict[str, Any]  # a record's "code"
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
ODD = (*DOCUMENTED, ast.JoinedStr, ast.FormattedValue)  # nodes of which not every field is written as it is


def normalised(source: bytes) -> bytes:
    """What of a Python source can matter when it runs: its syntax tree, as text that no Python version changes.

    Python's own ast.dump and ast.unparse write one tree differently from version to version (3.12 added type_params,
    3.13 leaves empty fields out), so the tree is written here:
    1. Dropped: comments, blanks, line numbers, the docstrings of modules, classes and functions, the "u" of u"text".
    2. A node is its name and its fields in alphabetical order; a field that is None or an empty list is not written, so
       a field that a later Python adds changes nothing where it is not used.  A None in a list (** in a dict) is.
    3. Constants and names are written in ASCII, because which characters repr() escapes follows the Unicode tables.
    4. Neighbouring text parts of an f-string are one, empty ones none: 3.11 and 3.12 split them differently.
    No Python function recurses: its limit would depend on the caller's depth.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "\d": a SyntaxWarning, which -W error makes a SyntaxError
            return "".join(_texts(ast.parse(source))).encode()
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return source


def _texts(tree: ast.AST) -> list[str]:
    texts: list[str] = []
    waiting: list[str | ast.AST] = [tree]  # the next one last
    while waiting:
        part = waiting.pop()
        if isinstance(part, str):
            texts.append(part)
        else:
            waiting += _parts(part)[::-1]
    return texts


def _parts(node: ast.AST) -> list[str | ast.AST]:
    """A node -> the nodes below it that have nodes below them, and the texts before, between and after these."""
    kind: Any = type(node)
    parts: list[str | ast.AST] = []
    text = f"{kind.__name__}("
    for name in _field_names(kind):
        value: Any = _field(node, name) if kind in ODD else getattr(node, name, None)
        if value is None or value == []:
            continue
        is_list = type(value) is list
        text += f"{name}=[" if is_list else f"{name}="
        for item in value if is_list else (value,):
            part = _part(item)
            if isinstance(part, str):
                text += f"{part},"
            else:
                parts += [text, part]
                text = ","
        text += "]," if is_list else ""
    return [*parts, f"{text})"]


@functools.cache
def _field_names(kind: Any) -> list[str]:
    return sorted(kind._fields)


def _part(value: Any) -> str | ast.AST:
    """A value, or a node with nodes below it, which waits for its turn."""
    kind = type(value)
    if kind is ast.Constant:
        return f"Constant({ascii(value.value)})"
    if kind is ast.Name:  # every third node: written as _parts would
        return f"Name(ctx={type(value.ctx).__name__}(),id={ascii(value.id)},)"
    if not isinstance(value, ast.AST):
        return ascii(value)
    return value if value._fields else f"{kind.__name__}()"


def _field(node: Any, name: str) -> Any:
    """A field of a node whose kind is in ODD."""
    value: Any = getattr(node, name, None)
    if name == "body" and isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
        return value[1:]
    if name == "values" and isinstance(node, ast.JoinedStr):
        return _joined(value)
    if name == "format_spec" and value is not None and not _joined(value.values):
        return None  # f"{x:}": 3.11 has an empty one
    return value


def _joined(values: list[Any]) -> list[Any]:
    """The parts of an f-string, neighbouring texts as one."""
    parts: list[Any] = []
    for value in values:
        if not isinstance(value, ast.Constant):
            parts.append(value)
        elif parts and isinstance(parts[-1], ast.Constant):
            parts[-1] = ast.Constant(str(parts[-1].value) + str(value.value))
        elif value.value:
            parts.append(value)
    return parts


IDENTITY_VERSION = 2
# Files and folders whose code decides what a run trains, or acts or measures while it trains.  Not here: conf/ (its
# values are in config_id), what writes and reads records.
RACED = (
    "models", "bench/training", "bench/data", "bench/config", "bench/machine/telemetry", "bench/launch/guard.py",
    "bench/launch/nodes/leader.py", "bench/launch/nodes/member.py", "bench/launch/ranks.py",
    "bench/launch/script/output.py", "bench/launch/script/script_run.py", "bench/machine/meters.py",
    "bench/machine/environment.py", "bench/machine/gpus.py", "bench/machine/processes.py",
    "bench/machine/stamped_pipes.py", "bench/record/step_files.py", "bench/base/units.py",
    "bench/machine/lazy_dynamo.py", "bench/base/metric.py", "bench/__init__.py",
)  # fmt: skip
OTHER_SOURCES = user_code.KERNELS
SUFFIXES = (".py", ".yaml", ".toml", ".sh", *OTHER_SOURCES)  # of what git may not know
NONE_OWN: Mapping[str, Path] = {}  # a run of nothing but what is here
_last_patch: dict[str, str] = {}  # {diff_sha256: code/diff.patch} of the last state(): git runs once a run
MAX_UNTRACKED_BYTES = MIB  # a source file; anything larger is data


# ---- the identity of what is raced


def raced_files(repo: Path | str = CODE, own: Mapping[str, Path] = NONE_OWN) -> dict[str, str]:
    """{path from repo: sha256 of what counts of the file} of RACED and of own (a run's user_code.sources()), sorted."""
    paths = [path for name in RACED for path in _sources(Path(repo, name))]
    sources = {path.relative_to(repo).as_posix(): path for path in paths} | dict(own)
    return {name: file_sha256(path) for name, path in sorted(sources.items())}


def file_sha256(path: Path) -> str:
    """sha256 of what counts of one file."""
    return _sha256_of(path.read_bytes(), path.suffix == ".py")


def source_sha256(
    repo: Path | str = CODE, files: dict[str, str] | None = None, own: Mapping[str, Path] = NONE_OWN
) -> str:
    """One hash over raced_files(repo, own), or those given.  One of another identity version is never equal to it."""
    lines = [f"{path} {sha256}" for path, sha256 in (raced_files(repo, own) if files is None else files).items()]
    return hashlib.sha256("\n".join([f"identity version {IDENTITY_VERSION}", *lines]).encode()).hexdigest()


def identity_version(code: Code) -> int | None:
    """Version of a record's "code".  None: an imported log, whose source_sha256 is that of the log's own source."""
    return code.get("identity_version", 1)


def differing_files(a_code: Code, b_code: Code) -> list[str] | None:
    """Two records' "code" -> sorted paths of the raced files that differ, added and removed ones too; None: unknown."""
    a, b = a_code.get("files"), b_code.get("files")
    if not a or not b or identity_version(a_code) != identity_version(b_code):
        return None
    return sorted(path for path in a.keys() | b.keys() if a.get(path) != b.get(path))


def _sources(path: Path) -> list[Path]:
    """Source files at or below path, through symbolic links too."""
    if not path.is_dir():
        return [path] if path.is_file() else []
    files = map(Path, glob.iglob(f"{glob.escape(str(path))}/**/*", recursive=True))
    return [file for file in files if file.suffix in (".py", *OTHER_SOURCES) and file.is_file()]


@functools.lru_cache(maxsize=1024)  # a sweep and a race ask before every run; parsing all takes 0.2 s
def _sha256_of(content: bytes, is_python: bool) -> str:
    return hashlib.sha256(normalised(content) if is_python else content).hexdigest()


# ---- what a record keeps


def state(
    code: Path | str = CODE,
    own: Mapping[str, Path] = NONE_OWN,
    repo: Path | str | None = None,
    composed_of: Callable[[], Iterable[Path]] = tuple,
) -> Code:
    """A record's "code": identity_version, source_sha256, files, commit, dirty, diff_sha256, untracked,
    untracked_excluded, git_failure.

    code: the folder whose sources are hashed and held against the commit, such as a run's copy; repo: whose git is
    run, None: that of code itself.  files: raced_files(code, own), each hash cut to 12 digits.  dirty: a file of
    code_copy.FOLDERS differs from the commit.  untracked: sources there that the commit lacks and the run uses: they
    are raced, imported by this process, or among composed_of(), the yamls of its config.  Of any other,
    untracked_excluded, a record holds the name and the hash.  The five of git are None where there is no repository,
    and where git failed: then git_failure, else absent, holds its message.
    """
    files = raced_files(code, own)
    known: Code = {"identity_version": IDENTITY_VERSION, "source_sha256": source_sha256(code, files)}
    known |= {"files": {path: sha256[:12] for path, sha256 in files.items()}}
    known |= dict.fromkeys(("commit", "dirty", "diff_sha256", "untracked", "untracked_excluded"))
    if not _has_repository(repo or code):
        return known
    try:
        with git.folder_view(code, repo or code) as ask:
            commit, changes, names = (
                ask.commit,
                ask.changes(code_copy.FOLDERS),
                ask.untracked(code_copy.FOLDERS, SUFFIXES),
            )
    except git.Failed as error:
        return known | {"git_failure": _one_line(error, repo or code)}
    used = _used(names, files, composed_of, {code, repo or code})
    excluded = {credentials.redacted(name): _sha256_of_file(Path(code, name)) for name in names if name not in used}
    known |= {"commit": commit, "dirty": bool(changes or names), "untracked": used, "untracked_excluded": excluded}
    if changes:
        digest = hashlib.sha256(changes.encode(errors="surrogateescape")).hexdigest()
        _last_patch.clear()
        _last_patch[digest] = changes
        return known | {"diff_sha256": digest}
    return known


def git_failure(repo: Path | str = REPO) -> str | None:
    """Why git cannot say which commit the code is; None: it can, or there is no repository."""
    if not _has_repository(repo):
        return None
    try:
        with git.folder_view(repo, repo) as ask:
            ask.changes(code_copy.FOLDERS)
    except git.Failed as error:
        return _one_line(error, repo)
    return None


def _one_line(error: git.Failed, repo: Path | str) -> str:
    """The message of git, without private paths and without its own remedy, in which the path would be missing."""
    return " ".join(private.redact(str(error), repo).partition("To add an exception")[0].split())


def write(
    code: Path | str,
    folder: Path | str,
    own: Mapping[str, Path] = NONE_OWN,
    known: Code | None = None,
    repo: Path | str | None = None,
) -> None:
    """The run folder's code/: commit.json, diff.patch, untracked/, own/.  known: what state() last returned for it."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    known = known or state(code, own, repo)
    atomic.write_json(folder / "commit.json", known)
    patch = _last_patch.get(known["diff_sha256"], "") if known["diff_sha256"] else ""
    (folder / "diff.patch").write_text(patch, errors="surrogateescape")
    copies = {f"untracked/{name}": Path(code, name) for name in known["untracked"] or ()} | dict(own)
    for name, path in copies.items():
        content = path.read_bytes()
        if len(content) <= MAX_UNTRACKED_BYTES:
            copy = folder / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(content)


def _has_repository(repo: Path | str) -> bool:
    """Whether git is to know this code: not that of a wheel or an unpacked archive."""
    repo = Path(repo).absolute()
    return not INSTALLED and any(Path(folder, ".git").exists() for folder in (repo, *repo.parents))


def _used(
    names: list[str], files: Mapping[str, str], composed_of: Callable[[], Iterable[Path]], folders: Iterable[Path | str]
) -> list[str]:
    """The untracked sources that the run uses, sorted.  names: relative to any of the folders or to CODE."""
    if not names:
        return []
    imported = filter(None, (getattr(module, "__file__", None) for module in [*sys.modules.values()]))
    yamls = composed_of() if any(name.endswith(".yaml") for name in names) else ()
    roots = {os.path.realpath(root) for root in (CODE, *folders)}
    paths = {os.path.realpath(path) for path in (*yamls, *imported)}
    used = {os.path.relpath(path, root) for path in paths for root in roots if path.startswith(root + os.sep)}
    return [name for name in names if name in files or name in used]


def _sha256_of_file(path: Path) -> str | None:
    """Cut to 12 digits; None of what cannot be read."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:12]
    return None
