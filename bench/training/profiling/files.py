"""A recorded profile -> a Chrome trace file: whole or not there, compressed, of bounded size, without private names.

torch writes the machine's name, its own temporary path and, with stacks, the paths of all sources.  What is written
here has neither: the repository is ".", home is "~".
"""

import contextlib
import gzip
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from bench.base import atomic
from bench.base.paths import CODE, REPO
from bench.base.units import MIB
from bench.training.profiling import shrink

GZIP_LEVEL = 6
END = b"\n]}\n"
BLOCK_EVENTS = 10_000  # searched for private paths together: some MB
CONTROL_TO_SPACE = bytes(32 if byte < 32 and byte != 10 else byte for byte in range(256))  # JSON's strings hold none


@dataclass(frozen=True)
class Saved:
    """A trace that was written."""

    path: Path
    num_events: int
    num_bytes: int  # of the file, compressed or not
    dropped: dict[str, int]  # category: events, where max_mib did not allow them

    def facts(self) -> dict:
        """What the record says of it."""
        return {"num_events": self.num_events, "num_bytes": self.num_bytes, "dropped": self.dropped}

    @property
    def num_recorded(self) -> int:
        """Events that torch has in memory, written or not."""
        return self.num_events + sum(self.dropped.values())


def save(profile, path: Path | str, max_mib: float | None = None, renamed: Iterable[tuple[str, str]] = ()) -> Saved:
    """Write the trace of a stopped torch.profiler.profile to path, gzipped if that ends in .gz.  Raises OSError.

    max_mib: of the trace before compression, None for no limit.  renamed: pairs (name of an event, its new name).
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    raw = path.with_name(f".{path.name}.{os.getpid()}.raw.tmp")
    try:
        profile.export_chrome_trace(os.fspath(raw))  # .tmp: torch writes it plain
        facts, events = _read(raw)
        is_large = max_mib is not None and raw.stat().st_size > max_mib * MIB
    finally:
        raw.unlink(missing_ok=True)
    facts |= {"host_name": b'""', "traceName": json.dumps(path.name).encode()}
    head = b",\n".join(b"%s: %s" % (json.dumps(key).encode(), value) for key, value in facts.items())
    head = b"{\n" + head + b',\n"traceEvents": [\n'
    events, dropped = shrink.to(events, max_mib * MIB - len(head) - len(END)) if is_large else (events, {})
    replaced = [*_private_paths(), *((f'"name": "{old}"', f'"name": "{new}"') for old, new in renamed)]
    _write(path, head, events, [(old.encode(), new.encode()) for old, new in replaced])
    return Saved(path, len(events), path.stat().st_size, dropped)


def _read(raw):
    """({key: its JSON} of all but the events, [the JSON of each event]).

    Nothing of an event is decoded: 0.9 million of them (300 MB) take 0.8 s and 600 MB, a third of what torch holds.
    """
    text = raw.read_bytes().translate(CONTROL_TO_SPACE)
    try:
        facts = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        return facts, msgspec.json.decode(facts.pop("traceEvents"), type=list[msgspec.Raw])
    except (msgspec.DecodeError, KeyError):  # libkineto does not report a full disk
        raise OSError(f"the trace of {len(text)} bytes is cut: is the disk full?") from None


def _write(path, head, events, replaced):
    with atomic.replacing(path, durable=False) as file, contextlib.ExitStack() as stack:
        if path.suffix == ".gz":
            file = stack.enter_context(gzip.GzipFile("", "wb", GZIP_LEVEL, file))
        file.write(_clean(head, replaced))
        for start in range(0, len(events), BLOCK_EVENTS):
            file.write(
                b"," * bool(start) + _clean(shrink.SEPARATOR.join(events[start : start + BLOCK_EVENTS]), replaced)
            )
        file.write(END)


def _clean(block, replaced):
    """UTF-8, also where torch wrote other bytes (see allocations._name), and without private paths in any string."""
    for old, new in replaced:
        block = block.replace(old, new)
    try:
        block.decode()
        return block
    except UnicodeDecodeError:
        return block.decode(errors="replace").encode()


def _private_paths():
    home = os.path.expanduser("~")
    return [(f"{REPO}/", ""), (f"{CODE}/", ""), *([(f"{home}/", "~/")] if len(home) > 1 else [])]
