"""What changed in the source between two runs, rebuilt from what their folders say: commit, patch and untracked sources.

Nothing is checked out and nothing is written into the repository: trees are made in an index and an object store of their
own.  What a record says is data for git, which refuses paths that lead outside.
"""

import json
import os
import subprocess
import tempfile
from pathlib import Path

from bench.paths import INSTALLED, REPO

MAX_PATCH_CHARS = 200_000
SHOWN = ("--", ".", ":(exclude)results")
TIMEOUT_S = 60


class Unknown(Exception):
    """Why a run's source cannot be rebuilt."""


def of_folders(a_folder, b_folder, repo=REPO):
    """Run folders -> {"files": [{"path", "added", "removed"}], "patch": text, "is_cut", "unknown"}.

    Lines are None for binary files; the patch is cut to MAX_PATCH_CHARS at a line.  unknown says why there is none.
    """
    with tempfile.TemporaryDirectory(prefix="speedrun-code-") as scratch:
        try:
            git = _Git(repo, scratch)
            trees = [git.tree(Path(folder)) for folder in (a_folder, b_folder)]
            files = [
                _counted(line)
                for line in git("diff", "--numstat", "--no-renames", "-z", *trees, *SHOWN).split("\0")
                if line
            ]
            patch = git("diff", "--no-color", "--no-ext-diff", "--no-textconv", *trees, *SHOWN)
        except Unknown as error:
            return {"files": [], "patch": "", "is_cut": False, "unknown": str(error)}
    cut = patch[:MAX_PATCH_CHARS].rpartition("\n")[0] + "\n" if len(patch) > MAX_PATCH_CHARS else patch
    return {"files": files, "patch": cut, "is_cut": len(cut) < len(patch), "unknown": None}


def _counted(line):
    added, removed, path = line.split("\t", 2)
    return {
        "path": path,
        "added": None if added == "-" else int(added),
        "removed": None if removed == "-" else int(removed),
    }


class _Git:
    def __init__(self, repo, scratch):
        self._repo, self._scratch = repo, scratch
        os.mkdir(f"{scratch}/objects")
        self._env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
        known = self("rev-parse", "--git-path", "objects").strip()
        self._env |= {
            "GIT_INDEX_FILE": f"{scratch}/index",
            "GIT_OBJECT_DIRECTORY": f"{scratch}/objects",
            "GIT_ALTERNATE_OBJECT_DIRECTORIES": str(Path(repo, known).resolve()),
        }

    def __call__(self, *words, why=None, given=None):
        """Its output.  Raises Unknown with the reason, or with git's own words."""
        if INSTALLED:
            raise Unknown("the installed program has no repository: compare them in a clone")
        try:
            done = subprocess.run(
                ["git", *words], cwd=self._repo, env=self._env, input=given, capture_output=True, timeout=TIMEOUT_S
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise Unknown(f"git cannot be run: {error}") from None
        if done.returncode:
            raise Unknown(why or f"git {words[0]}: {done.stderr.decode(errors='replace').strip()}")
        return done.stdout.decode(errors="replace")

    def tree(self, folder):
        """The run's source as a tree."""
        try:
            found = json.loads((folder / "code" / "commit.json").read_text())
            patch = (folder / "code" / "diff.patch").read_bytes()
            commit, untracked = found["commit"], list(found["untracked"] or ())
        except (OSError, ValueError, KeyError, TypeError):
            raise Unknown(f"{folder.name} does not say which code ran") from None
        if not commit:
            raise Unknown(f"{folder.name} ran outside of git")
        if not isinstance(commit, str) or set(commit) - set("0123456789abcdef"):
            raise Unknown(f"{folder.name} names no commit: {commit!r:.60}")
        self("cat-file", "-e", f"{commit}^{{commit}}", why=f"commit {commit[:12]} is not in this repository: fetch it")
        self("read-tree", commit)
        if patch.strip():
            self(
                "apply",
                "--cached",
                "--whitespace=nowarn",
                "-",
                given=patch,
                why=f"the patch of {folder.name} does not fit its commit",
            )
        for name in untracked:
            self._add(folder, name)
        return self("write-tree").strip()

    def _add(self, folder, name):
        root = (folder / "code" / "untracked").resolve()
        path = (root / str(name)).resolve()
        if not path.is_relative_to(root) or not path.is_file():
            raise Unknown(f"{folder.name} does not hold its untracked source {name}")
        blob = self("hash-object", "-w", "--stdin", given=path.read_bytes()).strip()
        self("update-index", "--add", "--cacheinfo", f"100644,{blob},{name}")
