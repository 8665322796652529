"""A rung against the rung below: what each run needs to the target, the changes, and the verdict of the time."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

from bench.base import stats
from bench.compare import calibration, effects, eligibility, target, verdict
from bench.compare.selection import Arm
from bench.record import step_files
from bench.record.rows import Row
from bench.report import curves

Validation = tuple[int, float | None, float]  # step, seconds of training so far, val_loss
POSITIVE = ("to_target_s", "steps_to_target", "step_ms")  # their means are geometric, their changes per cent
OWN_CLOCK = {"outside_s": None, "outside_unknown": None}  # the launcher's has no time of a point between validations


class Run(TypedDict):
    """One started run of a rung; None: not reached, not complete, not known."""

    run_id: str
    steps_to_target: float | None  # whole, unless it is interpolated
    to_target_s: float | None  # of training: no warm-up, no validation
    val_loss: float | None  # at the end, nats a token
    step_ms: float | None
    is_timed: bool  # its times count: complete, and not of a disturbed machine where others are


def curve_of(folder: Path | str) -> list[Validation]:
    """A run folder -> its validations, in order."""
    columns = step_files.read_columns(folder, curves.STEP_COLUMNS)
    lines = zip(columns["step"], curves.train_s_of(columns), columns["val_loss"], strict=True)
    return [line for line in lines if line[2] is not None]


def every_steps(curve: Sequence[Validation]) -> set[int]:
    """Steps between validations, without the last one's, which may come sooner."""
    steps = [step for step, _, _ in curve]
    return {later - step for step, later in zip(steps[:-1], steps[1:-1])} or {steps[-1] - steps[0]} if steps else set()


def way(curve: Sequence[Validation], goal: float, interpolate: bool = False) -> tuple[float | None, float | None]:
    """(steps, seconds) to the first validation at or below goal; (None, None) where none is.

    interpolate: to where the line from the validation before it crosses goal.
    """
    for number, (step, at_s, val_loss) in enumerate(curve):
        if val_loss <= goal:
            if not interpolate or not number:
                return step, at_s
            step_before, before_s, loss_before = curve[number - 1]
            frac = (loss_before - goal) / (loss_before - val_loss)
            seconds = None if None in (at_s, before_s) else before_s + frac * (at_s - before_s)
            return step_before + frac * (step - step_before), seconds
    return None, None


def of_run(row: Row, curve: Sequence[Validation], goal: float | None, interpolate: bool, is_timed: bool) -> Run:
    """A run's row and validations -> Run.  goal None: there is no target; is_timed: as in Run."""
    ended = is_ended(row)
    steps, seconds = way(curve, goal, interpolate) if ended and goal is not None else (None, None)
    return {
        "run_id": row["run_id"],
        "steps_to_target": steps,
        "to_target_s": seconds,
        "val_loss": row["val_loss"] if ended else None,
        "step_ms": row["step_avg_ms"] if ended else None,
        "is_timed": is_timed,
    }


def is_ended(row: Row) -> bool:
    """Whether its losses count: it is complete, and nothing shows that it is wrong."""
    return row["status"] == "complete" and row["validity"] != "invalid"


class Level(TypedDict):
    """One measure of a rung: the mean over its runs, geometric but of val_loss, and its 95 % interval."""

    mean: float | None
    ci95: list[float] | None
    n: int


class Step(TypedDict):
    """A rung against the rung below."""

    verdict: str  # of the time to target, as of a race: faster, slower, equivalent, inconclusive, not_comparable
    why: list[str]  # there is no more
    to_target: effects.Time
    steps: effects.Change
    val_loss: effects.Loss
    step_ms: effects.Change
    record_pct: float | None  # of the records' minutes on 8x H100


