"""The process that ends a run whose launcher was killed, and finishes its record:  python -m bench.launch.guard FOLDER

It sleeps on its standard input, a pipe that only the launcher holds: a byte there says that the run has ended in order,
its end without one that the launcher is gone.  It imports nothing until then: it runs beside training.
"""

import os
import sys

GOODBYE = b"."


def main(folder):
    if os.read(0, 1) == GOODBYE:
        return
    from pathlib import Path

    from bench.machine import run_processes
    from bench.record import failures

    run_processes.end(Path(folder))
    failures.write_launcher_killed(Path(folder))


if __name__ == "__main__":
    main(sys.argv[1])
