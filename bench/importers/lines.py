"""Metric lines of modded-nanogpt's logs -> numbers, every one of them understood or reported.

A line that begins with "step:7/", "s:7 " or "tailavg step:" is a metric line; the code that logs embed has no digit there.
A line's shape is what is left of it without digits: lines of one shape are read together.
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
COLOUR = re.compile(rb"\x1b\[[0-9;]*m")
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
KNOWN = {"train_loss": "train_loss", "val_loss": "val_loss"}
NOT_DIGITS = bytes(byte if chr(byte) in "0123456789.-\n" else 32 for byte in range(256))
DIGITS = b"0123456789."
FLOATS = msgspec.json.Decoder(list[float])


@dataclass
class Metrics:
    """Metric lines in order: .columns {name: array, nan where a line has none}; .extras {place: {key: text}}."""

    columns: dict
    extras: dict = field(default_factory=dict)
    unmatched: list = field(default_factory=list)  # metric lines that could not be read
    shapes: dict = field(default_factory=dict)  # shape -> number of lines
    num_tail_lines: int = 0  # "tailavg" lines: read, and no steps of a run

    def __len__(self):
        return len(self.columns["step"])


def plain(data):
    """The bytes of a log without what a terminal, an editor or a launcher put around its lines."""
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        data = data.decode("utf-16", "replace").encode()
    data = data.removeprefix(codecs.BOM_UTF8)
    if b"\r" in data:
        data = data.replace(b"\r\n", b"\n")
    if b"\x1b[" in data:
        data = COLOUR.sub(b"", data)
    if not IS_METRIC.match(data) and FIRST.search(data) is None:
        data = BEHIND_PREFIX.sub(b"", data)
    return data


def read(data):
    """The bytes of a plain log -> (Metrics, what stands before the first metric line, all other lines that are none)."""
    first = None if IS_METRIC.match(data) else FIRST.search(data)
    start = 0 if IS_METRIC.match(data) else len(data) if first is None else first.start() + 1
    head, data = data[:start], data[start:]
    everything, by_shape = data.split(b"\n"), {}
    for place, shape in enumerate(data.translate(None, DIGITS).split(b"\n")):
        by_shape.setdefault(shape, []).append(place)
    groups = {shape: [place for place in places if shape in SHAPES or IS_METRIC.match(everything[place])]
              for shape, places in by_shape.items() if shape.startswith((b"step:", b"s:", b"tailavg "))}  # fmt: skip
    is_metric = np.zeros(len(everything), bool)
    for places in groups.values():
        is_metric[places] = True
    number = np.cumsum(is_metric) - 1
    groups = {shape: number[places] for shape, places in groups.items() if places}
    lines = list(itertools.compress(everything, is_metric.tolist()))
    return _metrics(lines, groups), head, b"\n".join(itertools.compress(everything, (~is_metric).tolist()))


def _metrics(lines, groups):
    """Metric lines, {shape: places} -> Metrics."""
    found = Metrics({})
    columns = {name: np.full(len(lines), np.nan) for name in (*COLUMNS, *NOT_FINITE.values())}
    drop = []
    for shape, places in groups.items():
        found.shapes[shape.decode("utf-8", "replace")] = len(places)
        table = _table(SHAPES.get(shape), [lines[place] for place in places])
        if table is not None:
            for name, values in table.items():
                columns[name][places] = values
            continue
        for place in places:
            if not _one(lines[place], place, columns, found):
                drop.append(place)
    keep = np.ones(len(lines), bool)
    keep[drop] = False
    where = np.cumsum(keep) - 1
    found.columns = {name: values[keep] for name, values in columns.items()}
    found.extras = {int(where[place]): extra for place, extra in found.extras.items() if keep[place]}
    return found


def _table(names, lines):
    """Lines of one known shape -> {column: values}, or None if they are not what the shape promises."""
    if names is None:
        return None
    words = b" ".join(lines).translate(NOT_DIGITS).split()
    if len(words) != len(names) * len(lines):
        return None
    try:  # as JSON: the quickest way from digits to floats
        values = np.array(FLOATS.decode(b"[" + b",".join(words) + b"]")).reshape(len(lines), len(names))
    except msgspec.DecodeError:
        return None
    table = {name: values[:, place] for place, name in enumerate(names)}
    if "train_time_s" in table:
        table["train_time_ms"] = np.round(table.pop("train_time_s") * 1e3, 6)
    return table


STEP = re.compile(rb"step:(\d+)/(\d+)((?: \S+)+)\s*$")
TAIL = re.compile(rb"tailavg step:\d+(?: \w+:\S+)*\s*$")


def _one(line, place, columns, found):
    """A line of a rarer shape: key:value words in any order.  False: not kept as a step's line."""
    if TAIL.match(line):
        found.num_tail_lines += 1
        return False
    match = STEP.match(line)
    words = [word.partition(b":") for word in match.group(3).split()] if match else []
    values, extra = {}, {}
    for key, colon, text in words:
        key = key.decode("utf-8", "replace")
        number = _number(text)
        if not colon:
            words = []
            break
        if key in KNOWN and number is not None:
            values |= {KNOWN[key]: number} if math.isfinite(number) else {NOT_FINITE[KNOWN[key]]: 1.0}
        elif key == "train_time" and _time_ms(text) is not None:
            values["train_time_ms"] = _time_ms(text)
        elif key == "step_avg" and text.endswith(b"ms"):
            values["step_avg_ms"] = _number(text[:-2])
        elif key in ("train_loss", "val_loss", "train_time", "step_avg"):
            words = []  # a known word with a value that is none
            break
        else:
            extra[key] = text.decode("utf-8", "replace")
    if not match or not words or not values:
        found.unmatched.append(line.decode("utf-8", "replace")[:200])
        return False
    columns["step"][place], columns["total"][place] = float(match.group(1)), float(match.group(2))
    for name, value in values.items():
        columns[name][place] = np.nan if value is None else value
    if extra:
        found.extras[place] = extra
    return True


def _number(text):
    try:
        return float(text)
    except ValueError:
        return None


def _time_ms(text):
    """"12ms" or "0.012s" -> milliseconds."""
    if text.endswith(b"ms"):
        return _number(text[:-2])
    seconds = _number(text[:-1]) if text.endswith(b"s") else None
    return None if seconds is None else round(1e3 * seconds, 6)
