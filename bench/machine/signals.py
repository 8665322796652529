"""Signals that end a program, as an exception: what was begun is brought to an orderly end.

Python runs a signal's handler between any two instructions, also where what it raises is printed and dropped: in what
runs around a fork (os.register_at_fork), in a destructor, below an "except Exception".  So it is not an Exception;
nothing is raised where signals are held(); and loops that wait call check(), which raises a lost one again.
"""

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
OF_CALLERS = (signal.SIGUSR1, signal.SIGUSR2)  # where Python handles one: submitit's, at a job's limit or preemption


class Interrupted(BaseException):
    """One of them came; str() is its name."""


class Signals:
    """The first signal of a block, until it has been acted upon.  Calling it: all are ignored from now on."""

    def __init__(self, first: Callable[[], object] = lambda: None):
        """first(): called before the first raises, in the main thread, wherever it is."""
        self._first = first
        self._name: str | None = None  # of the first
        self._num_held = 0
        self._are_ignored = False

    def __call__(self) -> None:
        self._are_ignored = True

    def check(self) -> None:
        """Raise Interrupted where a signal came and nobody acted upon it.  For loops that wait."""
        if self._name is not None and not self._are_ignored and not self._num_held:
            raise Interrupted(self._name)

    def _came(self, number: int, frame: FrameType | None) -> None:
        if self._name is None:  # later ones say nothing new
            self._name = signal.Signals(number).name
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
    before = {number: signal.getsignal(number) for number in (*ENDING, *OF_CALLERS)}
    before = {n: old for n, old in before.items() if callable(old) or n in ENDING and old == signal.SIG_DFL}
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


def held() -> contextlib.AbstractContextManager[None]:
    """In this block nothing is raised; at its end, what came meanwhile is.  Outside of raise_interrupted(): nothing."""
    return _blocks[-1]._held() if _blocks else contextlib.nullcontext()
