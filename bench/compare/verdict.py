"""Compares the rows of two groups of runs and reaches a verdict.  Performs no I/O.

The rules of the verdict are here and in bench/compare/questions.py; bench/compare/eligibility.py decides whether there
may be one, and bench/compare/effects.py computes the numbers.  The verdict answers the plan's question; the answers on
time and loss are reported as well.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

from bench.base import stats
from bench.base.metric import named
from bench.compare import clocks, design, effects, eligibility, questions, target, wording
from bench.compare.clocks import Arms
from bench.record.rows import Row, metric_of
from bench.record.shape import CALIBRATION

DEPENDS = "verdict-depends-on-exclusions"
# p values that Holm's method adjusts among several candidates
ADJUSTED: tuple[tuple[Literal["time", "val_loss"], Literal["p", "p_equivalent"]], ...] = (
    ("time", "p"),
    ("time", "p_equivalent"),
    ("val_loss", "p"),
    ("val_loss", "p_equivalent"),
)


class Difference(TypedDict):
    """One fact in which two arms differ; a and b are each arm's distinct values, None for unknown."""

    kind: str  # config, code, data or environment
    what: str  # dotted name of the fact
    a: list[Any]
    b: list[Any]


class Excluded(TypedDict):
    """A run excluded because the machine disturbed it, and the evidence for that."""

    arm: str
    run_id: str
    reasons: list[str]


class Looks(TypedDict):
    """The interim analyses of a plan."""

    looks: list[int]  # numbers of runs per arm at which there is a verdict
    alpha: float  # level of each analysis
    name: str | None  # of the plan; "study" for a study's race
    sequential: bool  # whether there is an analysis after every round


class Answer(TypedDict):
    """The verdict on one question, and the sentence that explains it."""

    verdict: str
    words: str


class Comparison(TypedDict, total=False):
    """A candidate compared with a baseline, as --json prints it; pairs are (baseline, candidate).

    comparison.py adds about and the last five fields.
    """

    comparable: bool  # whether the times are comparable
    reasons: list[str]  # why they are not, followed by what is unknown
    on: str  # the question, a key of questions.QUESTIONS
    answers: dict[str, Answer]  # answers to the question, to time and to loss
    steps_to_target: questions.Steps | None  # None if the question is another
    kind: str | None  # what is compared, one of questions.KINDS, or None if nothing is
    kind_words: str  # kind as a sentence
    time: effects.Time  # without the excluded runs
    val_loss: effects.Loss
    verdict: str  # faster, slower, better, worse, equivalent, inconclusive, not_interleaved, not_comparable
    all_disturbed: bool  # whether the machine disturbed every run that has a time
    flags: list[str]  # keys of wording.FLAGS, which explains them
    words: str  # the verdict as a sentence
    arms: list[str]  # names of baseline and candidate in the sentences
    about: list[str]  # description of each arm: its overrides, or the user's arguments
    energy: effects.Secondary
    memory: effects.Secondary
    compile: effects.Secondary
    time_all: effects.Time | None  # including the excluded runs; None if there are none
    excluded: list[Excluded]
    more_outside: bool  # whether B spends more time outside its own clock than A, also if times are not comparable
    started: list[int]
    run_again: list[int]  # how many interrupted runs the race has run again, warm-ups too
    steps: list[int | None]  # None if the runs of the arm differ
    plan: Looks | None
    differences: list[Difference]
    calibration: dict[str, Any] | None  # fields of this session's calibration.find(), chosen by comparison.py
    earlier_weight: float  # the share of alpha that earlier races of the same arms leave
    earlier_races: dict[str, int] | None  # {verdict or "none": number of earlier races}; None if there are none
    code_change: dict[str, Any] | None  # from bench/analysis/diagnosis/code_diff.py
    diagnosis: dict[str, Any]  # from bench/analysis/diagnosis/between_runs.py
    certificates: list[str | None]  # what replays of the runs showed; missing if no run was replayed


