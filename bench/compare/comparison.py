"""Arms of runs -> comparisons: the verdict with its differences, the noise floor of the session, and where the time went."""

import json
import os

import yaml

from bench.compare import calibration, differences, eligibility, verdict
from bench.compare import selection as arms_of_words
from bench.config import schema
from bench.diagnosis import between_runs
from bench.record import step_files

MAX_PAPERS = 3  # runs of an arm whose config, code and environment are read for the differences
MAX_TRAJECTORIES = 50  # runs of an arm whose losses are compared step by step


def of_arms(arms, diagnose=True, **options):
    """arms: of bench.compare.selection, the baseline first -> [(name of B, comparison with diagnosis)]; several B share Holm's p."""
    baseline, *candidates = arms
    results = {place: _one(baseline, arm, diagnose, options) for place, arm in enumerate(candidates)}
    verdict.adjusted(results)
    return [(candidates[place].name, result) for place, result in results.items()]


def of_folders(a_folders, b_folders, **options):
    """Run folders of all started runs -> the comparison with differences, diagnosis and this session's noise floor."""
    a, b = (arms_of_words.of_folders(name, folders) for name, folders in (("A", a_folders), ("B", b_folders)))
    return _one(a, b, options.pop("diagnose", True), options)


def _one(a, b, diagnose, options):
    timed = [[row for row in arm.rows if eligibility.is_timed(row)] for arm in (a, b)]
    kept = calibration.of_runs(timed[0] + timed[1]) if all(timed) else None
    of_one_race = a.race is not None and a.race == b.race
    options = {
        "plan": a.plan if of_one_race else None,
        "floor_pct": kept and calibration.floor_for(kept, *map(len, timed)),
        "peeked": of_one_race and a.peeked,
        "identical_losses": identical_losses(a, b),
        "differing": differences.of_papers(_papers(a), _papers(b)),
    } | options
    if (
        of_one_race and b.told
    ):  # the floor that was known when it ended: a later calibration does not change what a race said
        options["floor_pct"] = None if "uncalibrated" in b.told["flags"] else b.told["time"]["floor_pct"]
        kept = b.told.get("calibration")
    result = verdict.of_rows(a.rows, b.rows, **options)
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
            config = config and schema.upgraded(config)
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
    places = [place for place, row in enumerate(arm.rows) if eligibility.is_timed(row)][: between_runs.MAX_RUNS]
    return [(arm.record_of(place), steps_of(arm, place)) for place in places]


def steps_of(arm, place):
    """Rows of the run's steps.csv; of a log, what the importer put into the record."""
    folder = arm.folders[place]
    return arm.record_of(place).get("steps") or [] if folder is None else step_files.read(folder)


def identical_losses(a, b):
    """Whether every loss of every run of B is that of A's run with the same seed, bit for bit, for the same seeds.

    None where that cannot be known: a seed or the steps are missing, or there are too many runs to read.
    """
    seeds = [[row["seed"] for row in arm.rows if eligibility.is_timed(row)] for arm in (a, b)]
    if not all(seeds) or any(None in some or len(some) > MAX_TRAJECTORIES for some in seeds):
        return None
    if set(seeds[0]) != set(seeds[1]):
        return None
    found = [{}, {}]
    for by_seed, arm in zip(found, (a, b), strict=True):
        for place, row in enumerate(arm.rows):
            if eligibility.is_timed(row):
                by_seed.setdefault(row["seed"], []).append(_losses(steps_of(arm, place)))
    trajectories = [one for by_seed in found for runs in by_seed.values() for one in runs]
    if not all(trajectories):
        return None
    return all(one == found[0][seed][0] for by_seed in found for seed, runs in by_seed.items() for one in runs)


def _losses(rows):
    return [(row["step"], row.get("train_loss"), row.get("val_loss")) for row in rows]
