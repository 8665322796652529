"""Runs git in a repository's folder, never with the GIT_ variables of the calling process."""

import contextlib
import glob
import os
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from bench.base.paths import INSTALLED, REPO
from bench.machine import processes

TIMEOUT_S = 300  # enough to add a worktree of a large repository


class Failed(Exception):
    """git cannot be run, or failed; the message is git's."""


def run(
    repo: Path | str, *arguments: str, stdin: bytes | None = None, errors: str = "surrogateescape", **env: str
) -> str:
    """Returns the output of `git ARGUMENTS` in this folder as text.  stdin: its standard input; env: further variables.

    errors: how bytes that are not UTF-8 are decoded.  Raises Failed, also for the folder of an installed harness,
    because a repository around it, such as that of its venv, is another project's.  Raises OSError, which ask() does
    not suppress, if this machine has no free process, memory or file for git: that says nothing about the repository.
    """
    if INSTALLED and Path(repo).resolve().is_relative_to(REPO):
        raise Failed("the installed program has no repository")
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")} | env
    env["GIT_NO_REPLACE_OBJECTS"] = "1"  # git replace shows other files under a commit's name
    env |= {} if Path(repo) == REPO else {"GIT_ALLOW_PROTOCOL": "none"}  # fetching a missing object runs its programs
    settings = ("core.fsmonitor=false", "core.hooksPath=/dev/null", "log.showSignature=false")  # run no program of it
    command = ["git", *(argument for setting in settings for argument in ("-c", setting)), *arguments]
    try:
        done = subprocess.run(command, cwd=repo, env=env, input=stdin, capture_output=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise Failed(f"git {' '.join(arguments)[:40]} timed out after {TIMEOUT_S:g} s") from None
    except OSError as error:
        if error.errno in processes.SHORTAGES:
            raise OSError(error.errno, f"git could not be started: {os.strerror(error.errno)}") from None
        raise Failed(f"git cannot be run: {error}") from None
    if done.returncode:
        verb = next(argument for argument in arguments if not argument.startswith("-") and "=" not in argument)
        message = f"git {verb}: {done.stderr.decode(errors='replace').strip() or f'exit code {done.returncode}'}"
        if code := processes.shortage(message):
            raise OSError(code, message)
        raise Failed(message)
    return done.stdout.decode(errors=errors)


def ask(repo: Path | str, *arguments: str) -> str | None:
    """Like run(), but returns None if git, the repository or the commit is missing."""
    with contextlib.suppress(Failed):
        return run(repo, *arguments)
    return None


def commit_of(repo: Path | str, rev: str) -> str | None:
    """Returns the full hash of the commit that a revision names, or None if there is none."""
    commit = ask(repo, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{rev}^{{commit}}")
    return commit.strip() if commit else None


@contextlib.contextmanager
def folder_view(code: Path | str, repo: Path | str) -> Iterator["FolderView"]:
    """Context that yields a FolderView with a temporary index.

    In the repository's own index a file may be marked as unchanged (assume-unchanged, fsmonitor), and its times are
    those of another folder.
    """
    with tempfile.TemporaryDirectory(prefix="speedrun-git-") as temporary:
        yield FolderView(Path(code), Path(repo), os.path.join(temporary, "index"))


class FolderView:
    """git of repo, with the files of code as its work tree.  Its methods raise Failed."""

    def __init__(self, code: Path, repo: Path, index: str):
        self._code, self._repo, self._env = code, repo.absolute(), {"GIT_INDEX_FILE": index}
        below = run(repo, "rev-parse", "--show-prefix").strip()
        if not below:  # otherwise inside another project's repository, whose folders a copy lacks
            self._env["GIT_WORK_TREE"] = str(code.absolute())
        self.commit: str | None = None  # None before the first commit
        try:
            self.commit = self._ask("rev-parse", "--verify", "HEAD").strip()
        except Failed:
            if self._ask("rev-list", "--all", "--max-count=1"):
                raise
        if self.commit:
            self._ask("read-tree", self.commit)

    def changes(self, folders: Iterable[str]) -> str:
        """Returns the patch for `git apply` from the commit to this code; "" if there is none, or no commit."""
        if not self.commit:
            return ""
        form = ("--no-color", "--no-ext-diff", "--no-textconv", "--src-prefix=a/", "--dst-prefix=b/", "-U3", "--binary")
        return self._ask("diff", self.commit, *form, "--", *folders)  # whatever the user's configuration says

    def untracked(self, folders: Iterable[str], suffixes: tuple[str, ...]) -> list[str]:
        """Returns the files with these suffixes that the commit lacks and git does not ignore, sorted."""
        patterns = [f":(glob){folder}/**/*{suffix}" for folder in folders for suffix in suffixes]
        ignored = [f"--exclude-from={path}" for path in [self._repo / ".gitignore"] if path.is_file()]
        listed = self._ask("ls-files", "--others", "--exclude-standard", *ignored, "-z", "--", *patterns)
        return sorted(name for name in listed.split("\0") if name)

    def unknown(self, folders: Iterable[str], suffixes: tuple[str, ...]) -> list[str]:
        """Returns the same with those that git ignores or that lie in a repository within, sorted."""
        tree = self._ask("ls-tree", "-r", "-z", "--name-only", self.commit, "--", *folders) if self.commit else ""
        paths = (
            path
            for folder in folders
            for path in glob.iglob(f"{glob.escape(str(self._code / folder))}/**/*", recursive=True)
            if path.endswith(suffixes) and os.path.isfile(path)
        )
        return sorted({os.path.relpath(path, self._code) for path in paths} - set(tree.split("\0")))

    def _ask(self, *arguments: str) -> str:
        options = ("-c", "core.fileMode=false")
        return run(self._repo, *options, *arguments, stdin=None, errors="surrogateescape", **self._env)
