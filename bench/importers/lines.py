"""Metric lines of modded-nanogpt's logs -> numbers, every one of them understood or reported.

A line that begins with "step:7/", "s:7 " or "tailavg step:" is a metric line; the code that logs embed is none of this file's.
A line's shape is what is left of it without digits: lines of one shape are read together.  Reported is what is no whole metric
line but looks like one: cut, torn by another rank's output, the second voice of a run, or with words in front.
"""

import codecs
import itertools
import math
import re
from dataclasses import dataclass, field

import msgspec
import numpy as np

IS_METRIC = re.compile(rb"(?:step|s):\d|tailavg step:")
FIRST = re.compile(rb"\n(?:(?:step|s):\d|tailavg step:\d)")  # with a newline first, which is looked for quickly
# in a line that is none: the middle of a metric line
STRAY = re.compile(rb"(?<![\w./])(?:step:\d+/\d+ +\w+:|s:\d+ t[re]l:)|(?:train_time|step_avg):[\d.]")
LAST_DECIMALS = re.compile(rb"\.(\d*)\s*$")
COLOUR = re.compile(rb"\x1b\[[0-9;]*[mK]")
BEHIND_PREFIX = re.compile(rb"^(?:\[[^\]\n]{1,40}\]:? ?|\d+: |[ \t]+)+(?=step:\d+/\d+ |s:\d+ t[re]l:)", re.M)  # "[rank0]: ", "0: "
# shape -> columns; train_time in ms. "-" is a number that is not kept
SHAPES = {
    b"s: trl: lr: norm:": ("step", "train_loss", "lr", "grad_norm"),
    b"s: trl:": ("step", "train_loss"),
    b"s: tel:": ("step", "val_loss"),
    b"step:/ train_loss: train_time:ms step_avg:ms": ("step", "total", "train_loss", "train_time_ms", "step_avg_ms"),
    b"step:/ train_loss: train_time:ms step_avg:nanms": ("step", "total", "train_loss", "train_time_ms"),
    b"step:/ train_time:ms step_avg:ms": ("step", "total", "train_time_ms", "step_avg_ms"),
    b"step:/ train_time:ms step_avg:nanms": ("step", "total", "train_time_ms"),
    b"step:/ val_loss: train_time:ms step_avg:ms": ("step", "total", "val_loss", "train_time_ms", "step_avg_ms"),
    b"step:/ val_loss: train_time:ms step_avg:nanms": ("step", "total", "val_loss", "train_time_ms"),
    b"step:/ train_time:s step_avg:ms": ("step", "total", "train_time_s", "step_avg_ms"),
    b"step:/ train_time:s step_avg:nanms": ("step", "total", "train_time_s"),
    b"step:/ val_loss: train_time:s step_avg:ms": ("step", "total", "val_loss", "train_time_s", "step_avg_ms"),
    b"step:/ val_loss: train_time:s step_avg:nanms": ("step", "total", "val_loss", "train_time_s"),
}
COLUMNS = ("step", "total", "train_loss", "val_loss", "train_time_ms", "step_avg_ms", "lr", "grad_norm")
NOT_FINITE = {"train_loss": "train_diverged", "val_loss": "val_diverged"}  # columns with 1 where a line says nan or inf
NOT_DIGITS = bytes(byte if chr(byte) in "0123456789.-\n" else 32 for byte in range(256))
COMMAS = bytes(44 if chr(byte) in " /\n" else byte if chr(byte) in "0123456789.-" else 32 for byte in range(256))  # 44 is ","
DIGITS = b"0123456789."
MAX_STEP = 10**9  # a number beyond is no step
FLOATS = msgspec.json.Decoder(list[float])


@dataclass
class Metrics:
    """Metric lines in order: .columns {name: array, nan where a line has none}; .extras {place: {key: text}}."""

    columns: dict
    line_numbers: np.ndarray = None  # of each, from 0
    extras: dict = field(default_factory=dict)
    unmatched: list = field(default_factory=list)  # (line number from 0, text) of what looks like one and could not be read
    shapes: dict = field(default_factory=dict)  # shape -> number of lines
    tails: list = field(default_factory=list)  # {key: text} of "tailavg" lines: read, and no steps of a run
    num_repeated: int = 0  # lines that were there twice in a row

    def __len__(self):
        return len(self.columns["step"])

    def keep(self, mask):
        """Only the metric lines where mask is True."""
        where = np.cumsum(mask) - 1
        self.columns = {name: values[mask] for name, values in self.columns.items()}
        self.line_numbers = self.line_numbers[mask]
        self.extras = {int(where[place]): extra for place, extra in self.extras.items() if mask[place]}

    def report(self, lines, line_number):
        self.unmatched.append((int(line_number), lines[line_number].decode("utf-8", "replace")[:200]))


