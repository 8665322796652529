"""Two groups of runs -> numbers and a verdict.  Rows in, a Comparison out; no file is read here.

The rules of the verdict are here and nowhere else: bench/compare/eligibility.py says whether there may be one,
bench/compare/effects.py gives the numbers.
"""

from typing import TypedDict

from bench import stats
from bench.compare import effects, eligibility, kind, sentences, target

DEPENDS = "verdict-depends-on-exclusions"


class Comparison(TypedDict, total=False):
    """Of a candidate against a baseline, JSON as it stands; pairs are of baseline and candidate.

    comparison.py adds about and the last three.
    """

    comparable: bool  # the times
    reasons: list[str]  # why the times are not, then what is unknown
    kind: str | None  # what is compared, one of bench/compare/kind.py's KINDS; None: none of them
    kind_words: str  # the same as a sentence
    time: effects.Time  # of the runs that count
    val_loss: effects.Loss
    verdict: str  # faster, slower, equivalent, inconclusive, not_comparable
    flags: list[str]  # bench/compare/text.py says what they mean
    words: str  # the verdict as a sentence
    arms: list[str]  # names of baseline and candidate, as the sentences call them
    about: list[str]  # what each of them is: its overrides, or the words of the user
    energy: effects.Change
    memory: effects.Change
    compile: effects.Change
    time_all: effects.Time | None  # with the excluded runs, where there are some
    excluded: list[dict]  # the excluded runs: arm, run_id, reasons
    started: list[int]
    steps: list[int | None]  # None: the runs of the arm differ
    plan: dict | None  # looks, and alpha of each
    differences: list[dict]  # bench/compare/differences.py
    calibration: dict | None  # of this session
    code_change: dict | None  # bench/diagnosis/code_diff.py
    diagnosis: dict  # bench/diagnosis/between_runs.py


def adjusted(against):
    """{name: Comparison} of several candidates with one baseline -> the same, decided by Holm's adjusted p."""
    if len(against) < 2:
        return against
    for key in ("p", "p_equivalent"):
        all_p = stats.holm([one["time"][key] for one in against.values()])
        for result, p_holm in zip(against.values(), all_p, strict=True):
            result["time"][f"{key}_holm"] = p_holm
    for result in against.values():
        _decide(result)
    return against


def adjusted_as(result: Comparison, reported: Comparison | None) -> None:
    """One candidate of a race compared alone: its p stays adjusted for all the candidates that the race had."""
    if reported and reported["arms"] == result["arms"]:
        for key in ("p_holm", "p_equivalent_holm"):
            result["time"][key] = reported["time"].get(key)
        _decide(result)


def of_rows(
    a_rows,
    b_rows,
    floor_pct=None,
    plan=None,
    identical_losses=None,
    target_val_loss=None,
    loss_margin_nats=None,
    force=False,
    differing=(),
    unplanned_look=False,
    names=("A", "B"),
) -> Comparison:
    """Rows (bench/record/rows.py) of all started runs; names: what the baseline and the candidate are called.

    floor_pct: this machine's A/A floor, None if it is not calibrated.  plan: {"n", "looks", "alpha",
    "equivalence_margin_pct"} made before the first run; without one the margin is the track's.  identical_losses:
    every trajectory of B is one of A, bit for bit.  target_val_loss, loss_margin_nats: None takes the runs' own, the
    plan's.  force: numbers although the runs are not comparable, still without a verdict.  unplanned_look: the race
    had an interim look that its plan has not.
    """
    plan = plan or {}
    answer = eligibility.judge(a_rows, b_rows, names)
    shown = force or not answer.refusals
    arms = [[row for row in rows if eligibility.is_timed(row)] for rows in (a_rows, b_rows)]
    counted, excluded = _without_disturbed_runs(arms, names)
    looks = plan.get("looks") or ([plan["n"]] if plan.get("n") else [])
    alpha = _first(plan.get("alpha"), stats.ALPHA) / max(1, len(looks))
    track = _common(arms, "track")
    margin_pct = plan.get("equivalence_margin_pct", target.MARGIN_PCT) if plan else target.margin_pct_of(track)
    judged_by = max(effects.MIN_FLOOR_PCT, floor_pct or 0.0), margin_pct, alpha
    target_val_loss = _first(target_val_loss, _common(arms, "target_val_loss"))
    margin_nats = _first(loss_margin_nats, plan.get("loss_margin_nats"), effects.LOSS_MARGIN_NATS)
    judged_losses = target_val_loss, target.p_value_of(track), margin_nats
    result = {
        "comparable": not answer.refusals,
        "reasons": answer.refusals + answer.remarks,
        "time": effects.time(counted if shown else [[], []], *judged_by),
        "val_loss": effects.val_loss((a_rows, b_rows), *judged_losses, identical_losses, force, answer, names),
        "verdict": None,
        "flags": [*answer.flags, *(["forced"] if force and answer.refusals else [])],
        "words": None,
        "arms": list(names),
        **effects.secondary(counted if shown else [[], []], alpha),
        "time_all": effects.time(arms, *judged_by) if excluded and shown else None,
        "excluded": excluded,
        "started": [len(a_rows), len(b_rows)],
        "steps": [_common([rows], "num_steps") for rows in counted],
        "plan": {"looks": looks, "alpha": alpha} if looks else None,
        "differences": list(differing),
    }
    result["flags"] += _flags(result, (a_rows, b_rows), arms, floor_pct) + ["unplanned-look"] * bool(unplanned_look)
    result["kind"], result["kind_words"] = kind.of(
        counted,
        names,
        target_val_loss,
        target.judged_of(track),
        has_times=result["comparable"],
        has_losses=result["val_loss"]["verdict"] != "unknown" or None not in result["val_loss"]["mean"],
        margin_pct=margin_pct,
    )
    _decide(result)
    return result


