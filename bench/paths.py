"""Where things are: this repository, its results, and the folder that the user's relative paths start from.

run.sh changes folder, and gives the user's own as SPEEDRUN_CWD.
"""

import os
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
CONF = REPO / "conf"
PUBLISHED = "published"  # copies for git, in results/: what searches a results folder skips it


def working_folder():
    """What the user's relative paths start from."""
    return os.environ.get("SPEEDRUN_CWD", os.getcwd())


def of_user(word):
    """A path as the user typed it -> Path; ~ is their home."""
    return Path(working_folder(), os.path.expanduser(word))


def results_root():
    """SPEEDRUN_RESULTS, else results/ of the repository."""
    return of_user(os.environ.get("SPEEDRUN_RESULTS", REPO / "results"))


def published_root():
    """Where publications lie, a results folder each: in the repository, whatever SPEEDRUN_RESULTS says."""
    return REPO / "results" / PUBLISHED


def race_roots():
    """Folders whose folders are races: this machine's own first, then the published."""
    return [results_root() / "races", *sorted(published_root().glob("*/races"))]