def plain(data):
    """The bytes of a log without what a terminal, an editor or a launcher put around its lines."""
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        data = data.decode("utf-16", "replace").encode()
    data = data.removeprefix(codecs.BOM_UTF8)
    if b"\r" in data:  # alone it is a progress bar's, which the next words overwrite
        data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    if b"\x1b[" in data:
        data = COLOUR.sub(b"", data)
    if first(data) == len(data):
        data = BEHIND_PREFIX.sub(b"", data)
    return data


def first(data):
    """Where the first metric line begins; the length of the data if there is none."""
    if IS_METRIC.match(data):
        return 0
    found = FIRST.search(data)
    return len(data) if found is None else found.start() + 1


def read(data):
    """The bytes of a plain log without its code -> (Metrics, its lines, a mask of those that are metric lines)."""
    lines = data.split(b"\n")
    groups = _by_shape(lines, data.translate(None, DIGITS).split(b"\n"))
    is_metric = np.zeros(len(lines), bool)
    for numbers in groups.values():
        is_metric[numbers] = True
    found = _metrics(lines, groups, np.flatnonzero(is_metric))
    others = b"\n".join(itertools.compress(lines, (~is_metric).tolist()))
    if STRAY.search(others):
        for line_number in np.flatnonzero(~is_metric).tolist():
            if STRAY.search(lines[line_number]):
                found.report(lines, line_number)
    _drop_repeated(found, lines)
    found.unmatched.sort()
    return found, lines, is_metric


def _by_shape(lines, shapes):
    """Lines and their shapes -> {shape: numbers of its metric lines}; a Python loop only over shapes."""
    index = {shape: number for number, shape in enumerate(dict.fromkeys(shapes))}
    ids = np.fromiter(map(index.__getitem__, shapes), int, len(shapes))
    by_id = np.split(np.argsort(ids, kind="stable"), np.cumsum(np.bincount(ids))[:-1])
    groups = {}
    for shape, number in index.items():
        if shape in SHAPES:
            groups[shape] = by_id[number].tolist()
        elif shape.startswith((b"step:", b"s:", b"tailavg ")):
            groups[shape] = [line for line in by_id[number].tolist() if IS_METRIC.match(lines[line])]
    return {shape: numbers for shape, numbers in groups.items() if numbers}


def _metrics(lines, groups, line_numbers):
    """Lines, {shape: numbers of its metric lines}, the numbers of all metric lines -> Metrics."""
    found = Metrics({name: np.full(len(line_numbers), np.nan) for name in (*COLUMNS, *NOT_FINITE.values())}, line_numbers)
    place_of = np.cumsum(np.bincount(line_numbers, minlength=len(lines))) - 1
    mask = np.ones(len(line_numbers), bool)
    for shape, numbers in groups.items():
        found.shapes[shape.decode("utf-8", "replace")] = len(numbers)
        if numbers[-1] == len(lines) - 1 and _is_cut(lines, numbers):
            mask[-1] = False
            found.report(lines, numbers.pop())
        table = _table(SHAPES.get(shape), [lines[number] for number in numbers])
        if table is not None:
            places = place_of[numbers]
            for name, values in table.items():
                found.columns[name][places] = values
            continue
        for number in numbers:
            place = int(place_of[number])
            mask[place] = _one(lines[number], place, found)
            if not mask[place] and not TAIL.match(lines[number]):
                found.report(lines, number)
    if not mask.all():
        found.keep(mask)
    return found


def _is_cut(lines, numbers):
    """Whether the file ends within its last line: with fewer decimals than the line of this shape before it."""
    before, last = ([None, *(LAST_DECIMALS.search(lines[number]) for number in numbers[-2:])])[-2:]
    return before is not None and (last is None or len(last[1]) < len(before[1]))


