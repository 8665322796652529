"""Regular expressions that a user, or a stranger's record, brings: refused if one may take forever, and timed.

re tries every way in which repeats can share a text, and keeps the GIL meanwhile: matched in another thread, it also
keeps the main thread from its signals.
"""

import contextlib
import re
import signal
from collections.abc import Iterator
from re import _parser  # type: ignore[attr-defined]
from typing import Any

REPEATS = ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT")


class TooLong(Exception):
    """Matching took too long."""


def compiled(text: str) -> re.Pattern[str]:
    """Returns the regular expression.  Raises ValueError if it is none, or may need time exponential in a line."""
    try:
        pattern, parts = re.compile(text), _parser.parse(text)
    except (re.error, TypeError, OverflowError, RecursionError) as error:
        raise ValueError(f"is not a regular expression ({error})") from None
    if _varies_in_a_repeat(parts, False):
        raise ValueError("repeats a group that varies, as in (x+)+, which may take forever: repeat a set, as in [x,]+")
    return pattern


def _varies_in_a_repeat(node: Any, is_repeated: bool) -> bool:
    """Whether a part of a parsed pattern that is repeated has a repeat or alternatives itself."""
    if isinstance(node, (list, tuple)):  # the arguments of an operator
        return any(_varies_in_a_repeat(part, is_repeated) for part in node)
    if not isinstance(node, _parser.SubPattern):
        return False
    for operator, arguments in node:
        repeats = str(operator) in REPEATS
        if is_repeated and (str(operator) == "BRANCH" or (repeats and arguments[0] != arguments[1])):
            return True
        if _varies_in_a_repeat(arguments, is_repeated or (repeats and arguments[1] > 1)):
            return True
    return False


@contextlib.contextmanager
def limited(cpu_s: float) -> Iterator[None]:
    """Context, for the main thread, that raises TooLong after so many CPU seconds of this process; a match checks for
    signals."""

    def end(number: int, frame: object) -> None:
        raise TooLong(f"its lines took more than {cpu_s:g} s to match: use a simpler pattern, with fewer repeats")

    before = signal.signal(signal.SIGVTALRM, end)
    signal.setitimer(signal.ITIMER_VIRTUAL, cpu_s, 1.0)  # again each second, if something catches the first
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, before)
