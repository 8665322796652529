"""Reads trace files as Ranks.  Large files of one job are read by one process each."""

import collections
import concurrent.futures
import contextlib
import gc
import itertools
import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from bench.analysis.trace.rank import Collector, Rank
from bench.analysis.trace.source import NoTrace, Source
from bench.base.reading import plain_file
from bench.machine.environment import usable_cpus
from bench.record import run_folder

PARALLEL_BYTES = 100 * 2**20  # of JSON in all files; below, starting processes costs more than it saves
GZIP_FACTOR = 15  # bytes of JSON per byte of gzip, about
SUFFIXES = (".json", ".json.gz")
Made = TypeVar("Made")  # what is made from a trace file


def load(path: str | Path) -> Rank:
    """Reads one file.  Raises NoTrace, a ValueError, for a file that is not a trace."""
    source, collector = Source(path), Collector()
    with uncollected():
        for chunk in source.chunks():
            collector.add(chunk)
    if not collector.num_events and (source.cut is not None or not (source.head or source.tail)):
        why = f"no event is in what can be read of it ({source.cut})" if source.cut else "it has no events"
        raise NoTrace(f"{path}: it is not a Kineto trace: {why}")
    return Rank(path, collector.finish(), source.head, source.tail, source.cut)


def are_of_one_job(files: Sequence[Path]) -> bool:
    """Returns whether every trace file says its rank, and all of them differ.  Decodes no event."""
    ranks = []
    for path in files:
        source = Source(path)
        collections.deque(source.chunks(), maxlen=0)  # the rank may be after the events
        ranks.append(Rank(path, Collector().finish(), source.head, source.tail, source.cut).rank)
    return None not in ranks and len(set(ranks)) == len(ranks)


def by_window(paths: Sequence[str | Path]) -> dict[str | None, list[Rank]]:
    """Returns {window: Ranks in order of rank}, the earliest first.  Raises NoTrace for a file that is not a trace."""
    return grouped(over_files(load, paths), lambda rank: rank)


def grouped(items: Iterable[Made], rank_of: Callable[[Made], Rank]) -> dict[str | None, list[Made]]:
    """Returns {window: what was made of its files, in order of rank}, the earliest window first.

    Traces of this project say in which window of the run they were recorded; the others are one window, None.
    """
    windows: dict[str | None, list[Made]] = {}
    first_ns: dict[str | None, int] = {}
    for item in items:
        rank = rank_of(item)
        facts = rank.meta.get("speedrun")
        name = facts.get("window") if isinstance(facts, dict) else None
        windows.setdefault(name, []).append(item)
        if len(rank.ts):
            earliest_ns = int(rank.ts.min())
            first_ns[name] = min(first_ns.get(name, earliest_ns), earliest_ns)
    for members in windows.values():
        number(map(rank_of, members))
        members.sort(key=lambda item: rank_of(item).rank)
    return {name: windows[name] for name in sorted(windows, key=lambda name: first_ns.get(name, 0))}


def number(ranks: Iterable[Rank]) -> None:
    """Sets the rank of each file; those that do not say their rank, or say one that is taken, get the next free one."""
    used_ranks: set[int | None] = set()
    for rank in sorted(ranks, key=lambda rank: (rank.rank is None, rank.rank or 0, rank.path.name)):
        rank.is_taken = rank.rank in used_ranks
        if rank.rank is None or rank.is_taken:
            rank.rank = next(free for free in itertools.count() if free not in used_ranks)
        used_ranks.add(rank.rank)


def over_files(work: Callable[..., Made], paths: Sequence[str | Path], *extra_arguments: Any) -> Iterator[Made]:
    """Yields work(path, *extra_arguments) of each file in order, in several processes if the files are large.

    work: a function of a module, so that processes can import it.
    """
    num_processes, arguments = min(usable_cpus(), len(paths)), (paths, *map(itertools.repeat, extra_arguments))
    # of JSON, estimated for compressed files
    num_bytes = sum(os.path.getsize(path) * (GZIP_FACTOR if str(path).endswith(".gz") else 1) for path in paths)
    if num_processes == 1 or num_bytes < PARALLEL_BYTES:
        yield from map(work, *arguments)
        return
    spawning = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(num_processes, spawning) as pool:
        yield from pool.map(work, *arguments)


def find(name: str | Path) -> list[Path]:
    """Returns the trace files that a user names: a file, or all traces in a folder, else those in its traces/.

    Raises NoTrace if there is none.
    """
    path = Path(name)
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise NoTrace(f"{name}: no such file or folder")
    for folder in filter(os.path.isdir, (path, path / "traces")):
        candidates = (Path(entry.path) for entry in plain_file.entries_below(folder) if entry.name.endswith(SUFFIXES))
        files = sorted(file for file in candidates if is_trace(file))
        if files:
            if (path / "run.json").is_file():  # it may be somebody else's
                run_folder.refuse_links_out(path, files)
            return files
    raise NoTrace(f"{name}: it holds no trace (.json, .json.gz); a run records traces with look=on or profile=window")


def is_trace(path: Path) -> bool:
    """Returns whether a file begins as a trace does."""
    try:
        next(iter(Source(path).chunks()), None)
    except (NoTrace, OSError):
        return False
    return True


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Suspends garbage collection: a chunk, or an account, is a hundred thousand objects without cycles."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
