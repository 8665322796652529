"""Is B faster than A?  ./run.sh compare A B      A, B: run folders, globs, run ids, RACE:ARM, logs; or one race

First whether they may be compared and what differs, then the numbers and the verdict, then where the time went.
"""

import argparse
import json
import math
import os
import sys

import yaml

from bench.compare import selection as arms_of_words
from bench.compare import calibration, csv_text, differences, text as compare_text, verdict as comparison
from bench.diagnosis import between_runs
from bench.record import step_files

MAX_PAPERS = 3  # runs of an arm whose config, code and environment are read for the differences
MAX_TRAJECTORIES = 50  # runs of an arm whose losses are compared step by step
FAILURES = ("slower", "inconclusive", "loss")


def main(argv):
    """Exit codes: 0 compared, 1 what --fail-on names, 2 wrong use or not comparable."""
    args = _parser().parse_args(argv)
    for option, value in (("--margin", args.margin), ("--target", args.target)):
        if value is not None and not 0 <= value < math.inf:
            raise ValueError(f"{option} {value:g}: use a number of nats, 0 or more")
    fail_on = [_condition(word) for words in args.fail_on for word in words.split(",")]
    arms = arms_of_words.of_words(args.runs, lambda message: print(f"compare: left out: {message}", file=sys.stderr))
    _refuse_open_races(arms)
    against = of_arms(arms, force=args.force, target_val_loss=args.target, loss_margin_nats=args.margin,
                      diagnose=not args.no_diagnosis)  # fmt: skip
    if args.json:
        results = [{"names": [arms[0].name, name]} | result for name, result in against]
        print(json.dumps(results[0] if len(results) == 1 else results, indent=1))
    elif args.csv:
        print(csv_text.text([(name, result) for name, result in against]), end="")
    else:
        form = "md" if args.md else "terminal"
        print("\n\n".join(compare_text.render(result, (arms[0].name, name), form, patch=args.diff) for name, result in against))
    return max(exit_code(result, fail_on) for _, result in against)


def _refuse_open_races(arms):
    """What a race has so far is hidden until its end: looking is a declared act, which its ledger keeps."""
    for arm in arms:
        for race_id in arms_of_words.open_races(arm):
            raise ValueError(f"{arm.name}: holds runs of the race {race_id}, which is not over: ./run.sh race --look {race_id} shows them, and the ledger keeps the look; --abandon {race_id} gives it up")


def exit_code(result, fail_on=()):
    """0 fine, 1 a condition of --fail-on holds, 2 not comparable, or a condition needs a verdict that n = 1 denies."""
    if not result["comparable"]:
        return 2
    if fail_on and result["time"]["p"] is None:
        print("compare: --fail-on needs a verdict, and these runs give none: give at least two a side", file=sys.stderr)
        return 2
    code = 0
    for kind, limit in fail_on:
        time, loss = result["time"], result["val_loss"]
        failed = {
            "slower": result["verdict"] == "slower" and time["change_pct"] > limit,
            "inconclusive": result["verdict"] == "inconclusive",
            "loss": loss["verdict"] not in ("waived", "not_worse"),
        }[kind]
        if failed:
            why = (
                result["words"]
                if kind != "loss"
                else f"val_loss is {loss['verdict']}, not shown to be within {loss['margin_nats']:g} nats"
            )
            print(f"compare: fails on {kind}: {why}", file=sys.stderr)
            code = 1
    return code


def of_arms(arms, diagnose=True, **options):
    """arms: of bench.compare.selection, the baseline first -> [(name of B, comparison with diagnosis)]; several B share Holm's p."""
    baseline, *candidates = arms
    results = {place: _one(baseline, arm, diagnose, options) for place, arm in enumerate(candidates)}
    comparison.adjusted(results)
    return [(candidates[place].name, result) for place, result in results.items()]


def of_folders(a_folders, b_folders, **options):
    """Run folders of all started runs -> the comparison with differences, diagnosis and this session's noise floor."""
    a, b = (arms_of_words.of_folders(name, folders) for name, folders in (("A", a_folders), ("B", b_folders)))
    return _one(a, b, options.pop("diagnose", True), options)


def _one(a, b, diagnose, options):
    timed = [[row for row in arm.rows if comparison.comparable.is_timed(row)] for arm in (a, b)]
    kept = calibration.of_runs(timed[0] + timed[1]) if all(timed) else None
    of_one_race = a.race is not None and a.race == b.race
    options = {
        "plan": a.plan if of_one_race else None,
        "floor_pct": kept and calibration.floor_for(kept, *map(len, timed)),
        "peeked": of_one_race and a.peeked,
        "identical_losses": identical_losses(a, b),
        "differing": differences.of_papers(_papers(a), _papers(b)),
    } | options
    if of_one_race and b.told:  # the floor that was known when it ended: a later calibration does not change what a race said
        options["floor_pct"] = None if "uncalibrated" in b.told["flags"] else b.told["time"]["floor_pct"]
        kept = b.told.get("calibration")
    result = comparison.of_rows(a.rows, b.rows, **options)
    result["calibration"] = kept and {name: kept[name] for name in ("file", "floor_pct", "floor_n", "cv_pct", "exact")}
    result["code_change"] = _code_change(a, b)
    if diagnose:
        shown = result["comparable"] or options.get("force")
        result["diagnosis"] = between_runs.of_runs(*((_with_steps(a), _with_steps(b)) if shown else ([], [])))
        result["diagnosis"]["traces"] = _traces(a, b)  # also of profiled runs, whose times are refused
    return result


