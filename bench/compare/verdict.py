"""Two groups of runs -> numbers and a verdict.  Rows in, a Comparison out; no file is read here.

The rules of the verdict are here and in bench/compare/questions.py: bench/compare/eligibility.py says whether there may
be one, bench/compare/effects.py gives the numbers.  The verdict answers the question of the plan; the answers to time
and loss stand below it.
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

DEPENDS = "verdict-depends-on-exclusions"
# the p of a comparison that several candidates share by Holm's method
ADJUSTED: tuple[tuple[Literal["time", "val_loss"], Literal["p", "p_equivalent"]], ...] = (
    ("time", "p"),
    ("time", "p_equivalent"),
    ("val_loss", "p"),
    ("val_loss", "p_equivalent"),
)


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


class Answer(TypedDict):
    """A verdict on one question, and the sentence that says it."""

    verdict: str
    words: str


class Comparison(TypedDict, total=False):
    """A candidate compared with a baseline, as --json prints it; pairs are (baseline, candidate).

    comparison.py adds about and the last five.
    """

    comparable: bool  # the times
    reasons: list[str]  # why the times are not, then what is unknown
    on: str  # the question, one of questions.QUESTIONS
    answers: dict[str, Answer]  # to the question, to time and to loss
    steps_to_target: questions.Steps | None  # None: the question is another
    kind: str | None  # what is compared, one of questions.KINDS; None: none of them
    kind_words: str  # the same as a sentence
    time: effects.Time  # of the runs that count
    val_loss: effects.Loss
    verdict: str  # faster, slower, better, worse, equivalent, inconclusive, not_interleaved, not_comparable
    all_disturbed: bool  # the machine disturbed every run that has a time
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
    earlier_weight: float  # the share of alpha that they leave
    earlier_races: dict[str, int] | None  # {verdict or "none": how many} of the same arms; None: there was none
    code_change: dict[str, Any] | None  # bench/analysis/diagnosis/code_diff.py
    diagnosis: dict[str, Any]  # bench/analysis/diagnosis/between_runs.py
    certificates: list[str | None]  # what the replays of their runs showed; absent where no run has been replayed


@dataclass(frozen=True)
class Options:
    """The options of a comparison."""

    floor_pct: float | None = None  # this machine's A/A floor; None: it is not calibrated
    # n, looks, alpha, margins, made before the first run; None: the margin is the track's
    plan: Mapping[str, Any] | None = None
    identical_losses: bool | None = None  # every trajectory of B is one of A, bit for bit; None: unknown
    losses_ids: Sequence[Sequence[str | None] | None] = (None, None)  # of each arm's rows, losses_id(); None: unknown
    target_val_loss: float | None = None  # None: the runs' own
    loss_margin_nats: float | None = None  # None: the plan's
    force: bool = False  # numbers although the runs are not comparable, still without a verdict
    differing: Sequence[Difference] = ()
    not_as_recorded: Sequence[str] = ()  # sentences: runs that are not those that the ledger has
    # whether both arms ran in one session -> what the machine alone may do to arms that took no turns; None: what
    # public logs show
    drift_pct: Callable[[bool], float] | None = None
    on: str | None = None  # one of questions.QUESTIONS; None: the plan's, or time
    earlier_weight: float = 1.0  # by which earlier races of these arms lower alpha
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
    refusals, loss_refusals = ([*given.not_as_recorded, *found] for found in (answer.refusals, answer.loss_refusals))
    answer = answer._replace(refusals=refusals, loss_refusals=loss_refusals)
    shown = force or not answer.refusals
    arms = [[row for row in rows if eligibility.is_timed(row)] for rows in (a_rows, b_rows)]
    counted, excluded = _without_disturbed_runs(arms, names)
    looks = plan.get("looks") or ([plan["n"]] if plan.get("n") else [])
    alpha: float = given.earlier_weight * _first(plan.get("alpha"), stats.ALPHA)
    if not plan.get("sequential"):  # an e-process holds at all looks together
        alpha /= max(1, len(looks))
    designed = design.from_rows(a_rows, b_rows, plan)
    on = _first(given.on, plan.get("on"), "time")
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
    if (known := _first(given.loss_margin_nats, target.planned_margin(plan, metric))) is not None:
        margin, margin_source = known, "as planned" if given.loss_margin_nats is None else "as given"
    loss_by = target_val_loss, target.p_value_of(track), margin
    others = effects.secondary(counted if shown else [[], []], alpha, designed)
    comparison: Comparison = {
        "comparable": not answer.refusals,
        "reasons": answer.refusals + answer.remarks,
        "time": effects.time(counted if shown else [[], []], *judged_by),
        "val_loss": effects.val_loss(
            (a_rows, b_rows), *loss_by, given.identical_losses, force, answer, given.names, given.losses_ids, designed
        ),
        "verdict": "",  # as words, filled in by _decide()
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
        "started": [len(a_rows), len(b_rows)],
        "earlier_weight": given.earlier_weight,
        "steps": [_common([rows], "num_steps") for rows in counted],
        "plan": {"looks": looks, "alpha": alpha} if looks else None,
        "differences": list(given.differing),
    }
    comparison["flags"] += _flags(comparison, (a_rows, b_rows), arms, given)
    loss, has_times = comparison["val_loss"], comparison["comparable"]
    loss["margin_source"] = margin_source
    has_losses = loss["verdict"] != "unknown" or None not in loss["mean"]
    steps_alpha = alpha / (len(looks) if plan.get("sequential") else 1)
    comparison["steps_to_target"] = questions.steps_to(counted, loss, steps_alpha) if on == "steps_to_target" else None
    comparison["kind"], comparison["kind_words"] = questions.kind_of(
        counted, names, target_val_loss, rules.judged, has_times, has_losses, margin_pct
    )
    _decide(comparison)
    return comparison


def adjust(comparisons: Sequence[Comparison]) -> None:
    """Several candidates with one baseline are decided again by Holm's adjusted p."""
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
    """One candidate of a race compared alone: its p stays adjusted for all the candidates that the race had.

    reported: the Comparison, of any version, in race.json.
    """
    if reported and reported["arms"] == comparison["arms"]:
        for part, key in ADJUSTED:
            measure: Any = comparison[part]
            measure[f"{key}_holm"] = reported[part].get(f"{key}_holm")
        if (steps := comparison["steps_to_target"]) and (race_steps := reported.get("steps_to_target")):
            steps["alpha"] = race_steps.get("alpha", steps["alpha"])
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
        "one-clock": sum(map(clocks.has_outside_clock, arms)) == 1,
        "one-compilation": comparison["comparable"]
        and any(row["compile_s"] for row in rows)
        and ((given.plan or {}).get("compilations") or 1) == 1,
        "outliers-contradict": comparison["comparable"] and effects.rests_on_clipping(comparison["time"]),
        "baseline-unsteady": effects.differs_from_itself(comparison["time"]),
        "same-seed": any(len(group) > len(set(group)) for group in seeds),
        "without-its-plan": not plan and any(row["race_id"] not in (None, "calibration") for row in rows),
        "not-at-a-planned-look": plan is not None and (a != b or a not in plan["looks"]),
        "unplanned-look": given.unplanned_look,
    }
    return [flag for flag, holds in flags.items() if holds]


