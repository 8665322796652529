"""Trace files -> Ranks.  A large file is read by several processes, a folder of ranks by one process a file."""

import contextlib
import gc
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.analysis.trace.rank import Collector, Rank
from bench.analysis.trace.source import NoTrace, Source
from bench.base.reading import plain_file
from bench.machine.environment import usable_cpus

if TYPE_CHECKING:
    from concurrent.futures import ProcessPoolExecutor

PARALLEL_BYTES = 100 * 2**20  # of JSON; below, starting a process costs more than it saves
PART_BYTES = PARALLEL_BYTES // 2  # of one file, at least
MAX_PARTS_OF_GZIP = 4  # each decompresses all of it
GZIP_FACTOR = 15  # of JSON, about
SUFFIXES = (".json", ".json.gz")


def load(path: str | Path, num_parts: int | None = None) -> Rank:
    """One file -> Rank.  NoTrace (a ValueError) for a file that is not a trace.

    num_parts: that so many processes read, None: as many as may run here, of a large file.
    """
    source = Source(path)
    if source.is_zip:
        raise NoTrace(f"{path}: it is a zip archive: unpack it and name the .json in it")
    if num_parts is None:
        most = MAX_PARTS_OF_GZIP if source.is_gzip else num_bytes(path) // PART_BYTES
        num_parts = min(usable_cpus(), most) if num_bytes(path) >= PARALLEL_BYTES else 1
    if num_parts == 1:
        return _rank(path, [_read(path)])
    with tempfile.TemporaryDirectory(prefix="trace-") as folder:
        with _pool(num_parts - 1) as pool:
            reading = [pool.submit(_read_into, folder, path, part, num_parts) for part in range(1, num_parts)]
            first = _read(path, 0, num_parts)
            others = [other.result() for other in reading]
        for part in others:  # once the processes that read are gone
            part["columns"] = {name: np.load(file, mmap_mode="r") for name, file in part["columns"].items()}
        return _rank(path, [first, *others])


def load_all(paths: Sequence[str | Path]) -> list[Rank]:
    """Files of one job -> Ranks in order of rank.  A file that cannot be read raises NoTrace."""
    return number(list(over_files(_load_one, paths)))


def by_window(paths: Sequence[str | Path]) -> dict[str | None, list[Rank]]:
    """Files -> {window: Ranks in order of rank}, the earliest first.  A file that is not a trace raises NoTrace.

    Traces of this project say of which window they are; the others are one, None.
    """
    windows: dict[str | None, list[Rank]] = {}
    for rank in over_files(_load_one, paths):
        windows.setdefault(window_of(rank), []).append(rank)
    return {name: number(ranks) for name, ranks in earliest_first(windows)}


def window_of(rank: Rank) -> str | None:
    """The window of a run in which it was recorded; None: it does not say."""
    facts = rank.meta.get("speedrun")
    return facts.get("window") if isinstance(facts, dict) else None


def earliest_first(
    windows: Mapping[str | None, list[Any]], rank_of: Callable[[Any], Rank] = lambda rank: rank
) -> list[tuple[str | None, list[Any]]]:
    """{window: what has a Rank each} -> its items, by the first row of any."""
    first_ns = {
        name: min((int(rank.ts.min()) for rank in map(rank_of, members) if len(rank.ts)), default=0)
        for name, members in windows.items()
    }
    return sorted(windows.items(), key=lambda item: first_ns[item[0]])


def over_files(work: Callable[..., Any], paths: Sequence[str | Path], *given: Any) -> Iterator[Any]:
    """Yields work(path, num_parts, *given) of each file in order, on all cores where they are large.

    work is a function of a module; num_parts: as load() has it.  This process has its share of the files too: another
    one would cost a start and the memory of its modules.
    """
    if len(paths) == 1 or usable_cpus() == 1 or sum(map(num_bytes, paths)) < PARALLEL_BYTES:
        yield from (work(path, None, *given) for path in paths)
        return
    num = min(usable_cpus(), len(paths))
    largest_first = sorted(range(len(paths)), key=lambda index: -num_bytes(paths[index]))
    own = set(largest_first[num - 1 :: num])  # the smallest of every num
    with _pool(num - 1) as pool:
        others = {index: pool.submit(work, path, 1, *given) for index, path in enumerate(paths) if index not in own}
        done = {index: work(paths[index], 1, *given) for index in own}
        for index in range(len(paths)):
            yield others.pop(index).result() if index in others else done.pop(index)


def num_bytes(path: str | Path) -> int:
    """Approximate bytes of JSON in a file; estimated for a compressed one."""
    return os.path.getsize(path) * (GZIP_FACTOR if str(path).endswith(".gz") else 1)


def _load_one(path: str | Path, num_parts: int | None) -> Rank:
    return load(path, num_parts=num_parts)


def find(word: str | Path) -> list[Path]:
    """What a user named -> trace files, at least one: a file, or all traces in a folder, else those in its traces/.

    NoTrace where there is none.
    """
    path = Path(word)
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise NoTrace(f"{word}: no such file or folder")
    for folder in filter(os.path.isdir, (path, path / "traces")):
        found = (Path(entry.path) for entry in plain_file.entries_below(folder) if entry.name.endswith(SUFFIXES))
        files = sorted(file for file in found if _looks_like_a_trace(file))
        if files:
            return files
    raise NoTrace(f"{word}: it holds no trace (.json, .json.gz); a run records traces with look=on or profile=window")


def _looks_like_a_trace(path: Path) -> bool:
    try:
        next(iter(Source(path).chunks()), None)
    except (NoTrace, OSError):
        return False
    return True


def _pool(size: int) -> "ProcessPoolExecutor":
    import concurrent.futures
    import multiprocessing

    return concurrent.futures.ProcessPoolExecutor(size, mp_context=multiprocessing.get_context("spawn"))


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Without garbage collection: a chunk, or an account, is a hundred thousand objects in no circle."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _read(path: str | Path, part: int = 0, num_parts: int = 1) -> dict[str, Any]:
    source, collector = Source(path), Collector()
    with uncollected():
        for chunk in source.chunks(part, num_parts):
            collector.add(chunk)
    return collector.finish() | {"head": source.head, "tail": source.tail, "cut": source.cut}


def _read_into(folder: str, path: str | Path, part: int, num_parts: int) -> dict[str, Any]:
    """_read() with its columns in files: through a pipe the one who merges would hold them twice."""
    part_read = _read(path, part, num_parts)
    for name, column in part_read["columns"].items():
        file = f"{folder}/{part}-{name}.npy"
        np.save(file, column)
        part_read["columns"][name] = file
    return part_read


def _rank(path: str | Path, parts: list[dict[str, Any]]) -> Rank:
    head = next((part["head"] for part in parts if part["head"]), b"")
    tail = next((part["tail"] for part in parts if part["tail"]), b"")
    cut = next((part["cut"] for part in parts if part["cut"]), None)
    if sum(part["num_events"] for part in parts) == 0 and cut is None and not head and not tail:
        raise NoTrace(f"{path}: it is not a Kineto trace: it has no events")
    return Rank(path, parts, head, tail, cut)


def number(ranks: list[Rank]) -> list[Rank]:
    """In order of rank; files that do not say their rank, or say one that is taken, get the next free one."""
    taken: set[int | None] = set()
    for rank in sorted(ranks, key=lambda rank: (rank.rank is None, rank.rank or 0, rank.path.name)):
        if rank.rank is None or rank.rank in taken:
            rank.rank = next(number for number in range(len(ranks) + len(taken) + 1) if number not in taken)
        taken.add(rank.rank)
    return sorted(ranks, key=lambda rank: rank.rank)
