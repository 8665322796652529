"""Prints messages to the user of a command: lines, and on a terminal live bars below them.

--quiet leaves only messages with always=True; with --json all messages go to standard error.
"""

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Self

from bench.base import escape, text_table
from bench.base.escape import Door

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

BAR_CHARS = 16
_quiet = False


@contextlib.contextmanager
def output(quiet: bool = False, as_json: bool = False) -> Iterator[None]:
    """Context whose lines and bars obey a verb's --quiet and --json; print the JSON after leaving it."""
    global _quiet
    before, _quiet = _quiet, quiet
    try:
        with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
            yield
    finally:
        _quiet = before


def say(topic: str, text: str, always: bool = False) -> None:
    """Prints text after its topic.  always: also with --quiet."""
    if always or not _quiet:
        print(f"{topic:>8}  {text}", flush=True)


def show(lines: list[str]) -> None:
    """Prints lines, unless --quiet is set."""
    if lines and not _quiet:
        print("\n".join(lines), flush=True)


def is_live() -> bool:
    """Whether live bars can be drawn and --quiet is not set."""
    return not _quiet and text_table.is_terminal() and os.environ.get("TERM") != "dumb"


def confirmed(question: str) -> bool | None:
    """Asks the user at the terminal.  Returns whether the answer is yes, or None if there is no terminal."""
    if not (sys.stdin.isatty() and text_table.is_terminal()):
        return None
    print(f"{question} [y/N] ", end="", flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


class Bars:
    """Context with live bars: "run", the current run; "runs", its series; others for a race's arms and analyses.

    Lines printed meanwhile appear above the bars.  Without a suitable terminal nothing is drawn.
    """

    def __init__(self, wanted: bool = True):
        self._wanted = wanted
        self._progress: Progress | None = None
        self._tasks: dict[str, TaskID] = {}

    @property
    def are_live(self) -> bool:
        return self._progress is not None

    def __enter__(self) -> Self:
        if self._wanted and is_live():
            self._progress = _progress()
            self._progress.start()
            self._progress.console.show_cursor(True)  # a killed program could not restore a hidden cursor
            sys.stdout, sys.stderr = Door(sys.stdout), Door(sys.stderr)  # rich does not filter control characters
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def draw(self, name: str, num_done: float, num_all: float | None, text: str) -> None:
        """Updates one bar.  num_all: None if the total is not known yet; text: shown beside the bar."""
        if self._progress is None:
            return
        if name not in self._tasks:
            self._tasks[name] = self._progress.add_task(name, total=None, text="")
        self._progress.update(self._tasks[name], completed=num_done, total=num_all, text=text)
        self._progress.refresh()


def _progress() -> "Progress":
    """Returns a Progress that no thread redraws, which would disturb the run; narrow terminals cut text, not bars."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
    from rich.table import Column
    from rich.text import Text

    class Words(ProgressColumn):
        def render(self, task: Task) -> Text:
            return Text(task.fields["text"], no_wrap=True, overflow="ellipsis")

    return Progress(
        TextColumn("{task.description:>8} ", markup=False, table_column=Column(no_wrap=True)),
        BarColumn(BAR_CHARS, table_column=Column(no_wrap=True)),
        Words(),
        # soft_wrap: printed lines are not broken
        console=Console(file=escape.raw(sys.stdout), soft_wrap=True, highlight=False, markup=False, emoji=False),
        auto_refresh=False,
        transient=True,
        redirect_stderr=sys.stderr.isatty(),
    )
