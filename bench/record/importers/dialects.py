"""Reads what training programs print, in a dialect that is chosen by name, by a yaml of patterns, or detected.

row() and read() of a dialect are for a script that is running; files_of() and read_file() make records of logs.

A yaml of patterns:
    step: 'iter (?P<step>\\d+) loss (?P<train_loss>\\S+) elapsed (?P<train_time_s>\\S+)'
    val: 'eval at (?P<step>\\d+): (?P<val_loss>\\S+)'
    first_step: 0          # the number of the first optimizer step; 1 if this line is missing
Groups: step, total, train_loss, val_loss, val_bpb, core, artifact_bytes, lr, grad_norm; train_time_ms or train_time_s,
the time of training so far; step_ms or step_s, that of the step.  Patterns are searched in every line; only the group
step is required, and no line may match both patterns.
"""

import glob
import hashlib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.base.reading import json_file, patterns, plain_file, yaml_file
from bench.base.reading.damage import Damaged
from bench.base.units import GIB, gib_from_bytes
from bench.record.importers import consoles, modded_nanogpt, programs, records
from bench.record.importers.records import Run
from bench.record.shape import Record
from bench.record.step_files import StepRow

# Fields of modded-nanogpt's and llm.c's lines, all optional and in any order: (name, column, unit)
WORDS = (
    ("train_loss|trl", "train_loss", ""),
    ("val_loss|tel", "val_loss", ""),
    ("train_time", "train_time_ms", "ms"),
    ("train_time", "train_time_s", "s"),
)
GROUPS = (
    *("step", "total", "train_loss", "val_loss", *records.PRINTED_METRICS, "lr", "grad_norm"),
    *("train_time_ms", "train_time_s", "step_ms", "step_s"),
)
NAMES = ("modded-nanogpt", *programs.FORMS)
SUFFIXES = (".txt", ".log", ".stdout", ".out")
MAX_BYTES = GIB  # the limit for a log; the largest public one has 5 MB


class Modded(consoles.Form):
    """modded-nanogpt and llm.c's main.log.  The patterns are for a running program; logs are read by lines.py."""

    name = "modded-nanogpt"
    looks_like = re.compile(r"^(?:step|s|val_step):\d")
    patterns = {
        r"^(?:\S{0,20}: ?)?(?:step:(?P<step>\d{1,9})/(?P<total>\d{1,9})|s:(?P<s>\d{1,9})(?= t[re]l:))(?= )"
        + "".join(rf"(?=(?:.* (?:{key}):(?P<{name}>{consoles.FLOAT}){unit}(?= |$))?)" for key, name, unit in WORDS): 0
    }

    def parsed(self, line: str) -> consoles.Row | None:
        """Does what Form.parsed() does; returns None also for a line that has only a step."""
        row = super().parsed(line)
        if row and "s" in row:
            row["step"] = int(row.pop("s"))
        return row if row and len(row) > 1 else None

    def read(self, data: bytes) -> tuple[list[Run], dict[str, Any]]:
        """Reads a log with modded_nanogpt.read()."""
        return modded_nanogpt.read(data)


Dialect = str | Mapping[str, Any]  # one of NAMES, or patterns of one's own: step, val, first_step


def metrics_of(dialect: Dialect) -> set[str]:
    """Returns the names of the numbers that lines of a dialect may have; always includes val_loss."""
    return {"val_loss", *(name for pattern in reader_of(dialect).patterns for name in re.compile(pattern).groupindex)}


class Patterns(consoles.Form):
    """Reads lines by the patterns of a yaml."""

    name = "patterns"

    def __init__(self, chosen: Sequence[re.Pattern[str]], first_step: int):
        self.patterns, self._first_step = {pattern.pattern: 0 for pattern in chosen}, first_step
        plain = (re.sub(r"[?]P<[a-z_]+>", "?:", pattern.pattern) for pattern in chosen)
        self.looks_like = re.compile("|".join(f"(?:{text})" for text in plain))

    def parsed(self, line: str) -> consoles.Row | None:
        if sum(re.search(pattern, line) is not None for pattern in self.patterns) > 1:
            self.ambiguous = self.ambiguous or line  # it cannot be decided which of the two is meant
            return None
        row = super().parsed(line)
        if row and ("train_loss" in row or not any(name in row for name in consoles.VALIDATED)):  # not a validation
            row["step"] += 1 - self._first_step
        return row

    def clock(self, by_step: consoles.Rows) -> tuple[str, int]:
        if any("train_time_ms" in row for row in by_step.values()):
            return "as the patterns name it", 0
        return super().clock(by_step)


def reader_of(dialect: Dialect) -> consoles.Form:
    """Returns a new reader.  Raises ValueError for malformed patterns."""
    if dialect == "modded-nanogpt":
        return Modded()
    return programs.FORMS[dialect]() if isinstance(dialect, str) else _patterns(dialect, "script.lines")


