"""Two groups of runs -> numbers and a verdict.  Rows in, a Comparison out; no file is read here.

The rules of the verdict are here and nowhere else: bench/compare/eligibility.py says whether there may be one,
bench/compare/effects.py gives the numbers.  The kind of a comparison (time or steps to a target, ms per step, loss) is
for the reader: no verdict depends on it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

from bench.base import stats
from bench.compare import effects, eligibility, target, wording
from bench.compare.effects import Arms
from bench.record.rows import Row

DEPENDS = "verdict-depends-on-exclusions"
LOSS_AT_STEPS = "loss_at_equal_steps"
LOSS_AT_TIME = "loss_at_equal_time"
KINDS = ("time_to_target", "steps_to_target", "ms_per_step", LOSS_AT_STEPS, LOSS_AT_TIME)


class Difference(TypedDict):
    """One fact in which two arms differ; a and b are the values found in that arm, None for unknown."""

    kind: str  # config, code, data or environment
    what: str  # the fact's dotted name
    a: list[Any]
    b: list[Any]


class Excluded(TypedDict):
    """A run that the machine disturbed, and the reasons to say so."""

    arm: str
    run_id: str
    reasons: list[str]


class Looks(TypedDict):
    """Numbers of runs an arm at which the plan has a verdict, and the alpha of each look."""

    looks: list[int]
    alpha: float


class Comparison(TypedDict, total=False):
    """Of a candidate against a baseline, JSON as it stands; pairs are of baseline and candidate.

    comparison.py adds about and the last five.
    """

    comparable: bool  # the times
    reasons: list[str]  # why the times are not, then what is unknown
    kind: str | None  # what is compared, one of KINDS; None: none of them
    kind_words: str  # the same as a sentence
    time: effects.Time  # of the runs that count
    val_loss: effects.Loss
    verdict: str  # faster, slower, equivalent, inconclusive, not_comparable
    flags: list[str]  # bench/compare/wording.py says what they mean
    words: str  # the verdict as a sentence
    arms: list[str]  # names of baseline and candidate, as the sentences call them
    about: list[str]  # what each of them is: its overrides, or the words of the user
    energy: effects.Secondary
    memory: effects.Secondary
    compile: effects.Secondary
    time_all: effects.Time | None  # with the excluded runs, where there are some
    excluded: list[Excluded]
    started: list[int]
    steps: list[int | None]  # None: the runs of the arm differ
    plan: Looks | None
    differences: list[Difference]
    calibration: dict[str, Any] | None  # of this session: what comparison.py keeps of calibration.find()
    earlier_races: dict[str, int] | None  # {verdict or "none": how many} of the same arms; None: there was none
    code_change: dict[str, Any] | None  # bench/analysis/diagnosis/code_diff.py
    diagnosis: dict[str, Any]  # bench/analysis/diagnosis/between_runs.py
    certificates: list[str | None]  # what the replays of their runs showed; absent where no run has been replayed


@dataclass(frozen=True)
class Options:
    """What a comparison is given beside its rows."""

    floor_pct: float | None = None  # this machine's A/A floor; None: it is not calibrated
    # n, looks, alpha, margins, made before the first run; None: the margin is the track's
    plan: Mapping[str, Any] | None = None
    identical_losses: bool | None = None  # every trajectory of B is one of A, bit for bit; None: unknown
    losses_ids: Sequence[Sequence[str | None] | None] = (
        None,
        None,
    )  # of each arm's rows step_files.losses_id(); None: unknown
    target_val_loss: float | None = None  # None: the runs' own
    loss_margin_nats: float | None = None  # None: the plan's
    force: bool = False  # numbers although the runs are not comparable, still without a verdict
    differing: Sequence[Difference] = ()
    unplanned_look: bool = False  # the race had an interim look that its plan has not
    names: Sequence[str] = ("A", "B")  # what the baseline and the candidate are called


def compare_rows(a_rows: Sequence[Row], b_rows: Sequence[Row], **options: Any) -> Comparison:
    """Rows (bench/record/rows.py) of all started runs; options: of Options.

    Runs that the machine disturbed are excluded, unless fewer than two others of an arm would remain: then they count,
    with the flag suspect-runs.
    """
    given = Options(**options)
    plan, names, force = given.plan or {}, given.names, given.force
    answer = eligibility.judge(a_rows, b_rows, names)
    shown = force or not answer.refusals
    arms = [[row for row in rows if eligibility.is_timed(row)] for rows in (a_rows, b_rows)]
    counted, excluded = _without_disturbed_runs(arms, names)
    looks = plan.get("looks") or ([plan["n"]] if plan.get("n") else [])
    alpha: float = _first(plan.get("alpha"), stats.ALPHA) / max(1, len(looks))
    track = _common(arms, "track")
    rules = target.rules_of(track)
    margin_pct = plan.get("equivalence_margin_pct", target.MARGIN_PCT) if plan else rules.equivalence_margin_pct
    judged_by = max(effects.MIN_FLOOR_PCT, given.floor_pct or 0.0), margin_pct, alpha
    target_val_loss = _first(given.target_val_loss, _common(arms, "target_val_loss"))
    margin_nats: float = _first(given.loss_margin_nats, plan.get("loss_margin_nats"), effects.LOSS_MARGIN_NATS)
    of_loss = target_val_loss, target.p_value_of(track), margin_nats
    others = effects.secondary(counted if shown else [[], []], alpha)
    comparison: Comparison = {
        "comparable": not answer.refusals,
        "reasons": answer.refusals + answer.remarks,
        "time": effects.time(counted if shown else [[], []], *judged_by),
        "val_loss": effects.val_loss(
            (a_rows, b_rows), *of_loss, given.identical_losses, force, answer, given.names, given.losses_ids
        ),
        "verdict": "",  # as words, filled in by _decide()
        "flags": [*answer.flags, *(["forced"] if force and answer.refusals else [])],
        "words": "",
        "arms": list(names),
        "energy": others["energy"],
        "memory": others["memory"],
        "compile": others["compile"],
        "time_all": effects.time(arms, *judged_by) if excluded and shown else None,
        "excluded": excluded,
        "started": [len(a_rows), len(b_rows)],
        "steps": [_common([rows], "num_steps") for rows in counted],
        "plan": {"looks": looks, "alpha": alpha} if looks else None,
        "differences": list(given.differing),
    }
    comparison["flags"] += _flags(comparison, (a_rows, b_rows), arms, given)
    loss, has_times = comparison["val_loss"], comparison["comparable"]
    has_losses = loss["verdict"] != "unknown" or None not in loss["mean"]
    comparison["kind"], comparison["kind_words"] = kind_of(
        counted, names, target_val_loss, rules.judged, has_times, has_losses, margin_pct
    )
    _decide(comparison)
    return comparison


def adjust(comparisons: Sequence[Comparison]) -> None:
    """Several candidates with one baseline are decided again by Holm's adjusted p."""
    if len(comparisons) < 2:
        return
    times = [comparison["time"] for comparison in comparisons]
    all_p = stats.holm([effects.joint_p(time, "p") for time in times])
    all_p_equivalent = stats.holm([effects.joint_p(time, "p_equivalent") for time in times])
    for time, p, p_equivalent in zip(times, all_p, all_p_equivalent, strict=True):
        time["p_holm"], time["p_equivalent_holm"] = p, p_equivalent
    for comparison in comparisons:
        _decide(comparison)


