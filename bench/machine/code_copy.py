"""Read-only copies of code, each named by the hash of its content.  Ranks import from them, so a record holds what ran.

A run reads the checkout's bench/, models/ and conf/ once, and the user's own sources with them.  These bytes are hashed
and copied, with their bytecode, and the run's processes start from the copy; nothing reads the checkout's sources
again.  Editing them while a run starts, trains or is raced changes no run that has begun.

Copies lie in a cache folder of the user's (paths.copy_roots()): one for each state of the code, shared by all its
runs.  A copy is hashed whenever a run uses it, rebuilt if it does not match its name, and hashed once more as the run
ends, with the bytecode that was imported (bench/training/imported.py).  A program that runs as the same user and
restores everything in between is not noticed: docs/reference/guarantees.md.
"""

import contextlib
import fcntl
import hashlib
import os
import py_compile
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from bench.base.paths import CODE, COPY_NAME, copy_roots
from bench.base.reading import plain_file
from bench.base.units import MIB
from bench.config.user_code import KERNELS

FOLDERS = ("bench", "models", "conf")
KEPT_COPIES = 8  # the most recently used; one that a run uses is always kept
MAX_BYTES = MIB  # size of a file; larger ones are data, and are linked
MAX_LINKS = 4096  # number of links to files beside the user's own sources
PACKAGES = ("site-packages", "dist-packages")  # folders whose contents are not linked: they are on the path anyway


@dataclass(frozen=True)
class Content:
    """The content of a copy, by relative path: the bytes of its files, and links to files that are not sources."""

    files: Mapping[str, bytes]
    links: Mapping[str, str]

    @property
    def sha256(self) -> str:
        lines = [f"{hashlib.sha256(content).hexdigest()} {name}" for name, content in self.files.items()]
        lines += [f"-> {target} {name}" for name, target in self.links.items()]
        return hashlib.sha256("\n".join(sorted(lines)).encode(errors="surrogateescape")).hexdigest()

    @property
    def name(self) -> str:
        """Name of the copy's folder.  It holds bytecode, so each Python version has its own copies."""
        return f"{self.sha256[:32]}-{sys.implementation.cache_tag}"


@contextlib.contextmanager
def held(repo: Path) -> Iterator[Path]:
    """Context that yields the copy of this checkout's code; a process that runs from a copy gets that one.

    Raises ValueError if a source cannot be read or a copy cannot be written.
    """
    if is_copy(CODE):
        with _locked(CODE.parent / f"{CODE.name}.lock"):
            if not is_whole(CODE):
                raise ValueError(f"{CODE}: this program runs from this read-only copy, which was changed: remove it")
            yield CODE
        return
    with _held(content_of(repo), _root()) as folder:
        yield folder


@contextlib.contextmanager
def held_sources(sources: Mapping[str, Path]) -> Iterator[dict[str, Path]]:
    """Context that yields {"own/net.py": path of a read-only copy} for {"own/net.py": a user's file}, until it is left.

    Whatever else lies beside the files (data, extension modules, modules imported by a computed name) is linked.
    """
    if not sources:
        yield {}
        return
    files = {name: _read(path) for name, path in sources.items()}
    with _held(Content(files, _links_beside(sources)), _root()) as folder:
        yield {name: folder / name for name in sources}


def is_copy(folder: Path) -> bool:
    """Whether this folder is a copy, judging by its name."""
    return COPY_NAME.fullmatch(folder.name) is not None


def is_whole(folder: Path) -> bool:
    """Whether a copy can be read, and still has the content that its name states."""
    files: dict[str, bytes] = {}
    links: dict[str, str] = {}
    try:
        for parent, folders, names in os.walk(folder):
            folders[:] = [name for name in folders if name != "__pycache__"]
            linked = [name for name in folders if os.path.islink(os.path.join(parent, name))]
            folders[:] = [name for name in folders if name not in linked]
            for name in (*names, *linked):
                path = os.path.join(parent, name)
                key = os.path.relpath(path, folder)
                if os.path.islink(path):
                    links[key] = os.readlink(path)
                else:
                    files[key] = Path(path).read_bytes()
    except OSError:
        return False
    return Content(files, links).name == folder.name


def content_of(repo: Path) -> Content:
    """Returns the content of FOLDERS as it is now.  Raises ValueError if a file cannot be read."""
    files: dict[str, bytes] = {}
    links: dict[str, str] = {}
    seen: set[str] = set()
    for top in FOLDERS:
        for parent, folders, names in os.walk(repo / top, followlinks=True):
            real = os.path.realpath(parent)
            folders[:] = [] if real in seen else [name for name in folders if name != "__pycache__"]
            seen.add(real)
            for name in names:
                path = os.path.join(parent, name)
                key = os.path.relpath(path, repo)
                if name.startswith(".") or name.endswith((".pyc", "~")) or not os.path.isfile(path):
                    continue
                if os.path.getsize(path) > MAX_BYTES and not name.endswith((".py", *KERNELS)):
                    links[key] = os.path.realpath(path)
                else:
                    files[key] = _read(path)
    return Content(files, links)


