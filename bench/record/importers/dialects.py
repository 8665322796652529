"""How the lines of a training program read: a dialect by name, by a yaml of patterns, or found in the lines themselves.

A yaml of patterns:
    step: 'iter (?P<step>\\d+) loss (?P<train_loss>\\S+) elapsed (?P<train_time_s>\\S+)'
    val: 'eval at (?P<step>\\d+): (?P<val_loss>\\S+)'
    first_step: 0          # what it calls its first optimizer step; 1 where the line is missing
Groups: step, total, train_loss, val_loss, lr, grad_norm; train_time_ms or train_time_s, the time of training so far;
step_ms or step_s, of that step.  A pattern is searched in every line; step alone is needed in each.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from bench.base.reading import yaml_file
from bench.base.reading.damage import Damaged
from bench.record.importers import consoles, modded_nanogpt
from bench.record.importers.records import Run

WORD = re.compile(r" (train_loss|val_loss|train_time):([-+.\deEnaif]+)(ms|s)?(?= |$)")
STEP = re.compile(r"^(?:\S{0,20}: ?)?(?:step:(\d{1,9})/(\d{1,9})|s:(\d{1,9})(?= t[re]l:))(?= )")
LLM_C = re.compile(r" (tel|trl):([-+.\deEnaif]+)")
GROUPS = (
    *("step", "total", "train_loss", "val_loss", "lr", "grad_norm"),
    *("train_time_ms", "train_time_s", "step_ms", "step_s"),
)
MS = {"train_time_s": "train_time_ms", "step_s": "step_ms"}


class Modded:
    """modded-nanogpt's tracks, and llm.c's main.log: row() while the program runs, read() for what it comes to."""

    looks_like = re.compile(r"^(?:step|s|val_step):\d")

    def row(self, line: str) -> consoles.Row | None:
        match = STEP.search(line)
        if not match:
            return None
        row: consoles.Row = {"step": int(match[1] or match[3])} | ({"total": int(match[2])} if match[2] else {})
        for name, text, unit in WORD.findall(line):
            if (number := consoles.as_number(text)) is not None:
                is_time = name == "train_time"
                row[name + "_ms" * is_time] = number * (1e3 if is_time and unit == "s" else 1.0)
        for name, text in LLM_C.findall(line) if match[3] else ():
            row["val_loss" if name == "tel" else "train_loss"] = consoles.as_number(text)
        return row if len(row) > 1 else None

    def read(self, data: bytes) -> tuple[list[Run], dict[str, Any]]:
        return modded_nanogpt.read(data, "script")


class Console:
    """A form of bench/record/importers/consoles.py, or a reader like those."""

    def __init__(self, form: str, make: Callable[[], consoles.Form]):
        self._form, self._make, self._live = form, make, make()
        self.looks_like = self._live.looks_like

    def row(self, line: str) -> consoles.Row | None:
        try:
            return self._live.row(consoles.COLOUR.sub("", line))
        except (TypeError, ValueError):
            return None

    def read(self, data: bytes) -> tuple[list[Run], dict[str, Any]]:
        return consoles.read(data, self._form, self._make())


class Patterns:
    """A reader, as consoles.py has them, of the patterns in a yaml."""

    facts: dict[str, re.Pattern[str]] = {}

    def __init__(self, patterns: Sequence[re.Pattern[str]], first_step: int):
        self._patterns, self._first_step = patterns, first_step
        self.looks_like = re.compile("|".join(f"(?:{re.sub(r'[?]P<[a-z_]+>', '?:', one.pattern)})" for one in patterns))

    def row(self, line: str) -> consoles.Row | None:
        row: consoles.Row = {}
        for pattern in self._patterns:
            if match := pattern.search(line):
                for name, text in match.groupdict().items():
                    if text is not None:
                        number = consoles.as_number(text)
                        row[MS.get(name, name)] = number if name not in MS else None if number is None else 1e3 * number
        if row.get("step") is None:
            return None
        is_val = "val_loss" in row and "train_loss" not in row
        row["step"] = int(row["step"]) + (0 if is_val else 1 - self._first_step)
        return row | ({"total": int(row["total"])} if row.get("total") is not None else {})

    def clock(self, by_step: consoles.Rows) -> tuple[str, int]:
        timed = [row for row in by_step.values() if "train_time_ms" in row]
        if not timed:
            consoles.summed(by_step, untimed=0)
        return "as the patterns name it" if timed else "sum of the steps' times", 0


NAMES = ("modded-nanogpt", *consoles.FORMS)


def of_name(name: str) -> Modded | Console:
    """One of NAMES, or the path of a yaml of patterns, as a reader with looks_like, row(line) and read(bytes).

    row: {"step", ...} of one line, None for another; step k is after k optimizer steps.  ValueError: see read_yaml.
    """
    if name == "modded-nanogpt":
        return Modded()
    return Console(name, consoles.FORMS[name]) if name in consoles.FORMS else read_yaml(name, name)


def read_yaml(path: str, where: str) -> Console:
    """The dialect that a yaml of patterns describes.  ValueError says what is wrong with it; where: the setting."""
    try:
        described = yaml_file.read(path)
    except Damaged as error:
        known = f"give one of {', '.join(NAMES)}, or a yaml of patterns"
        raise ValueError(f"{where}: cannot be read ({error}): {known}") from None
    if not {"step", "val"} & set(described) or set(described) - {"step", "val", "first_step"}:
        raise ValueError(f"{where}: give the patterns step and val, and first_step: 0 where it counts from 0")
    first_step = described.get("first_step", 1)
    if type(first_step) is not int:
        raise ValueError(f"{where}: first_step={first_step!r}: give a whole number, 0 or 1")
    patterns = [_pattern(f"{where}: {name}", described[name]) for name in ("step", "val") if name in described]
    return Console("patterns", lambda: Patterns(patterns, first_step))


def edge(path: str) -> tuple[str, int]:
    """Of a readable yaml of patterns: that of a step's line, its number the first group, and what to add to it."""
    described = yaml_file.read(path)
    return re.sub(r"[?]P<(?!step>)[a-z_]+>", "?:", described["step"]), 1 - described.get("first_step", 1)


def _pattern(where: str, text: str) -> re.Pattern[str]:
    try:
        pattern = re.compile(text)
    except (re.error, TypeError) as error:
        raise ValueError(f"{where}={text!r}: is not a regular expression ({error})") from None
    unknown = set(pattern.groupindex) - set(GROUPS)
    if "step" not in pattern.groupindex or unknown:
        why = f"unknown group {sorted(unknown)[0]}" if unknown else "the group (?P<step>...) is missing"
        raise ValueError(f"{where}={text!r}: {why}; a pattern may have {', '.join(GROUPS)}")
    return pattern


def detect(lines: Iterable[str]) -> str | None:
    """The dialect of NAMES that reads most of the lines, the first of them where several do; None: none reads one."""
    lines = list(lines)
    num_read = {name: sum(of_name(name).row(line) is not None for line in lines) for name in NAMES}
    best = max(NAMES, key=lambda name: num_read[name])
    return best if num_read[best] else None


def read(name: str, lines: Sequence[str]) -> tuple[list[Run], dict[str, Any]]:
    """All lines of a program, in that dialect -> (its runs, facts as log_files.read has them: "unmatched" and more)."""
    return of_name(name).read(("\n".join(lines) + "\n").encode())
