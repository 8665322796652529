"""Train once, or sweep settings with -m.  ./run.sh run [-m] model=modern optim=muon seed=0,1"""

import argparse
import contextlib
import json
import time
from typing import Any

from bench.base.units import seconds_of
from bench.cli import arguments
from bench.config import compose, explain, groups, overrides
from bench.launch import console, launcher, series, summary
from bench.launch.console import say
from bench.launch.nodes import joining, member
from bench.launch.prepare import Job, frozen, prepare, requested_config, this_machine
from bench.machine import leases
from bench.plans.sweep import packing

Answer = dict[str, Any] | int  # what --json prints, or the exit code if another node has the record

ENDED_WELL = ("complete", "stopped")  # a sweep's pruner stops hopeless runs


def main(argv: list[str]) -> int:
    """Exit codes: 0 all complete, 1 one failed or was not started, 2 usage error."""
    if (help_text := explain.help_text(argv, this_machine)) is not None:
        print(help_text)
        return 0
    args = _parsed(argv)
    if args.info:
        from bench.config import multirun  # loads Hydra, which --help does not need

        multirun.show_info(args.overrides, args.info)
        return 0
    if args.cfg:
        _show_cfg(args)
        return 0
    if args.beside:
        from bench.cli import sweeping

        return sweeping.beside(args)
    stored = _is_sweep(args)
    if args.dry_run:
        from bench.cli import sweeping

        with console.output(args.quiet, args.json):
            forecast = sweeping.forecast(args, _listed(args))
        if args.json:
            print(json.dumps(forecast, indent=1))
        return 0
    if args.multirun:
        joining.refuse("run -m", args.overrides)
    started_by = None if args.multirun else joining.started_by("run")
    if started_by and started_by.rank > 0:  # another process makes the record and prints all messages
        return _follow(started_by, args.overrides)
    with console.output(args.quiet, args.json):
        if stored and not args.multirun:
            say("run", f"one run, though a sweep is stored here: {' '.join(stored)}; -m makes it")
        if args.multirun:
            from bench.cli import sweeping  # loads pages and tables, which a single run does not need

            runs = sweeping.go(args, argv)
        else:
            ended = _run(args, argv, started_by)
            if isinstance(ended, int):  # another node has the record
                return ended
            runs = [ended]
    if args.json:
        print(json.dumps(runs if args.multirun else ended, indent=1))
    return 0 if all(run["status"] in ENDED_WELL for run in runs) else 1


def check(argv: list[str]) -> None:
    """Raises ValueError for arguments that make no run, before they are submitted with cluster=slurm."""
    args = _parsed(argv)
    _is_sweep(args)
    for point in _points(args) or ():
        requested_config(point)


def _parsed(argv: list[str]) -> argparse.Namespace:
    args = _parser().parse_intermixed_args(overrides.spelled(argv))
    if args.jobs is not None:
        args.overrides.append(f"hydra.launcher.parallel={args.jobs}")
    return args


def _is_sweep(args: argparse.Namespace) -> list[str]:
    """Sets args.multirun from the options and yamls. Returns the overrides of the stored sweep."""
    mode, stored = (None, []) if args.multirun or args.race else compose.stored_sweep(args.overrides)
    args.multirun = args.multirun or mode == "MULTIRUN"
    if args.budget is not None and not args.multirun:
        raise ValueError(f"--budget {args.budget}: it is for sweeps (-m); hardware.wall_timeout_s=SECONDS ends one run")
    try:
        args.budget_s = None if args.budget is None else seconds_of(args.budget)
    except ValueError as error:
        raise ValueError(f"--budget {error}") from None
    return stored


def _points(args: argparse.Namespace) -> list[list[str]] | None:
    """Returns the overrides of every run; None if a search chooses them as it goes."""
    if not args.multirun:
        return [args.overrides]
    from bench.config import multirun

    return multirun.points(args.overrides, this_machine())


def _listed(args: argparse.Namespace) -> list[list[str]]:
    """Returns _points().  Raises ValueError for a search."""
    if (points := _points(args)) is None:
        raise ValueError("-m: a search has no list of points: omit -m, or list values, as in optim.lr=0.001,0.002")
    return points


def _show_cfg(args: argparse.Namespace) -> None:
    """Prints --cfg: our settings with their meanings; Hydra's own as Hydra prints them."""
    if args.cfg != "job":
        from bench.config import multirun

        multirun.show_cfg(args.overrides, args.cfg, this_machine())
        return
    for point in _listed(args):
        header = f"---\n# {' '.join(point)}\n" if args.multirun else ""
        print(header + explain.commented(requested_config(point), explain.Origins(point, this_machine())), end="")


def _follow(started_by: Any, overrides: list[str]) -> int:
    """Follows a run as a rank that another launcher started. Rank 0 prints the messages."""
    try:
        return member.follow_adopted(started_by, lambda: _prepared(joining.effective(overrides, started_by), True))
    except member.Refused as refused:
        time.sleep(joining.SAY_S)
        return refused.exit_code


