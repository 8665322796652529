"""A program as a revision of its own repository has it (script.rev), beside what git does not know: prepared data.

The tracked files of the commit lie in the data folder, read by every run of it, with links to the untracked ones.
"""

import os
import shutil
import tempfile
from pathlib import Path

from bench.config import user_code
from bench.data.sources.source import data_root
from bench.machine import git


def checked_out(root: Path, rev: str) -> tuple[Path, str]:
    """-> (folder with the files of root at this revision, full commit).  ValueError: there is no such revision."""
    commit = git.ask(root, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{rev}^{{commit}}")
    if commit is None:
        raise ValueError(f"script.rev={rev}: git in {root} has no such revision: git log --oneline there shows some")
    commit = commit.strip()
    folder = data_root() / "revisions" / f"{root.name}-{commit[:12]}"
    try:
        inner = git.run(root, "rev-parse", "--show-prefix").strip()  # root may lie below its repository's top
        if not folder.is_dir():
            _export(root, f"{commit}:{inner}", folder)
        others = git.run(root, "ls-files", "--others", "--directory", "-z").split("\0")
    except git.Failed as error:
        raise ValueError(f"script.rev={rev}: {error}") from None
    for name in filter(None, others):
        link = folder / name.rstrip("/")
        if not os.path.lexists(link) and not name.endswith(user_code.SUFFIXES) and user_code.is_linked(root / name):
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(root / name.rstrip("/"))
    return folder, commit


def _export(root: Path, tree: str, folder: Path) -> None:
    """Whole or not at all, also where two processes make it at once."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".made."))
    try:
        index = str(made / ".index.tmp")
        git.run(root, "read-tree", tree, GIT_INDEX_FILE=index)
        git.run(root, "checkout-index", "--all", f"--prefix={made / 'files'}/", GIT_INDEX_FILE=index)
        if not folder.is_dir():
            (made / "files").rename(folder)
    finally:
        shutil.rmtree(made, ignore_errors=True)
