"""Cells as a table of text: for a terminal, or Markdown.  10,000 rows in a tenth of a second."""

import re
import unicodedata
from collections.abc import Iterable, Sequence


def render(
    columns: Iterable[str], cells: Iterable[Iterable[str]], right: Sequence[bool] = (), form: str = "simple"
) -> str:
    """columns: names; cells: rows of strings; right: whether each column is aligned right; form: simple or github.

    No rows: just the head.  Cells may be words of a foreign record: see line().
    """
    is_md = form == "github"
    rows = [[line(cell, is_md) for cell in row] for row in (columns, *cells)]
    widths = [max(map(len, column), default=0) for column in zip(*rows)]
    widths = [max(width, 3) for width in widths] if is_md else widths
    signs = [">" if is_right else "<" for is_right in right or [False] * len(widths)]
    between, edges = (" | ", ("| ", " |")) if is_md else ("  ", ("", ""))
    form_row = between.join(f"{{:{sign}{width}}}" for sign, width in zip(signs, widths)).join(edges).format
    rule = between.join("-" * width for width in widths).join(edges)
    head, *body = (form_row(*row).rstrip() for row in rows)
    return "\n".join([head, rule.replace(" ", "-") if is_md else rule, *body])


def two_digits(number: float) -> str:
    """0.14259 -> "0.14", 5.04 -> "5", 612.3 -> "612": never an exponent."""
    return f"{number:.0f}" if abs(number) >= 100 else f"{number:.2g}"


def printable(text: str) -> str:
    """Without control characters: an escape sequence of a foreign record would be obeyed by the terminal."""
    if text.isprintable():
        return text
    return "".join(" " if char in "\n\r\t" else char for char in text if char in "\n\r\t" or not _is_control(char))


def line(text: str, is_md: bool = False) -> str:
    """Foreign text as a part of our own: printable(), and with is_md also escaped for Markdown."""
    return _escaped(printable(text)) if is_md else printable(text)


def _is_control(char):
    return unicodedata.category(char) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")


def _escaped(text):
    """For Markdown: no cell may end a cell, begin a link, or be HTML."""
    return re.sub(r"([\\|`*\[\]<>])", r"\\\1", text) if re.search(r"[\\|`*\[\]<>]", text) else text