def _prepared(overrides: list[str], check_own: bool) -> Job:
    return prepare(overrides, say=lambda text: say("data", text), check_own=check_own)


def _run(args: argparse.Namespace, argv: list[str], started_by: Any) -> Answer:
    """Returns what --json prints, or the exit code if another node has the record."""
    with contextlib.ExitStack() as stack:
        leading = joining.lead_adopted(started_by) if started_by else joining.lead_nodes(args.overrides)
        if leading is not None:
            stack.enter_context(leading)

        def prepared() -> Job:
            job = _prepared(joining.effective(args.overrides, started_by), not args.race)  # a race has checked it
            joining.check(job, started_by)
            return job

        if leading is None and (where := joining.is_node_of(args.overrides)):
            say("run", f"a node of the run that {where} records")
            return member.follow_nodes(args.overrides, prepared)
        try:
            job = stack.enter_context(frozen(prepared()))  # so that nodes are compared by what they will run
            if leading is None and job.config.hardware.rendezvous:  # from a yaml of the user's
                meet = job.config.hardware
                args.overrides += [f"hardware.rendezvous={meet.rendezvous}", f"hardware.nodes={meet.nodes}"]
                return _run(args, argv, started_by)
            if leading is not None:
                stack.enter_context(leases.held_by_ranks(job.config.hardware))
                leading.gather(job)
        except ValueError as error:
            if leading is not None:
                leading.refuse(error)
            raise
        return _run_job(job, args, argv, leading)


def _run_job(job: Job, args: argparse.Namespace, argv: list[str], leading: Any) -> dict[str, Any]:
    for deviation in job.deviations:
        say("track", f"open division: {deviation}")
    race = json.loads(args.race) if args.race else None
    if race and not race.pop("looks", False):  # one look per arm, in its warm-up or its first run
        job = job.with_look(False)
    if not race:
        known_s = series.earlier_s({job.config.track.name}, [job.config_id]).get(job.config_id)
        say("run", summary.announcement(job, known_s) + "; what else there is: ./run.sh --help" * (not args.overrides))
    plan = {"race": race} if race else None
    run = launcher.launch(job, ["run", *(args.overrides if race else argv)], plan=plan, leader=leading)
    if leading:
        leading.bye(run)
    say("run", summary.outcome_text(run), always=True)
    return summary.as_json(run)


def _parser() -> arguments.Parser:
    listed = "\n".join(f"  {group}={' | '.join(groups.choices(group))}" for group in groups.GROUPS)
    parser = arguments.Parser(
        "./run.sh run",
        main=main,
        description="Run once, or with -m once for every combination of values.",
        epilog=f"groups:\n{listed}\n\ninstruments and exporters are lists: instruments=[regions] or instruments=[]\n"
        "profile=window (stages, modded) adds an instrument with its recipe\n"
        "profile.schedule={wait:5,warmup:5,active:4,repeat:2} is torch.profiler.schedule; profile.every=500\n"
        "settings: --cfg job lists all with their meaning, --help KEY explains one or a group",
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="e.g. model=modern seed=3 goal.num_steps=100")
    sweep_help = "sweep: seed=0,1,2 or seed=range(0,3); finished points are skipped"
    parser.flag("-m", "--multirun", help=sweep_help)
    parser.add_argument("--enable_profiling", metavar="True", help="nanochat's name for profile=stages")
    parser.add_argument(
        "--cfg",
        choices=["job", "hydra", "all"],
        help="print the composed config with the meaning of every setting, null where it is derived, and stop; "
        "hydra: the settings of Hydra's launcher and sweeper; all: both, as Hydra prints them",
    )
    parser.add_argument("--info", nargs="?", const="all", choices=compose.INFO, help="print what Hydra found, and stop")
    name_help = "the config to start from instead of conf/config.yaml"
    parser.add_argument("-cn", "--config-name", metavar="NAME", help=name_help)
    parser.add_argument(
        "--budget",
        metavar="2h",
        help="for a sweep: start no run that would end later than this after the first began (90s, 45m, 1h30m); the "
        "same command continues",
    )
    parser.add_argument(
        "-j",
        "--jobs",
        metavar="N",
        help="for a sweep: this many runs at a time, each on its own GPU or cores; auto: as many as fit",
    )
    parser.flag("--dry-run", help="check every run, print what is left to do and how long it would take; run nothing")
    parser.flag("--anyway", help="continue although the machine is busy, as a single run does in any case")
    parser.forms("print run_id, folder, status, validity, metrics ... as JSON, with -m a list of them", says_more=True)
    parser.add_argument("--race", help=argparse.SUPPRESS)  # the run's slot in a race, as JSON (plans/race/runner.py)
    parser.add_argument(packing.OPTION, help=argparse.SUPPRESS)  # JSON of the slot of a concurrent run
    return parser
