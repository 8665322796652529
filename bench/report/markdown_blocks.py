"""Generated blocks in Markdown files, which can be updated and checked for being stale.

    <!-- ./run.sh table --md results/published/NAME -->
    ... what that command prints ...
    <!-- end of ./run.sh -->

./run.sh table --write writes them, ./run.sh table --check fails when one is stale.
"""

import contextlib
import io
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from bench.base import atomic
from bench.base.paths import REPO, project_folder, published_root, shown, user_path, variables
from bench.base.reading import plain_file

END = "<!-- end of ./run.sh -->"
FILES = ("README.md", "results/README.md")  # files in project_folder() with committed tables
Table = Callable[[list[str]], int]  # main() of ./run.sh table
BLOCK = re.compile(r"<!-- \./run\.sh (?P<command>[^\n>]*?) -->\n(?P<body>.*?)" + re.escape(END), re.S)


def block(command: str, body: str) -> str:
    """Returns the output of ./run.sh COMMAND between its marks; Markdown needs an empty line around a table."""
    return f"<!-- ./run.sh {command} -->\n\n{body.strip()}\n\n{END}"


def commands(text: str) -> list[str]:
    """Returns the commands of the blocks in the text, in order."""
    return [match["command"] for match in BLOCK.finditer(text)]


def fresh(text: str, write: Callable[[str], str]) -> str:
    """Returns the text with the body of every block replaced by write(command)."""
    return BLOCK.sub(lambda match: block(match["command"], write(match["command"])), text)


def stale(text: str, write: Callable[[str], str]) -> list[str]:
    """Returns the commands whose block differs from what write(command) returns now."""
    blocks = BLOCK.finditer(text)
    return [match["command"] for match in blocks if match["body"].strip() != write(match["command"]).strip()]


# ---- files


def check(files: Sequence[Path | str], table: Table) -> int:
    """Prints the commands of stale tables in these files (default: committed ones); returns 1 if any, else 0."""
    code = 0
    for file, content in _contents(files):
        old = stale(content, lambda command: printed(command, table))
        for command in old:
            print(f"{shown(file)}: stale: ./run.sh {command}", file=sys.stderr)
        if old:
            code = 1
        else:
            print(f"{shown(file)}: {len(commands(content))} up to date")
    if code:
        print("table: ./run.sh table --write writes them again", file=sys.stderr)
    return code


def write(files: Sequence[Path | str], table: Table, only_changes: bool = False) -> int:
    """Updates every table in these files, or in the committed ones if there are none.  Returns the exit code, 0.

    It prints the state of each file; only_changes: of each that it has changed.
    """
    for file, before in _contents(files):
        after = fresh(before, lambda command: printed(command, table))
        if after != before:
            atomic.write_text(os.path.realpath(file), after)  # of a link, the file that it leads to
        if after != before or not only_changes:
            print(f"{shown(file)}: {'written' if after != before else 'up to date'}")
    return 0


def _contents(files: Sequence[Path | str]) -> Iterator[tuple[Path, str]]:
    """Yields each file with its text; by default those of the project and of publications.

    The tables of claims are excluded, because ./run.sh judge checks them.
    """
    paths, readmes = [user_path(file) for file in files], list[Path]()
    if not paths:
        paths = [project_folder() / name for name in FILES]
        if project_folder() != REPO:  # a user's project need not have these files
            paths = [path for path in paths if path.exists()]
        readmes = sorted(published_root().glob("[!.]*/README.md"))  # .NAME.PID.tmp is one that is being published
        paths += [path for path in readmes if not (path.parent / "claim.yaml").exists()]
    if not paths and not readmes:
        raise ValueError(f"{project_folder()}: there is no {' or '.join(FILES)}: name a Markdown file")
    for path in paths:
        yield path, plain_file.text(path)


def printed(command: str, table: Table) -> str:
    """Returns what ./run.sh table ... prints in Markdown.  table: its main; raises ValueError for any other verb."""
    verb, *argv = shlex.split(command) or [""]
    if verb != "table" or {"--check", "--write"} & set(argv):
        raise ValueError(f"./run.sh {command}: only tables of ./run.sh table can be updated")
    out = io.StringIO()
    with contextlib.redirect_stdout(out), variables({"SPEEDRUN_CWD": str(project_folder())}):
        try:
            table([*argv, *(["--md"] if "--md" not in argv else [])])
        except (ValueError, SystemExit) as error:  # such as --help
            raise ValueError(f"./run.sh {command}: {error if isinstance(error, ValueError) else 'no table'}") from None
    return out.getvalue()
