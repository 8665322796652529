"""Cells as a table of text: for a terminal, or Markdown.  10,000 rows in a tenth of a second."""

import re
import unicodedata


def render(columns, cells, right=(), form="simple"):
    """columns: names; cells: rows of strings; right: whether each column is aligned right; form: simple or github.

    No rows: just the head.  What is no printable character is left out: a cell may come from a foreign record.
    """
    right = list(right) or [False] * len(columns)
    cells = [[printable(cell) for cell in row] for row in cells]
    if form == "github":
        columns, cells = [escaped(name) for name in columns], [[escaped(cell) for cell in row] for row in cells]
    widths = [
        max([len(name), *map(len, column)])
        for name, column in zip(columns, _by_column(cells, len(columns)), strict=True)
    ]
    signs = [">" if is_right else "<" for is_right in right]
    if form == "github":
        widths = [max(width, 3) for width in widths]
        line = "| " + " | ".join(f"{{:{sign}{width}}}" for sign, width in zip(signs, widths, strict=True)) + " |"
        rule = "|".join("-" * (width + 2) for width in widths)
        return "\n".join([line.format(*columns), f"|{rule}|", *(line.format(*row) for row in cells)])
    line = "  ".join(f"{{:{sign}{width}}}" for sign, width in zip(signs, widths, strict=True))
    rule = "  ".join("-" * width for width in widths)
    return "\n".join(text.rstrip() for text in [line.format(*columns), rule, *(line.format(*row) for row in cells)])


def _by_column(cells, num_columns):
    return zip(*cells, strict=True) if cells else [()] * num_columns


def two_digits(number):
    """0.14259 -> "0.14", 5.04 -> "5", 612.3 -> "612": never an exponent."""
    return f"{number:.0f}" if abs(number) >= 100 else f"{number:.2g}"


def printable(text):
    """Without control characters: an escape sequence of a foreign record would be obeyed by the terminal."""
    if text.isprintable():
        return text
    return "".join(" " if char in "\n\r\t" else char for char in text if char in "\n\r\t" or not _is_control(char))


def line(text, is_md=False):
    """Somebody's words as a part of our text."""
    return escaped(printable(text)) if is_md else printable(text)


def _is_control(char):
    return unicodedata.category(char) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")


def escaped(text):
    """For Markdown: no cell may end a cell, begin a link, or be HTML."""
    return re.sub(r"([\\|`*\[\]<>])", r"\\\1", text) if re.search(r"[\\|`*\[\]<>]", text) else text
