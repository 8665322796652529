"""python -m bench [verb] [...], which ./run.sh calls."""

import sys

try:
    from bench.cli.main import run
except KeyboardInterrupt:
    sys.exit("interrupted")

if __name__ == "__main__":
    run()
