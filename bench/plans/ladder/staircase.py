"""Makes a staircase from a race of rungs: what each needs to the target, and its change against the rung below.

A run's way to the target ends at its first validation at or below it. A rung has a time and steps to the target only if
all its started runs reached it, because a mean of those that did would flatter it. The target is the runs' own
(goal.target_val_loss), or, if they have none, what the lowest rung reaches at its last step: the worst final value of
its runs, so that all of them reach it. val_loss stands for the metric of the runs' goal, as in a Comparison, in its
unit and direction.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

from bench.base import stats, text_table
from bench.base.metric import VAL_LOSS, Metric
from bench.compare import calibration, design, effects, eligibility, same_loss, selection, target, verdict
from bench.compare.selection import Arm
from bench.record import race_folder
from bench.record.rows import Row, metric_of
from bench.record.step_files import Validation
from bench.report import curves

POSITIVE = ("to_target_s", "steps_to_target", "step_ms")  # their means are geometric, their changes per cent
OWN_CLOCK = {"outside_s": None, "outside_unknown": None}  # the launcher's clock has no time between validations


class Run(TypedDict):
    """One started run of a rung. None: not reached, not complete, or not known."""

    run_id: str
    steps_to_target: float | None
    to_target_s: float | None  # training time, without warm-up and validation
    val_loss: float | None  # at the end of the run
    step_ms: float | None
    is_timed: bool  # whether its times count: complete, and not excluded as disturbed


class Level(TypedDict):
    """One measure of a rung: the mean over its runs (geometric, except for val_loss) and its 95 % interval."""

    mean: float | None
    ci95: list[float] | None
    n: int


class Step(TypedDict):
    """A rung against the rung below."""

    verdict: str  # on the time to the target: faster, slower, equivalent, inconclusive, not_comparable
    why: list[str]  # why the way to the target cannot be compared
    to_target: effects.Time
    steps: effects.Change
    val_loss: effects.Loss
    step_ms: effects.Change
    record_pct: float | None  # change of the records' minutes on 8x H100


class Rung(TypedDict):
    arm: str
    rung: dict[str, Any]  # bench.plans.ladder.sizes.Rung, with "changed"
    runs: list[Run]
    num_reached: int
    levels: dict[str, Level]  # {one of POSITIVE or val_loss: level}
    step: Step | None  # None for the lowest


class Staircase(TypedDict):
    race_id: str
    track: str
    size: str
    about: str
    metric: list[str]  # name, unit and direction of the metric that val_loss and the target are in
    target_val_loss: float | None  # None: no run of the lowest rung is complete
    target_words: str
    val_every_steps: list[int]  # over all runs: the resolution of steps and times to the target
    notes: list[str]  # what a reader must know beside the numbers
    rungs: list[Rung]  # the lowest first
    excluded: dict[str, str]  # {rung: why it cannot run at this size}


def from_race(folder: Path | str) -> Staircase:
    """Returns the staircase of a race's folder. Raises ValueError without one: not a ladder, not ended, no result."""
    race = race_folder.read(folder)
    plan = race["plan"] or {}
    kept = plan.get("ladder")
    if kept is None:
        raise ValueError(f"{race['race_id']}: it is not a ladder: ./run.sh report {race['race_id']} makes its page")
    if race["result"] is None:
        raise ValueError(f"{race['race_id']}: there is no staircase: {race['why']}")
    arms = {name: _arm(folder, race, name) for name in race["arms"]}
    rows = [row for arm in arms.values() for row in arm.rows]
    metric = metric_of(rows)
    curves_of = {name: [curves.validations(path, metric) for path in arm.folders if path] for name, arm in arms.items()}
    goal, target_text = _target(arms, curves_of, kept, metric)
    timed = _timed(arms)
    judge, rungs = Judge(plan, goal, metric), list[Rung]()
    for name, arm in arms.items():
        entry = kept["rungs"][name]
        runs = [
            _run(row, curve, goal, row["run_id"] in timed, metric)
            for row, curve in zip(arm.rows, curves_of[name], strict=True)
        ]
        step = None
        if rungs:
            below = rungs[-1]
            step = judge.step((below["rung"]["name"], arms[below["arm"]], below["runs"]), (entry["name"], arm, runs))
            minutes, minutes_below = entry["minutes"], below["rung"]["minutes"]
            step["record_pct"] = None if None in (minutes, minutes_below) else 100 * (minutes / minutes_below - 1)
        levels = {key: _level(_values(runs, key), is_geometric=True) for key in POSITIVE}
        levels["val_loss"] = _level([run["val_loss"] for run in runs if run["val_loss"] is not None], False)
        num_reached = sum(run["steps_to_target"] is not None for run in runs)
        rungs.append(
            {"arm": name, "rung": entry, "runs": runs, "num_reached": num_reached, "levels": levels, "step": step}
        )
    _decide([rung["step"] for rung in rungs if rung["step"]])
    return {
        "race_id": race["race_id"],
        "track": race["track"],
        "size": kept["size"],
        "about": kept["about"],
        "metric": [metric.name, metric.unit, metric.direction],
        "target_val_loss": goal,
        "target_words": target_text,
        "val_every_steps": sorted(set().union(*map(every_steps, itertools.chain(*curves_of.values())))),
        "notes": _notes(race, rows, timed),
        "rungs": rungs,
        "excluded": kept["excluded"],
    }


