"""Which data and sources a script opened, as the workers of its ranks noted them, and the doubts that follow."""

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NotRequired, TypedDict

from bench.base import private
from bench.base.paths import REPO
from bench.base.reading import json_file, plain_file
from bench.base.reading.damage import Damaged
from bench.launch.prepare import Job
from bench.launch.script import work_folder
from bench.record.step_files import StepRow
from bench.training import script_worker

# Folders of compiled and of installed code.  Not ~/.cache, which may hold weights and data.
CACHES = (".triton", "torchinductor", "site-packages", "dist-packages")
DATA = script_worker.DATA  # suffixes of data files
MAX_SHOWN = 200
READER_LATE_TIMES = 3.0  # margin for the estimate of a reader's delay (assumed; 1.0 accused one run in 94)
PRINTED_LATE_S = 0.1  # delay of a line that another thread of the script prints (assumed)


class Opened(TypedDict):
    """A file that a script opened, as its worker noted it; the script itself can write such notes too."""

    path: str  # as the script named it
    real: str  # with links resolved
    writes: bool
    t_ns: NotRequired[int]  # time.perf_counter_ns


def noted(folder: Path, rank: int) -> Iterator[Opened]:
    """Yields the files that the worker of a rank noted."""
    path = folder / f".rank{rank}.opened.tmp"
    with contextlib.suppress(Damaged), plain_file.lines(path) as lines:
        for line in lines:
            with contextlib.suppress(Damaged):  # a line that a killed rank left unfinished
                yield json_file.parsed(line, path, Opened)


class OpenedFiles:
    """Which data a script opened, and whether these are the track's.

    work_shards: true paths of the shards of each split that its work/ had when it began.
    """

    def __init__(self, folder: Path, job: Job, opened: Sequence[Opened], work_shards: Mapping[str, Sequence[str]]):
        assert job.script is not None
        self._script, self._work = job.script, (folder / work_folder.WORK).absolute()
        self._opened = opened
        self._data = [file for file in opened if file["path"].endswith(DATA) or file["real"].endswith(DATA)]
        self._real = {file["real"] for file in self._data}
        shards = {"train": job.dataset.train, "val": job.dataset.val}
        self._ours = {
            split: {*work_shards[split], *(os.path.realpath(shard.path) for shard in shards[split])} for split in shards
        }
        self.read = [file["real"] for file in opened if not file["writes"]]
        self.are_fixed = any(key.split(".")[0] == "data" for key in job.config.track.fixed)  # by its track
        # true if its track fixes no data and it opened none of the track's
        self.are_own_data = not self.are_fixed and not self._real & (self._ours["train"] | self._ours["val"])

    def names(self) -> list[str]:
        """Returns the names of the opened data files, each once, as the record shows them."""
        names = {file["path"].replace(str(self._work), "work") for file in self._data}
        return sorted(private.redact(plain_file.name_in_utf8(name), REPO) for name in names)[:MAX_SHOWN]

    def doubts(self) -> list[str]:
        """Returns a sentence for each doubt: other data than the track's, none of the track's, or unknown sources.

        If the track fixes no data (are_own_data), the script's own are as good, and only the sources matter.
        """
        written = {file["real"] for file in self._opened if file["writes"]}
        doubts = []
        if not self.are_own_data:
            others = self._real - self._ours["train"] - self._ours["val"] - written
            if foreign := sorted(path for path in others if not _is_cache(path)):
                rest = f" and {len(foreign) - 1} more" if len(foreign) > 1 else ""
                doubts.append(f"it opened data that are not the track's: {self._short(foreign[0])}{rest}")
            for split, so in (
                ("train", "it trained on others (track=free allows that)"),
                ("val", "its val_loss is not of the track's tokens"),
            ):
                if not self._real & self._ours[split]:
                    doubts.append(f"it never opened the track's {split} shards: {so}, or opened them unseen")
        if overwritten := sorted(written & (self._ours["train"] | self._ours["val"])):
            doubts.append(f"it opened the track's data for writing: {Path(overwritten[0]).name}")
        homes = (self._work, self._script.root)  # folders of the copies, and of the sources themselves
        names = [name.removeprefix("script/") for name in self._script.sources]
        expected = {os.path.realpath(home / name) for home in homes for name in names}
        unknown = {file["real"] for file in self._opened if file["path"].endswith(script_worker.SOURCES)} - expected
        unknown = {path for path in unknown & set(self.read) - written if not path.endswith(DATA)}
        if foreign := sorted(path for path in unknown if not _is_cache(path)):
            doubts.append(f"it read a source that its identity lacks: {self._short(foreign[0])}")
        return doubts

    def validation_at_start_s(self, rows: list[StepRow]) -> float | None:
        """Returns the seconds from the first opening of a validation shard to the line of the validation at step 0,
        None if they were not observed."""
        opens_ns, line_ns = self._validation_opens_ns(), rows[0].get("val_line_t_ns")
        if rows[0]["step"] or not line_ns or not opens_ns or opens_ns[0] >= line_ns:
            return None
        return float(line_ns - opens_ns[0]) / 1e9

    def while_training(self, rows: list[StepRow], reader_late_s: float) -> list[str]:
        """Returns a sentence if a rank opened a validation shard while the script trained.

        An opening counts after the first step's line and before the last step's line that precedes the next validation:
        no rank is a whole step ahead of the first.  That line may have arrived before its stamp, by the reader's
        estimate and a few times that on a starved machine, or another thread of the script may have printed it late.
        """
        steps = sorted((row["line_t_ns"], row["step"]) for row in rows if row["line_t_ns"] is not None)
        validated_ns = sorted(row["val_line_t_ns"] for row in rows if row["val_line_t_ns"] is not None)
        early_ns, fault_steps = round(1e9 * (READER_LATE_TIMES * reader_late_s + PRINTED_LATE_S)), []
        for open_ns in self._validation_opens_ns():
            next_ns = next((t_ns for t_ns in validated_ns if t_ns > open_ns), None)
            before_ns = [t_ns for t_ns, _ in steps if next_ns is not None and t_ns <= next_ns]
            if steps and before_ns and steps[0][0] < open_ns < before_ns[-1] - early_ns:
                fault_steps.append(next(step for t_ns, step in steps if t_ns > open_ns))
        if not fault_steps:
            return []
        where = f"at {len(set(fault_steps))} steps, first at step {fault_steps[0]}"
        return [f"it opened the track's validation shards while it trained, {where}"]

    def _validation_opens_ns(self) -> list[int]:
        own = self._ours["val"] - self._ours["train"]
        reads = [file for file in self._opened if file["real"] in own and not file["writes"]]
        return sorted(file["t_ns"] for file in reads if file.get("t_ns"))

    def _short(self, path: str) -> str:
        beside = os.path.realpath(self._script.root)
        for folder, name in ((str(self._work), "work"), (beside, "beside the script")):
            if path.startswith(folder + os.sep):
                return f"{name}/{path[len(folder) + 1 :]}"
        return path


def _is_cache(path: str) -> bool:
    parts = Path(path).parts
    return path.startswith((sys.prefix, sys.base_prefix)) or any(part.startswith(CACHES) for part in parts)
