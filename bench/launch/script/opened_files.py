"""Which data and sources a script opened, as the workers of its ranks noted them, and the doubts that follow."""

import collections
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.base import private
from bench.base.paths import REPO
from bench.base.reading import plain_file
from bench.base.text_table import some
from bench.launch import opened
from bench.launch.opened import OTHER_DATA, OTHER_SOURCE, Opened
from bench.launch.prepare import Job
from bench.launch.script import work_folder
from bench.record import race_folder
from bench.record.step_files import StepRow
from bench.training.open_watch import MUCH, OTHERS

MAX_SHOWN = 200
READER_LATE_TIMES = 3.0  # margin for the estimate of a reader's delay (assumed; 1.0 accused one run in 94)
PRINTED_LATE_S = 0.1  # delay of a line that another thread of the script prints (assumed)


class OpenedFiles:
    """Which data a script opened, and whether these are the track's.

    work_shards: true paths of the shards of each split that its work/ had when it began.
    """

    def __init__(self, folder: Path, job: Job, notes: Sequence[Opened], work_shards: Mapping[str, Sequence[str]]):
        assert job.script is not None
        self._is_confined = job.script.sandbox
        work_path, self._notes = (folder / work_folder.WORK).absolute(), notes
        # a results folder may be a link, which the working folder of a process is not
        self._folder = os.path.join(folder.absolute(), "")
        self._works = (os.path.join(os.path.realpath(work_path), ""), os.path.join(work_path, ""))
        shards = {"train": job.dataset.train, "val": job.dataset.val}
        self._ours = {
            split: {*work_shards[split], *(os.path.realpath(shard.path) for shard in shards[split])} for split in shards
        }
        self._shards = self._ours["train"] | self._ours["val"]
        homes = (work_path, job.script.root)  # folders of the copies, and of the sources themselves
        names = [name.removeprefix("script/") for name in job.script.sources]
        sources = {os.path.realpath(home / name) for home in homes for name in names}
        self._own = tuple(os.path.join(os.path.realpath(path), "") for path in (folder, job.script.root))
        read, self._sources = opened.foreign(notes, self._shards | sources, self._own, self._works[0])
        self._data = opened.without_small(read)
        self.read = [opened.source_of(note["real"]) for note in notes if note["reads"]]
        self.are_fixed = opened.fixes_data(job)
        others = [note for note in read if note["real"].startswith(self._own) or self.are_fixed]
        self._stated = [*self._data, *(note for note in others if note not in self._data)]
        # an empty file that it only reads may be a switch
        written = {note["real"] for note in notes if note["writes"] or note["hides"]}
        empty = {n["real"]: n for n in notes if n["reads"] and not n["num_bytes"]}.values()
        outside = (note for note in [*read, *empty] if not note["real"].startswith(self._own))
        self._elsewhere = [note for note in outside if note["real"] not in written]
        # true if its track fixes no data and it opened none of the track's
        self.are_own_data = not self.are_fixed and not self._shards & {note["real"] for note in notes}

    def names(self) -> list[str]:
        """Returns the names of the data files that it read, each once, as the record shows them."""
        shards = {self._name(note) for note in self._notes if note["real"] in self._shards}
        return sorted(shards | set(map(self._name, self._data)))[:MAX_SHOWN]

    def states(self) -> dict[str, list[int]]:
        """Returns {name: [size in bytes, ns of its last change]} of the data files that are not the track's, and of
        small files beside the script; if the track fixes the data, of all of the user's."""
        states = {self._name(note): [note["num_bytes"], note["changed_ns"]] for note in self._stated}
        return dict(itertools.islice(states.items(), work_folder.MAX_LISTED))

    def elsewhere(self) -> dict[str, list[int]]:
        """Returns the same of files outside of its folders that it read and did not write, and that are still there;
        [0, 0] of those that it looked for and that are still missing.

        Of more than MAX_LISTED files, OTHERS stand for those in the fullest folders: how many, and their last change.
        In a sandbox there are none.
        """
        states = dict[str, list[int]]()
        for note in [] if self._is_confined else self._elsewhere:
            path = note["real"] if note["path"].startswith(self._works) else note["path"]  # of a link in work/
            if os.path.exists(path) != opened.is_missing(note):
                states[self._shared(path)] = [note["num_bytes"], note["changed_ns"]]
        in_folder = collections.Counter(map(os.path.dirname, states))
        names = sorted(states, key=lambda name: in_folder[os.path.dirname(name)])
        others = [states[name] for name in names[work_folder.MAX_LISTED :]]
        listed = {name: states[name] for name in names[: work_folder.MAX_LISTED]}
        last_ns = max((changed_ns for _, changed_ns in others), default=0)
        return listed | ({OTHERS: [len(others), last_ns]} if others else {})

    def written(self) -> list[str]:
        """Returns the names of what it wrote, moved, linked or removed outside of its own folders, by both paths; of
        more than MAX_LISTED, folders in place of what lies deepest."""
        notes = (note for note in self._notes if note["writes"] or note["hides"] or note["num_bytes"] == MUCH)
        first = {note["real"]: note for note in reversed(self._notes)}
        made = {real for real, note in first.items() if note["writes"] and not note["changed_ns"]}  # it was not there
        kept = [note for note in notes if not self._is_confined and _may_be_written(note)]
        kept = [note for note in kept if note["real"] not in made or os.path.lexists(note["real"])]
        paths = {path for note in kept for path in (note["path"], note["real"])}
        outside = {path for path in paths if not f"{path}/".startswith((*self._own, self._folder))}
        while len(outside) > work_folder.MAX_LISTED:
            depth = max(path.count("/") for path in outside)
            outside = {os.path.dirname(path) if path.count("/") == depth else path for path in outside}
        return sorted(map(self._shared, outside))

    def _name(self, note: Opened) -> str:
        path = note["path"]
        for work in self._works:
            path = path.replace(work, "work/")
        return self._shared(path)

    def _shared(self, path: str) -> str:
        return private.redact(plain_file.name_in_utf8(path), REPO)

    def doubts(self) -> list[str]:
        """Returns a sentence for each doubt: other data than the track's, none of the track's, or unknown sources.

        If the track fixes no data (are_own_data), the script's own are as good, and only the sources matter.
        """
        doubts = []
        if not self.are_own_data:
            if self._data:
                doubts.append(OTHER_DATA.format(some([self._short(note["real"]) for note in self._data], 1)))
            for split, so in (
                ("train", "it trained on others (track=free allows that)"),
                ("val", "its val_loss is not of the track's tokens"),
            ):
                if not self._ours[split] & {note["real"] for note in self._notes}:
                    doubts.append(f"it never opened the track's {split} shards: {so}, or opened them unseen")
        written = sorted({note["real"] for note in self._notes if note["writes"]})
        if overwritten := [path for path in written if path in self._shards]:
            doubts.append(f"it opened the track's data for writing: {Path(overwritten[0]).name}")
        if others := list(filter(self._is_of_another_arm, written)):
            doubts.append(f"it wrote to a file of another arm of its race: {some(others, 1)}")
        if self._sources:
            doubts.append(OTHER_SOURCE.format(some(list(map(self._short, self._sources)), 1)))
        return doubts

    def _is_of_another_arm(self, path: str) -> bool:
        arms = [os.path.join(name, "") for name in os.environ.get(race_folder.ARMS, "").split(os.pathsep) if name]
        owners = [folder for folder in (*arms, *self._own) if path.startswith(folder)]
        return bool(owners) and max(owners, key=len) not in self._own

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
        return [note["t_ns"] for note in self._notes if note["real"] in own and note["reads"]]

    def _short(self, path: str) -> str:
        for folder, name in zip(self._own, ("the run's folder", "beside the script"), strict=True):
            if path.startswith(folder):
                return f"{name}/{path[len(folder) :]}"
        return path


def _may_be_written(note: Opened) -> bool:
    """Returns whether a note of writing can be true: it is made before the attempt, which may fail."""
    is_folder = os.path.isdir(note["real"]) and not os.path.islink(note["real"])
    if not note["changed_ns"] and (is_folder or not os.path.lexists(note["real"])):
        return False  # it was not there before, and an empty folder changes nothing that others read
    return os.access(note["real"] if os.path.exists(note["real"]) else os.path.dirname(note["real"]), os.W_OK)


def changed_since(run: Mapping[str, Any], job: Job) -> Iterator[str]:
    """Yields the names of files that a script read, other than its sources, that have changed since."""
    script, of_rev = job.script, job.config.script is not None and job.config.script.rev is not None
    read: Mapping[str, list[int]] = (run.get("script") or {}).get("data_states") or {}
    for name, seen in read.items():
        is_beside = script is not None and name.startswith("work/")
        path = script.root / name[len("work/") :] if script and is_beside else Path(REPO, os.path.expanduser(name))
        if not is_beside or path.is_symlink() or not of_rev:  # others of a revision are the commit's
            if work_folder.REDACTED.search(name):
                continue
            if seen != work_folder.state_of(path):
                yield name