def _arm(folder: Path | str, race: race_folder.Race, name: str) -> Arm:
    runs = race["arms"][name]["runs"] or []
    paths = [path for run in runs if (path := race_folder.run_folder_of(Path(folder), run))]
    if len(paths) < len(runs):
        raise ValueError(f"{race['race_id']}: the runs of {name} are missing: restore them to the results folder")
    return selection.arm_from_folders(name, paths)


def every_steps(curve: Sequence[Validation]) -> set[int]:
    """Returns the steps between validations, without those before the last, which may come sooner."""
    steps = [step for step, _, _ in curve]
    return {later - step for step, later in zip(steps[:-1], steps[1:-1])} or {steps[-1] - steps[0]} if steps else set()


# ---- the target, and which times count


def _target(
    arms: Mapping[str, Arm],
    curves_of: Mapping[str, Sequence[Sequence[Validation]]],
    kept: Mapping[str, Any],
    metric: Metric,
) -> tuple[float | None, str]:
    """Returns the target and a phrase that says where it comes from."""
    targets = {row["target"] for arm in arms.values() for row in arm.rows}
    if len(targets) == 1 and None not in targets:
        return targets.pop(), f"the runs' own target (goal.target{'_val_loss' * (metric == VAL_LOSS)})"
    name, arm = next(iter(arms.items()))
    rung = kept["rungs"][name]["name"]
    finals = [
        curve[-1][2]
        for row, curve in zip(arm.rows, curves_of[name], strict=True)
        if eligibility.is_complete(row) and curve
    ]
    if not finals:
        return None, f"no run of {rung} is complete, and the target would have been what it reaches"
    all_runs = text_table.counted(len(finals), "run")
    worst = metric.sign * max(metric.sign * final for final in finals)
    extreme = "highest" if metric.sign > 0 else "lowest"
    return worst, f"the {extreme} final {metric.name} of {rung}, of {all_runs}"


def _timed(arms: Mapping[str, Arm]) -> set[str]:
    """Returns the ids of the runs whose times count. Disturbed runs are excluded from all rungs or, if fewer than two
    runs of a rung would remain, from none.
    """
    ended = [[row for row in arm.rows if eligibility.is_timed(row)] for arm in arms.values()]
    quiet = [[row for row in rows if not row["machine_doubts"]] for rows in ended]
    is_enough = all(len(remaining) >= min(2, len(rows)) for remaining, rows in zip(quiet, ended, strict=True))
    return {row["run_id"] for rows in (quiet if is_enough else ended) for row in rows}


def _notes(race: race_folder.Race, rows: Sequence[Row], timed: set[str]) -> list[str]:
    """Returns sentences that a reader must know. rows: of all runs; timed: ids."""
    disturbed, notes = [row for row in rows if row["machine_doubts"]], []
    if disturbed:
        among = "are excluded from times"
        if disturbed[0]["run_id"] in timed:
            among = "still count, because too few others remain"
        first = disturbed[0]["machine_doubts"][0]
        notes.append(f"the machine disturbed {len(disturbed)} of {len(rows)} runs, which {among} ({first})")
    if num_failed := sum(not eligibility.is_complete(row) for row in rows):
        notes.append(f"{num_failed} of {len(rows)} runs failed or are invalid: they have not reached the target")
    if race["unplanned_look"]:
        notes.append("there was an interim look that was not planned: the verdicts are not evidence")
    if race["status"] == "stopped_early":
        notes.append(str(race["why"]))
    return notes


# ---- one run


def _run(row: Row, curve: Sequence[Validation], goal: float | None, is_timed: bool, metric: Metric) -> Run:
    """Returns a Run from a run's row and validations. goal None: there is no target; is_timed: as in Run."""
    ended = eligibility.is_complete(row)
    steps, seconds = same_loss.way(curve, goal, metric) if ended and goal is not None else (None, None)
    return {
        "run_id": row["run_id"],
        "steps_to_target": steps,
        "to_target_s": seconds,
        "val_loss": row["score"] if ended else None,
        "step_ms": row["step_avg_ms"] if ended else None,
        "is_timed": is_timed,
    }


