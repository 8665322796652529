"""Two revisions at once: each in a git worktree of its own, made for a race and removed after it.

They lie in the repository's .git folder, where no git command looks for files and no run counts them as untracked.
"""

import contextlib
import os
import shutil
import subprocess
from pathlib import Path

from bench.paths import INSTALLED

FOLDER = "speedrun-worktrees"


def commit_of(repo, rev):
    """What a user calls a revision -> its full commit hash.  ValueError for one that does not exist."""
    _git_folder(repo, rev)
    found = _git(repo, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{rev}^{{commit}}")
    if found is None:
        raise ValueError(f"{rev}: this repository has no such revision: git log --oneline shows some")
    return found.strip()


def path_of(repo, name):
    """Where the worktree of this name lies, made or not.  ValueError outside git."""
    return _git_folder(repo, name) / FOLDER / name


def _git_folder(repo, name):
    """The repository's .git.  An installed harness has none: one around it is somebody else's."""
    common = None if INSTALLED else _git(repo, "rev-parse", "--path-format=absolute", "--git-common-dir")
    if common is None:
        raise ValueError(f"{name}: the harness does not lie in a git repository of its own: race revisions in a clone")
    return Path(common.strip())


def add(repo, name, commit):
    """The path of a worktree that holds exactly this commit; one that a killed race left behind is made anew."""
    path = path_of(repo, name)
    remove(repo, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        _must(repo, "worktree", "add", "--detach", "--force", str(path), commit)
    except ValueError:
        remove(repo, name)
        raise
    return path


def remove(repo, name):
    """Away with a worktree, whatever is left of it."""
    path = path_of(repo, name)
    if path.exists():
        _git(repo, "worktree", "remove", "--force", "--force", str(path))
        shutil.rmtree(path, ignore_errors=True)  # what git did not know
    _git(repo, "worktree", "prune")
    with contextlib.suppress(OSError):  # others are in use
        path.parent.rmdir()


@contextlib.contextmanager
def of(repo, commits):
    """{name: commit} -> {name: path}, for as long as this block lasts."""
    made = {}
    try:
        for name, commit in commits.items():
            made[name] = add(repo, name, commit)
        yield made
    finally:
        for name in made:
            remove(repo, name)


def _must(repo, *words):
    done = _run(repo, words)
    if done is None or done.returncode:
        why = "git cannot be run" if done is None else done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise ValueError(f"git {' '.join(words[:2])}: {why if isinstance(why, str) else ''.join(why)}")
    return done.stdout.decode(errors="replace")


def _git(repo, *words):
    """Output of a git command, or None where it fails."""
    done = _run(repo, words)
    return None if done is None or done.returncode else done.stdout.decode(errors="replace")


def _run(repo, words):
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        return subprocess.run(["git", *words], cwd=repo, env=env, capture_output=True, timeout=300)
    except (OSError, subprocess.SubprocessError):
        return None