@dataclass(frozen=True)
class Options:
    """The options of a comparison."""

    floor_pct: float | None = None  # the machine's noise floor from A/A runs; None if it is not calibrated
    # the race's plan (n, looks, alpha, margins), made before its first run; None for the track's margins
    plan: Mapping[str, Any] | None = None
    identical_losses: bool | None = None  # whether every trajectory of B is bit-identical to one of A; None if unknown
    losses_ids: Sequence[Sequence[str | None] | None] = (None, None)  # losses_id() of each arm's rows; None if unknown
    target_val_loss: float | None = None  # None for the runs' own
    loss_margin_nats: float | None = None  # None for the plan's
    force: bool = False  # compute numbers, but no verdict, although the runs are not comparable
    differing: Sequence[Difference] = ()
    not_as_recorded: Sequence[str] = ()  # sentences about runs that differ from the ledger
    # takes whether both arms ran in one session, returns the change that machine drift may cause between arms that
    # were not interleaved; None for what public logs show
    drift_pct: Callable[[bool], float] | None = None
    on: str | None = None  # a key of questions.QUESTIONS; None for the plan's question, or time
    earlier_weight: float = 1.0  # factor by which earlier races of these arms lower alpha
    unplanned_look: bool = False  # whether the race had an interim analysis that was not planned
    run_again: Sequence[int] = (0, 0)  # how many runs of each arm the race has run again
    names: Sequence[str] = ("A", "B")  # names of the baseline and the candidate


def compare_rows(a_rows: Sequence[Row], b_rows: Sequence[Row], **options: Any) -> Comparison:
    """Compares the rows (bench/record/rows.py) of all started runs.  options: fields of Options.

    Runs that the machine disturbed are excluded.  If that would leave fewer than two runs in an arm, none is excluded,
    and the comparison has the flag suspect-runs.
    """
    given = Options(**options)
    plan, names, force = given.plan or {}, given.names, given.force
    on = _first(given.on, plan.get("on"), "time")
    answer = eligibility.judge(a_rows, b_rows, names, on)
    refusals, loss_refusals = ([*given.not_as_recorded, *faults] for faults in (answer.refusals, answer.loss_refusals))
    answer = answer._replace(refusals=refusals, loss_refusals=loss_refusals)
    shown = force or not answer.refusals
    arms = [[row for row in rows if eligibility.is_timed(row)] for rows in (a_rows, b_rows)]
    counted, excluded = _without_disturbed_runs(arms, names)
    looks = plan.get("looks") or ([plan["n"]] if plan.get("n") else [])
    alpha: float = given.earlier_weight * _first(plan.get("alpha"), stats.ALPHA)
    if not plan.get("sequential"):  # an e-process holds at all interim analyses together
        alpha /= max(1, len(looks))
    designed = design.from_rows(a_rows, b_rows, plan)
    track = _common(arms, "track")
    rules = target.rules_of(track)
    margin_pct = plan.get("equivalence_margin_pct", target.MARGIN_PCT) if plan else rules.equivalence_margin_pct
    drift_pct = None
    if eligibility.NOT_INTERLEAVED & set(answer.flags):
        is_one_session = "session-unknown" not in answer.flags
        least_pct = effects.DRIFT_PCT if is_one_session else effects.SESSION_DRIFT_PCT
        drift_pct = given.drift_pct(is_one_session) if given.drift_pct else least_pct
    judged_by = max(effects.MIN_FLOOR_PCT, given.floor_pct or 0.0), margin_pct, alpha, designed, drift_pct
    target_val_loss = _first(given.target_val_loss, _common(arms, "target"))
    metric = metric_of(row for rows in arms for row in rows)
    margin, margin_source = target.margin_of(track, metric)
    if (chosen := _first(given.loss_margin_nats, target.planned_margin(plan, metric))) is not None:
        margin, margin_source = chosen, "from the plan" if given.loss_margin_nats is None else "as given"
    loss_by = target_val_loss, target.p_value_of(track), margin
    others = effects.secondary(counted if shown else [[], []], alpha, designed)
    time = effects.time(counted, *judged_by)
    is_one_session = len({row.get("session_id") for rows in arms for row in rows}) == 1  # else disks may differ too
    more_outside = (shown or is_one_session) and effects.spends_more_outside(time)
    if not shown:
        time = effects.time([[], []], *judged_by) | {"outside": clocks.without_times(time["outside"])}
    comparison: Comparison = {
        "comparable": not answer.refusals,
        "reasons": answer.refusals + answer.remarks,
        "time": time,
        "val_loss": effects.val_loss(
            (a_rows, b_rows),
            *loss_by,
            given.identical_losses,
            force,
            answer,
            given.names,
            given.losses_ids,
            designed,
            alpha,
            given.run_again,
        ),
        "verdict": "",  # filled in by _decide(), as are words and answers
        "flags": [*answer.flags, *(["forced"] if force and answer.refusals else [])],
        "words": "",
        "on": on,
        "answers": {},
        "all_disturbed": all(row["machine_doubts"] for rows in arms for row in rows) and any(arms),
        "arms": list(names),
        "energy": others["energy"],
        "memory": others["memory"],
        "compile": others["compile"],
        "time_all": effects.time(arms, *judged_by) if excluded and shown else None,
        "excluded": excluded,
        "more_outside": more_outside,
        "started": [len(a_rows), len(b_rows)],
        "run_again": list(given.run_again),
        "earlier_weight": given.earlier_weight,
        "steps": [_common([rows], "num_steps") for rows in arms],
        "plan": None,
        "differences": list(given.differing),
    }
    if looks:
        is_sequential = bool(plan.get("sequential"))
        comparison["plan"] = Looks(looks=looks, alpha=alpha, name=plan.get("name"), sequential=is_sequential)
    comparison["flags"] += _flags(comparison, (a_rows, b_rows), arms, given)
    loss, has_times = comparison["val_loss"], comparison["comparable"]
    loss["margin_source"] = margin_source
    has_losses = loss["verdict"] != "unknown" or None not in loss["mean"]
    steps_alpha = alpha / (len(looks) if plan.get("sequential") else 1)
    comparison["steps_to_target"] = questions.steps_to(arms, loss, steps_alpha) if on == "steps_to_target" else None
    comparison["kind"], comparison["kind_words"] = questions.kind_of(
        arms, names, target_val_loss, rules.judged, has_times, has_losses, margin_pct
    )
    _decide(comparison)
    return comparison


