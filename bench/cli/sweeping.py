"""A sweep of ./run.sh run -m: begun, run by Hydra's sweeper and launcher, ended with its table and page."""

import argparse
import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

from bench.base.paths import results_root
from bench.base.units import format_about_s
from bench.config import compose, identity, multirun, overrides
from bench.data.sources import datasets
from bench.launch import console, summary
from bench.launch.console import say
from bench.launch.prepare import prepare, requested_config, this_machine
from bench.launch.series import Series, earlier_s
from bench.machine.signals import Interrupted
from bench.plans import locks
from bench.plans.race import state
from bench.plans.sweep import packing
from bench.plans.sweep.elsewhere import Unfinished
from bench.plans.sweep.points import Points, complete_before, source_sha256
from bench.record import run_folder, sweep
from bench.report import sweep_page, sweep_results


def go(args: argparse.Namespace, argv: list[str]) -> list[dict[str, Any]]:
    """Runs the sweep. Returns what --json prints, a run for every point; its run_id is None if it was not begun."""
    command = ["run", *argv]
    points = multirun.points(args.overrides, this_machine()) or []  # a search chooses its points as it goes
    same = [word for word in overrides.split_sweep(args.overrides)[1] if overrides.plain(word)]
    configs = [requested_config(point) for point in points or [same]]
    data_ids = {repr(config.data): datasets.content_id(config.data) for config in configs}
    config_ids = {f"{identity.config_id(config)} {data_ids[repr(config.data)]}" for config in configs}
    _, stored = compose.stored_sweep(same)
    of_code = {tuple(filter(overrides.names_code, point)) for point in points}
    sources = {source_sha256([*same, *(word for word in own if word not in same)]) for own in of_code or {()}}
    sweep_id = sweep.id_of([*args.overrides, *stored], config_ids, " ".join(sorted(sources)))
    if points:
        say("sweep", f"{sweep_id}, {sweep_results.about(sweep.axes(points), len(points))}")
    folder = results_root() / sweep.FOLDER / sweep_id
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    with locks.held(folder / state.LOCK, "runs this sweep"):
        return _run(sweep.begin(results_root(), sweep_id, command, points, args.budget_s), args, command, is_new)


def _run(folder: Path, args: argparse.Namespace, command: list[str], is_new: bool) -> list[dict[str, Any]]:
    """Runs what is left of a begun sweep. Returns what --json prints."""
    why: str | None = "it was interrupted"
    try:
        with contextlib.suppress(Interrupted):
            multirun.go(args.overrides, Points(folder, command, args.anyway, args.budget_s), folder, this_machine())
            why = None
    except Unfinished as error:
        why = str(error)
    except ValueError as error:
        if not any(point.folder for point in sweep.points(folder)):
            if is_new:
                shutil.rmtree(folder)  # the sweep was refused before its first run
            raise
        why = str(error)
    return _end(folder, why)


def forecast(args: argparse.Namespace, points: list[list[str]]) -> list[dict[str, Any]]:
    """Prints --dry-run: each run, whether it is complete already, and how long the others take.

    points: the overrides of each. Returns what --json prints.
    """
    jobs = [prepare(point, say=lambda text: say("data", text)) for point in points]
    complete = complete_before(jobs) if args.multirun else {}
    known_s = earlier_s({job.config.track.name for job in jobs}, [job.config_id for job in jobs])
    for number, job in enumerate(jobs):
        about = known_s.get(job.config_id)
        if run := complete.get(number):
            say("run", f"{' '.join(job.overrides)}: complete, {run['run_id']}")
            continue
        its_own = f"{' '.join(job.overrides)}{'' if about is None else f', {format_about_s(about)}'}"
        sentence = its_own if args.multirun else summary.announcement(job, about)
        say("run", f"{sentence}, config {job.config_id}")
        for deviation in job.deviations:
            say("track", f"open division: {deviation}")
    todo = [job.config_id for number, job in enumerate(jobs) if number not in complete]
    say("plan", f"{Series(todo, known_s, live=False).forecast()}; a dry run: nothing was trained or recorded")
    return [
        {"overrides": point, "config_id": job.config_id, "complete": complete.get(number, {}).get("run_id")}
        for number, (point, job) in enumerate(zip(points, jobs))
    ]


def _end(folder: Path, why: str | None) -> list[dict[str, Any]]:
    """Ends the sweep, and prints its results and writes its page. Returns what --json prints."""
    none: dict[str, Any] = dict.fromkeys(summary.KEYS)
    points = sweep.points(folder)
    rows = []
    for point in points:
        run = point.folder and {**run_folder.read(point.folder), "folder": str(point.folder)}
        rows.append({"overrides": point.overrides} | (summary.as_json(run) if run else none))
    sweep.end(folder, why)
    results = sweep_results.read(folder)
    console.show(sweep_results.table(results))
    lines = sweep_results.best, sweep_results.why, sweep_results.fastest, sweep_results.confirm
    for line in filter(None, (line_of(results) for line_of in lines)):
        say("sweep", line, always=True)
    page = sweep_page.write(folder, results)
    num_complete = sum(row["status"] == "complete" for row in rows)
    say("sweep", sweep_results.ended(results, page, num_complete, len(rows)), always=True)
    return rows


def beside(args: argparse.Namespace) -> int:
    """Makes one of several concurrent runs for bench/plans/sweep/packing.py. Returns the exit code."""
    request = json.loads(args.beside)
    runs, reply = Points(Path(request.pop("folder")), request.pop("command")), Path(request.pop("answer"))
    with console.output(args.quiet):
        run = runs.beside(args.overrides, packing.slot_of(request))
    reply.write_text(run["folder"])
    return 0 if run["status"] == "complete" else 1
