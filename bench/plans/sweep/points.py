"""Makes runs of a sweep's points, each in a new process group with its own record, and skips what is complete.

Hydra's sweepers and launchers call this, through bench/config/multirun.py: all() in the sweep's process, or run_one()
in a process of another launcher. The sweep's folder (bench/record/sweep.py) keeps each point's record.
"""

import contextlib
import itertools
import json
import os
import shlex
import signal
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.base.paths import results_root
from bench.config.overrides import names_code
from bench.data.sources import datasets
from bench.launch import allocation, launcher, ready, summary
from bench.launch.console import say
from bench.launch.prepare import Job, prepare, requested_config, this_machine
from bench.launch.script import script
from bench.launch.series import Series, earlier_s
from bench.machine.signals import Interrupted, raise_interrupted
from bench.plans.sweep import packing, search
from bench.plans.sweep.elsewhere import Unfinished, followed
from bench.record import configs, failures, ledger, run_folder, store, sweep
from bench.record.rows import metric_of, row_of

Run = dict[str, Any]  # a record, with its folder
Validations = list[tuple[int, float]]  # (step, val_loss in nats per token), the newest last
Stop = Callable[[Validations], str | None]  # launch()'s stop: returns why the run is to end now, or None
ARM_NAMES = "ABCDEFGHIJ"