# ---- the verdict


def _decide(comparison: Comparison) -> None:
    """Fill in answers, verdict and words, and flag a verdict that depends on the excluded runs."""
    loss, time_all = comparison["val_loss"], comparison["time_all"]
    steps_answer = questions.steps_answer(comparison["steps_to_target"], _is_at_a_look(comparison))
    is_lower = (
        named(*loss.get("metric", ())).sign * (loss["change"] or 0.0) < 0
        or loss["below_target"] == [False, True]
        or steps_answer == "better"
    )
    hides_time = is_lower and effects.spends_more_outside(comparison["time"])  # B may have trained outside its clock
    flags = {
        DEPENDS: time_all is not None
        and _time_answer(comparison, time_all) != _time_answer(comparison, comparison["time"]),
        effects.DISAGREE: clocks_disagree(comparison["time"]) and comparison["comparable"],
        effects.NOT_COUNTED: hides_time and comparison["comparable"],
    }
    comparison["flags"] = [flag for flag in comparison["flags"] if flag not in flags] + [
        flag for flag in flags if flags[flag]
    ]
    answers = {
        "time": _time_answer(comparison, comparison["time"]),
        "loss": questions.loss_answer(loss, comparison["time"]["alpha"], _is_at_a_look(comparison)),
        "steps_to_target": steps_answer,
    }
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
    """The verdict on these times."""
    if not comparison["comparable"]:
        return "not_comparable"
    if time["p"] is None or not _is_at_a_look(comparison):
        return "inconclusive"
    return "not_interleaved" if time["drift_pct"] is not None else decide(time)


def _is_at_a_look(comparison: Comparison) -> bool:
    return "not-at-a-planned-look" not in comparison["flags"]


def decide(time: effects.Time) -> str:
    """Times with a p -> equivalent: shown to be inside the margin; faster, slower: p < alpha, and beyond the floor.

    Each by the runs' own clocks and by the launcher's; else inconclusive.  Equivalence comes first: a difference inside
    the margin is never called by its sign.  The floor is what this machine lets us see, the margin what matters:
    a machine that is noisier than the margin can show a difference, never the lack of one.  And no change is shown
    whose sign the mean of all runs contradicts, outlying ones too.
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
    """Whether the runs' own clocks alone would give another verdict than both clocks together."""
    if time.get("outside") is None or time["p"] is None or time["drift_pct"] is not None:
        return False
    both: effects.Time = {**time, "p_holm": None, "p_equivalent_holm": None}
    return decide({**both, "outside": None}) not in (decide(both), "inconclusive")


def _common(arms: Arms, column: Literal["track", "target", "num_steps"]) -> Any:
    """The value that all rows share, or None."""
    values = {row[column] for rows in arms for row in rows}
    return values.pop() if len(values) == 1 else None


def _first(*values: Any) -> Any:
    """The first that is not None, or None."""
    return next((value for value in values if value is not None), None)
