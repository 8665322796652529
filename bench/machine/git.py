"""git, asked from a repository's folder and never through the GIT_ variables of the process that calls."""

import os
import subprocess
from pathlib import Path

from bench.base.paths import INSTALLED

TIMEOUT_S = 300  # adding a worktree of a large repository


class Failed(Exception):
    """git cannot be run, or refused; the message is its own."""


def run(repo: Path | str, *words: str, given: bytes | None = None, errors: str = "surrogateescape", **env: str) -> str:
    """Output of `git WORDS` in this folder as text.  given: bytes for its standard input; env: variables beside ours.

    errors: how bytes that are not UTF-8 are decoded.  Raises Failed, also where the harness is installed: a repository
    around it, such as that of its venv, is another project's.
    """
    if INSTALLED:
        raise Failed("the installed program has no repository: use a clone")
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")} | env
    try:
        done = subprocess.run(["git", *words], cwd=repo, env=env, input=given, capture_output=True, timeout=TIMEOUT_S)
    except (OSError, subprocess.SubprocessError) as error:
        raise Failed(f"git cannot be run: {error}") from None
    if done.returncode:
        verb = next(word for word in words if not word.startswith("-") and "=" not in word)
        raise Failed(f"git {verb}: {done.stderr.decode(errors='replace').strip() or f'exit code {done.returncode}'}")
    return done.stdout.decode(errors=errors)


def ask(repo: Path | str, *words: str) -> str | None:
    """The same, or None where git, the repository or the commit is missing."""
    try:
        return run(repo, *words)
    except Failed:
        return None
