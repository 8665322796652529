"""Escapes text from outside before it leaves the program: a function for each medium, and Door for terminals.

terminal   Door: whatever is printed passes through it; line(): foreign text within a line of ours
Markdown   markdown()          csv    csv_text()          LaTeX   latex()
HTML       text() and tag() of bench/web/page.py          YAML    yaml.safe_dump       shell   shlex.join, .quote
"""

import contextlib
import csv
import io
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TextIO

from bench.base import paths

# Characters that no text needs and that a terminal obeys or a reader does not see: control characters, directions,
# invisible characters and lone surrogates.
HIDDEN = (
    "\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff"
    "\ufdd0-\ufdef\ufeff\ufff9-\uffff\U000e0000-\U000e007f"
)
CONTROL = re.compile(f"[{HIDDEN}]")
COLOUR = re.compile(rf"\x1b\[(?:[01]|3[123])m|[{HIDDEN}]")  # also matches the colours of text_table.coloured()
MARKED = re.compile(r"([\\|`*\[\]<>&])")
NO_SPACE = "&#8203;"  # a gap of no width: without it GitHub makes mentions, references and links even of escaped text
LINKED = re.compile(r"@(?=\w)|(?<=[#])(?=\d)|(?<=\bGH-)(?=\d)|(?<=:)(?=//)|(?<=\bwww)(?=\.)", re.I)
PAGE = re.compile(r"(?<![\w/])docs/(?=(?:reference/)?[\w-]+\.md)")  # a message's reference to a documentation page
FORMULA = re.compile(r"[=+\-@]")
NUMBER = re.compile(r"{0}(?: to {0})?(?: ?[%\w]+)?".format(r"[+-]?[\d.,]+(?:e[+-]?\d+)?"), re.I)  # or an interval
LATEX = str.maketrans({char: f"\\{char}" for char in "&%$#_{}"} | {"\\": r"\textbackslash{}"})
LATEX |= str.maketrans({"~": r"\textasciitilde{}", "^": r"\textasciicircum{}"})


def shown(match: re.Match[str]) -> str:
    """Returns a matched control character in visible form, such as \\x1b; a matched colour stays as it is."""
    is_colour = len(match[0]) > 1
    return match[0] if is_colour else match[0].encode("unicode_escape").decode()


def line(text: object) -> str:
    """Escapes text for use within a line: control characters become visible (\\x1b), line ends and tabs spaces."""
    text = str(text)
    if text.isprintable():
        return text
    return CONTROL.sub(shown, text.replace("\r\n", " ").translate({10: " ", 13: " ", 9: " "}))


def markdown(text: object) -> str:
    """Escapes text for Markdown: line(), and it ends no table cell, begins no link or HTML, and mentions nobody."""
    return LINKED.sub(lambda match: match[0] + NO_SPACE, MARKED.sub(r"\\\1", line(text)))


def escaped(text: object, is_md: bool) -> str:
    """Escapes text with markdown() if is_md, else with line()."""
    return markdown(text) if is_md else line(text)


def latex(text: object) -> str:
    """Escapes text for LaTeX: line(), with LaTeX's special characters escaped."""
    return line(text).translate(LATEX)


def csv_text(rows: Iterable[Iterable[object]]) -> str:
    """Returns rows as CSV.  None becomes an empty cell; an apostrophe keeps spreadsheets from evaluating formulas."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([_cell(value) for value in row] for row in rows)
    return out.getvalue()


def _cell(value: object) -> object:
    if not isinstance(value, str):
        return value
    text = line(value)
    return f"'{text}" if FORMULA.match(text) and not NUMBER.fullmatch(text) else text


def installed(text: str) -> str:
    """Returns a message for the user of a wheel: with speedrun for ./run.sh, and the paths of installed docs pages."""
    text = text.replace("./run.sh", "speedrun").replace("./speedrun.sh", "speedrun speedrun")
    return PAGE.sub(f"{paths.REPO}/docs/", text)


class Door:
    """A text stream whose errors never interrupt the work, and that passes no control characters.

    The first error (a closed pipe, a full disk) is kept in `error`, and further output is discarded.
    is_ours: the text is drawn by rich and is not escaped.  renamed: what replaces ./run.sh, as installed() does.
    """

    def __init__(self, stream: TextIO, is_ours: bool = False, renamed: Callable[[str], str] | None = None) -> None:
        self._stream, self._is_ours, self._renamed = stream, is_ours, renamed
        self._hidden = COLOUR if stream.isatty() else CONTROL
        self.error: OSError | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        passed = text if self._is_ours else self._hidden.sub(shown, text)
        if self._renamed:
            passed = self._renamed(passed)
        with self._muted_by_errors():
            try:
                self._stream.write(passed)
            except UnicodeEncodeError:  # the terminal's encoding lacks a character, as ASCII does
                encoding = self._stream.encoding
                self._stream.write(passed.encode(encoding, "backslashreplace").decode(encoding))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        self.write("".join(lines))

    def flush(self) -> None:
        with self._muted_by_errors():
            self._stream.flush()

    @contextlib.contextmanager
    def _muted_by_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.error = self.error or error
            with contextlib.suppress(OSError, ValueError):
                nothing = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nothing, self._stream.fileno())
                os.close(nothing)


@contextlib.contextmanager
def doors(renamed: Callable[[str], str] | None = None) -> Iterator[Door]:
    """Passes standard output and standard error through doors in this block; yields the door of standard output."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = out, _ = [Door(stream, renamed=renamed) for stream in before]
    try:
        yield out
        out.flush()
    finally:
        sys.stdout, sys.stderr = before


def open_closed() -> None:
    """Opens /dev/null for standard streams that this process was started without (>&-).

    Otherwise the next file that is opened gets the stream's file descriptor, and what is printed ends up in it.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            number = os.open(os.devnull, os.O_RDWR)  # the lowest free descriptor: that of the missing stream
            os.set_inheritable(number, True)
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115 - open as long as the process lives


def raw(stream: TextIO) -> Any:
    """Returns a door to the same stream that does not escape, for what rich draws."""
    return Door(stream._stream if isinstance(stream, Door) else stream, is_ours=True)