def adjust(comparisons: Sequence[Comparison]) -> None:
    """Adjusts the p values of several candidates with one baseline by Holm's method, and decides again."""
    if len(comparisons) < 2:
        return
    for part, key in ADJUSTED:
        measures: list[Any] = [comparison[part] for comparison in comparisons]
        all_p = [effects.joint_p(measure, key) if part == "time" else measure[key] for measure in measures]
        for measure, p in zip(measures, stats.holm(all_p), strict=True):
            measure[f"{key}_holm"] = p
    for comparison in comparisons:
        if steps := comparison["steps_to_target"]:
            steps["alpha"] /= len(comparisons)
        _decide(comparison)


def adjust_as(comparison: Comparison, reported: Mapping[str, Any] | None) -> None:
    """Keeps the p values of a candidate that is compared alone adjusted for all candidates of its race.

    reported: the candidate's Comparison, of any version, in race.json.
    """
    if reported and reported["arms"] == comparison["arms"]:
        for part, key in ADJUSTED:
            measure: Any = comparison[part]
            measure[f"{key}_holm"] = reported[part].get(f"{key}_holm")
        if (steps := comparison["steps_to_target"]) and (race_steps := reported.get("steps_to_target")):
            steps["alpha"] = race_steps.get("alpha", steps["alpha"])
        _decide(comparison)


def _without_disturbed_runs(arms: list[list[Row]], names: Sequence[str]) -> tuple[list[list[Row]], list[Excluded]]:
    """Excludes runs that the machine disturbed, judged by their telemetry and never by their times."""
    kept = [[row for row in rows if not row["machine_doubts"]] for rows in arms]
    if kept == arms or min(map(len, kept)) < 2:
        return arms, []
    disturbed = [(name, row) for name, rows in zip(names, arms) for row in rows if row["machine_doubts"]]
    return kept, [{"arm": name, "run_id": row["run_id"], "reasons": row["machine_doubts"]} for name, row in disturbed]


