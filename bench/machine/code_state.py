"""Which code ran: commit, difference, sources that git does not track, and one hash over everything that is raced.

History of the identity, source_sha256:
  1  every *.py of bench/ and models/, byte by byte
  2  the sources that RACED names: of Python the syntax tree without docstrings and comments (normalised()),
     of a kernel that is built while it trains (OTHER_SOURCES) every byte
Hashes of different versions always differ, which does not mean that the code does.
"""

import ast
import contextlib
import functools
import glob
import hashlib
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from bench.base import atomic, credentials, private
from bench.base.paths import CODE, INSTALLED, REPO
from bench.base.reading import plain_file
from bench.base.reading.damage import Damaged
from bench.base.units import MIB
from bench.config import user_code
from bench.machine import code_copy, git

Code = dict[str, Any]  # run.json["code"]
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
ODD = {*DOCUMENTED, ast.JoinedStr, ast.FormattedValue}  # nodes that have a field which is not written as it is
MAX_DEPTH = 10**6  # of frames while a tree is written: ast.parse() refuses a source that is nested a hundredth as deep
READS_DOCSTRINGS = re.compile(rb"__doc__|\bgetdoc\b|\bdocopt\b")


def normalised(source: bytes) -> bytes:
    """Returns what can matter of a Python source when it runs: its syntax tree, as text that no Python version changes.

    Python's ast.dump and ast.unparse write the same tree differently from version to version (3.12 added type_params,
    3.13 omits empty fields), so the tree is written here:
    1. Dropped: comments, blanks, line numbers, the "u" of u"text", and the docstrings of modules, classes and
       functions, unless the source reads docstrings, as docopt does.
    2. A node is its name and its fields in alphabetical order; a field that is None or an empty list is omitted, so a
       field that a later Python adds changes nothing where it is not used.  A None in a list (** in a dict) is written.
    3. Constants and names are written in ASCII, because which characters repr() escapes follows the Unicode tables.
    4. Neighbouring texts of an f-string are joined, empty ones dropped: 3.11 and 3.12 split them differently.
    Python's recursion limit is lifted meanwhile, because what it leaves would depend on the caller's depth.
    """
    limit = sys.getrecursionlimit()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "\d" is a SyntaxWarning, which -W error turns into a SyntaxError
            tree = ast.parse(source)
        sys.setrecursionlimit(max(limit, MAX_DEPTH))
        for node in ast.walk(tree) if READS_DOCSTRINGS.search(source) else ():
            if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
                node.body.insert(0, ast.Pass())  # what follows it is no docstring
        return _text(tree).encode()
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return source
    finally:
        sys.setrecursionlimit(limit)


def _text(node: ast.AST) -> str:
    kind: Any = type(node)
    if kind is ast.Constant:
        return f"Constant({ascii(node.value)})"  # type: ignore[attr-defined]
    if kind is ast.Name:  # every third node is one: written as below
        return f"Name(ctx={type(node.ctx).__name__}(),id={ascii(node.id)},)"  # type: ignore[attr-defined]
    text = f"{kind.__name__}("
    for name in _field_names(kind):
        value: Any = _field(node, name) if kind in ODD else getattr(node, name, None)
        if type(value) is list:
            if value:
                text += f"{name}=["
                for item in value:  # no generator: it would use C's stack for each level
                    text += f"{_text(item) if isinstance(item, ast.AST) else ascii(item)},"
                text += "],"
        elif value is not None:
            text += f"{name}={_text(value) if isinstance(value, ast.AST) else ascii(value)},"
    return f"{text})"


@functools.cache
def _field_names(kind: Any) -> list[str]:
    return sorted(kind._fields)


def _field(node: Any, name: str) -> Any:
    """Returns a field of a node whose kind is in ODD."""
    value: Any = getattr(node, name, None)
    if name == "body" and isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
        return value[1:]
    if name == "values" and isinstance(node, ast.JoinedStr):
        return _joined(value)
    if name == "format_spec" and value is not None and not _joined(value.values):
        return None  # in f"{x:}", which has an empty one in 3.11
    return value


