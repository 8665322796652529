"""Which code ran: commit, difference, sources that git does not know, and one hash over all that races."""

import hashlib
import os
import subprocess
from pathlib import Path

from bench import atomic
from bench.paths import REPO
from bench.units import MIB

MAX_UNTRACKED_BYTES = MIB  # a source file; anything larger is data


def source_sha256(repo=REPO):
    """One hash over every *.py of bench/ and models/, path and content, in sorted order."""
    total = hashlib.sha256()
    paths = [path for room in ("bench", "models") for path in Path(repo, room).rglob("*.py")]
    for path in sorted(paths, key=lambda path: path.relative_to(repo).as_posix()):
        content = path.read_bytes()
        total.update(f"{path.relative_to(repo).as_posix()}\0{len(content)}\0".encode())
        total.update(content)
    return total.hexdigest()


def state(repo=REPO):
    """{"source_sha256", "commit", "dirty", "diff_sha256", "untracked"}; all but the first None outside git.

    dirty: a tracked file differs from the commit, or a source file is untracked; results/ does not count.
    """
    found = {
        "source_sha256": source_sha256(repo),
        "commit": None,
        "dirty": None,
        "diff_sha256": None,
        "untracked": None,
    }
    if _git(repo, "rev-parse", "--is-inside-work-tree") is None:
        return found
    changes, untracked = diff(repo), _untracked(repo)
    commit = _git(repo, "rev-parse", "--verify", "HEAD")
    found |= {"commit": commit.strip() if commit else None, "dirty": bool(changes or untracked), "untracked": untracked}
    digest = hashlib.sha256(changes.encode(errors="surrogateescape")).hexdigest() if changes else None
    return found | {"diff_sha256": digest}


def diff(repo=REPO):
    """What `git apply` needs to get from the commit to this code; "" if nothing, or no commit, or no git."""
    return _git(repo, "diff", "HEAD", "--no-color", "--no-ext-diff", "--binary", "--", ".", ":(exclude)results") or ""


def write(repo, folder):
    """The run folder's code/: commit.json, diff.patch and untracked/ with the sources that git does not know."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    found = state(repo)
    atomic.write_json(folder / "commit.json", found)
    (folder / "diff.patch").write_text(diff(repo), errors="surrogateescape")
    for name in found["untracked"] or ():
        content = Path(repo, name).read_bytes()
        if len(content) <= MAX_UNTRACKED_BYTES:
            copy = folder / "untracked" / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(content)


def _untracked(repo):
    sources = ("*.py", "*.yaml", "*.toml", "*.sh")
    listed = _git(repo, "ls-files", "--others", "--exclude-standard", "-z", "--", *sources, ":(exclude)results")
    return sorted(name for name in (listed or "").split("\0") if name)


def _git(repo, *words):
    """Output of a git command in repo, or None where git, the repository or the commit is missing."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        done = subprocess.run(["git", *words], cwd=repo, env=env, capture_output=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode(errors="surrogateescape")
