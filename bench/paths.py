"""Where things are: this repository, its results, and the folder that the user's relative paths start from.

run.sh changes folder, and gives the user's own as SPEEDRUN_CWD.
"""

import os
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
CONF = REPO / "conf"


def working_folder():
    """What the user's relative paths start from."""
    return os.environ.get("SPEEDRUN_CWD", os.getcwd())


def of_user(word):
    """A path as the user typed it -> Path; ~ is their home."""
    return Path(working_folder(), os.path.expanduser(word))


def results_root():
    """SPEEDRUN_RESULTS, else results/ of the repository."""
    return of_user(os.environ.get("SPEEDRUN_RESULTS", REPO / "results"))