def _joined(values: list[Any]) -> list[Any]:
    """Returns the parts of an f-string with neighbouring texts joined."""
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
# Files and folders whose code decides what a run trains, or acts or measures while it trains.  Excluded: conf/, whose
# values are in config_id, and code that writes and reads records.
RACED = (
    "models", "bench/training", "bench/data", "bench/config", "bench/machine/telemetry", "bench/launch/guard.py",
    "bench/launch/nodes/leader.py", "bench/launch/nodes/member.py", "bench/launch/ranks.py",
    "bench/launch/script/output.py", "bench/launch/script/script_run.py", "bench/machine/meters.py",
    "bench/machine/environment.py", "bench/machine/gpus.py", "bench/machine/processes.py",
    "bench/machine/stamped_pipes.py", "bench/record/step_files.py", "bench/base/units.py",
    "bench/machine/lazy_dynamo.py", "bench/base/metric.py", "bench/__init__.py",
)  # fmt: skip
OTHER_SOURCES = user_code.KERNELS
SUFFIXES = (".py", ".yaml", ".toml", ".sh", *OTHER_SOURCES)  # suffixes of sources that git may not track
NONE_OWN: Mapping[str, Path] = {}  # for a run without code of the user's own
_last_patch: dict[str, str] = {}  # {diff_sha256: code/diff.patch} of the last state(), so that git runs once per run
MAX_UNTRACKED_BYTES = MIB  # limit of a source file; anything larger is data


# ---- the identity of what is raced


def raced_files(repo: Path | str = CODE, own: Mapping[str, Path] = NONE_OWN) -> dict[str, str]:
    """Returns {path from repo: file_sha256()} of RACED and of own (a run's user_code.sources()), sorted."""
    paths = [path for name in RACED for path in _sources(Path(repo, name))]
    sources = {path.relative_to(repo).as_posix(): path for path in paths} | dict(own)
    return {name: file_sha256(path) for name, path in sorted(sources.items())}


def file_sha256(path: Path) -> str:
    """Returns the sha256 of what counts of one file: for Python, normalised()."""
    return _sha256_of(path.read_bytes(), path.suffix == ".py")


def source_sha256(
    repo: Path | str = CODE, files: dict[str, str] | None = None, own: Mapping[str, Path] = NONE_OWN
) -> str:
    """Returns one hash over files, by default raced_files(repo, own); other identity versions never give it."""
    lines = [f"{path} {sha256}" for path, sha256 in (raced_files(repo, own) if files is None else files).items()]
    return hashlib.sha256("\n".join([f"identity version {IDENTITY_VERSION}", *lines]).encode()).hexdigest()


def identity_version(code: Code) -> int | None:
    """Returns the version of run.json["code"]; None for an imported log, which has the hash of its own source."""
    return code.get("identity_version", 1)


def differing_files(a_code: Code, b_code: Code) -> list[str] | None:
    """Returns the sorted paths of raced files that differ, added and removed ones too; None if that is unknown."""
    a, b = a_code.get("files"), b_code.get("files")
    if not a or not b or identity_version(a_code) != identity_version(b_code):
        return None
    return sorted(path for path in a.keys() | b.keys() if a.get(path) != b.get(path))


def _sources(path: Path) -> list[Path]:
    """Returns the source files at or below path, through symbolic links too."""
    if not path.is_dir():
        return [path] if path.is_file() else []
    files = map(Path, glob.iglob(f"{glob.escape(str(path))}/**/*", recursive=True))
    return [file for file in files if file.suffix in (".py", *OTHER_SOURCES) and file.is_file()]


@functools.lru_cache(maxsize=1024)  # sweeps and races need it before every run; parsing all takes 0.2 s
def _sha256_of(content: bytes, is_python: bool) -> str:
    return hashlib.sha256(normalised(content) if is_python else content).hexdigest()


# ---- the code in a record


def state(
    code: Path | str = CODE,
    own: Mapping[str, Path] = NONE_OWN,
    repo: Path | str | None = None,
    composed_of: Callable[[], Iterable[Path]] = tuple,
) -> Code:
    """Returns run.json["code"]: identity_version, source_sha256, files, commit, dirty, diff_sha256, untracked,
    untracked_excluded, git_failure.

    code: the folder whose sources are hashed and compared with the commit, such as a run's copy; repo: the folder in
    which git runs, None for code itself.  files: raced_files(code, own), each hash cut to 12 digits.  dirty: whether a
    file of code_copy.FOLDERS differs from the commit.  untracked: sources there that the commit lacks and the run uses,
    because they are raced, imported by this process, or among composed_of(), the yamls of its config.
    untracked_excluded: names and hashes of the others.  The five of git are None if there is no repository or git
    failed; git_failure is there only if it failed, and holds its message.
    """
    files = raced_files(code, own)
    facts: Code = {"identity_version": IDENTITY_VERSION, "source_sha256": source_sha256(code, files)}
    facts |= {"files": {path: sha256[:12] for path, sha256 in files.items()}}
    facts |= dict.fromkeys(("commit", "dirty", "diff_sha256", "untracked", "untracked_excluded"))
    if not _has_repository(repo or code):
        return facts
    try:
        with git.folder_view(code, repo or code) as ask:
            commit, changes, names, unknown = (
                ask.commit,
                ask.changes(code_copy.FOLDERS),
                ask.untracked(code_copy.FOLDERS, SUFFIXES),
                ask.unknown(code_copy.FOLDERS, SUFFIXES),
            )
    except git.Failed as error:
        return facts | {"git_failure": _one_line(error, repo or code)}
    used = _used(unknown, files, composed_of, {code, repo or code})  # also what git ignores
    excluded = {credentials.redacted(name): _sha256_of_file(Path(code, name)) for name in names if name not in used}
    facts |= {"commit": commit, "dirty": bool(changes or names or used)}
    facts |= {"untracked": used, "untracked_excluded": excluded}
    if changes:
        digest = hashlib.sha256(changes.encode(errors="surrogateescape")).hexdigest()
        _last_patch.clear()
        _last_patch[digest] = changes
        return facts | {"diff_sha256": digest}
    return facts