@dataclass
class Points:
    """Makes a sweep's runs. It is pickled into a launcher's processes, where only run_one() is called."""

    folder: Path  # the sweep's folder, which exists
    command: list[str]  # what the user typed, for the records
    anyway: bool = False  # also on a busy machine
    budget_s: float | None = None  # no run begins that would end later than this after the first began
    objective: str = search.DEFAULT_OBJECTIVE
    stops: dict[tuple[str, ...], Stop | None] = field(default_factory=dict)  # a search's, by the overrides of a point
    _series: Series | None = None  # all trials of a search
    _began_s: float | None = None

    @property
    def _plan(self) -> dict[str, Any]:
        """The plan of the sweep's runs, for launch()."""
        return {"sweep": {"sweep_id": self.folder.name}}

    def elsewhere(
        self, launcher: str, settings: Mapping[str, Any], refusals: type[Exception]
    ) -> contextlib.AbstractContextManager[None]:
        """Returns a context around another launcher, which calls run_one() in processes with unseen output."""
        return followed(self.folder, launcher, settings, refusals)

    @contextlib.contextmanager
    def searching(self, num_trials: int, num_after: int = 0) -> Iterator[None]:
        """Wraps a search by our launcher: one plan and one bar for all its trials, which take about equally long.

        num_after: runs that follow the search, such as a race of its best.
        """
        runs = self.records()
        known_s = earlier_s({run["track"] for run in runs}, {run["config_id"] for run in runs})
        usual_s = {"trial": statistics.mean(known_s.values())} if known_s else {}
        with Series(["trial"] * (num_trials + num_after), usual_s, budget_s=self.budget_s) as self._series:
            yield
        self._series = None

    def run_one(self, overrides: list[str], number: int) -> float | None:
        """Makes a run in a process of another launcher and returns its objective.

        Returns None as well if the process is not the first of its job's, or the sweep was ended before the run began.
        """
        if os.environ.get("SLURM_PROCID", "0") != "0":
            return None  # a job's first task makes the run, over all nodes with hardware.nodes=N
        run: Run | None = None
        ended_by: str | None = None
        try:
            with raise_interrupted():
                sweep.hide(self.folder)  # Hydra has written it just before
                if why := sweep.read(self.folder)["why"]:
                    say("sweep", f"not begun: the sweep has ended: {why}", always=True)
                    return None
                job = prepare(overrides, say=lambda text: say("data", text))
                if run := complete_before([job]).get(0):
                    say_complete(job, run)
                else:
                    run = launcher.launch(job, self.command, plan=self._plan)
                    say("run", summary.outcome_text(run), always=True)
                sweep.keep(self.folder, number, overrides, run, apart=True)
        except Interrupted as error:
            ended_by = str(error)
            say("sweep", f"not begun: {ended_by}", always=True)
        else:
            ended_by = failures.interrupted_by(run)
        if ended_by == "SIGTERM" and allocation.ending().is_requeued:
            os.kill(os.getpid(), signal.SIGKILL)  # else submitit has a result, and the sweep would end before the job
        if ended_by in ("SIGUSR1", "SIGUSR2"):  # the record is finished: submitit may now requeue the job, or give up
            os.kill(os.getpid(), signal.Signals[ended_by])
        return search.objective_of(run, self.objective)

    def all(self, points: list[list[str]], first_number: int, settings: Mapping[str, Any]) -> list[float | None]:
        """Makes several runs, all checked before the first; one that fails does not end the sweep. Returns objectives.

        settings: hydra.launcher.* of our launcher. Raises Interrupted, Unfinished, ValueError.
        """
        sweep.hide(self.folder)
        where = self._places(points, settings)
        machine = where[0].machine() if where else None
        jobs = [prepare(overrides, say=lambda text: say("data", text), machine=machine) for overrides in points]
        first: dict[tuple[str, int], int] = {}  # equal points are run once: {kind of job: index of the first}
        same = [first.setdefault(_kind(job), number) for number, job in enumerate(jobs)]
        runs = complete_before(jobs)
        for number in sorted(runs.keys() & set(same)):
            say_complete(jobs[number], runs[number])
        for number, run in runs.items():
            sweep.keep(self.folder, first_number + number, points[number], run)
        todo = [number for number in dict.fromkeys(same) if number not in runs]
        if todo and self._began_s is None:
            ready.agree(ready.checks(jobs[todo[0]]), self.anyway)
            self._began_s = time.monotonic()
        for number, run in self._run_todo(todo, jobs, points, where) if todo else ():
            for other, first_like_it in enumerate(same):
                if first_like_it == number:
                    runs[other] = run
                    sweep.keep(self.folder, first_number + other, points[other], run)
            if ended_by := failures.interrupted_by(run):
                raise Interrupted(ended_by)
        if len(runs) < len(points) and self.left_s() is not None:
            raise Unfinished("--budget is spent")
        return [search.objective_of(runs.get(number), self.objective) for number in range(len(points))]

    def left_s(self) -> float | None:
        """Returns the seconds of the budget that are left; None if there is no budget, or no run has begun."""
        if self.budget_s is None or self._began_s is None:
            return None
        return self.budget_s - (time.monotonic() - self._began_s)

    def _run_todo(
        self, todo: list[int], jobs: list[Job], points: list[list[str]], where: list[packing.Slot]
    ) -> Iterator[tuple[int, Run]]:
        """Runs the points with these indices. Yields (index, record) of each that has one."""
        if where and len(todo) > 1:
            yield from self._side_by_side({number: points[number] for number in todo}, where, jobs)
            return
        own = list(map(sweep.public, points))
        all_points = [*own, *(point.overrides for point in sweep.points(self.folder))]  # a search's earlier trials
        runs = launcher.launch_each(
            [jobs[number] for number in todo],
            self.command,
            [sweep.its_own(own[number], all_points) for number in todo],
            plan=self._plan,
            budget_s=self.left_s(),
            stop_of=lambda job: self.stops.get(tuple(job.overrides)),
            series=self._series,
        )
        yield from zip(todo, runs)

    def _places(self, points: list[list[str]], settings: Mapping[str, Any]) -> list[packing.Slot]:
        """Returns the slots of concurrent runs; [] if runs are sequential."""
        if (parallel := settings["parallel"]) is None:
            return []
        on_cpu = requested_config(points[0], this_machine()).hardware.device == "cpu" or not this_machine().num_gpus
        where = packing.slots(parallel, on_cpu)
        if len(where) < 2 or len(points) < 2:
            return []
        say("sweep", f"{len(where)} concurrent runs on {' | '.join(map(str, where))}: their times do not count")
        return where

    def _side_by_side(
        self, points: dict[int, list[str]], where: list[packing.Slot], jobs: list[Job]
    ) -> Iterator[tuple[int, Run]]:
        """Runs points, {index: overrides}, concurrently. Yields (index, record) as they end."""
        known_s = earlier_s({job.config.track.name for job in jobs}, [jobs[number].config_id for number in points])
        usual_s = {"run": statistics.mean(known_s.values())} if known_s else {}
        facts = {"folder": str(self.folder), "command": self.command}
        series = Series(["run"] * len(points), usual_s, live=False, budget_s=self.left_s(), at_once=len(where))
        is_all = self._series is None  # else a search, which has printed how long it takes
        with series if is_all else contextlib.nullcontext():
            for number, folder, tail in packing.run_all(points, where, self.folder / "logs", facts, series, is_all):
                run = None if folder is None else _read(folder)
                how = summary.outcome_text(run) if run else f"left no record:\n{tail}"
                say("run", f"{sweep.its_own(points[number], points.values())}: {how}", always=not run)
                if run:
                    yield number, run

    def beside(self, overrides: list[str], slot: packing.Slot) -> Run:
        """Makes one of several concurrent runs, in its own process pinned to its slot, and returns its record."""
        packing.pin(slot)
        job = prepare(overrides, say=lambda text: say("data", text)).with_look(False)  # it would disturb the others
        if (whole_usd := job.config.hardware.price_usd_per_hour) is not None:
            job.config.hardware.price_usd_per_hour = whole_usd / slot.num_slots
        return launcher.launch(job, self.command, plan=self._plan | {"beside": slot.fact()})

    def records(self) -> list[Run]:
        """Returns the record of every point that has one so far, with its folder."""
        return [_read(point.folder) for point in sweep.points(self.folder) if point.folder is not None]

    def was_stopped(self, overrides: list[str]) -> bool:
        """Returns whether the run of a point was stopped before its end."""
        own = sweep.public(overrides)
        folders = [point.folder for point in sweep.points(self.folder) if point.overrides == own and point.folder]
        return bool(folders) and _read(folders[0])["status"] == "stopped"


