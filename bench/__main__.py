"""python -m bench [verb] [...], which ./run.sh calls."""

import os
import signal
from types import FrameType


def end_early(number: int, frame: FrameType | None) -> None:
    """Ends the program at a signal that comes while its modules are loaded, as run() does at later ones."""
    os.write(2, f"interrupted by {signal.Signals(number).name}\n".encode())
    os._exit(128 + number)


if __name__ == "__main__":
    for ending in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(ending) != signal.SIG_IGN:
            signal.signal(ending, end_early)
    from bench.cli.main import run

    run()
