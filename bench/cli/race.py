"""Is B faster than A?  ./run.sh race A=<overrides> B=<overrides> [C=...] [n=5] [key=value for all arms]

    ./run.sh race A= B="optim=muon"                        the default against Muon, 5 runs each
    ./run.sh race HEAD~1 HEAD n=auto:3-20                  two revisions of this repository, until it is decided
    ./run.sh race HEAD~1 HEAD script=train.py --fail-on slower:1%       of yours, as in CI; v1..HEAD: each commit
    ./run.sh race --from-sweep ID --top 2 n=5              the best two configs of a sweep
    ./run.sh race A="model=gpt2" B="model=modern data.seq_len=64" track=free looks=3,5

All runs are in one session: a fresh process group per run, a discarded warm-up run per arm, and a random order in
blocks, planned before the first run.  Results stay hidden until the race ends.  After an interrupt: race --resume
"""

import argparse
import json
import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.base.paths import REPO, results_root, shown, user_path
from bench.cli import arguments, compare
from bench.compare import comparison, eligibility
from bench.config import identity
from bench.launch import allocation, console, ready
from bench.launch.prepare import requested_config
from bench.plans.race import arm_process, condition, plan, planning, runner, state, worktrees
from bench.plans.sweep import points
from bench.record import named, race_folder, sweep
from bench.record.race_folder import Race, verdicts_of


def main(argv: list[str]) -> int:
    """Exit codes: 0 ended, 1 interrupted, abandoned or a --fail-on condition holds, 2 usage error or not comparable, 75
    not comparable because other programs kept the machine busy.
    """
    args = _parser().parse_intermixed_args(argv)
    fail_on = compare.conditions(args.fail_on)
    results = results_root().absolute()
    if args.look is not None:
        return _look(args, results)
    may_be_identical = args.anyway and not fail_on
    with console.output(args.quiet, args.json):
        try:
            if args.dry_run:
                request = plan.parse_request(_requested(args))
                planned, _ = planning.planned(request, results, args.anyway, None, may_be_identical)
                runner.introduce(planned, results)
                forecast = runner.series_of(planned).forecast()
                console.say("plan", f"{forecast}; a dry run: nothing was trained or recorded")
            else:
                folder, race = _raced(args, results, may_be_identical)
        except planning.Identical as error:
            if not fail_on:
                raise
            why = f"{error.same}: nothing was raced, and no condition of --fail-on holds"
            console.say("race", why, always=True)
            return 0
    if args.dry_run:
        if args.json:
            print(json.dumps(planned, indent=1))
        return 0
    if args.json:
        print(json.dumps(race, indent=1))
    elif race["status"] != "interrupted":
        _say(folder, race, args)
    if race["result"] is None:
        return 1
    against: Any = (race["result"]["against"] or {}).values()
    codes = [compare.exit_code(comparison, fail_on, args.fail_if == "shown") for comparison in against]
    is_busy = any(why.startswith(eligibility.KEPT_BUSY) for comparison in against for why in comparison["reasons"])
    is_blurred = any(c["verdict"] == "inconclusive" and "suspect-runs" in c["flags"] for c in against)
    if (2 in codes and is_busy) or (fail_on and is_blurred):  # then no condition would mean anything
        return os.EX_TEMPFAIL
    return max(codes, default=0)


def check(argv: list[str]) -> None:
    """Raises ValueError for arguments that make no race, before they are submitted with cluster=slurm.

    The settings of an arm of another revision are checked by that revision's code.
    """
    args, results = _parser().parse_intermixed_args(argv), results_root().absolute()
    compare.conditions(args.fail_on)
    if race_ids := [word for word in (args.resume, args.look, args.abandon) if word is not None]:
        _chosen(results, race_ids[0])
        return
    request = plan.parse_request(_requested(args))
    planning.check(request)
    configs = {}
    for name, arm in request["arms"].items():
        try:
            if arm["rev"] is None:
                configs[name] = requested_config(arm["overrides"])
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    for config in configs.values():
        planning.refuse_laxer(config.track.name, request | {"metric": config.goal.of})
    if not args.anyway:
        kinds = {  # the code of two folders may differ, though their names are the same
            name: request["arms"][name]
            | {"config_id": identity.config_id(config), "source_sha256": config.script and config.script.root}
            for name, config in configs.items()
        }
        planning.refuse_identical(kinds)