def _without_disturbed_runs(arms, names):
    """Runs that the machine disturbed are excluded from both arms, by their telemetry and never by their times.

    Where fewer than two a side would remain none is excluded, and the comparison is flagged instead.
    """
    kept = [[row for row in rows if not row["machine_doubts"]] for rows in arms]
    if kept == arms or min(map(len, kept)) < 2:
        return arms, []
    return kept, [
        {"arm": name, "run_id": row["run_id"], "reasons": row["machine_doubts"]}
        for name, rows in zip(names, arms, strict=True)
        for row in rows
        if row["machine_doubts"]
    ]


def _flags(result, started, arms, floor_pct):
    """Words for what a reader must know beside the verdict."""
    rows = [row for group in arms for row in group]
    ns, plan = result["time"]["n"], result["plan"]
    seeds = [[row["seed"] for row in group if row["seed"] is not None] for group in arms]
    a, b = result["started"]
    flags = {
        "uncalibrated": floor_pct is None,
        "n=1": result["comparable"] and min(ns) == 1,
        "no-spread": min(ns) > 1 and result["time"]["p"] is None,
        "runs-without-a-time": any(len(timed) < len(all_) for timed, all_ in zip(arms, started, strict=True)),
        "suspect-runs": any(row["machine_doubts"] for row in rows) and not result["excluded"],
        "suspect-records": any(row["validity"] == "suspect" and not row["machine_doubts"] for row in rows),
        "runs-excluded": bool(result["excluded"]) and result["comparable"],
        "same-seed": any(len(group) > len(set(group)) for group in seeds),
        "without-its-plan": not plan and any(row["race_id"] not in (None, "calibration") for row in rows),
        "not-at-a-planned-look": bool(plan) and (a != b or a not in plan["looks"]),
    }
    return [flag for flag, holds in flags.items() if holds]


# ---- the verdict


def _decide(result):
    """Fill in verdict and words, and flag a verdict that depends on the excluded runs."""
    result["verdict"] = _verdict(result, result["time"])
    depends = result["time_all"] is not None and _verdict(result, result["time_all"]) != result["verdict"]
    result["flags"] = [flag for flag in result["flags"] if flag != DEPENDS] + [DEPENDS] * depends
    result["words"] = sentences.of(result)


def _verdict(result, time):
    if not result["comparable"]:
        return "not_comparable"
    if time["p"] is None or "not-at-a-planned-look" in result["flags"]:
        return "inconclusive"
    return decide(time)


def decide(time: effects.Time) -> str:
    """Times that have a p -> faster, slower: p < alpha and beyond the floor; equivalent: shown to be inside the margin.

    Else inconclusive.  The floor is what this machine lets us see, the margin what matters: a machine that is noisier
    than the margin can show a difference, never the lack of one.
    """
    if _first(time["p_holm"], time["p"]) < time["alpha"] and abs(time["change_pct"]) > time["floor_pct"]:
        return "faster" if time["change_pct"] < 0 else "slower"
    p_equivalent = _first(time["p_equivalent_holm"], time["p_equivalent"])
    is_equivalent = p_equivalent < time["alpha"] and time["floor_pct"] <= time["margin_pct"]
    return "equivalent" if is_equivalent else "inconclusive"


def _common(arms, column):
    """The value that all rows share, or None."""
    values = {row[column] for rows in arms for row in rows}
    return values.pop() if len(values) == 1 else None


def _first(*values):
    """The first that is not None, or None."""
    return next((value for value in values if value is not None), None)
