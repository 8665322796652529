"""Reads console logs by the lines of one program, a Form; programs.py has the programs.

Row k is the state after k optimizer steps.
"""

import itertools
import math
import re
from typing import Any

import numpy as np

from bench.record.importers.lines import COLUMNS
from bench.record.importers.records import PRINTED_METRICS, Run

# The length is bounded to limit backtracking: if what follows does not match, every shorter number is tried.
FLOAT = r"(?:[-+]?(?:\d[\d,]{0,40}(?:\.\d{0,40})?|\.\d{1,40})(?:[eE][-+]?\d{1,5})?|nan|inf|-inf)"
TRAIN_LOSS, VAL_LOSS, STEP_MS = (rf"(?P<{name}>{FLOAT})" for name in ("train_loss", "val_loss", "step_ms"))
# {group of a pattern in another unit: (column, factor)}
UNITS = {"train_time_s": ("train_time_ms", 1e3), "train_time_min": ("train_time_ms", 60e3), "step_s": ("step_ms", 1e3)}
# what terminals, loggers and launchers add: colours; "[2026-06-25 19:28:42] ", "1776142719.307 " or "[default0]:"
THOUSANDS = re.compile(r"[+-]?\d{1,3}(,\d{3})+(\.\d*)?")
ADDED = re.compile(
    r"\x1b\[[0-9;]*m|^(?:\[?(?:\d{4}-\d\d-\d\d[ T])?\d\d:\d\d:\d\d(?:[.,]\d+)?Z?\]? +|\d{10}\.\d+ +"
    r"|\[(?:default|rank)0\]: ?)",
    re.M,
)
LOSSES = ("train_loss", "val_loss", "val_bpb")  # if one is nan or inf, the run diverged
VALIDATED = ("val_loss", *PRINTED_METRICS)
MAX_LINE_CHARS = 10_000  # longer lines are not searched for metrics; no program prints such a metric line

Row = dict[str, Any]  # the numbers in a line: "step" and others
Rows = dict[int, Row]  # the rows of a run by step


class Form:
    """Reads the lines of one program: parsed() reads a line, clock() computes the times of a run's rows.

    patterns: {pattern: what is added to the line's step to get the row's}.  A pattern has a group for each number,
    named after its column: step, total, train_loss, a key of UNITS, ...  A line without a step describes the weights
    after the last step that was named.  The clock is what the program printed (prints_time), or else the sum of the
    steps' times, if every step was printed with a time.
    """

    name: str
    looks_like: re.Pattern[str]
    patterns: dict[str, int] = {}
    facts: dict[str, re.Pattern[str]] = {}  # patterns for facts outside of the rows; the last group is the fact
    meaning = "sum of the steps' times"  # what train_time_ms is
    prints_time = False
    num_untimed = 0  # the number of first steps that train_time_ms excludes
    metric = "val_loss"  # the metric that the program's authors use
    ambiguous: str | None = None  # the first line that two patterns of a yaml match
    _latest = 0  # the last step that was named

    def parsed(self, line: str) -> Row | None:
        """Returns the row of a metric line, None for any other line."""
        row: Row = {}
        for pattern, offset in self.patterns.items():
            if match := re.search(pattern, line):
                row |= {name: _value(name, text) for name, text in match.groupdict().items() if text is not None}
                row["step"] = self._latest = int(row.get("step", self._latest)) + offset
        for name, (column, factor) in UNITS.items():
            if name in row:
                number = row.pop(name)
                row[column] = None if number is None else factor * number
        if row.get("total") is not None:
            row["total"] = int(row["total"])
        return row or None

    def row(self, line: str) -> Row | None:
        """Returns parsed() of a line as printed; None also if a number in it cannot be read."""
        if len(line) > MAX_LINE_CHARS:
            return None
        try:
            return self.parsed(ADDED.sub("", line))
        except (TypeError, ValueError):
            return None

    def clock(self, by_step: Rows) -> tuple[str, int]:
        """Adds train_time_ms, the sum of step_ms after the untimed steps, to each row, unless a step_ms is unknown.

        Returns what it means, and the number of first steps that are untimed.
        """
        if not self.prints_time:
            times_ms = [by_step.get(step, {}).get("step_ms") for step in range(self.num_untimed + 1, max(by_step) + 1)]
            if times_ms and None not in times_ms:
                for step, total_ms in enumerate([*[0.0] * self.num_untimed, *itertools.accumulate(times_ms)], 1):
                    if step in by_step:
                        by_step[step]["train_time_ms"] = total_ms
        return self.meaning, self.num_untimed

    def is_complete(self, last: int, val_step: int | None, total: int | None, facts: dict[str, str]) -> bool:
        """Whether a run is complete: the log says so, it has the last step, or it validates it (no total known)."""
        if "num_done" in facts or "total_min" in facts:  # programs print these at the end
            return total is None or last >= min(total, int(facts.get("num_done", total)))
        return val_step is not None and val_step >= (max(last, 1) if total is None else total)  # 0: it trained nothing

    def read(self, data: bytes) -> tuple[list[Run], dict[str, Any]]:
        """Reads a log.  Returns its runs, and facts about the file, as modded_nanogpt.read() does."""
        text = ADDED.sub("", data.decode("utf-8", "replace"))
        runs: list[Rows] = []
        unmatched, latest, first = [], 0, 0
        for number, line in enumerate(text.splitlines(), 1):
            if (row := self.row(line)) is None:
                if looks_like(self.looks_like, line):
                    unmatched.append((number, line[:200]))
                continue
            if not runs or (row["step"] <= first and row["step"] < latest):  # the first step again: a new run
                runs.append({})
                first = row["step"]
            latest = row["step"]
            finite = {name: value for name, value in row.items() if value is None or math.isfinite(value)}
            if "train_time_ms" in row and "train_time_ms" not in finite:
                finite["train_time_ms"] = math.inf  # Run reports it as impossible
            if any(name in row and name not in finite for name in LOSSES):
                finite["diverged"] = 1
            runs[-1].setdefault(latest, {}).update(finite)  # a resumed run repeats steps
        matches = ((name, pattern.search(text)) for name, pattern in self.facts.items())
        facts = {name: match[match.re.groups] for name, match in matches if match}
        logged = [_run(by_step, number, facts if len(runs) == 1 else {}, self) for number, by_step in enumerate(runs)]
        return logged, {"unmatched": unmatched, "num_repeated": 0}


