"""Where the user stands: run.sh changes folder, and says in SPEEDRUN_CWD where it was called."""

import os
from pathlib import Path


def working_folder():
    """What the user's relative paths start from."""
    return os.environ.get("SPEEDRUN_CWD", os.getcwd())


def of_user(word):
    """A path as the user typed it -> Path; ~ is their home."""
    return Path(working_folder(), os.path.expanduser(word))
