"""The folder in which a script runs: copies of its sources, links to everything beside them, and the track's shards.

Sources are copied, so that the record keeps what ran, and a script's changes to itself are noticed.  After the run the
files that it wrote stay in work/; copies and links are removed.
"""

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import IO, Any

from bench.base import atomic
from bench.base.paths import cache_root
from bench.base.reading import plain_file
from bench.base.reading.damage import Damaged
from bench.config import user_code
from bench.data import shards as shard_files
from bench.data.sources.datasets import Dataset, ShardFile
from bench.data.sources.source import data_root
from bench.launch.script.script import Script
from bench.record import run_folder

WORK = "work"
COPY_BYTES = 2**24
MAX_LISTED = 1000  # names of files: a record with a hundred thousand could not be read
NUM_KEPT = 8  # a nanoGPT's two files, and those of a few other data sets
MADE = re.compile(r"(raw|val-\d+-\d+)-[0-9a-f]{12}\.bin")
# what a name lost, so that its path does not lead there any more: see private.redact() and plain_file.name_in_utf8()
REDACTED = re.compile(r"\b(?:USER|HOST|SECRET)\b|\\x[0-9a-f]{2}")
_used: dict[Path, IO[bytes]] = {}  # files that this process uses until it ends, each with a shared lock


def make(folder: Path, script: Script, dataset: Dataset, val_tokens: int) -> Path:
    """Creates FOLDER/work for this script and dataset; returns its absolute path.  val_tokens: of the goal."""
    work = (folder / WORK).absolute()
    copies = {name.removeprefix("script/"): path for name, path in script.sources.items()}
    _link_all(script.root, work, Path(), copies, script.data)
    for name, path in copies.items():
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, work / name)
        if os.access(script.root / name, os.X_OK):
            (work / name).chmod(0o755)
    (work / script.data).mkdir(parents=True, exist_ok=True)
    for split in ("train", "val"):
        links = shard_links(script, dataset, split, work)
        for link, path in zip(links, shard_paths(script, dataset, split, val_tokens), strict=True):
            link.symlink_to(path)
    return work


def shard_links(script: Script, dataset: Dataset, split: str, work: Path) -> list[Path]:
    """Returns the paths in work/ that link to what shard_paths() returns.

    Scripts look for fineweb_train_000001.bin in fineweb10B, whatever the source's names.
    """
    folder = work / script.data
    if script.raw_data:
        return [folder / f"{split}.bin"]
    prefix = re.sub(r"[\d.]*[BMK]?$", "", script.data.name) or "tokens"
    first = split == "train"  # as the hub numbers them: training shards from 1, the validation shard is 0
    numbered = enumerate((shard.path.name for shard in getattr(dataset, split)), first)
    names = [name if f"_{split}_" in name else f"{prefix}_{split}_{number:06d}.bin" for number, name in numbered]
    return [folder / name for name in names]


def shard_paths(script: Script, dataset: Dataset, split: str, val_tokens: int) -> list[Path]:
    """Returns the true paths of the shards of a split that a script gets."""
    shards: tuple[ShardFile, ...] = getattr(dataset, split)
    if script.raw_data:
        return [_raw([shard.path for shard in shards])]
    if script.sandbox and split == "val" and not dataset.is_audit:
        return without_held_out(shards, val_tokens + 1)
    return [shard.path.resolve() for shard in shards]


def linked(script: Script, work: Path) -> list[Path]:
    """Returns the targets of links in work/ that a sandboxed script may read: shards, and files in its own folder."""
    root, targets = os.path.realpath(script.root), []
    for entry in plain_file.entries_below(work):
        if entry.is_symlink():
            is_inside = os.path.realpath(entry.path).startswith(root + os.sep)
            is_given = is_inside or Path(entry.path).parent == work / script.data
            if is_given and os.path.exists(entry.path):  # nothing that is not there can be mounted
                targets.append(Path(os.readlink(entry.path)))
    return targets


def _link_all(source: Path, work: Path, below: Path, copies: Mapping[str, Path], data: PurePosixPath) -> None:
    """Links work/below to everything in source/below except sources, the data folder and what earlier runs wrote."""
    (work / below).mkdir(parents=True, exist_ok=True)
    parents = {parent for name in (*map(Path, copies), data) for parent in Path(name).parents}
    for entry in sorted(os.scandir(source / below), key=lambda entry: entry.name):
        name = below / entry.name
        if name == Path(data) or name.as_posix() in copies or not user_code.is_linked(Path(entry.path)):
            continue
        if name in parents and entry.is_dir():
            _link_all(source, work, name, copies, data)
        else:
            (work / name).symlink_to(Path(entry.path).absolute())