def looks_like(pattern: re.Pattern[str], line: str) -> bool:
    """Returns whether an end of a line has the pattern; of a line that row() reads, the whole line."""
    return any(pattern.search(end) for end in {line[:MAX_LINE_CHARS], line[-MAX_LINE_CHARS:]})


def _value(name: str, text: str) -> float | None:
    """Returns a number of a line: None for a word, such as n/a, and nan for one in place of what is validated.

    Raises ValueError for what is neither, such as 3,9.
    """
    number = as_number(text)
    if number is None and any(map(str.isdigit, text)):
        raise ValueError(f"{name}: {text!r} is no number")
    return math.nan if number is None and name in VALIDATED else number


def as_number(text: str) -> float | None:
    """Parses a number: "1,234" -> 1234.0; None for text that is not a number."""
    try:
        return to_float(text)
    except ValueError:
        return None


def to_float(text: str) -> float:
    """Parses a number: "1,234" -> 1234.0.  Raises ValueError for text that is not a number."""
    if "," in text and not THOUSANDS.fullmatch(text):
        raise ValueError(f"{text!r}: is not a number as 1,234.5")
    return float(text.replace(",", ""))


def _run(by_step: Rows, number: int, facts: dict[str, str], form: Form) -> Run:
    meaning, num_untimed = form.clock(by_step)
    rows = [by_step[step] for step in sorted(by_step)]

    def values_of(name: str) -> list[Any]:
        return [row[name] for row in rows if name in row]

    names = (*COLUMNS, "step_ms", *PRINTED_METRICS)
    columns = {name: np.array([row.get(name, np.nan) for row in rows], float) for name in names}
    last, total = rows[-1]["step"], next(iter(values_of("total")), int(facts["total"]) if "total" in facts else None)
    total = int(facts["max_iters"]) + 1 if "max_iters" in facts else total  # nanoGPT numbers iterations from 0
    timed, validated = values_of("train_time_ms"), [row for row in rows if "val_loss" in row or "val_bpb" in row][-1:]
    if "total_min" in facts and ("train_time_ms" not in rows[-1] or len(timed) < last):
        timed.append(60e3 * to_float(facts["total_min"]))
    val_step = validated[0]["step"] if validated else None
    diverged = next((row["step"] for row in rows if "diverged" in row), None)
    peaks_mib = values_of("peak_mib") + [as_number(facts[name]) for name in ("peak_mib",) if name in facts]
    batch_tokens = as_number(facts["batch_tokens"]) if "batch_tokens" in facts else None
    if "num_tokens" in facts:
        batch_tokens = to_float(facts["num_tokens"]) / last
    measured = {"gpu_name": facts.get("gpu_name"), "peak_mib": max(peaks_mib, default=None)}
    measured |= {"seed": int(facts["seed"])} if "seed" in facts else {}
    return Run(
        number=number,
        columns=columns,
        num_steps=last,
        declared_steps=total,
        val_step=val_step,
        diverged_step=diverged,
        complete=diverged is None and form.is_complete(last, val_step, total, facts),
        val_loss=next(reversed(values_of("val_loss")), None),
        train_time_ms=timed[-1] if timed else None,
        step_avg_ms=None,
        step_avg_meaning=meaning if timed else None,
        num_untimed_steps=num_untimed if timed else 0,
        facts=measured | {"world_size": int(facts["world_size"]) if "world_size" in facts else None},
        model=form.name,
        metric=form.metric if values_of(form.metric) else "val_loss",
        headline={"val_bpb": str(validated[0]["val_bpb"])} if validated and "val_bpb" in validated[0] else {},
        flags={row["step"]: row["flags"] for row in rows if "flags" in row},
        batch_tokens=None if batch_tokens is None else round(batch_tokens),
    )
