"""Compares arms of runs: the verdict, the facts that differ, the session's noise floor, and where the time went.

Facts are config, code, data and environment.  An arm whose own runs differ in a fact shows several values.
"""

import collections
import contextlib
import hashlib
import json
import math
import os
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.analysis.diagnosis import between_runs
from bench.base.metric import VAL_LOSS
from bench.base.reading import json_file, yaml_file
from bench.base.reading.damage import Damaged, reading_record
from bench.base.text_table import counted
from bench.compare import calibration, effects, eligibility, questions, verdict
from bench.compare.selection import Arm, called
from bench.compare.verdict import Comparison, Difference
from bench.config import identity, schema
from bench.config.typed import leaves
from bench.record import certificates, ledger, race_folder, run_folder, step_files, store, verification
from bench.record.rows import Row

MAX_FACTS = 3  # most runs of an arm whose facts are read for the differences
OF_CALIBRATION = ("file", "floor_pct", "floor_n", "cv_pct", "exact")  # fields of a calibration in a Comparison
VERDICTS = (*questions.FIRM, "inconclusive")
KNOWN_BY = ("config_id", "source_sha256", "comparability_id", "session_id", "setting")
KINDS = ("config", "code", "data", "environment")
CONFIG_OF_RECORD = ("optim", "goal", "hardware", "instruments", "world_size")
# environment variables that differ for each run in older records, or for each compilation of a race
OF_ONE_RUN = ("SPEEDRUN_LAUNCHED_S", "SPEEDRUN_LAUNCHER_PID", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


Facts = Mapping[str, Mapping[str, Any]]  # {one of KINDS: {dotted name: value}} of a run


class Losses(NamedTuple):
    """What tells whether two runs have the same losses."""

    hash_of_all: str  # of the columns step_files.LOSSES, "" without steps
    losses_id: str | None  # step_files.losses_id()


def compare_arms(arms: Iterable[Arm], diagnose: bool = True, **options: Any) -> list[tuple[str, Comparison]]:
    """Compares each arm with the first; returns (name, Comparison) of each.  options: fields of verdict.Options."""
    baseline, *candidates = arms = list(arms)
    first, *others = called(arms)
    pairs = zip(candidates, others, strict=True)
    with contextlib.nullcontext() if baseline.race is None else reading_record(f"race {baseline.race}"):
        comparisons = [_compared(baseline, arm, (first, other), diagnose, options) for arm, other in pairs]
        verdict.adjust(comparisons)
        if len(comparisons) == 1 and baseline.race == candidates[0].race is not None:
            verdict.adjust_as(comparisons[0], candidates[0].reported)
    return [(arm.name, compared) for arm, compared in zip(candidates, comparisons, strict=True)]


def _compared(
    a: Arm, b: Arm, callings: Sequence[tuple[str, str]], diagnose: bool, options: dict[str, Any]
) -> Comparison:
    names = [name for name, _ in callings]
    losses = losses_of(a), losses_of(b)
    timed = [[row for row in arm.rows if eligibility.is_timed(row)] for arm in (a, b)]
    kept: Mapping[str, Any] | None = None
    floor_pct, is_one_race = None, a.race is not None and a.race == b.race
    if is_one_race and b.reported:  # the floor when the race ended: a later calibration must not change its verdict
        floor_pct = None if "uncalibrated" in b.reported["flags"] else b.reported["time"]["floor_pct"]
        kept = b.reported.get("calibration")
    elif all(timed) and (floor := calibration.find_for_rows(timed[0] + timed[1])):
        kept, floor_pct = dict(floor), calibration.floor_for(floor, *map(len, timed))
    earlier = earlier_races(a, b) if is_one_race and (diagnose or "earlier_weight" not in options) else None
    weight = earlier.weight if earlier else 1.0
    is_of_baseline = a.in_race is not None and a.in_race[0] == (a.plan or {}).get("baseline")
    if is_one_race and b.reported and is_of_baseline:  # as with the floor
        weight = b.reported.get("earlier_weight", 1.0)
    options = {
        "plan": a.plan if is_one_race else None,
        "earlier_weight": weight,
        "floor_pct": floor_pct,
        "unplanned_look": is_one_race and a.unplanned_look,
        "run_again": [a.num_run_again, b.num_run_again] if is_one_race else [0, 0],
        "identical_losses": _identical_losses((a, b), losses),
        "losses_ids": [[run and run.losses_id for run in arm_losses] for arm_losses in losses],
        "differing": differences_of(_facts(a), _facts(b)),
        "names": names,
        "drift_pct": lambda is_one_session: calibration.drift_pct(_history(a, b), is_one_session),
    } | options
    if "not_as_recorded" not in options:
        options["not_as_recorded"] = [*_not_as_recorded(a, names[0]), *_not_as_recorded(b, names[1])]
    compared = verdict.compare_rows(a.rows, b.rows, **options)
    compared["about"] = [about for _, about in callings]
    compared["earlier_races"] = earlier.verdicts if earlier else None
    compared["flags"] += ["raced-before"] * bool(compared["earlier_races"])
    compared["calibration"] = {name: kept[name] for name in OF_CALIBRATION} if kept else None
    compared["code_change"] = _code_change(a, b)
    replayed = [
        certificates.summarized(certificates.outcome(folder) for folder in arm.folders if folder) for arm in (a, b)
    ]
    if any(replayed):
        compared["certificates"] = replayed
    if diagnose:
        shown = compared["comparable"] or options.get("force")
        compared["diagnosis"] = between_runs.diagnose(*((_with_steps(a), _with_steps(b)) if shown else ([], [])), names)
        compared["diagnosis"]["traces"] = _traces(a, b)  # also of profiled runs, whose times are refused
    return compared


def _not_as_recorded(arm: Arm, name: str) -> Iterator[str]:
    """Yields a sentence about the runs whose run.json differs from the hash in the ledger, if there are any, and one
    about those whose steps.csv, which says which runs share a trajectory, or config.yaml, which says what differs, is
    not the one that their run.json lists."""
    by_ledger: dict[Path, list[str]] = {}
    changed, of_file = list[str](), {"steps.csv": list[str](), "config.yaml": list[str]()}
    for number, (folder, row) in enumerate(zip(arm.folders, arm.rows)):
        if folder and row["status"] == "complete":
            for item in arm.record_of(number)["artifacts"]:
                if item["path"] in of_file and (change := verification.change_of(Path(folder), item)):
                    of_file[item["path"]].append(f"{row['run_id']}: {change}")
            if results := ledger.find(folder):
                by_ledger.setdefault(results, []).append(ledger.name_of(results, folder))
    for results, runs in by_ledger.items():
        pattern = re.compile(b"|".join(re.escape(json.dumps(run).encode()) for run in runs))
        ledger_runs = ledger.runs_of(ledger.lines_with(results, pattern))
        ends = [(run, ledger_runs[run]["end"]) for run in runs if run in ledger_runs]
        changed += [run for run, end in ends if end and ledger.is_changed(results / run, end)]
    if changed:
        where = f"{counted(len(changed), 'run')} of {name}: {changed[0]}"
        yield f"run.json was changed after the run ended, in {where}: restore what the ledger's sha256 is of"
    for path, what in (("steps.csv", "the losses of the steps"), ("config.yaml", "the settings")):
        if of_file[path]:
            where = f"{counted(len(of_file[path]), 'run')} of {name}: {of_file[path][0]}"
            yield f"{what} are not those that were recorded, in {where}: restore the file"


class Earlier(NamedTuple):
    """The races of the same arms that precede a race in the ledger."""

    verdicts: dict[str, int]  # {verdict: number of races}; "none" for races without a verdict
    weight: float  # the share of alpha that they leave
    arms: list[str]  # the candidate in each of them that had this very config, RACE:B, the oldest first


def earlier_races(a: Arm, b: Arm) -> Earlier | None:
    """Returns the earlier races of the arms of a race, or None if there are none or that is unknown."""
    folder = a.folders[0] if a.folders else None
    if a.in_race is None or b.in_race is None or not (a.plan or {}).get("arms") or not folder:
        return None
    return earlier_than(a.plan or {}, (a.in_race[0], b.in_race[0]), Path(folder).parent.parent)


def earlier_than(
    plan: Mapping[str, Any], arms_of_plan: tuple[str, str], results: Path, among: Container[str] | None = None
) -> Earlier | None:
    """Returns the races of these two arms, in either order, that precede a plan in a ledger, which may lack the plan.

    An arm is its code and its config, or one that is near (identity.are_near): else a race could be repeated with a
    change that has no effect.  Of several such arms of a race, the one that had this very
    config is named, and the e-value is the least of them; of a run that has not begun, only this very config is known
    to be one.  among: the ids of the races that count; None: all.

    Repeating a race until it is won proves nothing, so each earlier race multiplies alpha by its e-value, at most 1, or
    by 1/2 if it has none, as for a plan that asks for the loss or for steps.  The product is an e-process over all
    races.  A race that was abandoned before its candidate ran does not count; an unfinished one does, because it may
    be resumed after this race.
    """
    num_by_verdict, weight, before = collections.Counter[str](), 1.0, list[str]()
    lines = list(ledger.lines_with(results, re.compile(rb'"event":"(plan|race_end)"|"race":\{')))
    starts = {(slot["race_id"], slot.get("arm")): line for line in lines if (slot := line.get("race"))}
    over = {line["race_id"] for line in lines if line["event"] == "race_end"}
    a, b = (plan["arms"][name] for name in arms_of_plan)
    config_ids = a.get("config_id"), b.get("config_id")
    for line in lines:
        if not isinstance(line.get("arms"), dict):
            continue
        if line.get("race_id") == plan["race_id"]:
            break
        if among is not None and line.get("race_id") not in among:
            continue
        runs: dict[str, Any] = {name: starts.get((line["race_id"], name), {}) for name in line["arms"]}
        is_a, is_b = (
            {name for name, kind in line["arms"].items() if _is_arm(arm, kind, runs[name], results)} for arm in (a, b)
        )
        baseline = line.get("baseline")
        is_of_both = plan["baseline"] not in arms_of_plan and is_a  # its candidates, which any race of both compares
        candidates = is_b if baseline in is_a else is_a if baseline in is_b else is_b if is_of_both else set[str]()
        names = sorted(candidates - {baseline}, key=lambda name: (line["arms"][name][0] not in config_ids, name))
        if line["race_id"] in over and not any(runs[name] for name in names):
            continue
        if names:
            ended, log_left = "none", effects.log_left({}, None)  # if the race is unfinished, abandoned or deleted
            with contextlib.suppress(ValueError, KeyError, TypeError):
                race = race_folder.vouched(race_folder.of(results, line["race_id"]))
                verdicts = race_folder.verdicts_of(race) if baseline in is_a | is_b else {}  # else of other pairs
                ended = str(verdicts[names[0]]["verdict"])
                log_left = min(effects.log_left(verdicts[name]["time"], plan.get("on")) for name in names)
            num_by_verdict[ended if ended in VERDICTS else "none"] += 1
            if line["arms"][names[0]][0] in config_ids:
                before.append(f"{line['race_id']}:{names[0]}")
            weight *= math.exp(log_left)
    counts = {name: num_by_verdict[name] for name in (*VERDICTS, "none") if num_by_verdict[name]}
    return Earlier(counts, weight, before) if num_by_verdict else None


def _is_arm(arm: Mapping[str, Any], kind: Sequence[str | None], run: Mapping[str, Any], results: Path) -> bool:
    """Returns whether an arm of an earlier race has the code of this one, and its config or one that is near.

    kind: its config_id and source_sha256; run: the line of one of its runs, {} if none began.
    """
    if kind[1] != arm.get("source_sha256") or kind[0] == arm.get("config_id"):
        return kind[1] == arm.get("source_sha256")
    shape = identity.effective_shape(run, results) if run and "effective" in arm else None
    return shape is not None and identity.are_near(shape, arm["effective"])


def _history(a: Arm, b: Arm) -> list[Row]:
    """Returns the rows of all runs in the track folders of these runs; logs have no folder."""
    tracks = {Path(folder).parent for arm in (a, b) for folder in arm.folders if folder}
    return [row for _, row in store.read_rows(sorted(tracks), lambda message: None)]


def _code_change(a: Arm, b: Arm) -> dict[str, Any] | None:
    """Returns the diff of source from A's first run to B's, or None if it is the same or unknown."""
    same = not a.rows or not b.rows or a.rows[0]["source_sha256"] == b.rows[0]["source_sha256"]
    if same or a.folders[0] is None or b.folders[0] is None:
        return None
    from bench.analysis.diagnosis import code_diff

    return code_diff.diff_folders(a.folders[0], b.folders[0])


def _traces(a: Arm, b: Arm) -> dict[str, Any] | None:
    """Returns the change between the arms' traces and its "cause" as a sentence, or None without traces."""
    folders = [[*arm.warm_ups, *(folder for folder in arm.folders if folder)] for arm in (a, b)]
    if not all(any(os.path.isdir(f"{folder}/traces") for folder in paths) for paths in folders):
        return None
    from bench.analysis.explain import document, explained

    difference = explained.difference_of_runs(*folders)
    return difference and difference | {"cause": document.cause(difference)}


def _with_steps(arm: Arm) -> list[tuple[Mapping[str, Any], list[dict[str, Any]]]]:
    timed = [number for number, row in enumerate(arm.rows) if eligibility.is_timed(row)][: between_runs.MAX_RUNS]
    return [(arm.record_of(number), arm.steps_of(number)) for number in timed]


def _identical_losses(
    arms: tuple[Arm, Arm], losses: tuple[Sequence[Losses | None], Sequence[Losses | None]]
) -> bool | None:
    """Returns whether both arms have the same seeds, and runs of one seed bit-identical losses and values of the goal's
    metric, which may be another one, or that of the best validation within a budget.

    Returns None if the seeds differ, or a seed or the steps are missing.
    """
    by_seed: list[dict[int | None, list[Any]]] = []  # {seed: (losses, metric) of its runs} of each arm
    for arm, arm_losses in zip(arms, losses, strict=True):
        by_seed.append({})
        for row, run_losses in zip(arm.rows, arm_losses, strict=True):
            if eligibility.is_timed(row):
                is_loss = row["metric"] == VAL_LOSS.name and not row.get("budget")
                score = None if is_loss else row["score"]  # of another metric or moment than the losses
                by_seed[-1].setdefault(row["seed"], []).append((run_losses and run_losses.hash_of_all, score))
    a, b = by_seed
    hashes = [hash_of_all for seeds in by_seed for seed_runs in seeds.values() for hash_of_all, _ in seed_runs]
    is_known = a and a.keys() == b.keys() and None not in a and all(hashes)
    return all(run == a[seed][0] for seed in a for run in a[seed] + b[seed]) if is_known else None


def losses_of(arm: Arm) -> list[Losses | None]:
    """Returns what tells each run's losses from those of others, None if its steps are damaged."""
    losses: list[Losses | None] = []
    for number, folder in enumerate(arm.folders):
        try:
            if folder is None:
                rows = arm.steps_of(number)
                columns = {name: [row.get(name) for row in rows] for name in step_files.LOSSES}
            else:
                columns = step_files.read_columns(folder, step_files.LOSSES)
        except ValueError:  # damaged, which verify reports
            losses.append(None)
            continue
        hash_of_all = hashlib.sha256(repr(columns).encode()).hexdigest() if columns["step"] else ""
        losses.append(Losses(hash_of_all, step_files.losses_id(columns)))
    return losses


def differing_folders(a: str, b: str) -> list[Difference]:
    """Returns the facts in which two run folders differ.  Raises ValueError if one of them cannot be read."""
    return differences_of(*([_facts_of_run(run_folder.read(folder), folder)] for folder in (a, b)))


def _facts(arm: Arm) -> list[Facts]:
    """Returns the facts of one run for each distinct KNOWN_BY in the arm, at most MAX_FACTS."""
    kinds: dict[tuple[Any, ...], int] = {}
    for number, row in enumerate(arm.rows):
        kinds.setdefault(tuple(dict(row)[column] for column in KNOWN_BY), number)
    numbers = list(kinds.values())[:MAX_FACTS]
    return [_facts_of_run(arm.record_of(number), arm.folders[number]) for number in numbers]


def _facts_of_run(run: Mapping[str, Any], folder: str | None) -> Facts:
    if folder is None:
        return facts(run)
    config = environment = None
    with contextlib.suppress(Damaged):  # verify reports the damage; here the content is unknown
        config = schema.upgraded(yaml_file.recorded(f"{folder}/config.yaml"))
    with contextlib.suppress(Damaged):
        environment = json_file.read(f"{folder}/environment.json")
    with contextlib.suppress(Damaged), reading_record(folder):
        return facts(run, config, environment)
    return facts(run)


def facts(
    run: Mapping[str, Any], config: dict[str, Any] | None = None, environment: Mapping[str, Any] | None = None
) -> Facts:
    """Returns the facts of a record, its config.yaml and environment.json.  None: the file is unknown."""
    if config is None:
        config = {"model": {"arch": run["model"]["arch"]}} | {name: run.get(name) for name in CONFIG_OF_RECORD}
    config = {name: value for name, value in config.items() if name not in identity.UNHASHED}
    config |= {f"instruments.{name}": "on" for name in config.get("instruments") or ()}  # also those without settings
    if isinstance(config.get("track"), dict):  # its rules judge runs and do not affect them
        config["track"] = {name: value for name, value in config["track"].items() if name != "rules"}
    code, data = run["code"], run["data"]
    used = {name: value for name, value in run["environment"].items() if name != "gpus"}
    gpus = {"gpus": _alike(run["environment"].get("gpus") or ())}
    machine = {name: dict((environment or {}).get(name) or {}) for name in ("packages", "env")}
    for name in OF_ONE_RUN:
        machine["env"].pop(name, None)
    protocol = {"timing_protocol": (run.get("timing_protocol") or {}).get("id")}
    known_as = {name: code.get(name) for name in ("source_sha256", "commit", "dirty", "diff_sha256")}
    return {
        "config": _flat(config),
        "code": {"identity_version": code.get("identity_version", 1)} | known_as,
        "data": {"source": data.get("source")}
        | {split: [file["sha256"] for file in data.get(split) or ()] or None for split in ("train", "val")},
        "environment": _flat(used | gpus | protocol | machine),
    }


def differences_of(a_facts: list[Facts], b_facts: list[Facts]) -> list[Difference]:
    """Returns the facts in which runs of A or B differ, by kind, then by name."""
    differing: list[Difference] = []
    for kind in KINDS:
        names = sorted({name for run_facts in a_facts + b_facts for name in run_facts[kind]})
        for name in names:
            a, b = _values_of(a_facts, kind, name), _values_of(b_facts, kind, name)
            if a != b or len(a) > 1:
                differing.append({"kind": kind, "what": name, "a": a, "b": b})
    return differing


def _values_of(all_facts: list[Facts], kind: str, name: str) -> list[Any]:
    """Returns the arm's distinct values of a fact, in a fixed order."""
    texts = {json.dumps(run_facts[kind].get(name), sort_keys=True, default=str) for run_facts in all_facts}
    return [json.loads(text) for text in sorted(texts)]


def _alike(gpus: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merges GPUs into one dict: their count, and each fact's common value, or all values if they differ."""
    alike: dict[str, Any] = {"count": len(gpus)}
    for name in dict.fromkeys(name for gpu in gpus for name in gpu):
        values = [gpu.get(name) for gpu in gpus]
        alike[name] = values[0] if values.count(values[0]) == len(values) else values
    return alike


def _flat(values: dict[str, Any]) -> dict[str, Any]:
    """Flattens {"a": {"b": 1}} to {"a.b": 1}."""
    return {name: value for name, value in leaves(values) if value != {}}
