"""Checks out revisions side by side, each in its own git worktree, created for a race and removed after it.

They lie in the repository's .git folder, where no git command looks for files and no run counts them as untracked.
"""

import contextlib
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from bench.base.paths import REPO, working_folder
from bench.machine import git, processes

FOLDER = "speedrun-worktrees"
LOCKS = "conf/data"  # where bench/data/sources/hub.py keeps lock files


def commit_of(repo: Path | str, rev: str) -> str:
    """Returns the full commit hash of a revision as a user names it. Raises ValueError if it does not exist."""
    _git_folder(repo, rev)
    commit = git.commit_of(repo, rev)
    if commit is None:
        remedy = "git log --oneline lists some; A.rev=HEAD B= races HEAD against uncommitted changes"
        if repo == REPO and not Path(working_folder()).resolve().is_relative_to(REPO):
            remedy = "give script=FILE for those of the repository in this folder"
        where = "the harness's repository" if repo == REPO else "this repository"
        raise ValueError(f"{rev}: {where} has no such revision: {remedy}")
    return commit


def commits_between(repo: Path | str, commit_range: str) -> list[str]:
    """Returns A of A..B and the commits after it up to B, by first parents, oldest first. Raises ValueError."""
    first, _, last = commit_range.partition("..")
    ends = [commit_of(repo, rev or "HEAD") for rev in (first, last)]
    return [ends[0], *git.run(repo, "rev-list", "--first-parent", "--reverse", f"{ends[0]}..{ends[1]}").split()]


def path_of(repo: Path | str, name: str) -> Path:
    """Returns the path of the worktree of this name, whether it exists or not. Raises ValueError outside git."""
    return _git_folder(repo, name) / FOLDER / name


def _git_folder(repo: Path | str, name: str) -> Path:
    """Returns the repository's .git. Raises ValueError for an installed harness: one around it is not its own."""
    try:
        return Path(git.run(repo, "rev-parse", "--path-format=absolute", "--git-common-dir").strip())
    except git.Failed as error:
        raise ValueError(f"{name} is not in a git repository ({error}): use a clone, or script=PATH") from None


def mark_of_process(repo: Path | str) -> str:
    """Returns a mark with which names of this process's worktrees end: others may do the same at the same time.

    Removes the worktrees of killed processes.  Raises ValueError outside git.
    """
    for path in path_of(repo, "").glob("*"):
        if is_left(path.name):
            remove(repo, path.name)
    return f"{(processes.boot_id_hash() or 'unknown')[:8]}-{os.getpid()}"


def is_left(name: str) -> bool:
    """Whether the mark in a name is that of a process of this boot that has ended."""
    mark = re.search(rf"-{(processes.boot_id_hash() or '?')[:8]}-(\d+)(?:-\w+)?$", name)
    return mark is not None and processes.start_ticks(int(mark[1])) is None


def add(repo: Path | str, name: str, commit: str) -> Path:
    """Makes a worktree of exactly this commit and returns the folder in it that repo is of its repository.

    Replaces one that a killed race left behind.
    """
    path = path_of(repo, name)
    remove(repo, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        git.run(repo, "worktree", "add", "--detach", "--force", str(path), commit)
    except git.Failed as error:
        remove(repo, name)
        raise ValueError(str(error)) from None
    path /= git.run(repo, "rev-parse", "--show-prefix").strip()
    # Adds data locks that the revision lacks, so that all arms use the data that were fetched.
    for lock in sorted((Path(repo) / LOCKS).glob("*.lock.json")):
        if (path / LOCKS).is_dir() and not (path / LOCKS / lock.name).exists():
            shutil.copy(lock, path / LOCKS)
    return path


def remove(repo: Path | str, name: str) -> None:
    """Deletes a worktree, also a damaged one."""
    path = path_of(repo, name)
    shutil.rmtree(path, ignore_errors=True)
    # Never `git worktree prune`: it forgets the user's own worktrees on a drive that is not mounted now
    git.ask(repo, "worktree", "remove", "--force", "--force", str(path))
    with contextlib.suppress(OSError):  # others are in use
        path.parent.rmdir()


def remove_all(repo: Path | str, prefix: str) -> None:
    """Deletes the worktrees whose names begin so; does nothing outside git."""
    with contextlib.suppress(ValueError):
        for path in path_of(repo, prefix).parent.glob(f"{prefix}*"):
            remove(repo, path.name)


@contextlib.contextmanager
def checked_out(repo: Path | str, commits: Mapping[str, str], prefix: str = "") -> Iterator[dict[str, Path]]:
    """Yields {name: path of its worktree, prefix + name} of {name: commit} within the block. Raises ValueError."""
    worktrees = {}
    try:
        for name, commit in commits.items():
            worktrees[name] = add(repo, prefix + name, commit)
        yield worktrees
    finally:
        for name in worktrees:
            remove(repo, prefix + name)