def _drop_repeated(found, lines):
    """A line that stands there twice in a row is one; two lines of one step between others are the voices of two ranks.

    The second voice is reported.  Where a step comes twice at a run's end or once in a log, another run begins: see runs.
    """
    step, total = found.columns["step"], found.columns["total"]
    if len(step) < 2:
        return
    again = np.append(False, same_again(found))
    for place in np.flatnonzero(again).tolist():
        if lines[found.line_numbers[place]].rstrip() == lines[found.line_numbers[place - 1]].rstrip():
            again[place], found.num_repeated = False, found.num_repeated + 1
            step[place] = -1
    inside = again & (step > 0) & ~(step == total)
    near = np.flatnonzero(inside)
    second = again if (np.diff(near) <= 2).any() else np.zeros(len(step), bool)
    for place in np.flatnonzero(second).tolist():
        found.report(lines, found.line_numbers[place])
    if second.any() or found.num_repeated:
        found.keep(~second & (step >= 0))


def same_again(found):
    """A mask for all lines but the first: of the same step and the same kind, training or validation, as the one before."""
    step = found.columns["step"]
    is_val = ~(np.isnan(found.columns["val_loss"]) & np.isnan(found.columns["val_diverged"]))
    return (step[1:] == step[:-1]) & (is_val[1:] == is_val[:-1])


def _table(names, lines):
    """Lines of one known shape -> {column: values}, or None if they are not what the shape promises."""
    if names is None or not lines:  # no lines: the only one was cut
        return None
    text = b"\n".join(lines)
    numbers = b",".join(text.translate(NOT_DIGITS).split()) if b":nan" in lines[0] else text.translate(COMMAS)
    try:  # as JSON: the quickest way from digits to floats
        values = np.array(FLOATS.decode(b"[" + numbers + b"]"))
    except msgspec.DecodeError:
        return None
    if len(values) != len(names) * len(lines):
        return None
    values = values.reshape(len(lines), len(names))
    table = {name: values[:, place] for place, name in enumerate(names)}
    if (table["step"] % 1).any() or table["step"].max() > MAX_STEP or not np.isfinite(values).all():
        return None
    if "train_time_s" in table:
        table["train_time_ms"] = np.round(table.pop("train_time_s") * 1e3, 6)
    return table


STEP = re.compile(rb"(?:step:(\d{1,9})/(\d{1,9})|s:(\d{1,9}))((?:\s+[A-Za-z]\w*:\S+)+)\s*$")
TAIL = re.compile(rb"tailavg step:\d+(?: +\w+:[^\s:/]+)*\s*$")
NUMBER = re.compile(rb"[-+]?(?:(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|nan|inf)")
LOSSES = {b"train_loss": "train_loss", b"val_loss": "val_loss", b"trl": "train_loss", b"tel": "val_loss"}
KEPT = {b"lr": "lr", b"norm": "grad_norm"}
NOT_TWICE = (b"step", b"s")  # a second line inside of the line


def _one(line, place, found):
    """A line of a rarer shape: key:value words in any order.  False: not kept as a step's line."""
    if TAIL.match(line):
        found.tails.append(_texts(line[len(b"tailavg ") :].split()))
        return False
    match = STEP.match(line)
    pairs = [word.split(b":", 1) for word in match[4].split()] if match else []
    words = dict(pairs)
    if len(words) < len(pairs) or any(key in words for key in NOT_TWICE) or not words:
        return False
    values = {"step": float(match[1] or match[3]), "total": float(match[2] or "nan")}
    if match[1]:  # both stand in every such line: one without them was cut
        values["train_time_ms"], values["step_avg_ms"] = _time_ms(words.pop(b"train_time", b"")), _time_ms(words.pop(b"step_avg", b""), (b"ms",))
    for key in [key for key in words if key in LOSSES or key in KEPT]:
        number = values[LOSSES.get(key) or KEPT[key]] = _number(words.pop(key))
        if number is not None and not math.isfinite(number):
            values[LOSSES.get(key) or KEPT[key]] = np.nan
            if key in LOSSES:
                values[NOT_FINITE[LOSSES[key]]] = 1.0
    if None in values.values() or (match[3] and (words or len(values) == 2)):
        return False
    for name, value in values.items():
        found.columns[name][place] = value
    if words:
        found.extras[place] = _texts(b"%s:%s" % item for item in words.items())
    return True


def _texts(words):
    return dict(word.decode("utf-8", "replace").split(":", 1) for word in words)


def _number(text):
    return float(text) if NUMBER.fullmatch(text) else None


def _time_ms(text, units=(b"ms", b"s")):
    """"12ms" or "0.012s" -> milliseconds, nan for nan and inf; None for what is no time in one of the units."""
    unit = next((unit for unit in units if text.endswith(unit)), None)
    number = _number(text.removesuffix(unit)) if unit else None
    if number is None:
        return None
    return np.nan if not math.isfinite(number) else number if unit == b"ms" else round(1e3 * number, 6)