def git_failure(repo: Path | str = REPO) -> str | None:
    """Returns why git cannot tell which commit the code is; None if it can, or there is no repository."""
    if not _has_repository(repo):
        return None
    try:
        with git.folder_view(repo, repo) as ask:
            ask.changes(code_copy.FOLDERS)
    except git.Failed as error:
        return _one_line(error, repo)
    return None


def _one_line(error: git.Failed, repo: Path | str) -> str:
    """Returns git's message without private paths and without its own remedy, in which the path would be missing."""
    return " ".join(private.redact(str(error), repo).partition("To add an exception")[0].split())


def write(
    code: Path | str,
    folder: Path | str,
    own: Mapping[str, Path] = NONE_OWN,
    facts: Code | None = None,
    repo: Path | str | None = None,
) -> None:
    """Writes the run folder's code/: commit.json, diff.patch, untracked/, own/.  facts: state() as last returned."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    facts = facts or state(code, own, repo)
    atomic.write_json(folder / "commit.json", facts)
    patch = _last_patch.get(facts["diff_sha256"], "") if facts["diff_sha256"] else ""
    (folder / "diff.patch").write_text(patch, errors="surrogateescape")
    copies = {f"untracked/{name}": Path(code, name) for name in facts["untracked"] or ()} | dict(own)
    for name, path in copies.items():
        content = path.read_bytes()
        if len(content) <= MAX_UNTRACKED_BYTES:
            copy = folder / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(content)


def kept(record: Path | str) -> Path:
    """Returns the code/ of a run folder, which may be somebody else's, so that its files can be read or run.

    Raises Damaged if it is or holds a link, which may lead to a private file, or a .git, whose settings git would obey.
    """
    folder = Path(record, "code")

    def refuse(path: str, why: str) -> None:
        name = os.path.relpath(path, Path(record).parent)
        raise Damaged(f"{name} {why}, so no file of this code/ is used: restore the record")

    def unreadable(path: str, why: str) -> None:
        refuse(path, f"cannot be read ({why})")

    if folder.is_symlink():
        refuse(str(folder), "is a link")
    for entry in plain_file.entries_below(folder, unreadable) if folder.is_dir() else ():
        if entry.is_symlink() or entry.name.lower() == ".git":
            refuse(entry.path, "is a link" if entry.is_symlink() else "is a git repository")
    return folder


def _has_repository(repo: Path | str) -> bool:
    """Whether git should know this code, which is not the case for a wheel or an unpacked archive."""
    repo = Path(repo).absolute()
    return not INSTALLED and any(Path(folder, ".git").exists() for folder in (repo, *repo.parents))


def _used(
    names: list[str], files: Mapping[str, str], composed_of: Callable[[], Iterable[Path]], folders: Iterable[Path | str]
) -> list[str]:
    """Returns the untracked sources that the run uses, sorted.  names: relative to any of the folders or to CODE."""
    if not names:
        return []
    imported = filter(None, (getattr(module, "__file__", None) for module in [*sys.modules.values()]))
    yamls = composed_of() if any(name.endswith(".yaml") for name in names) else ()
    roots = {os.path.realpath(root) for root in (CODE, *folders)}
    paths = {os.path.realpath(path) for path in (*yamls, *imported)}
    used = {os.path.relpath(path, root) for path in paths for root in roots if path.startswith(root + os.sep)}
    return [name for name in names if name in files or name in used]


def _sha256_of_file(path: Path) -> str | None:
    """Returns the first 12 digits, or None for a file that cannot be read."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:12]
    return None
