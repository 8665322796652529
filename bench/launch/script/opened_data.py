"""What data a script really opened, and whether those are the track's."""

import os
import sys
from pathlib import Path
from typing import TypedDict

from bench import private
from bench.launch.script import work_folder
from bench.paths import REPO
from bench.training import script_worker

# Where programs keep what they have compiled, and what is installed.  Not ~/.cache: it may hold weights and data.
CACHES = (".triton", "torchinductor", "site-packages", "dist-packages")
MAX_SHOWN = 200


class Opened(TypedDict):
    """A file that a script opened, as its worker noted it; the script can write there too."""

    path: str  # as the script named it
    real: str  # without links
    writes: bool


def shown(folder: Path, job, opened: list[dict]) -> list[str]:
    """Data files that the script opened, each once, as the record names them."""
    work = str((folder / work_folder.WORK).absolute())
    names = {one["path"].replace(work, "work") for one in opened if _is_data(one)}
    return sorted(private.redact(name, REPO) for name in names)[:MAX_SHOWN]


def is_own(folder: Path, job, opened: list[dict]) -> bool:
    """Whether the script brought data of its own: its track fixes none, and it opened none of what it was given."""
    if any(key.split(".")[0] == "data" for key in job.config.track.fixed):
        return False
    real = {one["real"] for one in opened if _is_data(one)}
    return not any(real & _of_split(folder, job, split) for split in ("train", "val"))


def doubts(folder: Path, job, opened: list[dict]) -> list[str]:
    """Sentences: it read other data than the track's, never the track's, or code that its identity lacks.

    Where the track fixes no data (is_own()) a script's own are as good: only the code is asked for.
    """
    ours = {split: _of_split(folder, job, split) for split in ("train", "val")}
    work = (folder / work_folder.WORK).absolute()
    real = {one["real"] for one in opened if _is_data(one)}
    written = {one["real"] for one in opened if one["writes"]}
    others = sorted(real - ours["train"] - ours["val"] - written - {path for path in real if _is_cache(path)})
    result = [] if is_own(folder, job, opened) else _of_data(real, ours, others, work, job)
    overwritten = sorted(written & (ours["train"] | ours["val"]))
    if overwritten:
        result.append(f"it opened the track's data for writing: {Path(overwritten[0]).name}")
    read = {one["real"] for one in opened if one["path"].endswith(script_worker.SOURCES) and not one["writes"]}
    unknown = sorted({path for path in read if not path.endswith(script_worker.DATA)} - _known(job, work))
    unknown = [path for path in unknown if path not in written and not _is_cache(path)]
    if unknown:
        result.append(f"it read a source that its identity lacks: {_short(unknown[0], work, job)}")
    return result


def _of_data(real, ours, others, work, job):
    result = []
    if others:
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        result.append(f"it opened data that are not the track's: {_short(others[0], work, job)}{more}")
    for split, words in (
        ("train", "it trained on others (track=free allows that)"),
        ("val", "its val_loss is not of the track's tokens"),
    ):
        if not real & ours[split]:
            result.append(f"it never opened the track's {split} shards: {words}, or opened them unseen")
    return result


def _is_data(one):
    return one["path"].endswith(script_worker.DATA) or one["real"].endswith(script_worker.DATA)


def _of_split(folder, job, split):
    """True paths of the shards, and of what was made of them."""
    paths = {os.path.realpath(shard.path) for shard in getattr(job.dataset, split)}
    data = folder / work_folder.WORK / job.script.data / f"{split}.bin"
    return paths | ({os.path.realpath(data)} if job.script.raw_data and data.is_symlink() else set())


def _known(job, work):
    """True paths of the identity's files, as copies and at home."""
    names = [name.removeprefix("script/") for name in job.script.sources]
    return {os.path.realpath(work / name) for name in names} | {
        os.path.realpath(job.script.path.parent / name) for name in names
    }


def _is_cache(path):
    parts = Path(path).parts
    return path.startswith((sys.prefix, sys.base_prefix)) or any(part.startswith(CACHES) for part in parts)


def _short(path, work, job):
    for folder, name in ((str(work), "work"), (os.path.realpath(job.script.path.parent), "beside the script")):
        if path.startswith(folder + os.sep):
            return f"{name}/{path[len(folder) + 1 :]}"
    return path
