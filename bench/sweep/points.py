"""The points of a sweep as runs: each with its own process group and record, what is complete skipped.

Each point leaves a line in the sweep's folder, whichever process made its run: results/sweeps/ID/points.jsonl.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.launch import launcher, ready, summary
from bench.launch.console import say
from bench.launch.prepare import Job, asked, prepare, this_machine
from bench.machine.signals import Interrupted
from bench.paths import results_root
from bench.record import index, run_folder
from bench.sweep import objective, packing, stopping

POINTS = "points.jsonl"  # {"number", "overrides", "folder"} of each point that has a record


@dataclass
class Points:
    """Makes the runs that Hydra asks for (bench/config/multirun.py).  It is pickled into a launcher's processes."""

    folder: Path  # of the sweep, absolute
    command: list[str]  # what the user typed, for the records
    anyway: bool = False  # on a busy machine too
    objective: str = objective.DEFAULT
    stops: dict[tuple, Callable] = field(default_factory=dict)  # a search's, by the words of a point
    asked_about_machine: bool = False
    slowdown_pct: float | None = None  # of runs side by side; None: not measured yet
    asked: list[list[str]] = field(default_factory=list)  # of every point that all() was given, in its process

    def one(self, words: list[str], number: int) -> float | None:
        """A run in a process of somebody else's launcher -> its objective.  words: its overrides."""
        job = prepare(words, say=lambda text: say("data", text))
        run = complete_before([job]).get(0)
        if run is None:
            run = launcher.launch(job, self.command)
            say("run", summary.last_words(run), always=True)
        else:
            _say_complete(job, run)
        self._keep(number, job, run)
        return objective.of(run, self.objective)

    def all(self, points: list[list[str]], first_number: int, settings: dict) -> list[float | None]:
        """Runs that follow each other, all checked before the first; one that fails does not end the sweep.

        settings: of our launcher, hydra.launcher.*.  Raises Interrupted, ValueError.
        """
        where = self._places(points, settings)
        machine = where[0].machine() if where else None
        prepared = [prepare(words, say=lambda text: say("data", text), machine=machine) for words in points]
        self.asked += [job.overrides for job in prepared]
        kinds = {_kind(job): job for job in prepared}  # of equal points one is run
        jobs = list(kinds.values())
        found = complete_before(jobs)
        numbers = {kind: number for number, kind in enumerate(kinds)}
        for number, run in found.items():
            _say_complete(jobs[number], run)
            self._keep(first_number + number, jobs[number], run)
        words_of = {job_kind: tuple(words) for job_kind, words in zip(map(_kind, prepared), points)}
        todo = [number for number in range(len(jobs)) if number not in found]

        def stop_of(job):
            if settings["stop_above_nats"] is None:
                return self.stops.get(words_of[_kind(job)])
            before = [run for _, run in self.made()]
            return stopping.AboveBest(settings["stop_above_nats"], settings["stop_from_frac"], before)

        if todo:
            if not self.asked_about_machine:
                ready.agree(ready.checks(jobs[todo[0]]), self.anyway)
                self.asked_about_machine = True
            words = [" ".join(jobs[number].overrides) for number in todo]
            if len(todo) > 1 and where:
                found |= self._side_by_side([(number, jobs[number].overrides) for number in todo], where, first_number)
                todo = []
            runs = launcher.launch_each([jobs[number] for number in todo], self.command, words, stop_of=stop_of)
            for number, run in zip(todo, runs):
                found[number] = run
                self._keep(first_number + number, jobs[number], run)
                if run["status"] == "aborted":
                    raise Interrupted(run["failure"]["signal"])
        runs = (found.get(numbers[_kind(job)]) for job in prepared)
        return [objective.of(run, self.objective) for run in runs]

    def _places(self, points, settings):
        """Where runs go side by side, [] where they follow each other: so they do where that costs too much."""
        if settings["parallel"] is None:
            return []
        if self.stops and any(self.stops.values()) or settings["stop_above_nats"] is not None:
            raise ValueError(
                "hydra.launcher.parallel: runs side by side cannot be stopped midway: no pruner and no stop_above_nats"
            )
        on_cpu = asked(points[0], this_machine()).hardware.device == "cpu" or not this_machine().num_gpus
        where = packing.places(settings["parallel"], settings["cores_per_run"], on_cpu)
        if len(where) < 2 or len(points) < 2:
            return []
        if self.slowdown_pct is None:
            self.slowdown_pct = packing.measured(where)
        limit_pct = settings["max_slowdown_pct"]
        facts = f"{self.slowdown_pct:.1f} % slower than alone (hydra.launcher.max_slowdown_pct={limit_pct:g})"
        if self.slowdown_pct > limit_pct:
            say("sweep", f"one run at a time: {len(where)} side by side are {facts}", always=True)
            return []
        say(
            "sweep",
            f"{len(where)} runs side by side, {facts}, on {' | '.join(map(str, where))}; no time of them counts",
        )
        return packing.with_slowdown(where, self.slowdown_pct)

    def _side_by_side(self, todo, where, first_number):
        """todo: (number, overrides) -> {number: record} of those that left one."""
        found = {}
        numbered = [(first_number + number, words) for number, words in todo]

        def record_of(number):
            return next((run for kept, _, run in self._kept() if kept == number), None)

        for number, run, tail in packing.run_all(numbered, where, self.folder / "logs", record_of):
            say("run", summary.last_words(run) if run else f"left no record:\n{tail}", always=not run)
            if run:
                found[number - first_number] = run
        return found

    def beside(self, words: list[str], place: packing.Place, number: int) -> dict:
        """One of several runs, in a process of its own, pinned to its place -> its record."""
        packing.pin(place)
        job = prepare(words, say=lambda text: say("data", text))
        run = launcher.launch(job, self.command, beside=place.fact())
        self._keep(number, job, run)
        return run

    def _keep(self, number, job, run):
        self.folder.mkdir(parents=True, exist_ok=True)
        line = {"number": number, "overrides": job.overrides, "folder": run["folder"]}
        with open(self.folder / POINTS, "a") as file:
            file.write(json.dumps(line) + "\n")

    def made(self) -> list[tuple[list[str], dict]]:
        """(overrides, record with its folder) of every point that has one, in order."""
        return [(words, run) for _, words, run in self._kept()]

    def _kept(self):
        try:
            lines = [json.loads(line) for line in (self.folder / POINTS).read_text().splitlines()]
        except FileNotFoundError:
            return []
        lines.sort(key=lambda line: line["number"])
        return [
            (line["number"], line["overrides"], run_folder.read(line["folder"]) | {"folder": str(line["folder"])})
            for line in lines
        ]

    def was_stopped(self, words: list[str]) -> bool:
        """Whether the run of a point was stopped before its end."""
        return any(run["status"] == "stopped" for made, run in self.made() if made == words)

    def not_begun(self) -> list[list[str]]:
        """The points that were asked for here and have no record: a signal ended the sweep."""
        begun = {tuple(words) for words, _ in self.made()}
        return [words for words in self.asked if tuple(words) not in begun]


