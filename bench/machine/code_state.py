"""Which code ran: commit, difference, sources that git does not know, and one hash over what is raced.

History of the identity, source_sha256:
  1  every *.py of bench/ and models/, byte by byte
  2  the sources that RACED names: of Python the syntax tree without docstrings and comments (bench/machine/syntax.py),
     of a kernel that is built while it trains (OTHER_SOURCES) every byte
Hashes of two versions are never equal, and that says nothing: whether the code is the same is then unknown.
"""

import contextlib
import functools
import glob
import hashlib
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from bench import atomic, credentials
from bench.machine import git, syntax
from bench.paths import REPO
from bench.units import MIB
from bench.user_code import classes

IDENTITY_VERSION = 2
# Files and folders whose code decides what a run trains, or acts or measures while it trains.  Not here: conf/ (its
# values are in config_id), what writes and reads records.
RACED = (
    "models",
    "bench/training",
    "bench/data",
    "bench/config",
    "bench/instruments",
    "bench/profiling",
    "bench/telemetry",
    "bench/memory/peaks.py",
    "bench/memory/recording.py",
    "bench/launch/agent.py",
    "bench/launch/joining.py",
    "bench/launch/nodes/rank_processes.py",
    "bench/launch/of_nodes.py",
    "bench/launch/ranks.py",
    "bench/launch/script/output.py",
    "bench/launch/script/script_run.py",
    "bench/machine/cpu_meter.py",
    "bench/machine/environment.py",
    "bench/machine/gpus.py",
    "bench/machine/processes.py",
    "bench/record/step_files.py",
    "bench/user_code/classes.py",
    "bench/units.py",
    "bench/machine/lazy_dynamo.py",
    "bench/__init__.py",
)
OTHER_SOURCES = classes.KERNELS
NONE_OWN: Mapping[str, Path] = {}  # a run of nothing but what is here
MAX_UNTRACKED_BYTES = MIB  # a source file; anything larger is data


# ---- the identity of what is raced


def raced_files(repo: Path | str = REPO, own: Mapping[str, Path] = NONE_OWN) -> dict[str, str]:
    """{path from repo: sha256 of what counts of the file} of RACED and of own (classes.sources() of a run), sorted."""
    paths = [path for name in RACED for path in _sources(Path(repo, name))]
    result = {path.relative_to(repo).as_posix(): path for path in paths} | dict(own)
    return {name: _sha256_of(path.read_bytes(), path.suffix == ".py") for name, path in sorted(result.items())}


def source_sha256(repo: Path | str = REPO, files: dict[str, str] | None = None, own: Mapping = NONE_OWN) -> str:
    """One hash over raced_files(repo, own), or those given.  One of another identity version is never equal to it."""
    lines = [f"{path} {sha256}" for path, sha256 in (raced_files(repo, own) if files is None else files).items()]
    return hashlib.sha256("\n".join([f"identity version {IDENTITY_VERSION}", *lines]).encode()).hexdigest()


def identity_version(code: dict) -> int | None:
    """Of a record's "code".  None: an imported log, whose source_sha256 is that of the log's own source."""
    return code.get("identity_version", 1)


def differing_files(a_code: dict, b_code: dict) -> list[str] | None:
    """Two records' "code" -> sorted paths of the raced files that differ, added and removed ones too; None: unknown."""
    a, b = a_code.get("files"), b_code.get("files")
    if not a or not b or identity_version(a_code) != identity_version(b_code):
        return None
    return sorted(path for path in a.keys() | b.keys() if a.get(path) != b.get(path))


def _sources(path):
    """Source files at or below path, through symbolic links too."""
    if not path.is_dir():
        return [path] if path.is_file() else []
    result = map(Path, glob.iglob(f"{glob.escape(str(path))}/**/*", recursive=True))
    return [file for file in result if file.suffix in (".py", *OTHER_SOURCES) and file.is_file()]


