"""The commonest metric lines of modded-nanogpt's logs, read as tables.

A layout is a line with 0 for every digit.  Neighbouring lines are mostly of one layout, so that their bytes are a
matrix, and one product with the powers of ten gives all their numbers.
"""

import functools
import re

import numpy as np

ZEROED = bytes(48 if chr(byte) in "0123456789" else byte for byte in range(256))
BEGINNINGS = (b"step:0", b"s:0")
NUMBER = rb"0{1,8}(?:\.0{0,7})?"  # 15 digits at most: below 2**53, so one division by a power of ten rounds as float()
LAYOUTS = tuple(
    re.compile(pattern.replace(b"NUMBER", NUMBER))
    for pattern in (
        rb"step:(?P<step>0{1,9})/(?P<total>0{1,9})"
        rb"(?: train_loss:(?P<train_loss>NUMBER)| val_loss:(?P<val_loss>NUMBER))?"
        rb" train_time:(?:(?P<train_time_ms>NUMBER)ms|(?P<train_time_s>NUMBER)s)"
        rb" step_avg:(?:(?P<step_avg_ms>NUMBER)|nan)ms",
        rb"s:(?P<step>0{1,9}) (?:tel:(?P<val_loss>NUMBER)"
        rb"|trl:(?P<train_loss>NUMBER)(?: lr:(?P<lr>NUMBER) norm:(?P<grad_norm>NUMBER))?)",
    )
)


def read(text):
    """Text -> {layout: (numbers of its lines, {column: values})}, of all lines that have one of LAYOUTS."""
    layouts, of_line = _layouts(text)
    by_layout, stops = np.argsort(of_line, kind="stable"), np.cumsum(np.bincount(of_line)).tolist()
    tables = {}
    for layout, start, stop in zip(layouts, [0, *stops], stops):
        if layout.startswith(BEGINNINGS) and (form := _form(layout)):
            numbers = by_layout[start:stop]
            lines = np.ndarray(len(text.data) - len(layout) + 1, f"V{len(layout)}", text.data, strides=(1,))[
                text.starts[numbers]
            ]
            tables[layout] = numbers, _columns(lines.view(np.uint8).reshape(len(numbers), -1), *form)
    return tables


def _layouts(text):
    """(list of different layouts, array: which of them each line has)."""
    zeroed = text.data.translate(ZEROED)
    index, of_spans, counts = {}, [], []
    edges = np.flatnonzero(text.lengths[1:] != text.lengths[:-1])  # where the next line is longer or shorter
    first, last = np.append(0, edges + 1), np.append(edges, len(text) - 1)
    spans = (text.starts[first], text.stops[first], text.stops[last], last - first + 1)
    for begin, end_of_line, end, count in zip(*(values.tolist() for values in spans)):
        line = zeroed[begin:end_of_line]
        if count == 1 or zeroed[begin:end] == b"\n".join([line] * count):
            of_spans.append(index.setdefault(line, len(index)))
            counts.append(count)
        else:
            of_spans += [index.setdefault(line, len(index)) for line in zeroed[begin:end].split(b"\n")]
            counts += [1] * count
    return list(index), np.repeat(of_spans, counts)


@functools.lru_cache(1000)
def _form(layout):
    """(column names, weights of its bytes (bytes, columns), offsets, divisors); None: it is not one of LAYOUTS."""
    match = next((match for pattern in LAYOUTS if (match := pattern.fullmatch(layout))), None)
    if match is None:
        return None
    names = [name for name, number in match.groupdict().items() if number]
    weights, divisors = np.zeros((len(layout), len(names))), np.ones(len(names))
    for column, name in enumerate(names):
        digits = [byte for byte in range(*match.span(name)) if layout[byte] == ord("0")]
        weights[digits, column] = 10.0 ** np.arange(len(digits))[::-1]
        divisors[column] = 10.0 ** len(match[name].partition(b".")[2])
    return names, weights, ord("0") * weights.sum(axis=0), divisors


def _columns(rows, names, weights, offsets, divisors):
    """Lines as bytes (lines, bytes) -> {column: values}."""
    values = rows.astype(float) @ weights
    values -= offsets
    values /= divisors
    columns = dict(zip(names, values.T))
    if "train_time_s" in columns:
        columns["train_time_ms"] = np.round(columns.pop("train_time_s") * 1e3, 6)
    return columns