def source_sha256(overrides: Sequence[str]) -> str:
    """Returns the fingerprint of the code that a sweep runs. overrides: those that all its runs have."""
    config = requested_config(list(overrides))
    no_data = datasets.Dataset("", 0, (), ())
    return Job(config, no_data, list(overrides), [], script.from_config(config, list(overrides))).source_sha256


def _read(folder: Path | str) -> Run:
    return run_folder.read(folder) | {"folder": str(folder)}


def _kind(job: Job) -> tuple[str, int]:
    return job.config_id + job.source_sha256, job.config.seed  # two folders of one name have one config_id


def complete_before(jobs: Sequence[Job]) -> dict[int, Run]:
    """Returns {index of a job: its complete record, with its folder}; a valid one if it exists, else a suspect one.

    Warm-up runs of a race do not count.
    """
    folders = {results_root() / job.config.track.name for job in jobs}
    folder_of: dict[tuple[Any, ...], str] = {}
    for folder, row in store.read_rows(folder for folder in folders if folder.is_dir()):
        if row["status"] == "complete" and not row["discarded"]:
            files = json.loads(row["setting"])
            data = frozenset((files["train_data"] or []) + (files["val_data"] or []))
            kind = (row["track"], row["config_id"], row["seed"], row["source_sha256"], data)
            folder_of.setdefault((*kind, row["validity"] == "valid"), folder)
    complete: dict[int, Run] = {}
    for number, job in enumerate(jobs):
        data = frozenset(shard.sha256 for shard in job.dataset.train + job.dataset.val)
        kind = (job.config.track.name, job.config_id, job.config.seed, job.source_sha256, data)
        for of_data in [kind] + [(*kind[:-1], frozenset[str]())] * (job.script is not None):  # its own, of no shards
            its_folder = folder_of.get((*of_data, True)) or folder_of.get((*of_data, False))
            if its_folder and not (job.script and _reads_other_data(_read(its_folder), job)):
                complete.setdefault(number, _read(its_folder))
    return complete


def _reads_other_data(run: Run, job: Job) -> bool:
    """Returns whether a file that the script read in this run has changed since."""
    from bench.launch.script import opened_files  # imports numpy, which sweeps of our models do not need

    return any(opened_files.changed_since(run, job))


def made_before(points: Sequence[list[str]]) -> dict[int, Run]:
    """Returns complete_before() of points: the records for which Points.all() would make no run."""
    return complete_before([prepare(point, say=lambda text: say("data", text), check_own=False) for point in points])


def say_complete(job: Job, run: Run) -> None:
    """Prints that a run is not made again, and the doubts about the run that stands for it."""
    doubts = ""
    if run["validity"] != "valid":
        doubts = f", {run['validity']}: {'; '.join(run['validity_reasons'])}"
    say("sweep", f"{' '.join(job.overrides)}: already complete, {run['run_id']}{doubts}")
    if exporters := ",".join(job.config.exporters):
        say("sweep", f"not exported again: ./run.sh dashboard {run['run_id']} --to {exporters}")


