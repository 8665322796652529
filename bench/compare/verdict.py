"""Two groups of runs -> numbers and a verdict.  Rows in, a Comparison out; no file is read here.

The rules of the verdict are here and nowhere else: bench/compare/eligibility.py says whether there may be one,
bench/compare/effects.py gives the numbers.
"""

from collections.abc import Mapping
from typing import TypedDict

from bench import stats, text_table
from bench.compare import effects, eligibility, target

DEPENDS = "verdict-depends-on-exclusions"


class Comparison(TypedDict, total=False):
    """Of a candidate against a baseline, JSON as it stands; pairs are of baseline and candidate.

    comparison.py adds about and the last three.
    """

    comparable: bool  # the times
    reasons: list[str]  # why the times are not, then what is unknown
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
    left_out: list[dict]  # the excluded runs: arm, run_id, reasons
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
    result = {
        "comparable": not answer.refusals,
        "reasons": answer.refusals + answer.remarks,
        "time": effects.time(counted if shown else [[], []], *judged_by),
        "val_loss": effects.val_loss(
            (a_rows, b_rows), target_val_loss, target.p_value_of(track), margin_nats, identical_losses, force, answer
        ),
        "verdict": None,
        "flags": [*answer.flags, *(["forced"] if force and answer.refusals else [])],
        "words": None,
        "arms": list(names),
        **effects.secondary(counted if shown else [[], []], alpha),
        "time_all": effects.time(arms, *judged_by) if excluded and shown else None,
        "left_out": excluded,
        "started": [len(a_rows), len(b_rows)],
        "steps": [_common([rows], "num_steps") for rows in counted],
        "plan": {"looks": looks, "alpha": alpha} if looks else None,
        "differences": list(differing),
    }
    result["flags"] += _flags(result, (a_rows, b_rows), arms, floor_pct) + ["unplanned-look"] * bool(unplanned_look)
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
        "suspect-runs": any(row["machine_doubts"] for row in rows) and not result["left_out"],
        "suspect-records": any(row["validity"] == "suspect" and not row["machine_doubts"] for row in rows),
        "runs-excluded": bool(result["left_out"]),
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
    result["words"] = _words(result)


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


# ---- words


def sentence(result: Mapping) -> str:
    """The verdict and its sentence, for where the verdict has no column of its own.  A Comparison of any version."""
    verdict, words = str(result["verdict"]).replace("_", " "), str(result["words"])
    return words if verdict in words or words.startswith("no verdict") else f"{verdict}: {words}"


def _words(result):
    """The verdict as a sentence, which does not say the verdict's own word again where it would only repeat it."""
    time, verdict, (a, b) = result["time"], result["verdict"], result["arms"]
    if verdict == "not_comparable":
        return _words_of_losses(result)
    if time["p"] is None:
        why = "one run has no spread" if min(time["n"]) < 2 else "identical times in each arm: not measured?"
        return f"no verdict: {why}"
    if "not-at-a-planned-look" in result["flags"]:
        looks = ", ".join(map(str, result["plan"]["looks"]))
        started = " and ".join(map(str, result["started"]))
        return f"no verdict: {started} runs were started, the plan looks at {looks} a side"
    low, high = time["ci95_pct"]
    p = f"p = {time['p']:.2g}" + ("" if time["p_holm"] is None else f", {time['p_holm']:.2g} after Holm")
    numbers = f"95 % interval {low:+.2f} to {high:+.2f} %, {p}, n = {time['n'][0]} and {time['n'][1]}"
    if verdict in ("faster", "slower"):
        return f"{b} is {abs(time['change_pct']):.2f} % {verdict} than {a} ({numbers})"
    change = f"{time['change_pct']:+.2f} %"
    if verdict == "equivalent":
        return f"{b} is as fast as {a}: {change} is inside the margin of {time['margin_pct']:g} % ({numbers})"
    return f"{b} against {a}: {change} ({numbers}); {_why_inconclusive(time)}"


def _why_inconclusive(time):
    floor = text_table.two_digits(time["floor_pct"])
    if time["floor_pct"] > time["margin_pct"]:
        coarse = f"this machine's noise floor of {floor} % is coarser than the margin of {time['margin_pct']:g} %"
        return f"{coarse}: measure on a quiet machine, calibrate again"
    if _first(time["p_holm"], time["p"]) < time["alpha"]:
        return f"the difference is not beyond the noise floor of {floor} %"
    mde = text_table.two_digits(time["mde_pct"])
    return f"the MDE (80 % power) of these runs is {mde} %: run more to see a smaller change"


def _words_of_losses(result):
    """Of times that are not comparable: why; and what the losses say all the same."""
    (a, b), loss, why = result["arms"], result["val_loss"], result["reasons"][0]
    said = {
        "waived": f"{b} has those of {a}, bit for bit",
        "not_worse": f"{b} is no worse",
        "worse": f"{b} is worse",
        "inconclusive": f"whether {b} is worse is open",
    }
    if loss["verdict"] not in said:
        return why
    change = "" if loss["change_nats"] is None else f"{loss['change_nats']:+.5f} nats, "
    return f"time: {why}; val_loss: {said[loss['verdict']]} ({change}margin {loss['margin_nats']:g})"


def _common(arms, column):
    """The value that all rows share, or None."""
    values = {row[column] for rows in arms for row in rows}
    return values.pop() if len(values) == 1 else None


def _first(*values):
    """The first that is not None, or None."""
    return next((value for value in values if value is not None), None)