def _flags(comparison: Comparison, started: Arms, arms: Arms, given: Options) -> list[str]:
    """Returns the flags that qualify the verdict."""
    rows = [row for group in arms for row in group]
    ns, plan, of_plan = comparison["time"]["n"], comparison["plan"], given.plan or {}
    seeds = [[row["seed"] for row in group if row["seed"] is not None] for group in arms]
    a, b = comparison["started"]
    is_compared, has_compiled = comparison["comparable"], any(row["compile_s"] for row in rows)
    flags = {
        "uncalibrated": given.floor_pct is None,
        "n=1": is_compared and min(ns) == 1,
        "no-spread": min(ns) > 1 and comparison["time"]["p"] is None,
        "runs-without-a-time": any(len(timed) < len(all_) for timed, all_ in zip(arms, started, strict=True)),
        "suspect-runs": any(row["machine_doubts"] for row in rows) and not comparison["excluded"],
        "suspect-records": any(row["validity"] == "suspect" and not row["machine_doubts"] for row in rows),
        "runs-excluded": bool(comparison["excluded"]) and is_compared,
        "one-clock": sum(map(clocks.has_outside_clock, arms)) == 1,
        clocks.MORE_BESIDE: (is_compared or any(row.get("budget") for row in rows)) and clocks.spends_more_beside(arms),
        "one-compilation": is_compared and has_compiled and (of_plan.get("compilations") or 1) == 1,
        "outliers-contradict": is_compared and effects.rests_on_clipping(comparison["time"]),
        "baseline-unsteady": effects.differs_from_itself(comparison["time"]),
        "seed-given": bool(of_plan.get("seed_given")),
        "same-seed": any(len(group) > len(set(group)) for group in seeds),
        "without-its-plan": not plan and any(row["race_id"] not in (None, CALIBRATION) for row in rows),
        "not-at-a-planned-look": plan is not None and (a != b or a not in plan["looks"]),
        "unplanned-look": given.unplanned_look,
        effects.ONE_SIDED: (is_compared and _is_one_sided(comparison, comparison["time"]))
        or comparison["val_loss"].get("flattered") is not None,
        "run-again": max(given.run_again) - min(given.run_again) > effects.MAX_ONE_SIDED,
    }
    return [flag for flag, holds in flags.items() if holds]


# ---- the verdict


def _decide(comparison: Comparison) -> None:
    """Fills in answers, verdict and words, and the flags that depend on the verdict."""
    loss, time_all = comparison["val_loss"], comparison["time_all"]
    on_time = _time_answer(comparison, comparison["time"])
    steps_answer = questions.steps_answer(comparison["steps_to_target"], _is_at_a_look(comparison))
    is_lower = (
        named(*loss.get("metric", ())).sign * (loss["change"] or 0.0) < 0
        or loss["below_target"] == [False, True]
        or steps_answer == "better"
    )
    flags = {
        DEPENDS: time_all is not None and _time_answer(comparison, time_all) != on_time,
        effects.DISAGREE: clocks_disagree(comparison["time"]) and comparison["comparable"],
        effects.NOT_COUNTED: is_lower and comparison["more_outside"],  # B may have trained outside its clock
    }
    comparison["flags"] = [flag for flag in comparison["flags"] if flag not in flags] + [
        flag for flag in flags if flags[flag]
    ]
    answers = {
        "time": "inconclusive" if on_time in questions.FIRM and _exclusions_decide(comparison, on_time) else on_time,
        "loss": questions.loss_answer(loss, comparison["time"]["alpha"], _is_at_a_look(comparison)),
        "steps_to_target": steps_answer,
    }
    if (arm := loss.get("flattered")) is not None:
        favourable = ("equivalent", ("worse", "better")[arm])
        for on in ("loss", "steps_to_target"):
            answers[on] = "inconclusive" if answers[on] in favourable and loss["verdict"] != "waived" else answers[on]
    if effects.NOT_COUNTED in comparison["flags"]:
        answers = {on: "inconclusive" if answer == "better" else answer for on, answer in answers.items()}
    answers["time_to_target"] = answers["time"]
    if comparison["kind"] != "time_to_target" and answers["time"] in questions.FIRM:
        answers["time_to_target"] = "inconclusive"
    comparison["verdict"] = answers[comparison["on"]]
    shown = dict.fromkeys((comparison["on"], "time", "loss"))
    comparison["answers"] = {
        on: {"verdict": answers[on], "words": wording.answer_sentence(comparison, on, answers[on])} for on in shown
    }
    comparison["words"] = comparison["answers"][comparison["on"]]["words"]