def adjust_as(comparison: Comparison, reported: Mapping[str, Any] | None) -> None:
    """One candidate of a race compared alone: its p stays adjusted for all the candidates that the race had.

    reported: the Comparison, of any version, in race.json.
    """
    if reported and reported["arms"] == comparison["arms"]:
        comparison["time"]["p_holm"] = reported["time"].get("p_holm")
        comparison["time"]["p_equivalent_holm"] = reported["time"].get("p_equivalent_holm")
        _decide(comparison)


def _without_disturbed_runs(arms: list[list[Row]], names: Sequence[str]) -> tuple[list[list[Row]], list[Excluded]]:
    """Judges disturbance by the runs' telemetry, never by their times."""
    kept = [[row for row in rows if not row["machine_doubts"]] for rows in arms]
    if kept == arms or min(map(len, kept)) < 2:
        return arms, []
    disturbed = [(name, row) for name, rows in zip(names, arms) for row in rows if row["machine_doubts"]]
    return kept, [{"arm": name, "run_id": row["run_id"], "reasons": row["machine_doubts"]} for name, row in disturbed]


def _flags(comparison: Comparison, started: Arms, arms: Arms, given: Options) -> list[str]:
    """Words for what a reader must know beside the verdict."""
    rows = [row for group in arms for row in group]
    ns, plan = comparison["time"]["n"], comparison["plan"]
    seeds = [[row["seed"] for row in group if row["seed"] is not None] for group in arms]
    a, b = comparison["started"]
    flags = {
        "uncalibrated": given.floor_pct is None,
        "n=1": comparison["comparable"] and min(ns) == 1,
        "no-spread": min(ns) > 1 and comparison["time"]["p"] is None,
        "runs-without-a-time": any(len(timed) < len(all_) for timed, all_ in zip(arms, started, strict=True)),
        "suspect-runs": any(row["machine_doubts"] for row in rows) and not comparison["excluded"],
        "suspect-records": any(row["validity"] == "suspect" and not row["machine_doubts"] for row in rows),
        "runs-excluded": bool(comparison["excluded"]) and comparison["comparable"],
        "one-clock": sum(map(effects.has_outside_clock, arms)) == 1,
        "same-seed": any(len(group) > len(set(group)) for group in seeds),
        "without-its-plan": not plan and any(row["race_id"] not in (None, "calibration") for row in rows),
        "not-at-a-planned-look": plan is not None and (a != b or a not in plan["looks"]),
        "unplanned-look": given.unplanned_look,
    }
    return [flag for flag, holds in flags.items() if holds]


