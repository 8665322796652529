"""Paths of this code and its results, and the folder that the user's relative paths start from.

run.sh changes the working folder and passes the user's own as SPEEDRUN_CWD.  REPO is the checkout, or the package that
a wheel installs, which has the same folders and is never written to.  CODE is the folder that this process imports
from: REPO, or a read-only copy of it (bench/machine/code_copy.py), whose processes get REPO from the variable
CHECKOUT.
"""

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

CHECKOUT = "SPEEDRUN_CHECKOUT"
COPY_NAME = re.compile(r"[0-9a-f]{32}-[\w-]+")  # the name of a copy's folder
CODE = Path(__file__).resolve().parents[2]
if COPY_NAME.fullmatch(CODE.name) and CHECKOUT not in os.environ:  # else its .data would be in the copy
    raise ImportError(f"{CODE} is a read-only copy of a checkout's code: run the program from the checkout")
REPO = Path(os.environ[CHECKOUT]) if COPY_NAME.fullmatch(CODE.name) else CODE
CONF = CODE / "conf"
MARK = "speedrun.yaml"  # marks a user's conf/, made by ./run.sh init; a conf/ without it belongs to another program
ABSOLUTE = re.compile(r"(?:^|(?<=, )|(?<=-> ))/.*?(?=$|, | -> )")
INSTALLED = (REPO / "__init__.py").exists()  # only a wheel has this file, from bench/cli/wheel.py
PUBLISHED = "published"  # the folder in results/ with copies for git, skipped when a results folder is searched


def working_folder() -> str:
    """Returns the folder that the user's relative paths start from."""
    return os.environ.get("SPEEDRUN_CWD", os.getcwd())


@contextlib.contextmanager
def variables(own: Mapping[str, str]) -> Iterator[None]:
    """Sets environment variables of this process, and of those that it starts, within the block."""
    before = {name: os.environ[name] for name in own if name in os.environ}
    os.environ.update(own)
    try:
        yield
    finally:
        for name in own.keys() - before.keys():
            os.environ.pop(name, None)
        os.environ.update(before)


USER = "$USER"
SYSTEM_FOLDERS = ("/", "/root", "/home", "/tmp", "/data", "/usr", "/var", "/mnt", "/opt", "/work", "/workspace")


def user_path(typed: str | Path) -> Path:
    """Returns a path that the user typed as a Path; ~ is their home, and a folder $USER that of their name."""
    path = os.path.expanduser(typed)
    return Path(working_folder(), path.replace(f"/{USER}/", f"/{login()}/") if login() else path)


def brief(text: str) -> str:
    """Shortens the absolute paths in a text such as "A, B" or "A -> B" to their last two parts."""
    return ABSOLUTE.sub(lambda path: "/".join(Path(path[0]).parts[-2:]), text)


def shown(path: str | Path) -> str:
    """Returns a path to show to the user: relative if it is below their working folder, else absolute."""
    path = Path(path)
    real = os.path.join(os.path.realpath(path.parent), path.name)  # path and working folder may contain links
    way = os.path.relpath(real, os.path.realpath(working_folder()))
    return real if way.startswith(("../", "-")) or way in (os.curdir, os.pardir) else way  # "-x" is an option


def shared(path: str | Path) -> str:
    """Returns shown() with ~ for the home folder and $USER for a folder of the user's name, as user_path() reads them.

    For tables and exports, which go to others.
    """
    text, home = shown(path), os.path.join(os.path.realpath(os.path.expanduser("~")), "")
    if text.startswith(home) and len(home) > 1:
        return f"~/{text.removeprefix(home)}"
    return text.replace(f"/{login()}/", f"/{USER}/") if login() and text.startswith("/") else text


def login() -> str:
    """Returns the user's name; "" if there is none, or it is that of a folder of the system."""
    name = os.environ.get("USER") or os.environ.get("LOGNAME") or os.path.basename(os.path.expanduser("~"))
    return "" if f"/{name}" in SYSTEM_FOLDERS else name


def project_folder() -> Path:
    """Returns the folder of results/ and .data/: the checkout, or the user's working folder.

    It is the working folder if the program is installed or ./run.sh init has made a project there.
    """
    return Path(working_folder()) if INSTALLED or own_conf() else REPO


def own_conf() -> Path | None:
    """Returns conf/ of the project that ./run.sh init made in the user's working folder, or None."""
    folder = Path(working_folder(), "conf").absolute()
    return folder if (folder / MARK).is_file() else None


def results_root() -> Path:
    """Returns SPEEDRUN_RESULTS if it is set and not empty, else results/ in project_folder()."""
    return user_path(os.environ.get("SPEEDRUN_RESULTS") or project_folder() / "results")


def cache_root() -> Path:
    """Returns XDG_CACHE_HOME, or ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))


def copy_roots() -> list[Path]:
    """Returns the folders that may hold copies of code; the first that only this user can write to is used.

    They are in the user's cache and, for a home that is read-only or owned by somebody else, in the temporary folder.
    """
    import tempfile  # 5 ms, which --help does not need

    return [cache_root() / "speedrun-code", Path(tempfile.gettempdir(), f"speedrun-code-{os.geteuid()}")]


def state_root() -> Path:
    """Returns the folder for state about results folders, kept outside of them.  Raises RuntimeError without a home."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state", "speedrun")


def published_root() -> Path:
    """Returns the folder of publications, each a results folder: in project_folder() even with SPEEDRUN_RESULTS."""
    return project_folder() / "results" / PUBLISHED


def race_roots() -> list[Path]:
    """Returns the folders that contain races: this machine's own first, then those of publications."""
    return [results_root() / "races", *sorted(published_root().glob("*/races"))]