def _read(path: Path | str) -> bytes:
    try:
        with open(path, "rb", opener=plain_file.open_now) as file:
            return file.read()
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}), and a run needs a copy of it") from None


def _links_beside(sources: Mapping[str, Path]) -> dict[str, str]:
    """Returns {"own/weights.bin": its path} for everything beside the user's own sources that is not a source."""
    own = {name: path for name, path in sources.items() if name.startswith("own/")}
    folders = sorted({(os.path.dirname(name), str(path.parent)) for name, path in own.items()})
    parents = {parent.as_posix() for name in sources for parent in Path(name).parents}
    links: dict[str, str] = {}
    for key, folder in folders:
        if os.path.basename(folder) in PACKAGES:
            continue
        for entry in sorted(os.listdir(folder)):
            name = f"{key}/{entry}"
            if name in sources or name in parents or entry == "__pycache__" or len(links) >= MAX_LINKS:
                continue
            links.setdefault(name, os.path.join(folder, entry))
    return links


# ---- the cache


@contextlib.contextmanager
def _held(content: Content, root: Path) -> Iterator[Path]:
    folder = root / content.name
    with _locked(root / f"{content.name}.lock"):
        if not is_whole(folder):
            _make(root, content)
        _prune(root)
        yield folder


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Context that keeps _prune() from removing the copy; the lock file's time is that of its last use."""
    with contextlib.ExitStack() as stack:
        while True:
            lock = stack.enter_context(open(path, "wb"))
            with contextlib.suppress(OSError):  # the file system may not support flock
                fcntl.flock(lock, fcntl.LOCK_SH)
            with contextlib.suppress(OSError):  # nor setting times
                os.utime(lock.fileno())
            if os.fstat(lock.fileno()).st_nlink:  # otherwise it was removed in between
                break
        yield


def _root() -> Path:
    """Returns the first folder of copy_roots() that this user can write and nobody else can."""
    reasons = []
    for root in copy_roots():
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            facts = root.stat()
            if facts.st_uid == os.geteuid() and not facts.st_mode & 0o022 and os.access(root, os.W_OK):
                return root
            reasons.append(f"{root} belongs to another user, or others can write to it")
        except OSError as error:
            reasons.append(f"{root}: {error.strerror}")
    raise ValueError(f"the code cannot be copied ({'; '.join(reasons)}): set XDG_CACHE_HOME to a folder of yours")


def _make(root: Path, content: Content) -> None:
    """Creates the copy atomically, also if two processes create it at once."""
    temporary = root / f".{content.name}.{os.getpid()}.{os.urandom(4).hex()}.tmp"
    folder = root / content.name
    try:
        _write(temporary, folder, content)
        if folder.is_dir() and not is_whole(folder):
            _remove(folder)
        os.rename(temporary, folder)
        os.chmod(folder, 0o555)
    except OSError as error:
        if not folder.is_dir():  # otherwise another process was first
            remedy = "free space, or set" if error.errno in plain_file.FULL else "make it writable (umask 022), or set"
            why = f"{root}: the code cannot be copied there ({error.strerror})"
            raise ValueError(f"{why}: {remedy} XDG_CACHE_HOME to another folder of yours") from None
    finally:
        _remove(temporary)


def _write(temporary: Path, folder: Path, content: Content) -> None:
    for name, source in content.files.items():
        path = temporary / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(source)
        path.chmod(0o444)
        if name.endswith(".py"):
            # bytecode that is valid without checking the source, under the source's final name
            unchecked = py_compile.PycInvalidationMode.UNCHECKED_HASH
            with contextlib.suppress(py_compile.PyCompileError):  # importing it will report the error
                final = str(folder / name)
                compiled = py_compile.compile(str(path), dfile=final, doraise=True, invalidation_mode=unchecked)
                os.chmod(str(compiled), 0o444)
    for name, target in content.links.items():
        path = temporary / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(target)
    for parent, _, _ in os.walk(temporary, topdown=False):
        if parent != str(temporary):  # it is still to be renamed
            os.chmod(parent, 0o555)


def _prune(root: Path) -> None:
    """Removes all but the KEPT_COPIES that were used last, but none that a process holds."""
    used_s = {}
    for path in root.glob("*.lock"):
        with contextlib.suppress(OSError):  # another process removed it
            used_s[path] = path.stat().st_mtime
    for path in sorted(used_s, key=lambda path: -used_s[path])[KEPT_COPIES:]:
        with contextlib.suppress(OSError), open(path, "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(root / path.stem)
            path.unlink()


def _remove(folder: Path) -> None:
    if folder.is_dir():
        for parent, _, _ in os.walk(folder):
            with contextlib.suppress(OSError):
                os.chmod(parent, 0o700)
        shutil.rmtree(folder, ignore_errors=True)
