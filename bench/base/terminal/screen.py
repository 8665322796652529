"""What standard output is: its width, and words in colour where it is a terminal that has some."""

import os
import sys

COLOURS = {  # a word on its own, in any case: what it says should be seen at once
    "faster": "green",
    "accepted": "green",
    "slower": "red",
    "fail": "red",
    "failed": "red",
    "refused": "red",
    "missed": "red",
    "invalid": "red",
    "aborted": "red",
    "stopped": "yellow",
    "inconclusive": "yellow",
    "equivalent": "yellow",
    "not comparable": "yellow",
    "no verdict": "yellow",
    "suspect": "yellow",
    "warn": "yellow",
}


def width() -> int | None:
    """Characters a line: $COLUMNS, else the terminal's.  None where there is neither: nothing needs to be cut."""
    asked = os.environ.get("COLUMNS", "")
    if asked.isdigit() and int(asked):
        return int(asked)
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns or None
    except (OSError, ValueError):  # a pipe, or no file at all
        return None


def is_terminal() -> bool:
    """Whether somebody looks at standard output."""
    return sys.stdout.isatty()


def colour(word: str) -> str:
    """Style of a word by rich's names; "" for the plain ones."""
    return COLOURS.get(word.strip().lower(), "")


def coloured(word: str) -> str:
    """A verdict with its colour's escape sequences; without them in a pipe, with NO_COLOR, and where TERM=dumb."""
    if not is_terminal():
        return word
    from rich.text import Text

    return drawn(Text(word, colour(word)), len(word))


def drawn(what, line_width: int) -> str:
    """Anything of rich's as text, in lines of this width, without trailing spaces.  No markup is interpreted."""
    from rich.console import Console

    console = Console(width=max(line_width, 1), markup=False, highlight=False, emoji=False)
    with console.capture() as captured:
        console.print(what)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())