def _look(args: argparse.Namespace, results: Path) -> int:
    """Prints the interim state of a race. Returns the exit code."""
    from bench.report import verdicts

    with console.output(args.quiet, args.json):
        interim = runner.look(_chosen(results, args.look), results)
    comparisons = list((interim["against"] or {}).values())
    print(json.dumps(interim, indent=1) if args.json else verdicts.document_of((), comparisons).terminal())
    return 0


def _say(folder: Path, race: Race, args: argparse.Namespace) -> None:
    """Prints how a race ended, and where its folder is; with --quiet only the verdicts."""
    from bench.report import race_page, verdicts

    command = f"./run.sh compare {race['race_id']} "
    report = race_page.document_of(race, options=verdicts.Options(command=command))
    if args.quiet and not args.md:
        print("\n".join(verdict.text(False) for verdict in report.verdicts))
        return
    print("\n" + (report.markdown() if args.md else report.terminal()))
    console.say("race", shown(folder))
    if len(race["arms"]) > 2 and all(map(race_folder.commit_of, race["arms"].values())):
        if first := _first_changed(race):
            console.say("found", first)
        at = f" {shlex.quote(shown(folder.parent.parent))}" * ("SPEEDRUN_RESULTS" in os.environ)  # of this call alone
        console.say("next", f"./run.sh history{at} shows the commits in their order, and where the speed changed")
    for name, compared in verdicts_of(race).items():
        if compared["verdict"] == "faster" and compared["val_loss"].get("below_target") == [True, True]:
            arms = " ".join([*_before(folder, race["plan"], name), f"{race['race_id']}:{name}"])
            console.say("next", f"./run.sh replay {arms}, whose certificates a claim takes along; then")
            console.say("", f"./run.sh judge {arms} --claim NAME judges it as a claim")


def _first_changed(race: Race) -> str | None:
    """Returns which commit is the first that differs from the baseline, if all after it do so too; else None."""
    verdicts = {name: compared["verdict"] for name, compared in verdicts_of(race).items()}
    names, shown = list(race["arms"]), ("slower", "faster", "worse", "better")
    first = next((name for name in names if verdicts.get(name) in shown), None)
    if first is None or any(verdicts.get(name) != verdicts[first] for name in names[names.index(first) :]):
        return None
    before, after = (race["arms"][name] for name in (names[names.index(first) - 1], first))
    ends = " ".join(str(race_folder.commit_of(arm))[:10] for arm in (before, after))
    found = f"{first} is the first commit that is {verdicts[first]} than {race['baseline']}"
    return f"{found}: ./run.sh race {ends} confirms it against the one before, with the same settings"


def _before(folder: Path, planned: Mapping[str, Any] | None, name: str) -> list[str]:
    """Returns the arms of earlier races of the same two programs, which a claim must include: RACE:B."""
    if not planned:
        return []
    earlier = comparison.earlier_than(planned, (planned["baseline"], name), folder.parent.parent)
    return earlier.arms if earlier else []


def _raced(args: argparse.Namespace, results: Path, may_be_identical: bool) -> tuple[Path, Race]:
    """Returns the race's folder, and race.json.  may_be_identical: as in planning.planned()."""
    if args.abandon is not None:
        folder = _chosen(results, args.abandon)
        with state.locked(folder):
            if state.read(folder, results).has_ended:
                raise ValueError(f"{folder.name}: has ended: only an unfinished race can be abandoned")
            worktrees.remove_all(REPO, f"{folder.name}-")  # of a killed race
            return folder, runner.finish(folder, results, "abandoned", "abandoned on request (--abandon)")
    is_new = False
    if args.resume is not None:
        folder = _chosen(results, args.resume)
    elif args.from_sweep is None and (requeued := _requeued(results)) is not None:
        folder = requeued
        console.say("race", f"job requeued: {folder.name} goes on")
    else:
        request = plan.parse_request(_requested(args))
        folder, is_new = planning.begin(request, results, args.anyway, None, may_be_identical), True
    return folder, runner.go(folder, results, args.show, args.anyway, is_new, args.machine)


def _requeued(results: Path) -> Path | None:
    """Returns the unfinished race of this SLURM job if it was requeued, else None."""
    job = allocation.current()
    if job is None or not job.num_restarts:
        return None
    for folder in state.unfinished(results):
        try:
            slots = state.read(folder, results).slots
        except ValueError as error:  # without a plan it cannot be this job's race
            named.report_excluded("race", str(error))
            continue
        runs = [arm_process.record_of(results, run) or {} for slot in slots for run, _ in slot.attempts]
        if any((run.get("launched_by") or {}).get("job_id") == job.job_id for run in runs):
            return folder
    return None