def _time_answer(comparison: Comparison, time: effects.Time) -> str:
    """Returns the verdict on these times."""
    if not comparison["comparable"]:
        return "not_comparable"
    if time["p"] is None or not _is_at_a_look(comparison):
        return "inconclusive"
    return "not_interleaved" if time["drift_pct"] is not None else decide(time)


def _is_one_sided(comparison: Comparison, time: effects.Time) -> bool:
    """Returns whether an arm lacks more of its started runs than the other."""
    return effects.flattered(comparison["started"], time["n"], comparison["run_again"]) is not None


def _exclusions_decide(comparison: Comparison, answer: str) -> bool:
    """Returns whether a firm answer on time rests on which runs have no time or are excluded.

    A run can fail, and it can stop its launcher, when it is slow.  So an answer of one-sided exclusions must hold with
    the excluded runs as well (an intersection-union test), and of one-sided failures there is none.  Where both arms
    were disturbed alike, it is enough that the excluded runs do not reverse the change.
    """
    everything = comparison["time_all"] or comparison["time"]
    if effects.ONE_SIDED not in comparison["flags"]:
        return answer != "equivalent" and effects.is_reversed(comparison["time"], everything["change_pct"])
    return _is_one_sided(comparison, everything) or _time_answer(comparison, everything) != answer


def _is_at_a_look(comparison: Comparison) -> bool:
    return "not-at-a-planned-look" not in comparison["flags"]


def decide(time: effects.Time) -> str:
    """Decides about times that have a p: equivalent, faster, slower or inconclusive.

    A change shown to be inside the margin is equivalent, whatever its sign; else one with p < alpha that exceeds the
    noise floor is faster or slower.  Both must hold by the runs' own clocks and by the launcher's.  The floor is what
    the machine can resolve, the margin what matters: a machine noisier than the margin can show a difference, but not
    equivalence.  A change is not shown if it has the other sign once outlying runs count in full.
    """
    change_pct, by_launcher = time["change_pct"] or 0.0, time.get("outside")
    least_pct = min(abs(change_pct), abs(by_launcher["change_pct"] or 0.0) if by_launcher else math.inf)
    p_equivalent = _first(time["p_equivalent_holm"], effects.joint_p(time, "p_equivalent"))
    if p_equivalent < time["alpha"] and time["floor_pct"] <= time["margin_pct"]:
        return "equivalent"
    is_shown = _first(time["p_holm"], effects.joint_p(time, "p")) < time["alpha"]
    if is_shown and least_pct > time["floor_pct"] and not effects.rests_on_clipping(time):
        return "faster" if change_pct < 0 else "slower"
    return "inconclusive"


def clocks_disagree(time: effects.Time) -> bool:
    """Returns whether the runs' own clocks alone would give a firm verdict that both clocks together do not."""
    if time.get("outside") is None or time["p"] is None or time["drift_pct"] is not None:
        return False
    both: effects.Time = {**time, "p_holm": None, "p_equivalent_holm": None}
    return decide({**both, "outside": None}) not in (decide(both), "inconclusive")


def _common(arms: Arms, column: Literal["track", "target", "num_steps"]) -> Any:
    """Returns the value that all rows share, or None."""
    values = {row[column] for rows in arms for row in rows}
    return values.pop() if len(values) == 1 else None


def _first(*values: Any) -> Any:
    """Returns the first value that is not None, or None."""
    return next((value for value in values if value is not None), None)
