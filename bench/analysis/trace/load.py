"""Trace files -> Ranks; large ones of several by one process a file."""

import concurrent.futures
import gc
import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.analysis.trace.rank import Collector, Rank
from bench.analysis.trace.source import NoTrace, Source
from bench.machine.environment import usable_cpus

PARALLEL_BYTES = 100 * 2**20  # of JSON; below, starting a process costs more than it saves
GZIP_FACTOR = 15  # of JSON, about
SUFFIXES = (".json", ".json.gz")


def load(path: str | Path) -> Rank:
    """One file -> Rank.  NoTrace (a ValueError) for a file that is not a trace."""
    source, collector = Source(path), Collector()
    if source.is_zip:
        raise NoTrace(f"{path}: it is a zip archive: unpack it and name the .json in it")
    collects = gc.isenabled()
    gc.disable()  # a chunk is a hundred thousand objects in no circle
    try:
        for chunk in source.chunks():
            collector.add(chunk)
    finally:
        if collects:
            gc.enable()
    rows = collector.finish()
    if not (rows["num_events"] or source.cut or source.head or source.tail):
        raise NoTrace(f"{path}: it is not a Kineto trace: it has no events")
    return Rank(path, rows, source.head, source.tail, source.cut)


def load_all(paths: Sequence[str | Path]) -> list[Rank]:
    """Files of one job -> Ranks in order of rank.  A file that cannot be read raises NoTrace."""
    return number(list(over_files(load, paths)))


def by_window(paths: Sequence[str | Path]) -> dict[str | None, list[Rank]]:
    """Files -> {window: Ranks in order of rank}, the earliest first.  A file that is not a trace raises NoTrace.

    Traces of this project say of which window they are; the others are one, None.
    """
    windows: dict[str | None, list[Rank]] = {}
    for rank in over_files(load, paths):
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
    """Yields work(path, *given) of each file in order, on all cores where they are large; work: of a module."""
    num = min(usable_cpus(), len(paths))
    if num == 1 or sum(map(num_bytes, paths)) < PARALLEL_BYTES:
        yield from (work(path, *given) for path in paths)
        return
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(num, mp_context=context) as pool:
        jobs = [pool.submit(work, path, *given) for path in paths]
        while jobs:  # what was yielded is not kept
            yield jobs.pop(0).result()


def num_bytes(path: str | Path) -> int:
    """Approximate bytes of JSON in a file; estimated for a compressed one."""
    return os.path.getsize(path) * (GZIP_FACTOR if str(path).endswith(".gz") else 1)


def find(word: str | Path) -> list[Path]:
    """What a user named -> trace files, at least one: a file, or all traces in a folder, else those in its traces/.

    NoTrace where there is none.
    """
    path = Path(word)
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise NoTrace(f"{word}: no such file or folder")
    for folder in (path, path / "traces"):
        files = sorted(file for file in folder.rglob("*") if file.name.endswith(SUFFIXES) and _looks_like_a_trace(file))
        if files:
            return files
    raise NoTrace(f"{word}: it holds no trace (.json, .json.gz); a run records traces with profile=window")


def _looks_like_a_trace(path: Path) -> bool:
    try:
        next(iter(Source(path).chunks()), None)
    except (NoTrace, OSError):
        return False
    return True


def number(ranks: list[Rank]) -> list[Rank]:
    """In order of rank; files that do not say their rank, or say one that is taken, get the next free one."""
    taken: set[int | None] = set()
    for rank in sorted(ranks, key=lambda rank: (rank.rank is None, rank.rank or 0, rank.path.name)):
        if rank.rank is None or rank.rank in taken:
            rank.rank = next(number for number in range(len(ranks) + len(taken) + 1) if number not in taken)
        taken.add(rank.rank)
    return sorted(ranks, key=lambda rank: rank.rank)
