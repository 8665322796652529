"""One run, or a sweep of them.  ./run.sh run [-m] model=modern optim=muon seed=0,1"""

import argparse
import json

from bench.cli import arguments, settings
from bench.config import compose, explain, groups, overrides
from bench.launch import console, launcher, ready, series, summary
from bench.launch.console import say
from bench.launch.prepare import Job, asked, prepare, this_machine
from bench.paths import results_root
from bench.record import index, run_folder, sweep
from bench.report import sweep_page, sweep_results, sweep_text
from bench.units import seconds_of


def main(argv):
    """Exit codes: 0 all complete, 1 one failed or was not begun, 2 wrong use."""
    if (explained := settings.asked_for(argv)) is not None:
        print(explained)
        return 0
    args = _parser().parse_intermixed_args(overrides.spelled(argv))
    if args.cfg:
        points = overrides.sweep(args.overrides) if args.multirun else [args.overrides]
        for point in points:
            head = f"---\n# {' '.join(point)}\n" if args.multirun else ""
            print(head + explain.commented(asked(point), explain.Origins(point, this_machine())), end="")
        return 0
    if args.anyway and not args.multirun:
        raise ValueError("--anyway: one run warns of a busy machine and never asks: it is for sweeps (-m)")
    if args.budget is not None and not args.multirun:
        raise ValueError(f"--budget {args.budget}: it is for sweeps (-m); hardware.wall_timeout_s=SECONDS ends one run")
    with console.output(args.quiet, args.json):
        found = _sweep(args, argv) if args.multirun else _run(args, argv)
    if args.json:
        print(json.dumps(found, indent=1))
    runs = found if args.multirun else [found]
    return 0 if all(run["status"] == "complete" for run in runs) else 1


def _run(args, argv):
    """-> what --json prints."""
    job = prepare(args.overrides, say=lambda text: say("data", text), check_own=not args.race)  # a race has checked it
    for deviation in job.deviations:
        say("track", f"open division, because {deviation}")
    race = json.loads(args.race) if args.race else None
    if not race:
        known_s = series.earlier_s({job.config.track.name}, [job.config_id]).get(job.config_id)
        say("run", summary.first_words(job, known_s) + "; what else there is: ./run.sh --help" * (not args.overrides))
    run = launcher.launch(job, command=["run", *(args.overrides if race else argv)], race=race)
    say("run", summary.last_words(run), always=True)
    return summary.as_json(run)


def _sweep(args, argv):
    """Every run in a process group of its own, all checked before the first; one that fails does not end the sweep.

    Returns what --json prints: of every point its run, whose run_id is None where it was not begun.
    """
    budget_s = None if args.budget is None else _budget_s(args.budget)
    points = [prepare(point, say=lambda text: say("data", text)) for point in overrides.sweep(args.overrides)]
    jobs = list({(job.config_id, job.config.seed): job for job in points}.values())
    asked_for, command = [job.overrides for job in jobs], ["run", *argv]
    sweep_id = sweep.id_of(args.overrides, jobs[0].source_sha256)
    found = complete_before(jobs)
    done = f", {len(found)} of them complete before" if found else ""
    say("sweep", f"{sweep_id}, {sweep_results.about(sweep.axes(asked_for), len(jobs))}{done}")
    for number, run in found.items():
        say("sweep", f"{' '.join(jobs[number].overrides)}: complete before, {run['run_id']}{_doubts(run)}")
        if exporters := ",".join(jobs[number].config.exporters):
            say("sweep", f"not exported again: ./run.sh dashboard {run['run_id']} --to {exporters}")
    todo = [number for number in range(len(jobs)) if number not in found]
    if todo:
        ready.agree(ready.checks(jobs[todo[0]]), args.anyway)
    folder = sweep.begin(results_root(), sweep_id, command, asked_for, budget_s)
    for number, run in found.items():
        sweep.keep(folder, number, jobs[number].overrides, run)
    if todo:
        words = [" ".join(jobs[number].overrides) for number in todo]
        runs = launcher.launch_each([jobs[n] for n in todo], command, words, sweep_id=sweep_id, budget_s=budget_s)
        for number, run in zip(todo, runs):
            found[number] = run
            sweep.keep(folder, number, jobs[number].overrides, run)
    none = dict.fromkeys(summary.KEYS)
    answers = [
        {"overrides": job.overrides} | (summary.as_json(found[number]) if number in found else none)
        for number, job in enumerate(jobs)
    ]
    _end(folder, args, answers)
    return answers


def _end(folder, args, answers):
    """What the sweep found, in words and as its page."""
    is_over = args.budget is not None and all(one["status"] != "aborted" for one in answers)
    is_whole = all(one["status"] for one in answers)
    sweep.end(folder, None if is_whole else f"--budget {args.budget} is spent" if is_over else "it was interrupted")
    found = sweep_results.read(folder)
    console.show(sweep_text.table(found))
    if words := sweep_text.best(found):
        say("sweep", words)
    sweep_page.write(folder, found)
    num_complete = sum(one["status"] == "complete" for one in answers)
    say("sweep", sweep_text.ended(found, folder, num_complete, len(answers)), always=True)


def _budget_s(words):
    try:
        return seconds_of(words)
    except ValueError as error:
        raise ValueError(f"--budget {error}") from None


def _doubts(run):
    return "" if run["validity"] == "valid" else f", {run['validity']}: {'; '.join(run['validity_reasons'])}"


def complete_before(jobs: list[Job]) -> dict[int, dict]:
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
            found[number] = run_folder.read(folder) | {"folder": folder}
    return found


def _parser():
    listed = "\n".join(f"  {group}={' | '.join(compose.choices(group))}" for group in compose.GROUPS)
    parser = arguments.Parser(
        "./run.sh run",
        description="Run once, or with -m once for every combination of values.",
        epilog=f"groups:\n{listed}\n\ninstruments and exporters are lists: instruments=[regions] or instruments=[]\n"
        "profile=window (stages, modded) adds an instrument with its recipe\n"
        "settings: --cfg job shows all with their meaning, --help KEY says more of one or of a group",
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="Hydra overrides, e.g. model=modern seed=3 goal.num_steps=100"
    )
    sweep_help = "sweep: seed=0,1,2 or seed=range(0,3); what is complete is skipped"
    parser.add_argument("-m", "--multirun", action="store_true", help=sweep_help)
    parser.add_argument("--enable_profiling", metavar="True", help="nanochat's name for profile=stages")
    parser.add_argument(
        "--cfg",
        choices=["job"],
        help="print the composed config with the meaning of every setting, null where it is derived, and stop",
    )
    parser.add_argument("--config-dir", **groups.OPTION)
    parser.add_argument(
        "--budget",
        metavar="2h",
        help="of a sweep: begin no run that would end later than that after the first began (90s, 45m, 1h30m); the "
        "same command goes on",
    )
    parser.add_argument("--anyway", action="store_true", help=f"of a sweep: {ready.ANYWAY}")
    console.add_options(parser, "print run_id, folder, status, validity, metrics ... as JSON, with -m a list of them")
    parser.add_argument("--race", help=argparse.SUPPRESS)  # the run's slot in a race, JSON: bench/race/runner.py
    return parser
