"""One race, or a sweep of them.  ./run.sh run [-m] model=modern optim=muon seed=0,1"""

import argparse
import json

from bench.config import compose
from bench.launch import launcher
from bench.launch.prepare import prepare
from bench.launch.progress import last_words, say
from bench.machine import code_state, gpus
from bench.paths import REPO, results_root
from bench.record import run_folder


def main(argv):
    """Exit codes: 0 all complete, 1 one failed, 2 wrong use."""
    args = _parser().parse_intermixed_args(compose.spelled(argv))
    if args.cfg:
        print(as_yaml(args.overrides), end="")
        return 0
    jobs = compose.sweep(args.overrides) if args.multirun else [args.overrides]
    if args.multirun:
        return _sweep(jobs, argv)
    job = prepare(jobs[0], say=lambda text: say("data", text))
    for deviation in job.deviations:
        say("track", f"open division, because {deviation}")
    race = json.loads(args.race) if args.race else None
    run = launcher.launch(job, command=["run", *(args.overrides if race else argv)], race=race)
    say("run", last_words(run))
    return 0 if run["status"] == "complete" else 1


def as_yaml(overrides):
    """The composed config, as asked: null is derived at the start of the run."""
    import yaml

    from bench.config import schema
    from bench.machine import environment

    asked = compose.compose(overrides, schema.Machine(gpus.num_visible(), environment.usable_cpus()))
    return yaml.safe_dump(schema.to_dict(asked), sort_keys=False)


def _sweep(jobs, argv):
    """Every job in a process group of its own; one that fails is recorded and the rest go on."""
    prepared = [
        prepare(overrides, say=lambda text: say("data", text)) for overrides in jobs
    ]  # refuse all before racing any
    num_complete, failed = 0, []
    for number, job in enumerate(prepared, 1):
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
    say(
        "sweep", f"{num_complete} of {len(jobs)} complete" + "".join(f"\n          failed: {words}" for words in failed)
    )
    return 0 if num_complete == len(jobs) else 1


def already_complete(job):
    """A complete record of the same config, seed, raced code and data, or None."""
    source_sha256 = code_state.source_sha256(REPO)
    data = {shard.sha256 for shard in job.dataset.train + job.dataset.val}
    for run in run_folder.read_all([results_root() / job.config.track.name]):
        if (run.get("race") or {}).get("discarded"):
            continue  # a warm-up
        same = (run["config_id"], run["seed"], run["code"]["source_sha256"]) == (
            job.config_id,
            job.config.seed,
            source_sha256,
        )
        if (
            same
            and run["status"] == "complete"
            and {file["sha256"] for split in ("train", "val") for file in run["data"][split]} == data
        ):
            return run
    return None


def _parser():
    groups = "\n".join(f"  {group}={' | '.join(compose.choices(group))}" for group in compose.GROUPS)
    parser = argparse.ArgumentParser(
        prog="./run.sh run",
        description="Race once, or with -m once for every combination of values.",
        epilog=f"groups:\n{groups}\n\ninstruments is a list: instruments=[regions] or instruments=[]\nprofile=window (stages, modded) adds one with its recipe\nsettings: --cfg job shows them all",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="Hydra overrides, e.g. model=modern seed=3 goal.num_steps=100"
    )
    parser.add_argument(
        "-m",
        "--multirun",
        action="store_true",
        help="sweep: seed=0,1,2 or seed=range(0,3); what is complete is skipped",
    )
    parser.add_argument("--enable_profiling", metavar="True", help="nanochat's word for profile=stages")
    parser.add_argument("--cfg", choices=["job"], help="print the composed config and stop")
    parser.add_argument(
        "--race", help=argparse.SUPPRESS
    )  # the run's place in a race, JSON: bench/race/runner.py gives it
    return parser
