"""What reaches the person who started a command: lines, and on a terminal live bars below them.

Quiet, only what was said with always=True; where JSON is wanted, everything goes to standard error.
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
    """A block whose lines and bars obey a verb's --quiet and --json; JSON is to be printed after it."""
    global _quiet
    before, _quiet = _quiet, quiet
    try:
        with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
            yield
    finally:
        _quiet = before


def say(topic: str, text: str, always: bool = False) -> None:
    """Print text for the person at the terminal, with the topic before it.  always: also if quiet is wanted."""
    if always or not _quiet:
        print(f"{topic:>8}  {text}", flush=True)


def show(lines: list[str]) -> None:
    """Print lines of the kind that --quiet drops."""
    if lines and not _quiet:
        print("\n".join(lines), flush=True)


def is_live() -> bool:
    """Whether bars can be drawn and are wanted."""
    return not _quiet and text_table.is_terminal() and os.environ.get("TERM") != "dumb"


def confirmed(question: str) -> bool | None:
    """Whether the person at the terminal answers yes; None where nobody is there to answer."""
    if not (sys.stdin.isatty() and text_table.is_terminal()):
        return None
    print(f"{question} [y/N] ", end="", flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


class Bars:
    """Live bars: of a race's arms and looks, "runs" that follow each other, and "run", the one that is running.

    A context.  What is printed meanwhile appears above them.  Where nothing live can be drawn it draws nothing.
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
            self._progress.console.show_cursor(True)  # a killed program could not bring it back
            sys.stdout, sys.stderr = Door(sys.stdout), Door(sys.stderr)  # rich obeys what it is given to print
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def draw(self, name: str, num_done: float, num_all: float | None, text: str) -> None:
        """Bring one bar up to date.  num_all: None where it is not known yet; text: beside the bar."""
        if self._progress is None:
            return
        if name not in self._tasks:
            self._tasks[name] = self._progress.add_task(name, total=None, text="")
        self._progress.update(self._tasks[name], completed=num_done, total=num_all, text=text)
        self._progress.refresh()


def _progress() -> "Progress":
    """No thread redraws it: the run beside it would pay.  On a narrow terminal the text is cut, not the bar."""
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
        # printed lines stay whole
        console=Console(file=escape.raw(sys.stdout), soft_wrap=True, highlight=False, markup=False, emoji=False),
        auto_refresh=False,
        transient=True,
        redirect_stderr=sys.stderr.isatty(),
    )
