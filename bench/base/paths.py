"""Where things are: this code, its results, and the folder that the user's relative paths start from.

run.sh changes folder, and gives the user's own as SPEEDRUN_CWD.  REPO is the checkout, or the package that a wheel
installs, which holds the same folders; there nothing is ever written.  CODE is where this process imports from: REPO,
or a read-only copy of it (bench/machine/code_copy.py), whose processes are told REPO by the variable CHECKOUT.
"""

import os
import re
from pathlib import Path

CHECKOUT = "SPEEDRUN_CHECKOUT"
COPY_NAME = re.compile(r"[0-9a-f]{32}-[\w-]+")  # the folder of a copy
CODE = Path(__file__).resolve().parents[2]
if COPY_NAME.fullmatch(CODE.name) and CHECKOUT not in os.environ:  # else its .data would be in the copy
    raise ImportError(f"{CODE} is a read-only copy of a checkout's code: run the program from the checkout")
REPO = Path(os.environ[CHECKOUT]) if COPY_NAME.fullmatch(CODE.name) else CODE
CONF = CODE / "conf"
MARK = "speedrun.yaml"  # in a user's conf/: ./run.sh init made it; a conf/ without it is some other program's
INSTALLED = (REPO / "__init__.py").exists()  # what bench/cli/wheel.py is in a wheel
PUBLISHED = "published"  # copies for git, in results/: what searches a results folder skips it


def working_folder() -> str:
    """What the user's relative paths start from."""
    return os.environ.get("SPEEDRUN_CWD", os.getcwd())


def of_user(word: str | Path) -> Path:
    """A path as the user typed it -> Path; ~ is their home."""
    return Path(working_folder(), os.path.expanduser(word))


def shown(path: str | Path) -> str:
    """A path for a person to use where they stand: relative if it lies below that folder, else absolute."""
    path = Path(path)
    real = os.path.join(os.path.realpath(path.parent), path.name)  # either may have been reached by a link
    way = os.path.relpath(real, os.path.realpath(working_folder()))
    return real if way.split(os.sep)[0] in (os.curdir, os.pardir) else way


def project_folder() -> Path:
    """The folder of results/ and .data/: the checkout, or where the user stands.

    The latter when the program is installed, or the folder is a project that ./run.sh init made.
    """
    return Path(working_folder()) if INSTALLED or own_conf() else REPO


def own_conf() -> Path | None:
    """conf/ of the project that the user stands in, made by ./run.sh init; None where there is none."""
    folder = Path(working_folder(), "conf").absolute()
    return folder if (folder / MARK).is_file() else None


def results_root() -> Path:
    """SPEEDRUN_RESULTS, where it is set and not empty, else results/ in project_folder()."""
    return of_user(os.environ.get("SPEEDRUN_RESULTS") or project_folder() / "results")


def copy_roots() -> list[Path]:
    """Folders for copies of code; the first that only this user can write is taken: their cache, the temporary folder.

    The second is for a home that is read only, or on a disk that gives its files to somebody else.
    """
    import tempfile  # 5 ms, which --help does not need

    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return [Path(cache, "speedrun-code"), Path(tempfile.gettempdir(), f"speedrun-code-{os.geteuid()}")]


def published_root() -> Path:
    """Where publications lie, a results folder each: in project_folder(), also if SPEEDRUN_RESULTS is set."""
    return project_folder() / "results" / PUBLISHED


def race_roots() -> list[Path]:
    """Folders whose folders are races: this machine's own first, then the published."""
    return [results_root() / "races", *sorted(published_root().glob("*/races"))]
