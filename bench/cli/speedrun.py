"""Run all of a track: data, checks, repeats, table and verdict.  ./speedrun.sh [overrides]

With a profiler (profile=...) it makes one run without a verdict, because such a run is not eligible for the track.
"""

import argparse
import json
from collections.abc import Sequence
from typing import Any

from bench.base.paths import results_root
from bench.base.text_table import counted
from bench.base.units import format_bytes
from bench.claims import claim as claims
from bench.cli import arguments
from bench.compare import target
from bench.config import explain
from bench.config.overrides import spelled
from bench.launch import console, launcher, ready, summary
from bench.launch.console import say
from bench.launch.prepare import Job, prepare, requested_config, this_machine
from bench.machine import preflight
from bench.record import run_folder, step_files, store
from bench.record.rows import row_of
from bench.report import table_text


def main(argv: list[str]) -> int:
    """Exit codes: 0 the track's target is reached (or it has none), 1 it is not or a run failed, 2 usage error."""
    if (help_text := explain.help_text(argv, this_machine)) is not None:
        print(help_text)
        return 0
    args = _parser().parse_intermixed_args(spelled(argv))
    with console.output(args.quiet, args.json):
        job = _prepared(args)
        checks = ready.checks(job)
        console.show([preflight.report(checks)])
        if any(check.status == "fail" for check in checks):
            return 1
        ready.agree(checks, args.anyway, are_shown=not args.quiet)
        say("plan", _cost(job, args.overrides))
        jobs = [job.with_seed(seed) for seed in fresh_seeds(job, args.overrides)]
        labels = [f"seed {job.config.seed}" for job in jobs]
        runs = list(launcher.launch_each(jobs, ["speedrun", *argv], labels))
    if _is_one_look(job, args.overrides):
        if args.json:
            print(json.dumps({"runs": [summary.as_json(run) for run in runs], "verdict": None}, indent=1))
        return 0 if runs[0]["status"] in ("complete", "stopped") else 1
    rows = [row_of(run_folder.read(run["folder"])) for run in runs]
    verdict: dict[str, Any] | None = None
    judged = ""
    if len(runs) == job.config.track.repeats and runs[-1]["status"] not in ("aborted", "preempted"):
        losses_ids = [step_files.losses_id_of(run["folder"]) for run in runs]
        num_ever_started, judged = _judged(runs)
        name = job.config.goal.of.name
        curves = lambda: [step_files.validations(run["folder"], name) for run in runs]  # noqa: E731
        decision = target.decide_by(job.config.track, rows, curves, losses_ids)
        verdict = {**decision, "num_ever_started": num_ever_started}
    if args.json:
        print(json.dumps({"runs": [summary.as_json(run) for run in runs], "verdict": verdict}, indent=1))
    elif verdict:
        if not args.quiet:
            print("\n" + table_text.runs_table(rows))
        say("verdict", verdict["words"])
        if job.deviations:
            say("verdict", f"open division: not eligible on track {job.config.track.name}")
        if judged and verdict["passed"] is not None:  # without a target nothing is claimed
            say("judge", judged)
    return 1 if verdict is None or verdict["passed"] is False else 0


def check(argv: list[str]) -> None:
    """Raises ValueError for arguments that make no run, before they are submitted with cluster=slurm."""
    requested_config(_parser().parse_intermixed_args(spelled(argv)).overrides)


def _prepared(args: argparse.Namespace) -> Job:
    """Returns the run to be repeated, its data found or made. Prints what it is."""
    job = prepare(args.overrides, fetch=True, say=lambda text: say("data", text))
    if not any(word.startswith("look") for word in args.overrides):
        job = job.with_look(job.script is None)  # also on a CPU
    config, dataset = job.config, job.dataset
    split = f"{counted(len(dataset.train), 'training shard')}, {counted(len(dataset.val), 'validation shard')}"
    say("data", f"{dataset.name}: {split}, {format_bytes(job.data_bytes)}, checksums match")
    say("track", f"{config.track.name}: {config.track.about}")
    if config.track.reference_hardware:
        say("track", f"its times are compared on {config.track.reference_hardware}")
    for deviation in job.deviations:
        say("track", f"open division: {deviation}")
    return job


def _is_one_look(job: Job, overrides: Sequence[str]) -> bool:
    """Returns whether a single profiled run is made, instead of judging the track's repeats."""
    return job.is_profiled and not any(word.startswith("track.repeats=") for word in overrides)


def _num_runs(job: Job, overrides: Sequence[str]) -> int:
    return 1 if _is_one_look(job, overrides) else job.config.track.repeats


def _cost(job: Job, overrides: Sequence[str]) -> str:
    """Returns what all runs together take, except for the time, as a sentence."""
    goal, repeats = job.config.goal, _num_runs(job, overrides)
    most = "at most " * goal.stop_at_target
    run_cost = f"{most}{goal.num_steps:,} steps, {job.num_tokens:,} tokens ({job.epochs:.2f} epochs)"
    if _is_one_look(job, overrides):
        all_of_them = f"without a profiler, {job.config.track.repeats} runs are made and judged"
        return f"one profiled run, which is not eligible ({all_of_them}): {run_cost}"
    return f"{counted(repeats, 'run')} of {run_cost}" + "; track.repeats=1 makes only one" * (repeats > 1)


def _judged(runs: list[dict[str, Any]]) -> tuple[int, str]:
    """Returns (the number of runs in a claim of these by ./run.sh judge, a sentence if it is larger, else "")."""
    others = claims.from_folders([run["folder"] for run in runs]).unclaimed()
    num_all = len(runs) + len(others.dropped)
    if not others.dropped:
        return num_all, ""
    rule = f"a claim is judged by all {num_all} runs of this config and code, not by these {len(runs)} alone"
    # the config_id would also name runs of other code
    has_more = others.excused or others.other_code
    which = f"{runs[0]['run_id']} names the others" if has_more else runs[0]["config_id"]
    return num_all, f"{rule}: ./run.sh judge {which}"


def fresh_seeds(job: Job, overrides: Sequence[str]) -> range:
    """Returns a seed for each run that no recorded run of this config has had, or those from seed=N on if given."""
    first = job.config.seed
    if not any(override.startswith("seed=") for override in overrides):
        folder = results_root() / job.config.track.name
        runs = store.opened([folder]).rows("config_id = ?", [job.config_id]) if folder.is_dir() else {}
        used_seeds = [row["seed"] or 0 for row in runs.values()]
        first = max(used_seeds, default=-1) + 1
    return range(first, first + _num_runs(job, overrides))


def _parser() -> arguments.Parser:
    parser = arguments.Parser("./speedrun.sh", main=main)
    values = "as for ./run.sh run; seed=N starts at seed N"
    parser.add_argument("overrides", nargs="*", metavar="key=value", help=values)
    parser.flag("--anyway", help=ready.ANYWAY)
    parser.forms('print {"runs": [as in ./run.sh run --json], "verdict": {...}}', says_more=True)
    return parser
