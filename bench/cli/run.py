"""One run, or a sweep of them.  ./run.sh run [-m] model=modern optim=muon seed=0,1"""

import argparse
import contextlib
import json
from pathlib import Path

from bench.cli import arguments, settings
from bench.config import compose, explain, groups, hydra_app, multirun, overrides
from bench.launch import console, launcher, ready, series, summary
from bench.launch.console import say
from bench.launch.prepare import asked, prepare, this_machine
from bench.machine.signals import Interrupted
from bench.paths import results_root
from bench.record.rows import row_of
from bench.report import table_groups, table_text
from bench.sweep import packing, points, sweeps

SWEEP_SHOWN = (
    "varied",
    "n",
    *(f"{name}_{what}" for name in ("val_loss", "train_s", "step_avg_ms") for what in ("mean", "sd")),
    "config_id",
)


def main(argv):
    """Exit codes: 0 all complete, 1 one failed, 2 wrong use."""
    if (explained := settings.asked_for(argv)) is not None:
        print(explained)
        return 0
    args = _parser().parse_intermixed_args(overrides.spelled(argv))
    if args.info:
        multirun.show_info(args.overrides, args.info)
        return 0
    if args.cfg:
        _show_cfg(args)
        return 0
    if args.beside:
        return _beside(args)
    mode, stored = (None, []) if args.multirun or args.race else multirun.stored(args.overrides)
    args.multirun = args.multirun or mode == "MULTIRUN"
    if args.anyway and not args.multirun:
        raise ValueError("--anyway: one run warns of a busy machine and never asks: it is for sweeps (-m)")
    with console.output(args.quiet, args.json):
        if stored and not args.multirun:
            say("run", f"one run, though a sweep is stored here: {' '.join(stored)}; -m makes it")
        found = _sweep(args, argv) if args.multirun else _run(args, argv)
    if args.json:
        print(json.dumps(found, indent=1))
    runs = found if args.multirun else [found]
    return 0 if all(run["status"] == "complete" for run in runs) else 1


def _beside(args):
    """One of several runs of a sweep, started by bench/sweep/packing.py."""
    given = json.loads(args.beside)
    runs = points.Points(Path(given.pop("folder")), ["run", *args.overrides])
    number = given.pop("number")
    with console.output(args.quiet):
        run = runs.beside(args.overrides, packing.parsed(json.dumps(given)), number)
    return 0 if run["status"] == "complete" else 1


def _show_cfg(args):
    """--cfg: of our settings with their meanings; Hydra's own as Hydra prints them."""
    if args.cfg != "job":
        multirun.show_cfg(args.overrides, args.cfg, this_machine(), args.resolve)
        return
    for point in multirun.points(args.overrides, this_machine()) if args.multirun else [args.overrides]:
        head = f"---\n# {' '.join(point)}\n" if args.multirun else ""
        print(head + explain.commented(asked(point), explain.Origins(point, this_machine())), end="")


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
    """Every run in a process group of its own, by Hydra's sweeper and launcher.

    Returns what --json prints: of every point its run, whose run_id is None where the sweep ended before.
    """
    folder = sweeps.new_folder(results_root())
    runs = points.Points(folder, ["run", *argv], args.anyway)
    with contextlib.suppress(Interrupted):
        multirun.go(args.overrides, runs, folder, this_machine())
    made = runs.made()
    console.show(_best_first(made))
    answers = [{"overrides": words} | summary.as_json(run) for words, run in made]
    none = dict.fromkeys(summary.KEYS)
    answers += [{"overrides": words} | none for words in runs.not_begun()]
    lost = [one for one in answers if one["status"] != "complete"]
    lines = [f"          {one['status'] or 'not begun'}: {' '.join(one['overrides'])}" for one in lost]
    say("sweep", "\n".join([f"{len(answers) - len(lost)} of {len(answers)} complete", *lines]), always=True)
    return answers


def _best_first(made):
    """Lines: a table of the configs that completed, means over their seeds; none where there is one alone."""
    words = {run["config_id"]: [word for word in words if not word.startswith("seed=")] for words, run in made}
    if not words:
        return []
    common = set.intersection(*map(set, words.values()))
    groups = table_groups.groups(row_of(run) for _, run in made if run["status"] == "complete")
    rows = [
        {"varied": " ".join(word for word in words[group["config_id"]] if word not in common)} | group
        for group in groups
        if group["val_loss_mean"] is not None
    ]
    if len(rows) < 2:
        return []
    rows.sort(key=lambda row: row["val_loss_mean"])
    return ["", table_text.fit(rows, SWEEP_SHOWN, SWEEP_SHOWN[:1]), ""]


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
        choices=["job", "hydra", "all"],
        help="print the composed config with the meaning of every setting, null where it is derived, and stop; "
        "hydra: what Hydra launches and searches with; all: both, as Hydra prints them",
    )
    parser.add_argument("--resolve", action="store_true", help="of --cfg hydra and all: with values in place of ${...}")
    parser.add_argument(
        "--info", nargs="?", const="all", choices=hydra_app.INFO, help="print what Hydra found, and stop"
    )
    parser.add_argument("--config-dir", **groups.OPTION)
    parser.add_argument("-cn", "--config-name", **groups.NAME_OPTION)
    parser.add_argument("--anyway", action="store_true", help=f"of a sweep: {ready.ANYWAY}")
    console.add_options(parser, "print run_id, folder, status, validity, metrics ... as JSON, with -m a list of them")
    parser.add_argument("--race", help=argparse.SUPPRESS)  # the run's slot in a race, JSON: bench/race/runner.py
    parser.add_argument(packing.OPTION, help=argparse.SUPPRESS)  # where it runs beside others, JSON
    return parser