def linked_stamps(work: Path) -> dict[str, tuple[Path, list[int] | None]]:
    """Returns {name: (true path, stamp())} of files that the links in work/ lead to, at most MAX_LISTED."""
    start, stamps = len(os.path.join(work, "")), dict[str, tuple[Path, list[int] | None]]()
    for link in filter(os.DirEntry.is_symlink, plain_file.entries_below(work)):
        inner = (entry.path for entry in plain_file.entries_below(os.path.realpath(link.path)) if entry.is_file())
        for path in inner if link.is_dir() else [os.path.realpath(link.path)]:
            if len(stamps) >= MAX_LISTED:
                return stamps
            name = link.path[start:] + path.removeprefix(os.path.realpath(link.path))
            stamps[name] = Path(path), stamp(Path(path))
    return stamps


def stamp(path: Path) -> list[int] | None:
    """Returns shards.stamp_of() the file; None if it is gone.

    Files of made_of() are compared without their ctime, which every run that uses them changes: see _use().
    """
    with contextlib.suppress(OSError):
        size_bytes, mtime_ns, ctime_ns, inode = shard_files.stamp_of(path)
        return [size_bytes, mtime_ns, 0 if path in _used else ctime_ns, inode]
    return None


def state_of(path: Path) -> list[int] | None:
    """Returns [size in bytes, ns of the last change] of a file that a script reads; None if it is not there."""
    with contextlib.suppress(OSError):
        found = path.stat()
        return [found.st_size, found.st_ctime_ns]
    return None


def without_held_out(shards: Sequence[ShardFile], num_kept: int, is_padded: bool = True) -> list[Path]:
    """Returns shards of the same sizes in which only the first num_kept tokens are real; what follows repeats these.

    So a loader reads what it would of the shards, and the held-out slice is nowhere in the sandbox.  Made once.
    is_padded: False ends the shards after these tokens.
    """
    paths, start = [], 0
    for shard in shards:
        own, start = max(0, num_kept - start), start + shard.num_tokens
        if own >= shard.num_tokens:
            paths.append(shard.path.resolve())
            continue
        if not (own or is_padded):
            break

        def write(path: Path, shard: ShardFile = shard, own: int = own) -> None:
            import numpy as np

            kept = np.concatenate([other.tokens()[:num_kept] for other in shards])[:num_kept]
            rest = np.resize(kept, (shard.num_tokens - own) * is_padded)
            shard_files.write(path, np.concatenate([shard.tokens()[:own], rest]))

        paths.append(
            made_of(
                [other.path for other in shards], f"val-{num_kept}-{len(paths)}{'' if is_padded else '-cut'}", write
            )
        )
    return paths


def _raw(files: Sequence[Path]) -> Path:
    """Returns a file with the tokens of all shards without headers, as nanoGPT reads them; it is made only once."""

    def write(raw: Path) -> None:
        with atomic.replacing(raw) as out:
            for path in files:
                with open(path, "rb") as shard:
                    shard.seek(shard_files.HEADER_BYTES)
                    shutil.copyfileobj(shard, out, COPY_BYTES)

    return made_of(files, "raw", write)


def keep_used(folder: Path, script: Script, opened: Iterable[str]) -> dict[str, str]:
    """Keeps every source that the script used in FOLDER/code; returns {name: why}.  opened: true paths that it read.

    For other sources beside it, which may be anybody's, a record holds only the name and the hash.
    """
    homes = [os.path.realpath(folder / WORK), os.path.realpath(script.root)]
    names = (os.path.relpath(path, home) for path in opened for home in homes if path.startswith(home + os.sep))
    paths = [script.sources[f"script/{name}"] for name in names if f"script/{name}" in script.sources]
    own = {name: folder / WORK / name.removeprefix("script/") for name in script.sources}
    there = {name: path if path.is_file() else own[name] for name, path in script.sources.items()}  # a cache may go
    used = user_code.used_by_script(script.starts, there, paths)
    for name in used:
        copy = folder / "code" / name
        for source in (own[name], script.sources[name]):
            if not copy.exists() and _sha256(source) == script.sha256_by_name[name]:
                atomic.inner_folder(folder, "code", *Path(name).parent.parts)
                shutil.copyfile(source, copy)
    return used


def changed(script: Script, work: Path) -> list[str]:
    """Returns the names of sources that have changed since the run began, sorted."""
    return sorted(
        name for name, sha256 in script.sha256_by_name.items() if _sha256(work / name.removeprefix("script/")) != sha256
    )