def winning_arms(folder: Path, top: int) -> list[str]:
    """Returns arguments for ./run.sh race, A='optim.lr=0.002 ...', of a sweep's best configs by the goal's metric.

    Of a study it is the best of each arm, its baseline first and then the best arms, under the study's names.  Raises
    ValueError if too few configs have complete runs, or top is not a number of arms.
    """
    if not 2 <= top <= len(ARM_NAMES):
        raise ValueError(f"--top {top}: use 2 to {len(ARM_NAMES)}: a race has that many arms")
    best = (_winners_of_study if (folder / sweep.STUDY).exists() else _winners_of_sweep)(folder)
    arms = dict(itertools.islice(best.items(), top))
    if len(arms) < top:
        raise ValueError(f"--top {top}: {folder.name} has {len(arms)} configs with complete runs")
    _refuse_strangers_code(folder, arms.values())
    return [f"{name}={shlex.join(overrides)}" for name, overrides in arms.items()]


def _winners_of_sweep(folder: Path) -> dict[str, list[str]]:
    """Returns {arm: its overrides}, the best first."""
    overrides_of: dict[str, list[str]] = {}  # {config_id: overrides}
    losses: dict[str, dict[str, float]] = {}  # {config_id: {run_id: loss}}
    for point in sweep.points(folder):
        run = point.folder and run_folder.read(point.folder)
        if not run or run["status"] != "complete" or run["validity"] == "invalid":
            continue
        row = row_of(run)
        if (score := row["score"]) is not None:
            config_id = str(run["config_id"])
            overrides_of.setdefault(config_id, _without_seed(point.overrides))
            losses.setdefault(config_id, {})[run["run_id"]] = metric_of([row]).sign * score
    best = sorted(losses, key=lambda config_id: statistics.mean(losses[config_id].values()))
    return {name: sweep.typed(folder, overrides_of[config_id]) for name, config_id in zip(ARM_NAMES, best)}


def _without_seed(overrides: Iterable[str]) -> list[str]:
    return [text for text in overrides if not text.startswith("seed=")]


def _refuse_strangers_code(folder: Path, arms: Iterable[Sequence[str]]) -> None:
    """Raises ValueError if an arm's words name code and are not those of a run of this machine, as a collected sweep's
    may be: a race would run that code unasked."""
    naming = [words for words in arms if any(map(names_code, words))]
    own = ledger.runs_of(ledger.read(results_root()).own_lines) if naming else {}
    places = [point.folder for point in sweep.points(folder) if point.folder]
    mine = [place for place in places if _is_below(place, results_root()) and "/".join(place.parts[-2:]) in own]
    typed = [{*sweep.public(_without_seed(configs.as_typed(place)))} for place in mine]
    for words in naming:
        if {*sweep.public(words)} not in typed:  # nor fewer: script.sandbox=true may be missing
            remedy = "read that code, and type the arms yourself: ./run.sh race A='...' B='...'"
            raise ValueError(f"{folder.name}: no run of this machine has an arm's code ({shlex.join(words)}): {remedy}")


def _is_below(path: Path, folder: Path) -> bool:
    return path.resolve().is_relative_to(folder.resolve())


def _winners_of_study(folder: Path) -> dict[str, list[str]]:
    """Returns {arm: its overrides}, the baseline first, then the best."""
    study = sweep.read_study(folder)
    metric = sweep.metric_of(study)
    best_of: dict[str, tuple[float, float]] = {}  # {arm: (its best metric, lower is better; the value that has it)}
    for name, tried in sweep.trials(folder, study).items():
        if tried:
            best = sweep.best_of(tried, metric)
            best_of[name] = metric.sign * tried[best], best
    baseline, *others = study["arms"]
    ordered = [baseline, *sorted((name for name in others if name in best_of), key=lambda name: best_of[name])]
    tuned = {name: f"{study['tune']}={best_of[name][1]!r}" for name in ordered if baseline in best_of}
    return {
        name: [*sweep.typed(folder, [*study["common"], *study["arms"][name]]), best] for name, best in tuned.items()
    }
