"""Reads the metric lines of modded-nanogpt's logs as numbers; each line is understood or reported.

A metric line begins with "step:7/", "s:7 ", "tailavg step:" or "val_step:7/"; the code that logs embed is not read
here.  Lines of common shapes are read by one regular expression, the others word by word.  A line that only looks like
a metric line is reported: it was cut, mixed with another rank's output, printed again by a second rank, or has text in
front.
"""

import codecs
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Columns = dict[str, Array]  # {name: an entry per metric line, nan if the line has none}

IS_METRIC = re.compile(rb"(?:step|s|val_step):\d|tailavg step:")
BEGINNINGS = (b"step:", b"s:", b"tailavg ", b"val_step:")
FIRST = re.compile(rb"\n(?:(?:step|s|val_step):\d|tailavg step:\d)")  # a pattern that begins with a newline is fast
# A metric line in the middle of another line.  To be fast, the lookbehinds come after the literal text.
STRAYS = (
    re.compile(rb"step:(?<![\w./]step:)\d+/\d+ +\w+:"),
    re.compile(rb"s:(?<![\w./]s:)\d+ t[re]l:"),
    re.compile(rb"train_time:[\d.]"),
    re.compile(rb"step_avg:[\d.]"),
)
DIGITS = b"0123456789."
LAST_DECIMALS = re.compile(rb"\.(\d*)\s*$")
COLOUR = re.compile(rb"\x1b\[[0-9;]*[mK]")
# "[rank0]: ", "0: "
BEHIND_PREFIX = re.compile(rb"^(?:\[[^\]\n]{1,40}\]:? ?|\d+: |[ \t])+(?=step:\d+/\d+ |s:\d+ t[re]l:)", re.M)
COLUMNS = ("step", "total", "train_loss", "val_loss", "train_time_ms", "step_avg_ms", "lr", "grad_norm")
NOT_FINITE = {"train_loss": "train_diverged", "val_loss": "val_diverged"}  # columns that are 1 if a loss is nan or inf
STEP = re.compile(
    rb"(?:step:(\d{1,9})/(\d{1,9})|s:(\d{1,9}))((?:\s+(?:[A-Za-z]\w*:|val_time: )\S+)+)(?:[ \t]+([a-z_]{3,}))?\s*$"
)
WORD = re.compile(rb"(\w+):(?:(?<=val_time:) )?(\S+)")  # only val_time may have a blank; elsewhere a digit may be lost
TAIL = re.compile(rb"tailavg step:\d+(?: +\w+:[^\s:/]+)*\s*$")
# progress within a validation; a further loss of a step, such as val_loss_unmasked
VAL_STEP = re.compile(
    rb"(?:val_step:\d+/\d+(?: +\w+:[^\s:/]+)*|step:\d+/\d+(?: +(?:train|val)_loss_\w+:[^\s:/]+)+)\s*$"
)
MEASURED = re.compile(rb"loss|time|avg|lr")  # keys of losses, times and learning rates; other lines are only kept
NUMBER = re.compile(rb"[-+]?(?:(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|nan|inf)")
NAMES = {b"train_loss": "train_loss", b"val_loss": "val_loss", b"trl": "train_loss", b"tel": "val_loss"}
NAMES |= {b"lr": "lr", b"norm": "grad_norm"}
NOT_TWICE = (b"step", b"s")  # if these keys occur again, a second line was printed into the line
# The most common shapes of lines.  Numbers have at most 15 digits, so that both ways of reading them round equally
COMMON = re.compile(
    (
        rb"step:(?P<step>\d{1,9})/(?P<total>\d{1,9})"
        rb"(?: train_loss:(?P<train_loss>NUMBER)| val_loss:(?P<val_loss>NUMBER))?"
        rb" train_time:(?:(?P<train_time_ms>NUMBER)ms|(?P<train_time_s>NUMBER)s)"
        rb" step_avg:(?:(?P<step_avg_ms>NUMBER)|nan)ms"
        rb"|s:(?P<s>\d{1,9}) (?:tel:(?P<tel>NUMBER)"
        rb"|trl:(?P<trl>NUMBER)(?: lr:(?P<lr>NUMBER) norm:(?P<grad_norm>NUMBER))?)"
    ).replace(b"NUMBER", rb"\d{1,8}(?:\.\d{0,7})?")
)
COLUMN_OF = {"s": "step", "tel": "val_loss", "trl": "train_loss"}  # {key in llm.c's lines: column}