def read_yaml(path: str, where: str) -> dict[str, Any]:
    """Returns the patterns in a yaml.  Raises ValueError, naming where, if it is missing or malformed."""
    try:
        described = dict(yaml_file.read(path))
    except Damaged as error:
        hint = f"give one of {', '.join(NAMES)}, or a yaml of patterns"
        raise ValueError(f"{where}: cannot be read ({error}): {hint}") from None
    _patterns(described, where)
    return described


def _patterns(described: Mapping[str, Any], where: str) -> Patterns:
    remedy, chosen = "give the patterns step and val, and first_step: 0 where it counts from 0", dict(described)
    if not {"step", "val"} & set(described) or set(described) - {"step", "val", "first_step"}:
        raise ValueError(f"{where}: {remedy}")
    first_step = json_file.check_kind(chosen.pop("first_step", 1), int, f"{where}: first_step", remedy)
    json_file.check_kind(chosen, dict[str, str], where, remedy)
    return Patterns([_pattern(f"{where}: {name}", chosen[name]) for name in sorted(chosen)], first_step)


def edge(described: Mapping[str, Any]) -> tuple[str, int]:
    """Returns one's own pattern for steps, whose first group is the step's number, and what to add to it."""
    return re.sub(r"[?]P<(?!step>)[a-z_]+>", "?:", described["step"]), 1 - described.get("first_step", 1)


def _pattern(where: str, text: str) -> re.Pattern[str]:
    try:
        pattern = patterns.compiled(text)
    except ValueError as error:
        raise ValueError(f"{where}={text!r}: {error}") from None
    unknown = set(pattern.groupindex) - set(GROUPS)
    if "step" not in pattern.groupindex or unknown:
        why = f"unknown group {sorted(unknown)[0]}" if unknown else "the group (?P<step>...) is missing"
        raise ValueError(f"{where}={text!r}: {why}; a pattern may have {', '.join(GROUPS)}")
    return pattern


def detect(lines: Iterable[str]) -> str | None:
    """Returns the one of NAMES that understands most of the lines, the first of several; None if none does."""
    lines = list(lines)
    num_read = {name: sum(reader_of(name).row(line) is not None for line in lines) for name in NAMES}
    best = max(NAMES, key=lambda name: num_read[name])
    return best if num_read[best] else None


def read(dialect: Dialect, lines: Sequence[str]) -> tuple[list[Run], dict[str, Any]]:
    """Reads all lines of a program.  Returns its runs, and facts such as "unmatched"; see read_file()."""
    return reader_of(dialect).read(("\n".join(lines) + "\n").encode())


# ---- files


def files_of(paths: Iterable[Path | str]) -> list[tuple[Path, Path | None]]:
    """Returns [(log, the folder that the user named, or None if they named the log)], without duplicates.

    paths: paths and globs from the user.  Raises ValueError if one names no log.
    """
    folder_of: dict[Path, Path | None] = {}
    for argument in paths:
        matches = sorted(glob.glob(str(argument), recursive=True))
        named = [Path(argument)] if os.path.exists(argument) else [Path(path) for path in matches]
        if not named:
            raise ValueError(f"{argument}: no such file or folder; give logs ({', '.join(SUFFIXES)}) or their folders")
        for path in named:
            below = _below(path) if path.is_dir() else [path]
            if not below and len(named) == 1:
                raise ValueError(f"{argument}: it holds no log, which ends in {', '.join(SUFFIXES)}; or name a file")
            for file in below:
                folder_of.setdefault(Path(os.path.realpath(file)), path.resolve() if path.is_dir() else None)
    return list(folder_of.items())


def _below(folder: Path) -> list[Path]:
    """Returns the logs in and below a folder, sorted.  Raises ValueError if a folder cannot be read."""

    def refuse(path: str, why: str) -> None:
        raise ValueError(f"{path}: cannot be read ({why})")

    entries = (entry for entry in plain_file.entries_below(folder, refuse) if entry.name.endswith(SUFFIXES))
    return sorted(Path(entry.path) for entry in entries if not entry.is_dir())


def read_file(
    path: Path | str, form: str = "modded-nanogpt", part_of: Path | None = None
) -> tuple[list[tuple[Record, list[StepRow]]], dict[str, Any]]:
    """Reads a log.  Returns [(record, rows of steps.csv)] of its runs, and facts about the file.

    facts: {"unmatched": [(line number, text)], "num_repeated", "sha256", "num_bytes", "num_runs"}.  Raises ValueError
    for an unknown format and for a file that cannot be read.
    """
    if form not in NAMES:
        raise ValueError(f"{form}: unknown format; choose from {', '.join(NAMES)}")
    with plain_file.opened(path) as file:
        if (num_bytes := os.fstat(file.fileno()).st_size) > MAX_BYTES:
            raise ValueError(f"{path}: is {gib_from_bytes(num_bytes):.1f} GiB, too large: cut out its lines of metrics")
    data = plain_file.content(path, MAX_BYTES)
    runs, facts = reader_of(form).read(data)
    digest = hashlib.sha256(data).hexdigest()
    facts |= {"sha256": digest, "num_bytes": len(data), "num_runs": len(runs)}
    return [records.record_of(run, Path(path), form, facts, part_of) for run in runs], facts
