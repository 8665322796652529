"""The command `speedrun` of a wheel, in which this file is speedrun_bench/__init__.py, beside bench/ and models/.

The two are on the path of this program's processes only: a user's own `import bench` or `import models` finds theirs.
"""

import os
import sys


def main() -> None:
    """What ./run.sh is in a checkout."""
    os.environ["SPEEDRUN_CWD"] = os.getcwd()
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    from bench.__main__ import run

    run()