@dataclass
class Metrics:
    """The metric lines of a log, in order."""

    columns: Columns
    line_numbers: Array  # the number of each metric line in the log, from 0
    extras: dict[int, dict[str, str]] = field(default_factory=dict)  # {index of a metric line: {key: text}}
    # (line number from 0, text) of lines that look like metric lines but cannot be read
    unmatched: list[tuple[int, str]] = field(default_factory=list)
    tails: list[dict[str, str]] = field(default_factory=list)  # {key: text} of "tailavg" lines, which are not steps
    others: list[str] = field(default_factory=list)  # lines of a step without a loss or a time, unchanged
    num_repeated: int = 0  # lines that repeat earlier lines
    num_validated_again: int = 0  # further validations of a run's last step; others has their lines

    def __len__(self) -> int:
        return len(self.columns["step"])

    def keep(self, mask: Array) -> None:
        """Keeps only the metric lines for which mask is True."""
        where = np.cumsum(mask) - 1
        self.columns = {name: values[mask] for name, values in self.columns.items()}
        self.line_numbers = self.line_numbers[mask]
        self.extras = {int(where[index]): extra for index, extra in self.extras.items() if mask[index]}

    def report(self, text: Sequence[bytes], line_number: int) -> None:
        self.unmatched.append((int(line_number), text[line_number].decode("utf-8", "replace")[:200]))


def plain(data: bytes) -> bytes:
    """Removes from a log what terminals, editors and launchers add to its lines."""
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        data = data.decode("utf-16", "replace").encode()
    data = data.removeprefix(codecs.BOM_UTF8)
    if b"\r" in data:  # without a newline, it ends a progress bar that the next text overwrites
        data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    if b"\x1b" in data:  # the search for a single byte is much faster than the pattern
        data = COLOUR.sub(b"", data)
    if first(data) == len(data):
        data = BEHIND_PREFIX.sub(b"", data)
    return data


def first(data: bytes) -> int:
    """Returns the offset of the first metric line; the length of the data if there is none."""
    if IS_METRIC.match(data):
        return 0
    match = FIRST.search(data)
    return len(data) if match is None else match.start() + 1


def read(data: bytes) -> tuple[Metrics, list[bytes], Array]:
    """Reads a plain() log without its code.  Returns its Metrics, its lines, and a mask of the metric lines."""
    text = data.split(b"\n")
    common: dict[int, re.Match[bytes]] = {}
    metric_lines: dict[int, bytes] = {}  # metric lines of other shapes
    strays: list[int] = []  # lines that have a metric line in their middle
    for number, line in enumerate(text):
        if match := COMMON.fullmatch(line):
            common[number] = match
        elif line.startswith(BEGINNINGS) and IS_METRIC.match(line):
            metric_lines[number] = line
        elif any(stray.search(line) for stray in STRAYS):
            strays.append(number)
    is_metric = np.zeros(len(text), bool)
    is_metric[[*common, *metric_lines]] = True
    metrics = _metrics(text, common, metric_lines, is_metric)
    for number in strays:
        metrics.report(text, number)
    metrics.unmatched.sort()
    return metrics, text, is_metric


def without(text: Sequence[bytes], mask: Array, start: int, stop: int) -> bytes:
    """Joins the lines from start to before stop for which the mask (of all lines) is False."""
    return b"\n".join(line for line, is_out in zip(text[start:stop], mask[start:stop].tolist()) if not is_out)


