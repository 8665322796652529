"""What this program is, in one line: ./run.sh --version"""

from importlib import metadata
from platform import python_version

from bench import __version__
from bench.base.paths import REPO
from bench.machine import git


def text() -> str:
    """Version and commit, and the Python and torch that decide how it runs."""
    commit = git.ask(REPO, "rev-parse", "--short", "HEAD")
    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        torch = "not installed"
    of_commit = f" ({commit.strip()})" if commit else ""
    return f"speedrun {__version__}{of_commit}, Python {python_version()}, torch {torch}"
