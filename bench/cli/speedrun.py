"""The whole road: data, preflight, the track's repeats, the table, the verdict.  ./speedrun.sh [overrides]

Exit codes: 0 the track's target is reached (or it has none), 1 it is not or a run failed, 2 wrong use.
"""

import argparse

from bench.compare import target
from bench.config import compose, groups
from bench.launch import launcher
from bench.launch.prepare import prepare
from bench.launch.progress import last_words, say
from bench.machine import environment, preflight
from bench.paths import results_root
from bench.record import run_folder
from bench.record.rows import row_of
from bench.report import table_text
from bench.units import format_bytes


def main(argv):
    """Make the track's repeats with fresh seeds and judge them."""
    overrides = _parser().parse_args(compose.spelled(argv)).overrides
    say("data", "looking for it; making it if that is possible here")
    job = prepare(overrides, fetch=True, say=lambda text: say("data", text))
    config, dataset = job.config, job.dataset
    num_bytes = sum(shard.num_bytes for shard in dataset.train + dataset.val)
    say("data", f"{dataset.name}, {len(dataset.train)} + {len(dataset.val)} shards, {format_bytes(num_bytes)}, checked")
    say("track", f"{config.track.name}: {config.track.about}")
    if config.track.reference_hardware:
        say("track", f"its times are compared on {config.track.reference_hardware}")
    for deviation in job.deviations:
        say("track", f"open division, because {deviation}")
    checks = preflight.checks(config.hardware, num_bytes, environment.environment(), results_root())
    print(preflight.report(checks), flush=True)
    if any(check.status == "fail" for check in checks):
        return 1
    runs = []
    for number, seed in enumerate(fresh_seeds(job, overrides), 1):
        say("run", f"{number} of {config.track.repeats}, seed {seed}")
        run = launcher.launch(job.with_seed(seed), command=["speedrun", *argv], brief=True)
        runs.append(run)
        say("run", last_words(run))
        if run["status"] == "aborted":
            return 1
    print()
    rows = [row_of(run_folder.read(run["folder"])) for run in runs]
    print(table_text.of_runs(rows))
    answer = target.of_repeats(rows, config.track.p_value)
    say("verdict", answer["words"])
    if job.deviations:
        say("verdict", f"open division: this counts for nothing on track {config.track.name}")
    return 1 if answer["passed"] is False else 0


def fresh_seeds(job, overrides):
    """The track's number of seeds that no recorded run of this config has had, or from seed=N on if that is given."""
    asked = [override for override in overrides if override.startswith("seed=")]
    first = job.config.seed
    if not asked:
        folder = results_root() / job.config.track.name
        taken = [run["seed"] for run in run_folder.read_all([folder]) if run["config_id"] == job.config_id]
        first = max(taken, default=-1) + 1
    return range(first, first + job.config.track.repeats)


def _parser():
    parser = argparse.ArgumentParser(
        prog="./speedrun.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    words = "those of ./run.sh run --help; seed=N begins at N"
    parser.add_argument("overrides", nargs="*", metavar="key=value", help=words)
    parser.add_argument("--config-dir", **groups.OPTION)
    return parser