def _metrics(
    text: Sequence[bytes], common: dict[int, re.Match[bytes]], metric_lines: dict[int, bytes], is_metric: Array
) -> Metrics:
    """Reads the metric lines: {line number: match of COMMON}, {line number: line} of the others, a mask of both."""
    line_numbers, index_of = np.flatnonzero(is_metric), np.cumsum(is_metric) - 1
    names = (*COLUMNS, *NOT_FINITE.values())
    metrics = Metrics({name: np.full(len(line_numbers), np.nan) for name in names}, line_numbers)
    indices = index_of[[*common]]
    for name, texts in zip(COMMON.groupindex, zip(*(match.groups() for match in common.values()))):
        is_number = [number is not None for number in texts]
        if any(is_number):
            values = np.array([float(number) for number in texts if number is not None])
            column, values = ("train_time_ms", np.round(values * 1e3, 6)) if name == "train_time_s" else (name, values)
            metrics.columns[COLUMN_OF.get(column, column)][indices[is_number]] = values
    mask = np.ones(len(line_numbers), bool)
    for number, line in metric_lines.items():
        index = int(index_of[number])
        is_known = _read_fields(line, index, metrics)
        mask[index] = is_known == "step"
        if not is_known:
            metrics.report(text, number)
    if len(mask) and mask[-1] and line_numbers[-1] == len(text) - 1 and _is_cut(text, line_numbers):
        mask[-1] = False
        metrics.report(text, line_numbers[-1])
    if not mask.all():
        metrics.keep(mask)
    return metrics


def _is_cut(text: Sequence[bytes], line_numbers: Array) -> bool:
    """Whether the last line was cut: it has fewer decimals than the previous line of its shape."""
    last, *lines = (text[number] for number in line_numbers[::-1])
    shape = last.translate(None, DIGITS)
    before = next((line for line in lines if line.translate(None, DIGITS) == shape), b"")
    decimals_before, decimals = LAST_DECIMALS.search(before), LAST_DECIMALS.search(last)
    return decimals_before is not None and (decimals is None or len(decimals[1]) < len(decimals_before[1]))


def _read_fields(line: bytes, index: int, metrics: Metrics) -> str | None:
    """Reads a line of a less common shape, with key:value fields in any order.

    Returns "step" for the line of a step, "other" for another line that is understood, and None for any other line.
    """
    if TAIL.match(line):
        metrics.tails.append(_texts(line[len(b"tailavg ") :].split()))
        return "other"
    match = STEP.match(line)
    pairs = WORD.findall(match[4]) if match else []
    fields = dict(pairs)
    has_numbers = any(MEASURED.search(key) or NAMES.get(key) in NOT_FINITE or key in NOT_TWICE for key in fields)
    if VAL_STEP.match(line) or (match and match[1] and not has_numbers):
        metrics.others.append(line.decode("utf-8", "replace").rstrip())
        return "other"
    if match is None or len(fields) < len(pairs) or any(key in fields for key in NOT_TWICE) or not fields:
        return None
    values: dict[str, float | None] = {"step": float(match[1] or match[3]), "total": float(match[2] or "nan")}
    if match[1]:  # every such line has both times; one without them was cut
        values["train_time_ms"] = _time_ms(fields.pop(b"train_time", b""), not_finite=np.inf)
        values["step_avg_ms"] = _time_ms(fields.pop(b"step_avg", b""), (b"ms",))
    for key in [key for key in fields if key in NAMES]:
        name, number = NAMES[key], _number(fields.pop(key))
        is_finite = number is None or math.isfinite(number)
        values[name] = number if is_finite else np.nan
        if not is_finite and name in NOT_FINITE:
            values[NOT_FINITE[name]] = 1.0
    if None in values.values() or (match[3] and (fields or match[5] or len(values) == 2)):
        return None
    for name, value in values.items():
        metrics.columns[name][index] = value
    if fields or match[5]:
        last = {match[5].decode(): ""} if match[5] else {}
        metrics.extras[index] = _texts(b"%s:%s" % item for item in fields.items()) | last
    return "step"


def _texts(fields: Iterable[bytes]) -> dict[str, str]:
    return dict(part.decode("utf-8", "replace").split(":", 1) for part in fields)


def _number(text: bytes) -> float | None:
    return float(text) if NUMBER.fullmatch(text) else None


def _time_ms(text: bytes, units: tuple[bytes, ...] = (b"ms", b"s"), not_finite: float = np.nan) -> float | None:
    """Milliseconds of "12ms" or "0.012s"; not_finite for nan and inf; None if it is not a time in one of the units."""
    unit = next((unit for unit in units if text.endswith(unit)), None)
    number = _number(text.removesuffix(unit)) if unit else None
    if number is None:
        return None
    return not_finite if not math.isfinite(number) else number if unit == b"ms" else round(1e3 * number, 6)
