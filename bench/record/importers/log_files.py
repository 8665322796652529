"""Training logs of other harnesses -> records.  One file a format; records.py makes records of what they find."""

import glob
import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bench.base.reading import plain_file
from bench.base.units import GIB, gib_from_bytes
from bench.record.importers import consoles, modded_nanogpt, records
from bench.record.shape import Record
from bench.record.step_files import StepRow

FORMATS = ("modded-nanogpt", "nanochat", "nanogpt", "kempnerforge", "llm.c")
SUFFIXES = (".txt", ".log", ".stdout", ".out")
MAX_BYTES = GIB  # of a log; the largest public one has 5 MB


def files(paths: Iterable[Path | str]) -> list[tuple[Path, Path | None]]:
    """Words of a user, globs too -> [(file, the folder it was under, or None)], each once.

    Raises ValueError for what is not there.
    """
    folder_of: dict[Path, Path | None] = {}
    for word in paths:
        matches = sorted(glob.glob(str(word), recursive=True))
        named = [Path(word)] if os.path.exists(word) else [Path(path) for path in matches]
        if not named:
            hint = f"give logs ({', '.join(SUFFIXES)}) or folders of them"
            raise ValueError(f"{word}: no such file or folder; {hint}")
        for path in named:
            below = _below(path) if path.is_dir() else [path]
            if not below and len(named) == 1:
                why = f"none of its files ends in {', '.join(SUFFIXES)}"
                raise ValueError(f"{word}: it holds no log: {why}; name a file to read that file anyway")
            for file in below:
                folder_of.setdefault(file.resolve(), path.resolve() if path.is_dir() else None)
    return list(folder_of.items())


def _below(folder: Path) -> list[Path]:
    """The logs in and below a folder, sorted."""

    def refuse(error: OSError) -> None:
        raise ValueError(f"{error.filename}: cannot be read ({error.strerror})")

    walked = sorted(os.walk(folder, onerror=refuse))
    return [Path(parent, name) for parent, _, names in walked for name in sorted(names) if name.endswith(SUFFIXES)]


def read(
    path: Path | str, form: str = "modded-nanogpt", part_of: Path | None = None
) -> tuple[list[tuple[Record, list[StepRow]]], dict[str, Any]]:
    """One file -> (list of (record, rows of steps.csv), facts of the file).

    facts: {"unmatched": [(line number, text)], "num_repeated", "num_tail_lines", "format_id", "sha256", "num_bytes",
    "num_runs"}.  Raises ValueError for an unknown format and for a file that cannot be read.
    """
    if form not in FORMATS:
        raise ValueError(f"{form}: unknown format; choose from {', '.join(FORMATS)}")
    data = _bytes_of(Path(path))
    runs, facts = modded_nanogpt.read(data, Path(path).name) if form == "modded-nanogpt" else consoles.read(data, form)
    digest = hashlib.sha256(data).hexdigest()
    facts |= {"sha256": digest, "num_bytes": len(data), "num_runs": len(runs)}
    return [records.of_run(run, Path(path), form, facts, part_of) for run in runs], facts


def _bytes_of(path: Path) -> bytes:
    with plain_file.opened(path) as file:
        if (num_bytes := os.fstat(file.fileno()).st_size) > MAX_BYTES:
            size = f"{gib_from_bytes(num_bytes):.1f} GiB"
            raise ValueError(f"{path}: is {size}, too large for a training log: cut out the part with the metric lines")
    return plain_file.content(path, MAX_BYTES)
