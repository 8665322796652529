"""What an analysis of traces is written with: words for a cell, and tables for a terminal or Markdown."""

import re
from collections.abc import Callable, Sequence

from bench.base.terminal import text_table
from bench.base.units import MIB

MAX_NAME_CHARS = 60
NUM_LINES = 10
NUMBER = re.compile(r"([-+]?[\d.,]+)?")  # or nothing
BOILERPLATE = re.compile(r"^void |at::native::|at::cuda::|c10::|\(anonymous namespace\)::|(?<=[<, ])at::(?=\w)")


def plain(value: object, limit: int = MAX_NAME_CHARS) -> str:
    """Words from outside: without control characters, and of bounded length with both ends."""
    words = text_table.printable("" if value is None else str(value))
    return text_table.middle(words, limit)


def short(name: object, limit: int = MAX_NAME_CHARS) -> str:
    """A kernel's name without what all have: return type, namespaces and arguments; what is left distinguishes them."""
    words = BOILERPLATE.sub("", str(name))
    head, bracket, _ = words.rpartition("(")
    is_call = words.endswith(")") and head and not head.endswith(" ")  # "Memcpy HtoD (Pinned -> Device)" is none
    return plain(head if bracket and is_call else words, limit)


def decimals(num, per=1.0):
    """A format for cells: so many decimals of a number divided by per."""
    return lambda value: "" if value is None else f"{value / per:.{num}f}"


def plain40(value):
    return plain(value, 40)


def short40(name):
    return short(name, 40)


def three_digits(value):
    return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"


MS, MS2, MIB3, ONE, TWO = decimals(3, 1000), decimals(2, 1000), decimals(3, MIB), decimals(1), decimals(2)


def table(lines: Sequence[dict], columns: Sequence[tuple[str, str, Callable]], form: str = "simple") -> str:
    """lines: dicts; columns: (head, key, format of a cell) each."""
    cells = [[words(line[key]) for _, key, words in columns] for line in lines]
    right = [all(map(NUMBER.fullmatch, column)) for column in zip(*cells)]
    return text_table.render([head for head, _, _ in columns], cells, right, form)
