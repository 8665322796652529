"""A race of rungs -> the staircase: what each needs to the target, and its change against the rung below.

A run's way to the target ends at its first validation at or below it.  A rung has a time and steps to the target where
all its runs that were started reached it; else it has none, because a mean of those that did would flatter it.  The
target is the runs' own (goal.target_val_loss), or, where they have none, what the lowest rung reaches at its last step:
the highest final val_loss of its runs, so that all of them reach it.
"""

from pathlib import Path
from typing import TypedDict

from bench.base import text_table
from bench.compare import eligibility, selection
from bench.plans.ladder import step as rung_step
from bench.plans.ladder.step import POSITIVE, Judge, Level, Run, Step, decide, level, values
from bench.record import race_folder


class Rung(TypedDict):
    arm: str
    rung: dict  # bench.plans.ladder.sizes.Rung, and changed
    runs: list[Run]
    num_reached: int
    levels: dict[str, Level]  # of POSITIVE and val_loss
    step: Step | None  # None: the lowest


class Staircase(TypedDict):
    race_id: str
    track: str
    size: str
    about: str
    target_val_loss: float | None  # None: no run of the lowest rung is complete
    target_words: str
    interpolated: bool
    val_every_steps: list[int]  # of all runs: how fine steps and times to the target are
    notes: list[str]  # what a reader must know beside the numbers
    rungs: list[Rung]  # the lowest first
    excluded: dict[str, str]  # {rung: why it cannot run at this size}


def of_race(folder: Path | str, interpolate: bool = False) -> Staircase:
    """A race's folder -> Staircase.  interpolate: linearly between the validations around the target.

    ValueError: it is not a ladder, has not ended, or ended without a result.
    """
    race = race_folder.read(folder)
    kept = race["plan"].get("ladder")
    if kept is None:
        raise ValueError(f"{race['race_id']}: is a race of other arms: ./run.sh report {race['race_id']} is its page")
    if race["result"] is None:
        raise ValueError(f"{race['race_id']}: there is no staircase: {race['why']}")
    arms = {name: _arm(folder, race, name) for name in race["arms"]}
    curves = {name: [rung_step.curve_of(path) for path in arm.folders] for name, arm in arms.items()}
    goal, words = _target(arms, curves, kept)
    timed = _timed(arms)
    runs = {
        name: [
            rung_step.of_run(row, curve, goal, interpolate, row["run_id"] in timed[name])
            for row, curve in zip(arm.rows, curves[name], strict=True)
        ]
        for name, arm in arms.items()
    }
    return {
        "race_id": race["race_id"],
        "track": race["track"],
        "size": kept["size"],
        "about": kept["about"],
        "target_val_loss": goal,
        "target_words": words,
        "interpolated": interpolate,
        "val_every_steps": sorted(
            {every for some in curves.values() for curve in some for every in rung_step.every_steps(curve)}
        ),
        "notes": _notes(race, arms, timed),
        "rungs": _rungs(kept, arms, runs, Judge(race["plan"], goal)),
        "excluded": kept["excluded"],
    }


def _arm(folder, race, name):
    paths = [race_folder.run_folder_of(Path(folder), run) for run in race["arms"][name]["runs"]]
    if None in paths:
        raise ValueError(f"{race['race_id']}: runs of {name} are not there: restore them beside the race")
    return selection.of_folders(name, paths)


# ---- the target, and which times count


def _target(arms, curves, kept):
    """-> (val_loss, where it comes from, a sentence)."""
    asked = {row["target_val_loss"] for arm in arms.values() for row in arm.rows}
    if len(asked) == 1 and None not in asked:
        return asked.pop(), "the runs' own target (goal.target_val_loss)"
    name, arm = next(iter(arms.items()))
    rung = kept["rungs"][name]["name"]
    finals = [
        curve[-1][2] for row, curve in zip(arm.rows, curves[name], strict=True) if rung_step.is_ended(row) and curve
    ]
    if not finals:
        return None, f"no run of {rung} is complete, and the target would have been what it reaches"
    of_runs = text_table.counted(len(finals), "run")
    return max(finals), f"measured here: what {rung} reaches at its last step, the highest of {of_runs}"


def _timed(arms):
    """{arm: ids of the runs whose times count}.  Disturbed ones are excluded from all rungs or, where fewer than two of
    a rung would remain, from none.
    """
    ended = {name: [row for row in arm.rows if eligibility.is_timed(row)] for name, arm in arms.items()}
    quiet = {name: [row for row in rows if not row["machine_doubts"]] for name, rows in ended.items()}
    chosen = quiet if all(len(quiet[name]) >= min(2, len(ended[name])) for name in arms) else ended
    return {name: {row["run_id"] for row in rows} for name, rows in chosen.items()}


def _notes(race, arms, timed):
    rows = [row for arm in arms.values() for row in arm.rows]
    disturbed = [row for row in rows if row["machine_doubts"]]
    counted = {run_id for ids in timed.values() for run_id in ids}
    notes = []
    if disturbed:
        is_counted = disturbed[0]["run_id"] in counted
        among = "count all the same: too few others" if is_counted else "are in no time"
        first = disturbed[0]["machine_doubts"][0]
        notes.append(f"the machine disturbed {len(disturbed)} of {len(rows)} runs, which {among} ({first})")
    failed = [row for row in rows if not rung_step.is_ended(row)]
    if failed:
        notes.append(f"{len(failed)} of {len(rows)} runs failed or are invalid: they reached nothing")
    if race["unplanned_look"]:
        notes.append("there was an interim look that the plan has not: the verdicts are not evidence")
    if race["status"] == "stopped_early":
        notes.append(str(race["why"]))
    return notes


# ---- the rungs, each with the step to it


def _rungs(kept, arms, runs, judge) -> list[Rung]:
    result: list[Rung] = []
    for name, arm in arms.items():
        known, of_arm = kept["rungs"][name], runs[name]
        step = None
        if result:
            below = result[-1]
            step = judge.step((below["rung"]["name"], arms[below["arm"]], below["runs"]), (known["name"], arm, of_arm))
            minutes = below["rung"]["minutes"], known["minutes"]
            step["record_pct"] = None if None in minutes else 100 * (minutes[1] / minutes[0] - 1)
        levels = {key: level(values(of_arm, key), True) for key in POSITIVE}
        losses = [run["val_loss"] for run in of_arm if run["val_loss"] is not None]
        result.append(
            {
                "arm": name,
                "rung": known,
                "runs": of_arm,
                "num_reached": sum(run["steps_to_target"] is not None for run in of_arm),
                "levels": levels | {"val_loss": level(losses, False)},
                "step": step,
            }
        )
    decide([rung["step"] for rung in result if rung["step"]])
    return result
