"""Signals that end a program, as an exception: what was begun is brought to an orderly end."""

import contextlib
import signal
from collections.abc import Callable, Iterator

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Interrupted(Exception):
    """One of them came; str() is its name."""


@contextlib.contextmanager
def raise_interrupted() -> Iterator[Callable[[], None]]:
    """In this block the first of them raises Interrupted, and later ones are ignored; as before afterwards.

    Yields a function that has all of them ignored from its call to the end of the block.
    """
    before = {number: signal.getsignal(number) for number in ENDING}

    def ignore():
        for number in ENDING:
            signal.signal(number, signal.SIG_IGN)

    def handler(number, frame):
        ignore()
        raise Interrupted(signal.Signals(number).name)

    for number in ENDING:
        signal.signal(number, handler)
    try:
        yield ignore
    finally:
        for number, old in before.items():
            signal.signal(number, old)