def _code_change(a, b):
    """The source of B's first run against A's; None where it is the same, or where no folder says it."""
    if a.rows[0]["source_sha256"] == b.rows[0]["source_sha256"] or None in (a.folders[0], b.folders[0]):
        return None
    from bench.diagnosis import code_diff

    return code_diff.of_folders(a.folders[0], b.folders[0])


def _traces(a, b):
    """The change between the traces of both arms; None without traces, and nothing for them is imported then."""
    folders = [[folder for folder in arm.folders if folder] for arm in (a, b)]
    if not all(any(os.path.isdir(f"{folder}/traces") for folder in some) for some in folders):
        return None
    from bench.diagnosis import trace_diff

    return trace_diff.of_folders(*folders)


def _papers(arm):
    """Of one run for each kind in the arm: what differs inside a kind is chance, not a difference."""
    kinds = {}
    for place, row in enumerate(arm.rows):
        kinds.setdefault(
            (row["config_id"], row["source_sha256"], row["comparability_id"], row["session_id"], row["setting"]), place
        )
    found = []
    for place in list(kinds.values())[:MAX_PAPERS]:
        folder = arm.folders[place]
        config = environment = None
        if folder is not None:
            config = _read(
                folder, "config.yaml", lambda text: yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
            )
            environment = _read(folder, "environment.json", json.loads)
        found.append(differences.papers(arm.record_of(place), config, environment))
    return found


def _read(folder, name, parse):
    try:
        with open(f"{folder}/{name}") as file:
            found = parse(file.read())
    except (OSError, ValueError, yaml.YAMLError):
        return None
    return found if isinstance(found, dict) else None


def _with_steps(arm):
    places = [place for place, row in enumerate(arm.rows) if comparison.comparable.is_timed(row)][: between_runs.MAX_RUNS]
    return [(arm.record_of(place), steps_of(arm, place)) for place in places]


def steps_of(arm, place):
    """Rows of the run's steps.csv; of a log, what the importer put into the record."""
    folder = arm.folders[place]
    return arm.record_of(place).get("steps") or [] if folder is None else step_files.read(folder)


def identical_losses(a, b):
    """Whether every loss of every run of B is that of A's run with the same seed, bit for bit, for the same seeds.

    None where that cannot be known: a seed or the steps are missing, or there are too many runs to read.
    """
    seeds = [[row["seed"] for row in arm.rows if comparison.comparable.is_timed(row)] for arm in (a, b)]
    if not all(seeds) or any(None in some or len(some) > MAX_TRAJECTORIES for some in seeds):
        return None
    if set(seeds[0]) != set(seeds[1]):
        return None
    found = [{}, {}]
    for by_seed, arm in zip(found, (a, b), strict=True):
        for place, row in enumerate(arm.rows):
            if comparison.comparable.is_timed(row):
                by_seed.setdefault(row["seed"], []).append(_losses(steps_of(arm, place)))
    trajectories = [one for by_seed in found for runs in by_seed.values() for one in runs]
    if not all(trajectories):
        return None
    return all(one == found[0][seed][0] for by_seed in found for seed, runs in by_seed.items() for one in runs)


def _losses(rows):
    return [(row["step"], row.get("train_loss"), row.get("val_loss")) for row in rows]


def _condition(word):
    """slower:0.5%, slower, inconclusive or loss -> (kind, per cent)."""
    kind, colon, limit = word.partition(":")
    try:
        pct = float(limit.rstrip("% ")) if colon else 0.0
    except ValueError:
        pct = -1.0
    if kind not in FAILURES or pct < 0 or (colon and kind != "slower"):
        raise ValueError(f"--fail-on {word}: use slower:0.5%, inconclusive or loss")
    return kind, pct


def _parser():
    parser = argparse.ArgumentParser(
        prog="./run.sh compare",
        description="Is B faster than A?  The change is of B against A; negative is faster.",
        epilog="A and B: a run folder or a folder of them, a quoted glob, part of a run id, RACE:ARM, imported logs.\n"
        "Several runs as one: A1,A2,A3 or A1 A2 A3 vs B1 B2 B3.  A race alone compares all its arms with the first.\n\n"
        "exit codes: 0 compared, 1 what --fail-on names is so, 2 wrong use or not comparable",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "runs", nargs="+", metavar="A B", help="the baseline first; several B are judged together (Holm)"
    )
    parser.add_argument("--fail-on", action="append", default=[], metavar="slower:0.5%",
                        help="exit code 1 if B is slower and by more than that; also inconclusive, loss")  # fmt: skip
    parser.add_argument(
        "--force", action="store_true", help="numbers although the runs are not comparable; never a verdict"
    )
    parser.add_argument("--target", type=float, metavar="VAL_LOSS", help="val_loss to be below; default: the runs' own")
    parser.add_argument(
        "--margin", type=float, metavar="NATS", help="a rise of val_loss that still is no worse; default 0.002"
    )
    parser.add_argument("--no-diagnosis", action="store_true", help="leave out where the time went")
    parser.add_argument("--diff", action="store_true", help="the change of the source in full, where the code differs")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="everything, unrounded; a list where there are several B")
    form.add_argument("--md", action="store_true", help="Markdown, to paste into a pull request")
    form.add_argument("--csv", action="store_true", help="the numbers, a metric a line")
    return parser
