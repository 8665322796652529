"""Signals that end a program, as an exception: what was begun is brought to an orderly end.

Python runs a signal's handler between any two instructions, also where what it raises is printed and dropped: in what
runs around a fork (os.register_at_fork), in a destructor, below an "except Exception".  So it is not an Exception;
nothing is raised where signals are held(); and loops that wait call check(), which raises a lost one again.
"""

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from types import FrameType

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# As SLURM sends them where sbatch --signal=USR1@60 asks for it, and submitit: before a time limit or a preemption
WARNING = (signal.SIGUSR1, signal.SIGUSR2)


PATIENCE_S = 3.0  # in which an end is brought about that is no longer interrupted


class Interrupted(BaseException):
    """One of them came; str() is its name."""


class Signals:
    """The first signal of a block, until it has been acted upon.  Calling it: all are ignored from now on."""

    def __init__(self, first: Callable[[], object] = lambda: None):
        """first(): called before the first raises, in the main thread, wherever it is."""
        self._first = first
        self._name: str | None = None  # of the first
        self._num_held = 0
        self._ignored_s: float | None = None  # since when, by time.monotonic()
        self._has_heeded = False

    def __call__(self) -> None:
        if self._ignored_s is None:
            self._name, self._ignored_s = None, time.monotonic()

    def late(self) -> str | None:
        """The name of one that came since they are ignored, once that has lasted PATIENCE_S: for what may take long."""
        is_short = self._ignored_s is None or time.monotonic() - self._ignored_s < PATIENCE_S
        return None if is_short else self._name

    def heed(self) -> None:
        """What came was a warning, and has been passed on: the next signal that is none raises again."""
        self._name, self._has_heeded = None, True

    def check(self) -> None:
        """Raise Interrupted where a signal came and nobody acted upon it.  For loops that wait."""
        if self._name is not None and self._ignored_s is None and not self._num_held:
            raise Interrupted(self._name)

    def _came(self, number: int, frame: FrameType | None) -> None:
        if self._has_heeded and number in (signal.SIGTERM, *WARNING):
            return
        if self._name is None:  # later ones say nothing new
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


_blocks: list[Signals] = []  # those that the main thread is in, the innermost last


@contextlib.contextmanager
def raise_interrupted(first: Callable[[], object] = lambda: None) -> Iterator[Signals]:
    """In this block the first of them raises Interrupted, and later ones are ignored; as before afterwards.

    first(): called before it is raised, for what must come before the block is left by it.
    A signal that this process was started to ignore, as nohup does, stays ignored.  Programs that are started
    here get none of it: a handler ends with exec, where SIG_IGN would stay.
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
    """From now on the names of warnings, SIGTERM among them, are appended to the list that this returns."""
    names: list[str] = []
    for number in (signal.SIGTERM, *WARNING):
        signal.signal(number, lambda number, frame: names.append(signal.Signals(number).name))
    return names


def held() -> contextlib.AbstractContextManager[None]:
    """In this block nothing is raised; at its end, what came meanwhile is.  Outside of raise_interrupted(): nothing."""
    return _blocks[-1]._held() if _blocks else contextlib.nullcontext()