def doubts(script: Script, work: Path, opened: Iterable[str]) -> list[str]:
    """Returns a sentence for each changed source, and one if sources ran from elsewhere.  opened: as in keep_used()."""
    sentences = [f"{name} changed while it ran" for name in changed(script, work)]
    root = os.path.realpath(script.root)
    names = {os.path.relpath(path, root) for path in opened if path.startswith(root + os.sep)}
    names = {name for name in names if name.endswith(".py") and f"script/{name}" in script.sources}
    if script.is_rooted and names:
        installed = "as a package installed in place (pip install -e) does"
        sentences.append(f"it ran {min(names)} of script.root itself instead of the run's copy, {installed}")
    return sentences


def _sha256(path: Path) -> str | None:
    """Returns None if the file is gone, or no longer a regular file."""
    try:
        return hashlib.sha256(plain_file.content(path)).hexdigest()
    except Damaged:
        return None


def tidy(script: Script, work: Path) -> dict[str, Any]:
    """Removes links, unchanged copies and empty folders; what the script wrote stays.

    Returns files_written, the first MAX_LISTED of its files in order, and num_files_written if there are more.  Nothing
    outside work/ is removed, whatever links the script has put in place of its folders.
    """
    if work.is_symlink() or not work.is_dir():
        return {"files_written": []}
    start = len(os.path.join(work, ""))
    entries = list(plain_file.entries_below(work))
    kept, present = set(changed(script, work)), {entry.path[start:] for entry in entries}  # not reached through links
    for name in script.sha256_by_name:
        if name not in kept and name.removeprefix("script/") in present:
            with contextlib.suppress(OSError):  # the script made it immutable
                (work / name.removeprefix("script/")).unlink(missing_ok=True)
    run_folder.remove_links(work)
    kept_files = (entry.path[start:] for entry in entries if entry.is_file(follow_symlinks=False))
    names = sorted(plain_file.name_in_utf8(path) for path in kept_files if os.path.lexists(work / path))
    listed = {"files_written": names[:MAX_LISTED]}
    return listed | ({"num_files_written": len(names)} if len(names) > MAX_LISTED else {})


def made_of(files: Sequence[Path], name: str, write: Callable[[Path], None]) -> Path:
    """Returns the file that write() makes of these files in their current state; it is made only once.

    Such files are kept in the data folder, or in the user's cache if that folder cannot be written: in each place the
    NUM_KEPT that were used last, and every one that a process uses.
    """
    digest = hashlib.sha256("\n".join(f"{path.resolve()} {path.stat().st_mtime_ns}" for path in files).encode())
    roots = [data_root(), cache_root() / "speedrun-data"]
    paths = [(root / f"{name}-{digest.hexdigest()[:12]}.bin").absolute() for root in roots]
    for path in paths:
        atomic.remove_left(path.parent, f".{name}-*.tmp")
        if _use(path):
            return path.resolve()
    errors = []
    for path in paths:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write(path)
            _use(path)
            _prune(path.parent)
            return path.resolve()
        except OSError as error:
            errors.append(error)
    first, last = errors
    remedy = f"and {roots[1]} cannot be written either ({last.strerror}): set SPEEDRUN_DATA=/path to a folder of yours"
    raise OSError(first.errno, f"{first.strerror}, {remedy}", first.filename)


def _use(path: Path) -> bool:
    """Keeps a file from being removed until this process ends; returns whether it is there.  Its time of access is that
    of its last use."""
    try:
        file = _used.get(path) or open(path, "rb")  # noqa: SIM115
        with contextlib.suppress(OSError):  # a file system without locks removes none
            fcntl.flock(file, fcntl.LOCK_SH)
        facts = os.fstat(file.fileno())
        if not facts.st_nlink:  # removed a moment ago, or by hand
            _used.pop(path, file).close()
            return path.exists() and _use(path)
    except OSError:
        return False
    _used[path] = file
    with contextlib.suppress(OSError):  # another user's
        os.utime(path, ns=(time.time_ns(), facts.st_mtime_ns))
    return True


def _prune(folder: Path) -> None:
    used_ns = {}
    for path in [path for path in folder.iterdir() if MADE.fullmatch(path.name)]:
        with contextlib.suppress(OSError):  # another process has just removed it
            used_ns[path] = path.stat().st_atime_ns
    for path in sorted(used_ns, key=lambda path: -used_ns[path])[NUM_KEPT:]:
        with contextlib.suppress(OSError), open(path, "rb") as file:  # a process uses it
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