def kind_of(
    arms: Arms,
    names: Sequence[str],
    target: float | None,
    judged: str,
    has_times: bool,
    has_losses: bool,
    margin_pct: float,
) -> tuple[str | None, str]:
    """Rows of the runs of both arms that have a time -> (one of KINDS or None, the sentence).

    target: val_loss, None without a common one; judged: the track's, time or steps; has_times, has_losses: whether
    these are compared; margin_pct: mean times that differ by less are equal.
    """
    steps = [_known_in(rows, "num_steps") for rows in arms]
    is_equal = len(set[int]().union(*steps)) < 2 and len(_known_in([*arms[0], *arms[1]], "batch_tokens")) < 2
    if has_times:
        missing = [name for name, rows in zip(names, arms, strict=True) if not _reaches(rows, target)]
        if not missing:
            stops = all(row["stop_at_target"] for rows in arms for row in rows)
            reached = f"the target {target:g}, which {'every run reaches' if stops else 'both reach on average'}"
            return _to_target(steps, reached, judged, is_equal)
        miss = f"{' and '.join(missing)} {'misses' if len(missing) == 1 else 'miss'}"
        why = "they have no shared target loss" if target is None else f"the mean of {miss} {target:g}"
        return "ms_per_step", f"ms per step at {_at(steps)}; not time to a target: {why}"
    if not has_losses:
        return None, "nothing: neither times nor losses"
    if is_equal:
        return LOSS_AT_STEPS, f"loss at {_at(steps)}; not times"
    settings = {row["comparability_id"] for rows in arms for row in rows}
    a_s, b_s = (stats.mean(eligibility.times_s(rows) or [math.nan]) for rows in arms)
    if len(settings) == 1 and None not in settings and abs(b_s / a_s - 1) < margin_pct / 100:  # of nan never
        return LOSS_AT_TIME, f"loss at equal time, after {_each(steps)} steps; not times"
    return None, f"losses after {_each(steps)} steps, which are neither equal steps nor equal time"


def _to_target(steps: list[set[int]], reached: str, judged: str, is_equal: bool) -> tuple[str, str]:
    if judged == "steps":
        return "steps_to_target", f"steps to {reached}: {_each(steps)}; this track does not judge time"
    also = f", at {_at(steps)}: so also ms per step"
    if not is_equal:
        also = f", in {_each(steps)} steps{' of other batches' * (steps[0] == steps[1])}: not ms per step"
    return "time_to_target", f"time to {reached}{also}"


