"""Turns the signals that end a program into an exception, so that the program can end in an orderly way.

Python may run a signal handler between any two instructions, also where it prints and drops what the handler raises: in
functions that run around a fork (os.register_at_fork), in destructors, below an "except Exception".  Therefore
Interrupted is not an Exception, nothing is raised inside held(), and loops that wait call check(), which raises again
if the exception was dropped.
"""

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from types import FrameType

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# Sent by SLURM (sbatch --signal=USR1@60) and submitit before a time limit or a preemption
WARNING = (signal.SIGUSR1, signal.SIGUSR2)


PATIENCE_S = 3.0  # time for the end of a program before another signal may interrupt it


class Interrupted(BaseException):
    """A signal arrived; str() is its name."""


class Signals:
    """Holds the first signal of a block until the program has acted upon it.  Call it to ignore signals from now on."""

    def __init__(self, first: Callable[[], object] = lambda: None):
        """first() is called in the main thread before the first signal raises."""
        self._first = first
        self._name: str | None = None  # name of the first signal
        self._num_held = 0
        self._ignored_s: float | None = None  # time.monotonic() when signals began to be ignored
        self._has_heeded = False

    def __call__(self) -> None:
        if self._ignored_s is None:
            self._name, self._ignored_s = None, time.monotonic()

    def missed(self) -> str | None:
        """Returns a signal that arrived while signals are ignored."""
        return None if self._ignored_s is None else self._name

    def late(self) -> str | None:
        """Returns a signal that arrived while signals are ignored, once they have been ignored for PATIENCE_S."""
        is_short = self._ignored_s is None or time.monotonic() - self._ignored_s < PATIENCE_S
        return None if is_short else self._name

    def heed(self) -> None:
        """Accepts the signal as a warning that was passed on: the next signal raises again unless it is a warning."""
        self._name, self._has_heeded = None, True

    def check(self) -> None:
        """Raises Interrupted if a signal arrived and nobody has acted upon it.  For loops that wait."""
        if self._name is not None and self._ignored_s is None and not self._num_held:
            raise Interrupted(self._name)

    def _came(self, number: int, frame: FrameType | None) -> None:
        if self._has_heeded and number in (signal.SIGTERM, *WARNING):
            return
        if self._name is None:  # later signals are ignored
            self._name = signal.Signals(number).name
            if self._ignored_s is None:
                self._first()
                self.check()

    @contextlib.contextmanager
    def _held(self) -> Iterator[None]:
        self._num_held += 1
        try:
            yield
        finally:
            self._num_held -= 1
        self.check()


_blocks: list[Signals] = []  # blocks that the main thread is in, the innermost last


@contextlib.contextmanager
def raise_interrupted(first: Callable[[], object] = lambda: None) -> Iterator[Signals]:
    """Context in which the first signal of ENDING and WARNING raises Interrupted and later ones are ignored.

    first(): called before Interrupted is raised.  A signal that this process was started to ignore, for example by
    nohup, stays ignored.  Programs started in the block do not inherit any of this, because exec() resets handlers.
    """
    block = Signals(first)
    before = {number: signal.getsignal(number) for number in (*ENDING, *WARNING)}
    before = {number: old for number, old in before.items() if callable(old) or old == signal.SIG_DFL}
    _blocks.append(block)
    try:
        for number in before:
            signal.signal(number, block._came)
        yield block
        block.check()
    finally:
        block()  # from here on nothing is raised
        for number, old in before.items():
            signal.signal(number, old)
        _blocks.remove(block)


def kept() -> list[str]:
    """Returns a list to which the name of each SIGTERM and WARNING signal is appended from now on."""
    names: list[str] = []
    for number in (signal.SIGTERM, *WARNING):
        signal.signal(number, lambda number, frame: names.append(signal.Signals(number).name))
    return names


def held() -> contextlib.AbstractContextManager[None]:
    """Context in which no signal raises; one that arrives meanwhile raises at its end.  Has no effect outside of
    raise_interrupted()."""
    return _blocks[-1]._held() if _blocks else contextlib.nullcontext()
