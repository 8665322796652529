"""Writes a trace with its account as additional tracks, for ui.perfetto.dev and chrome://tracing.

    ./run.sh explain rank0.json.gz --perfetto annotated/

A process above the trace's own shows the parts of each step, one after the other; where communication was exposed or
waited for; a track for each of the first lines of the ranking, at the times that it consists of; and the critical path,
with arrows from what each link waited for.  Every event of the trace is kept unchanged.
"""

import gzip
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.analysis.explain import device_steps, parts, ranking
from bench.analysis.trace import critical, device_time
from bench.analysis.trace.columns import US
from bench.analysis.trace.rank import Rank
from bench.analysis.trace.source import Source
from bench.base import atomic

PID = "speedrun"  # process id of the added tracks, which no real process has
MARK = "annotated_by_speedrun.json"  # the file's name within the gzip file, which shows whose it is
CATEGORY = "speedrun"  # category of the added events, which an analysis of the new file ignores
NUM_RANKED = 8  # lines of the ranking that have a track
ACCOUNT, COMMUNICATION, PATH = "1 parts of the step", "2 exposed communication", "3 critical path"
MAX_TRACK_CHARS = 120
COMMUNICATES = (parts.WAITING, parts.WIRE, parts.EXPOSED)


def write(folder: Path, rank: Rank, pieces: parts.Pieces, ranked: Sequence[dict[str, Any]]) -> Path:
    """Writes the trace of a rank with its account to a file of the same name in folder, and returns the path.

    ranked: the account's "next".  Raises ValueError if folder holds the trace itself, or cannot be written.
    """
    path = folder / (rank.path.name.removesuffix(".gz") + ".gz")
    if path.exists() and path.samefile(rank.path):
        raise ValueError(f"--perfetto {folder}: it holds the trace itself, {path.name}; name another folder")
    atomic.refuse_other(path, MARK.encode(), "--perfetto")
    source, added = Source(rank.path), [json.dumps(event).encode() for event in events(rank, pieces, ranked)]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with atomic.replacing(path, durable=False) as out, gzip.GzipFile(MARK, "wb", 3, out) as file:
            _copy(source, added, file)
    except OSError as error:
        raise ValueError(f"--perfetto {path}: cannot be written ({error.strerror}); name another folder") from None
    return path


def _copy(source: Source, added: Sequence[bytes], file: gzip.GzipFile) -> None:
    """Writes the trace with the added events."""
    first = True
    for chunk in itertools.chain(source.chunks(), [b",".join(added)]):
        if first:
            file.write((source.head or b"{") + b'"traceEvents": [')
        elif chunk.strip():
            file.write(b",\n")
        file.write(chunk.rstrip().rstrip(b","))
        first = first and not chunk.strip()
    file.write(b"]" + (source.tail if source.head and source.tail.strip() else b"}"))


def events(rank: Rank, pieces: parts.Pieces, ranked: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yields the added events, with timestamps in microseconds of the trace's clock."""
    yield {"ph": "M", "pid": PID, "name": "process_name", "args": {"name": "speedrun: where the step's time goes"}}
    yield {"ph": "M", "pid": PID, "name": "process_sort_index", "args": {"sort_index": -1}}
    timeline = sorted(pieces.timeline, key=lambda entry: entry[0])
    for begin, end, piece in timeline:
        yield _slice(ACCOUNT, begin, end, piece.part, piece)
        if piece.part in COMMUNICATES:
            yield _slice(COMMUNICATION, begin, end, piece.part, piece)
    for number, line in enumerate(ranked[:NUM_RANKED], start=1):
        track = f"4 ranking, {number}: {line['gain_ms']:.3f} ms, {line['part']}: {line['what'] or ''}"[:MAX_TRACK_CHARS]
        for begin, end, piece in timeline:
            if _is_of(line, piece):
                yield _slice(track, begin, end, piece.part, piece)
    yield from _path(rank, pieces.steps)


def _is_of(line: dict[str, Any], piece: parts.Piece) -> bool:
    """Returns whether a line of the ranking holds a piece, or a part of one that its bound divides."""
    part, name, late = ranking.origin_of(piece)
    if part not in (line["part"], device_steps.BOUNDED):
        return False
    return late == line["rank"] if part == parts.WAITING else name in (None, line["what"], line["where"])


def _slice(track: str, begin_ns: int, end_ns: int, name: str, piece: parts.Piece | None = None) -> dict[str, Any]:
    event: dict[str, Any] = {"ph": "X", "cat": CATEGORY, "pid": PID, "tid": track, "name": name}
    event |= {"ts": begin_ns / US, "dur": (end_ns - begin_ns) / US}
    if piece is not None:
        event["args"] = {key: value for key, value in piece._asdict().items() if value is not None}
    return event


def _path(rank: Rank, steps: Sequence[parts.Step]) -> Iterator[dict[str, Any]]:
    """Yields the chain of work that ends with the last row of each step, and arrows between its rows."""
    rows, number = rank.device_rows(), 0
    for _, begin, end in steps:
        mine = rows[(rank.ts[rows] >= begin) & (rank.end[rows] <= end)]
        if not len(mine):
            continue
        links = sorted(critical.walk(rank, mine, device_time.types(rank, mine)))
        previous: tuple[int, int] | None = None  # a row, and when the path leaves it, which may be before its end
        for kind, low, high, row in sorted(links, key=lambda link: link[1]):
            name = critical.KINDS[kind] if row is None else rank.names[rank.name[row]]
            yield _slice(PATH, low, high, name)
            if row is None:
                continue
            if previous is not None:
                number += 1
                yield _arrow("s", number, rank, previous[0], previous[1] - 1)
                yield _arrow("f", number, rank, row, low)
            previous = row, high


def _arrow(phase: str, number: int, rank: Rank, row: int, at_ns: int) -> dict[str, Any]:
    _, device, stream = rank.tracks[rank.track[row]]
    event = {"ph": phase, "id": f"speedrun{number}", "cat": CATEGORY, "name": "critical path", "ts": at_ns / US}
    return event | {"pid": device, "tid": stream} | ({"bp": "e"} if phase == "f" else {})