def _reaches(rows: Sequence[Row], target: float | None) -> bool:
    """By the mean, as bench/compare/eligibility.py asks; of runs that stop at the target, each."""
    losses = [row["val_loss"] for row in rows if row["val_loss"] is not None]
    if target is None or not losses:
        return False
    if all(row["stop_at_target"] for row in rows):
        return all(row["target_reached"] for row in rows)
    return stats.mean(losses) <= target


def _at(steps: list[set[int]]) -> str:
    known = set[int]().union(*steps)
    return f"equal steps ({known.pop():,})" if known else "equal steps"


def _each(steps: list[set[int]]) -> str:
    return " and ".join(", ".join(f"{number:,}" for number in sorted(of_arm)) or "unknown" for of_arm in steps)


def _known_in(rows: Sequence[Row], column: Literal["num_steps", "batch_tokens"]) -> set[Any]:
    return {row[column] for row in rows} - {None}


# ---- the verdict


def _decide(comparison: Comparison) -> None:
    """Fill in verdict and words, and flag a verdict that depends on the excluded runs."""
    comparison["verdict"] = _verdict(comparison, comparison["time"])
    loss = comparison["val_loss"]
    is_lower = (loss["change_nats"] or 0.0) < 0 or loss["below_target"] == [False, True]
    hides_time = is_lower and effects.spends_more_outside(comparison["time"])  # B may have trained outside its clock
    flags = {
        DEPENDS: comparison["time_all"] is not None
        and _verdict(comparison, comparison["time_all"]) != comparison["verdict"],
        effects.DISAGREE: clocks_disagree(comparison["time"]) and comparison["comparable"],
        effects.NOT_COUNTED: hides_time and comparison["comparable"],
    }
    comparison["flags"] = [flag for flag in comparison["flags"] if flag not in flags] + [
        flag for flag in flags if flags[flag]
    ]
    comparison["words"] = wording.verdict_sentence(comparison)


def _verdict(comparison: Comparison, time: effects.Time) -> str:
    if not comparison["comparable"]:
        return "not_comparable"
    if time["p"] is None or "not-at-a-planned-look" in comparison["flags"]:
        return "inconclusive"
    return decide(time)


def decide(time: effects.Time) -> str:
    """Times that have a p -> faster, slower: p < alpha and beyond the floor; equivalent: shown to be inside the margin.

    Each by the runs' own clocks and by the launcher's; else inconclusive.  The floor is what this machine lets us see,
    the margin what matters: a machine that is noisier than the margin can show a difference, never the lack of one.
    """
    change_pct, by_launcher = time["change_pct"] or 0.0, time.get("outside")
    least_pct = min(abs(change_pct), abs(by_launcher["change_pct"] or 0.0) if by_launcher else math.inf)
    p = _first(time["p_holm"], effects.joint_p(time, "p"))
    if p < time["alpha"] and least_pct > time["floor_pct"]:
        return "faster" if change_pct < 0 else "slower"
    p_equivalent = _first(time["p_equivalent_holm"], effects.joint_p(time, "p_equivalent"))
    is_equivalent = p_equivalent < time["alpha"] and time["floor_pct"] <= time["margin_pct"]
    return "equivalent" if is_equivalent else "inconclusive"


def clocks_disagree(time: effects.Time) -> bool:
    """Whether the runs' own clocks alone would give another verdict than both clocks together."""
    if time.get("outside") is None or time["p"] is None:
        return False
    both: effects.Time = {**time, "p_holm": None, "p_equivalent_holm": None}
    return decide({**both, "outside": None}) not in (decide(both), "inconclusive")


def _common(arms: Arms, column: Literal["track", "target_val_loss", "num_steps"]) -> Any:
    """The value that all rows share, or None."""
    values = {row[column] for rows in arms for row in rows}
    return values.pop() if len(values) == 1 else None


def _first(*values: Any) -> Any:
    """The first that is not None, or None."""
    return next((value for value in values if value is not None), None)
