"""One run, or a sweep of them.  ./run.sh run [-m] model=modern optim=muon seed=0,1"""

import argparse
import json

import yaml

from bench.config import compose, groups, schema
from bench.launch import launcher
from bench.launch.prepare import asked, prepare
from bench.launch.progress import last_words, say
from bench.paths import results_root
from bench.record import run_folder


def main(argv):
    """Exit codes: 0 all complete, 1 one failed, 2 wrong use."""
    args = _parser().parse_intermixed_args(compose.spelled(argv))
    if args.cfg:
        print(yaml.safe_dump(schema.to_dict(asked(args.overrides)), sort_keys=False), end="")
        return 0
    if args.multirun:
        return _sweep(compose.sweep(args.overrides), argv)
    job = prepare(args.overrides, say=lambda text: say("data", text), check_own=not args.race)  # a race has checked it
    for deviation in job.deviations:
        say("track", f"open division, because {deviation}")
    race = json.loads(args.race) if args.race else None
    run = launcher.launch(job, command=["run", *(args.overrides if race else argv)], race=race)
    say("run", last_words(run))
    return 0 if run["status"] == "complete" else 1


def _sweep(points, argv):
    """Every run in a process group of its own, all checked before the first; one that fails does not end the sweep."""
    jobs = [prepare(overrides, say=lambda text: say("data", text)) for overrides in points]
    num_complete, failed = 0, []
    for number, job in enumerate(jobs, 1):
        words = " ".join(job.overrides)
        before = already_complete(job)
        if before:
            say("sweep", f"{number} of {len(jobs)}: {words}: complete before, {before['run_id']}")
            num_complete += 1
            continue
        say("sweep", f"{number} of {len(jobs)}: {words}")
        run = launcher.launch(job, command=["run", *argv], brief=True)
        say("sweep", last_words(run))
        if run["status"] == "complete":
            num_complete += 1
        else:
            failed.append(words)
        if run["status"] == "aborted":
            break
    lines = [f"{num_complete} of {len(jobs)} complete", *(f"          failed: {words}" for words in failed)]
    say("sweep", "\n".join(lines))
    return 0 if num_complete == len(jobs) else 1


def already_complete(job):
    """A complete record of the same config, seed, raced code and data, or None.  A race's warm-up runs do not count."""
    kind = (job.config_id, job.config.seed, job.source_sha256)
    data = {shard.sha256 for shard in job.dataset.train + job.dataset.val}
    for run in run_folder.read_all([results_root() / job.config.track.name]):
        if run["status"] != "complete" or (run.get("race") or {}).get("discarded"):
            continue
        same_data = {file["sha256"] for split in ("train", "val") for file in run["data"][split]} == data
        if same_data and (run["config_id"], run["seed"], run["code"]["source_sha256"]) == kind:
            return run
    return None


def _parser():
    listed = "\n".join(f"  {group}={' | '.join(compose.choices(group))}" for group in compose.GROUPS)
    parser = argparse.ArgumentParser(
        prog="./run.sh run",
        description="Run once, or with -m once for every combination of values.",
        epilog=f"groups:\n{listed}\n\ninstruments and exporters are lists: instruments=[regions] or instruments=[]\n"
        "profile=window (stages, modded) adds an instrument with its recipe\nsettings: --cfg job shows them all",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="Hydra overrides, e.g. model=modern seed=3 goal.num_steps=100"
    )
    sweep_help = "sweep: seed=0,1,2 or seed=range(0,3); what is complete is skipped"
    parser.add_argument("-m", "--multirun", action="store_true", help=sweep_help)
    parser.add_argument("--enable_profiling", metavar="True", help="nanochat's name for profile=stages")
    parser.add_argument("--cfg", choices=["job"], help="print the composed config, null where it is derived, and stop")
    parser.add_argument("--config-dir", **groups.OPTION)
    parser.add_argument("--race", help=argparse.SUPPRESS)  # the run's slot in a race, JSON: bench/race/runner.py
    return parser
