"""What data a script really opened, and whether those are the track's."""

import os
import sys
from pathlib import Path
from typing import NotRequired, TypedDict

from bench.base import private
from bench.base.paths import REPO
from bench.launch.script import work_folder
from bench.training import script_worker

# Where programs keep what they have compiled, and what is installed.  Not ~/.cache: it may hold weights and data.
CACHES = (".triton", "torchinductor", "site-packages", "dist-packages")
MAX_SHOWN = 200
READER_LATE_TIMES = 3.0  # what a reader says of its own lateness is an estimate (assumed; 1.0 accused one run in 94)
PRINTED_LATE_S = 0.1  # a line that another thread of the script prints (assumed)


class Opened(TypedDict):
    """A file that a script opened, as its worker noted it; the script can write there too."""

    path: str  # as the script named it
    real: str  # without links
    writes: bool
    t_ns: NotRequired[int]  # time.perf_counter_ns


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


def validation_at_start_s(folder: Path, job, opened: list[dict], rows: list[dict]) -> float | None:
    """From the first time that it opened a validation shard to the line of its validation at step 0; None: not seen."""
    opens_ns, line_ns = _validation_opens_ns(folder, job, opened), rows[0].get("val_line_t_ns")
    is_seen = not rows[0]["step"] and line_ns and opens_ns and opens_ns[0] < line_ns
    return (line_ns - opens_ns[0]) / 1e9 if is_seen else None


def opened_while_training(folder: Path, job, opened: list[dict], rows: list[dict], reader_late_s: float) -> list[str]:
    """A sentence where a rank opened a validation shard while the script trained.

    Between two lines of steps, and earlier than the last line of a step before the next validation's: no rank is a
    whole step ahead of the first.  That line may have come earlier than its stamp, by what its reader estimates and
    a few times that on a starved machine, or have been printed late by another thread of the script.
    """
    steps = sorted((row["line_t_ns"], row["step"]) for row in rows if row["line_t_ns"] is not None)
    validated_ns = sorted(row["val_line_t_ns"] for row in rows if row["val_line_t_ns"] is not None)
    early_ns, found = round(1e9 * (READER_LATE_TIMES * reader_late_s + PRINTED_LATE_S)), []
    for open_ns in _validation_opens_ns(folder, job, opened):
        next_ns = next((t_ns for t_ns in validated_ns if t_ns > open_ns), None)
        before_ns = [t_ns for t_ns, _ in steps if next_ns is not None and t_ns <= next_ns]
        if steps and before_ns and steps[0][0] < open_ns < before_ns[-1] - early_ns:
            found.append(next(step for t_ns, step in steps if t_ns > open_ns))
    if not found:
        return []
    num_steps = len(set(found))
    return [f"it opened the track's validation shards while it trained, at {num_steps} steps, first at step {found[0]}"]


def _validation_opens_ns(folder, job, opened):
    ours = _of_split(folder, job, "val") - _of_split(folder, job, "train")
    return sorted(one["t_ns"] for one in opened if one["real"] in ours and not one["writes"] and one.get("t_ns"))


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
