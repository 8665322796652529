"""A recorded profile -> a Chrome trace file: whole or not there, compressed, of bounded size, without private names.

torch writes the machine's name, its own temporary path and, with stacks, the paths of all sources.  What is written
here has neither: the repository is ".", home is "~".
"""

import contextlib
import gzip
import os
import re
from dataclasses import dataclass
from pathlib import Path

from bench.paths import REPO
from bench.profiling import shrink
from bench.units import MIB

GZIP_LEVEL = 6
BLOCK_BYTES = 4 * MIB
CONTROL_TO_SPACE = bytes(32 if byte < 32 and byte != 10 else byte for byte in range(256))  # JSON's strings hold none


@dataclass(frozen=True)
class Saved:
    """A trace that was written."""

    path: Path
    num_events: int
    num_bytes: int  # of the file as it lies there
    left_out: dict[str, int]  # category: events, where max_mib did not allow them

    @property
    def num_recorded(self):
        """Events that torch has in memory, whatever was written."""
        return self.num_events + sum(self.left_out.values())


def save(profile, path, max_mib=None, renamed=()):
    """Write the trace of a stopped torch.profiler.profile to path, gzipped if that ends in .gz.  Raises OSError.

    renamed: pairs (name of an event, what it shall be called).
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    raw, made = (path.with_name(f".{path.name}.{os.getpid()}.{kind}.tmp") for kind in ("raw", "made"))
    try:
        profile.export_chrome_trace(os.fspath(raw))  # .tmp: torch writes it plain
        _refuse_cut(raw)
        left_out = shrink.to(raw, max_mib * MIB) if max_mib is not None and raw.stat().st_size > max_mib * MIB else {}
        num_events = _publish(raw, made, path, [(f'"name": "{old}"', f'"name": "{new}"') for old, new in renamed])
        os.replace(made, path)
    finally:
        for temporary in (raw, made):
            with contextlib.suppress(FileNotFoundError):
                temporary.unlink()
    return Saved(path, num_events, path.stat().st_size, left_out)


def _refuse_cut(raw):
    """libkineto says nothing of a full disk: a trace that does not end as one is none."""
    with open(raw, "rb") as file:
        file.seek(max(0, raw.stat().st_size - 4096))
        if not file.read().rstrip().endswith(b"}"):
            raise OSError(f"the trace of {raw.stat().st_size} bytes is cut: is the disk full?")


def _publish(raw, made, path, renamed):
    """Copy raw to made, compressed if path says so, and clean on the way.  Returns the number of events."""
    replaced = [*_private_paths(), *((old.encode(), new.encode()) for old, new in renamed)]
    opened = gzip.open(made, "wb", compresslevel=GZIP_LEVEL) if path.suffix == ".gz" else open(made, "wb")
    num_events = 0
    with open(raw, "rb") as source, opened as target:
        for number, block in enumerate(_blocks(source)):
            block = _as_text(block)
            num_events += block.count(b'"ph": ')
            if number == 0:
                block = re.sub(rb'"host_name": "[^"]*"', b'"host_name": ""', block, count=1)
            for found, shown in replaced:
                block = block.replace(found, shown)
            if b'"traceName": "' in block:
                block = re.sub(rb'"traceName": "[^"]*"', b'"traceName": "%s"' % path.name.encode(), block)
            target.write(block)
    return num_events


def _as_text(block):
    """UTF-8 without control characters, whatever torch wrote: see allocations._name."""
    block = block.translate(CONTROL_TO_SPACE)
    try:
        block.decode()
        return block
    except UnicodeDecodeError:
        return block.decode(errors="replace").encode()


def _blocks(file):
    """Pieces of some MiB that end where a line ends, so that no word is cut."""
    rest = b""
    while block := file.read(BLOCK_BYTES):
        block = rest + block
        end = block.rfind(b"\n") + 1
        rest = block[end:]
        if end:
            yield block[:end]
    if rest:
        yield rest


def _private_paths():
    home = os.path.expanduser("~")
    found = [(f"{REPO}/".encode(), b"")]
    return found + ([(f"{home}/".encode(), b"~/")] if len(home) > 1 else [])