class Judge:
    """How two rungs are judged: by what the race's plan says, on the way to goal, a val_loss."""

    def __init__(self, plan: dict, goal: float | None):
        self.goal, self.p_value = goal, target.p_value_of(plan["track"])
        self.alpha = plan["alpha"] / max(1, len(plan["looks"]))
        self.margin_pct, self.margin_nats = plan["equivalence_margin_pct"], plan["loss_margin_nats"]

    def step(self, below: tuple[str, Arm, list[Run]], above: tuple[str, Arm, list[Run]]) -> Step:
        """below, above: (name of the rung, its arm, its runs).  The verdict follows in decide()."""
        names, arms, runs = zip(below, above)
        answer = eligibility.judge(*(self._on_the_way(arm.rows) for arm in arms), names)
        missed = [words for pair in zip(names, runs, strict=True) if (words := _missed(*pair))]
        of_runs = {key: [values(some, key) for some in runs] for key in POSITIVE}
        rows = [
            [row | OWN_CLOCK | {"train_s": run["to_target_s"]} for row, run in zip(arm.rows, some) if _counts(run)]
            for arm, some in zip(arms, runs, strict=True)
        ]
        known = not missed and not answer.refusals
        floor_pct = self._floor_pct(rows) if known and all(rows) else effects.MIN_FLOOR_PCT
        return {
            "verdict": "not_comparable",
            "why": missed + answer.refusals,
            "to_target": effects.time(rows if known else [[], []], floor_pct, self.margin_pct, self.alpha),
            "steps": effects.change([[], []] if missed else of_runs["steps_to_target"], self.alpha)[0],
            "val_loss": effects.val_loss(
                [arm.rows for arm in arms], self.goal, self.p_value, self.margin_nats, None, False, answer
            ),
            "step_ms": effects.change(of_runs["step_ms"] if _same_steps(arms) else [[], []], self.alpha)[0],
            "record_pct": None,
        }

    def _on_the_way(self, rows):
        """Rows as of runs that ended at the target, which is what is compared: whether each did is asked of Run."""
        way = {"target_val_loss": self.goal, "stop_at_target": True, "target_reached": True}
        return rows if self.goal is None else [row | way for row in rows]

    def _floor_pct(self, rows):
        kept = calibration.of_runs(rows[0] + rows[1])
        return max(effects.MIN_FLOOR_PCT, calibration.floor_for(kept, *map(len, rows)) if kept else 0.0)


def decide(steps: Sequence[Step]) -> None:
    """In place: the verdict of each step, whose p are adjusted for all the steps of the ladder (Holm)."""
    for key in ("p", "p_equivalent"):
        for step, p_holm in zip(steps, stats.holm([step["to_target"][key] for step in steps]), strict=True):
            step["to_target"][f"{key}_holm"] = p_holm
    for step in steps:
        if not step["why"]:
            step["verdict"] = "inconclusive" if step["to_target"]["p"] is None else verdict.decide(step["to_target"])


def _same_steps(arms):
    """Whether a step is as many tokens in both, so that its milliseconds can be compared."""
    return len({row["batch_tokens"] for arm in arms for row in arm.rows if row["batch_tokens"] is not None}) == 1


def _missed(name, runs):
    """How many runs of a rung do not reach the target, a sentence; "" where all do."""
    num = sum(run["steps_to_target"] is None for run in runs)
    return "" if _all_reach(runs) else f"{num} of {len(runs)} runs of {name} do not reach the target"


def _all_reach(runs):
    return bool(runs) and all(run["steps_to_target"] is not None for run in runs)


def _counts(run):
    return run["is_timed"] and run["to_target_s"] is not None and run["to_target_s"] > 0


def values(runs: Sequence[Run], key: str) -> list[float]:
    """Of the runs that count for this measure; nothing of a rung whose runs did not all reach the target."""
    if key == "step_ms":
        return [run[key] for run in runs if run["is_timed"] and run[key] is not None]
    if not _all_reach(runs):
        return []
    return [run[key] for run in runs if (run[key] or 0) > 0 and (key == "steps_to_target" or run["is_timed"])]


def level(numbers: Sequence[float], is_geometric: bool) -> Level:
    """Numbers of one measure -> their mean and its interval; of equal numbers exactly theirs."""
    if len(set(numbers)) < 2:
        return {"mean": numbers[0] if numbers else None, "ci95": None, "n": len(numbers)}
    there, back = (math.log, math.exp) if is_geometric else (float, float)
    moved = [there(number) for number in numbers]
    edges = stats.mean_interval(moved)
    return {"mean": back(stats.mean(moved)), "ci95": edges and [back(edge) for edge in edges], "n": len(moved)}