def _kind(job):
    return job.config_id, job.config.seed


def _say_complete(job, run):
    say("sweep", f"{' '.join(job.overrides)}: complete before, {run['run_id']}{_doubts(run)}")
    if exporters := ",".join(job.config.exporters):
        say("sweep", f"not exported again: ./run.sh dashboard {run['run_id']} --to {exporters}")


def _doubts(run):
    return "" if run["validity"] == "valid" else f", {run['validity']}: {'; '.join(run['validity_reasons'])}"


def complete_before(jobs: Sequence[Job]) -> dict[int, dict]:
    """Index of a job: a complete record of its config, seed, raced code and data, a valid one where there is one.

    A race's warm-up runs do not count.
    """
    folders = {results_root() / job.config.track.name for job in jobs}
    known = {}
    for folder, row in index.read_rows(folder for folder in folders if folder.is_dir()):
        if row["status"] == "complete" and not row["discarded"]:
            files = json.loads(row["setting"])
            data = frozenset((files["train_data"] or []) + (files["val_data"] or []))
            kind = (row["track"], row["config_id"], row["seed"], row["source_sha256"], data)
            known.setdefault((kind, row["validity"] == "valid"), folder)
    found = {}
    for number, job in enumerate(jobs):
        data = frozenset(shard.sha256 for shard in job.dataset.train + job.dataset.val)
        kind = (job.config.track.name, job.config_id, job.config.seed, job.source_sha256, data)
        if folder := known.get((kind, True)) or known.get((kind, False)):
            found[number] = run_folder.read(folder) | {"folder": str(folder)}
    return found