@functools.lru_cache(maxsize=1024)  # a sweep and a race ask before every run; parsing all takes 0.2 s
def _sha256_of(content, is_python):
    return hashlib.sha256(syntax.normalised(content) if is_python else content).hexdigest()


# ---- what a record keeps


def state(
    repo: Path | str = REPO, own: Mapping[str, Path] = NONE_OWN, composed_of: Callable[[], Iterable[Path]] = tuple
) -> dict:
    """A record's "code": identity_version, source_sha256, files, commit, dirty, diff_sha256, untracked, and
    untracked_excluded.

    files: raced_files(repo, own), each hash cut to 12 digits.  The last five are None outside git.
    dirty: a tracked file differs from the commit, or a source file is untracked; results/ does not count.
    untracked: those that the run uses: they are raced, imported by this process, or among composed_of(), the yamls of
    its config.  Of any other, untracked_excluded, a record holds the name and the hash.
    """
    files = raced_files(repo, own)
    result = {"identity_version": IDENTITY_VERSION, "source_sha256": source_sha256(repo, files)}
    result |= {"files": {path: sha256[:12] for path, sha256 in files.items()}}
    result |= dict.fromkeys(("commit", "dirty", "diff_sha256", "untracked", "untracked_excluded"))
    if git.ask(repo, "rev-parse", "--is-inside-work-tree") is None:
        return result
    changes, (untracked, excluded) = diff(repo), _untracked(repo, files, composed_of)
    commit = git.ask(repo, "rev-parse", "--verify", "HEAD")
    result |= {
        "commit": commit.strip() if commit else None,
        "dirty": bool(changes or untracked or excluded),
        "untracked": untracked,
        "untracked_excluded": excluded,
    }
    digest = hashlib.sha256(changes.encode(errors="surrogateescape")).hexdigest() if changes else None
    return result | {"diff_sha256": digest}


def diff(repo: Path | str = REPO) -> str:
    """What `git apply` needs to get from the commit to this code; "" if nothing, or no commit, or no git."""
    options = ("--no-color", "--no-ext-diff", "--binary")
    return git.ask(repo, "diff", "HEAD", *options, "--", ".", ":(exclude)results") or ""


def write(repo: Path | str, folder: Path | str, own: Mapping[str, Path] = NONE_OWN, known: dict | None = None) -> None:
    """The run folder's code/: commit.json, diff.patch, untracked/, own/.  known: state(repo, own), where known."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    known = known or state(repo, own)
    atomic.write_json(folder / "commit.json", known)
    (folder / "diff.patch").write_text(diff(repo), errors="surrogateescape")
    copies = {f"untracked/{name}": Path(repo, name) for name in known["untracked"] or ()} | dict(own)
    for name, path in copies.items():
        content = path.read_bytes()
        if len(content) <= MAX_UNTRACKED_BYTES:
            copy = folder / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(content)


def _untracked(repo, files, composed_of):
    """-> names of those that the run uses, {name: first 12 digits of the sha256} of the others; both sorted."""
    sources = [f"*{suffix}" for suffix in (".py", ".yaml", ".toml", ".sh", *OTHER_SOURCES)]
    listed = git.ask(repo, "ls-files", "--others", "--exclude-standard", "-z", "--", *sources, ":(exclude)results")
    names = sorted(name for name in (listed or "").split("\0") if name)
    imported = {getattr(module, "__file__", None) for module in [*sys.modules.values()]}
    yamls = composed_of() if any(name.endswith(".yaml") for name in names) else ()
    used = {os.path.realpath(path) for path in (*yamls, *filter(None, imported))}
    kept = [name for name in names if name in files or os.path.realpath(Path(repo, name)) in used]
    others = [name for name in names if name not in kept]
    return kept, {credentials.redacted(name): _sha256_of_file(Path(repo, name)) for name in others}


def _sha256_of_file(path):
    """Cut to 12 digits; None of what cannot be read."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:12]
    return None