def _requested(args: argparse.Namespace) -> list[str]:
    """Returns the arguments of a race that is to begin; --from-sweep appends the sweep's best points as arms."""
    if args.from_sweep is None:
        if not args.arguments:
            raise ValueError("no arms are given: write A=... B=..., for example ./run.sh race A= B='optim=muon' n=5")
        return _with_ranges(args.arguments)
    folder = named.sweep_folder(args.from_sweep).absolute()
    own_arms = [word for word in args.arguments if word[:1].isupper() and word[1:2] in ("=", ".")]
    if own_arms:
        raise ValueError(f"{own_arms[0]}: --from-sweep makes the arms: write key=value for all of them")
    arms = points.winning_arms(folder, args.top)
    for arm in arms:
        console.say("race", f"from {folder.name}: {arm}")
    if not (folder / sweep.STUDY).exists() or any(word.startswith("alpha=") for word in args.arguments):
        return [*args.arguments, *arms]
    alpha = f"alpha={sweep.read_study(folder)['alpha'] / 2!r}"
    console.say("race", f"{alpha}: half of the study's, which has two questions")
    return [*args.arguments, alpha, *arms]


def _with_ranges(words: list[str]) -> list[str]:
    """Returns the arguments with each range A..B replaced by its commits."""
    repo = user_path(plan.root_of_script(words) or REPO)
    is_range = [".." in word and "=" not in word for word in words]
    expanded = (
        worktrees.commits_between(repo, word) if many else [word] for word, many in zip(words, is_range, strict=True)
    )
    return [word for commits in expanded for word in commits]


def _chosen(results: Path, name: str) -> Path:
    """Returns the race that --resume, --look or --abandon names, or the latest that has not ended."""
    if name:
        folder = named.find([name])[0].race or results
        if not (folder / "plan.json").is_file() or folder.resolve().parent.parent != results.resolve():
            raise ValueError(f"{name}: is not a race of {results}: ./run.sh race A=... B=... begins one")
    else:
        unfinished = state.unfinished(results)
        if not unfinished:
            raise ValueError("there is no unfinished race: start one with ./run.sh race A=... B=...")
        folder = unfinished[-1]
    planning.enter(folder, results)
    return folder


def _parser() -> arguments.Parser:
    parser = arguments.Parser("./run.sh race", main=main)
    parser.add_argument(
        "arguments",
        nargs="*",
        metavar="WORD",
        help="A=overrides, A.rev=REVISION or revisions alone (HEAD~1 HEAD, v1..HEAD), A.python=PATH (of a script), "
        "n=5 or auto:3-20, looks=3,5, alpha=0.05, margin=0.002 (in the unit of the goal's metric), seed=0 (the first), "
        "name=race, compilations=3 (fresh ones of each arm), on=time, loss, time_to_target or steps_to_target "
        "(default: by the arms); key=value for all arms",
    )
    arguments.latest(parser, "--resume", "continue this race, or the latest unfinished one")
    arguments.latest(parser, "--look", "show the interim state; the look goes on record")
    arguments.latest(parser, "--abandon", "end a race without a verdict, if it cannot be resumed; it stays on record")
    parser.add_argument("--from-sweep", metavar="ID", help="race the best configs of this sweep, by the mean metric")
    parser.add_argument("--top", type=int, default=2, metavar="N", help="how many of them; default 2")
    fails = "exit code 1 where a condition of ./run.sh compare --fail-on holds: slower:0.5%%, worse, inconclusive, ..."
    parser.add_argument("--fail-on", action="append", default=[], metavar="CONDITION", help=fails)
    parser.add_argument("--fail-if", choices=("possible", "shown"), help="as compare --fail-if; default possible")
    parser.needs("--fail-if", "--fail-on")
    parser.flag("--dry-run", help="print the plan and how long it would take; run and write nothing")
    parser.flag("--show", help="show every run's numbers as they arrive, which is an unplanned look")
    parser.flag("--anyway", help=ready.ANYWAY)
    help_ = "measure the machine for 20 s before and after (5 s on a CPU), and flag what is slow, or refuse to start"
    help_ += "; auto: flag on GPUs only"
    parser.add_argument("--machine", choices=condition.MODES, default="auto", help=help_)
    parser.forms("print race.json, of an interrupted race what there is so far", "print race.md", says_more=True)
    return parser