# ---- a rung against the rung below


class Judge:
    """Judges a rung against another by the race's plan, on the way to goal, a value of metric."""

    def __init__(self, plan: Mapping[str, Any], goal: float | None, metric: Metric):
        self.plan, self.goal, self.p_value = plan, goal, target.p_value_of(plan["track"])
        self.alpha = plan["alpha"] / max(1, len(plan["looks"]))
        self.margin_pct, margin = plan["equivalence_margin_pct"], target.planned_margin(plan, metric)
        self.margin = metric.margin or 0.0 if margin is None else margin

    def step(self, below: tuple[str, Arm, list[Run]], above: tuple[str, Arm, list[Run]]) -> Step:
        """Compares two rungs, each (name, arm, runs). _decide() sets the verdict afterwards."""
        arms, runs_of = (below[1], above[1]), (below[2], above[2])
        rows_of: list[Any] = [arm.rows for arm in arms]
        if self.goal is not None:  # as if the runs had ended at the target: that way is compared
            way = {"target": self.goal, "stop_at_target": True, "target_reached": True}
            rows_of = [[row | way for row in rows] for rows in rows_of]
        judged = eligibility.judge(rows_of[0], rows_of[1], (below[0], above[0]))
        designed = design.from_rows(rows_of[0], rows_of[1], self.plan)
        missed = []
        for name, _, runs in (below, above):
            num_missing = sum(run["steps_to_target"] is None for run in runs)
            if num_missing or not runs:
                missed.append(f"{num_missing} of {len(runs)} runs of {name} do not reach the target")
        timed: list[Any] = [
            [
                row | OWN_CLOCK | {"train_s": run["to_target_s"]}
                for row, run in zip(arm.rows, runs, strict=True)
                if run["is_timed"] and (run["to_target_s"] or 0) > 0
            ]
            for _, arm, runs in (below, above)
        ]
        if missed or judged.refusals:
            timed = [[], []]
        kept = calibration.find_for_rows(timed[0] + timed[1]) if all(timed) else None
        floor_pct = max(effects.MIN_FLOOR_PCT, calibration.floor_for(kept, *map(len, timed)) if kept else 0.0)
        batches = {row["batch_tokens"] for arm in arms for row in arm.rows if row["batch_tokens"] is not None}
        steps, steps_ms = ([_values(runs, key) for runs in runs_of] for key in ("steps_to_target", "step_ms"))
        return {
            "verdict": "not_comparable",
            "why": missed + judged.refusals,
            "to_target": effects.time(timed, floor_pct, self.margin_pct, self.alpha, designed),
            "steps": effects.change([[], []] if missed else steps, self.alpha)[0],
            "val_loss": effects.val_loss(
                [arm.rows for arm in arms], self.goal, self.p_value, self.margin, None, False, judged
            ),
            # only where a step is as many tokens in both can its milliseconds be compared
            "step_ms": effects.change(steps_ms if len(batches) == 1 else [[], []], self.alpha)[0],
            "record_pct": None,
        }


def _decide(steps: Sequence[Step]) -> None:
    """Sets the verdict of each step, with p adjusted for all the steps of the ladder (Holm)."""
    for key in ("p", "p_equivalent"):
        for step, p_holm in zip(steps, stats.holm([step["to_target"][key] for step in steps]), strict=True):
            step["to_target"][f"{key}_holm"] = p_holm  # type: ignore[literal-required]
    for step in steps:
        if not step["why"]:
            step["verdict"] = "inconclusive" if step["to_target"]["p"] is None else verdict.decide(step["to_target"])


def _values(runs: Sequence[Run], key: str) -> list[float]:
    """Returns the values that count for this measure; none for a rung whose runs did not all reach the target."""
    if key == "step_ms":
        return [run["step_ms"] for run in runs if run["is_timed"] and run["step_ms"] is not None]
    if any(run["steps_to_target"] is None for run in runs):
        return []
    pairs = [(run["steps_to_target"] if key == "steps_to_target" else run["to_target_s"], run) for run in runs]
    return [value for value, run in pairs if value and value > 0 and (key == "steps_to_target" or run["is_timed"])]


def _level(numbers: Sequence[float], is_geometric: bool) -> Level:
    """Returns the mean of the numbers and its interval; of equal numbers exactly that number, without an interval."""
    if len(set(numbers)) < 2:
        return {"mean": numbers[0] if numbers else None, "ci95": None, "n": len(numbers)}
    forward, back = (math.log, math.exp) if is_geometric else (float, float)
    moved = [forward(number) for number in numbers]
    edges = stats.mean_interval(moved)
    return {"mean": back(stats.mean(moved)), "ci95": edges and [back(edge) for edge in edges], "n": len(moved)}
