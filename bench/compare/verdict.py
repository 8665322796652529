"""Two groups of runs -> numbers and a verdict.  Records in, a dict out; no file is read here.

The rules of the verdict are here and nowhere else: bench/compare/eligibility.py says whether there may be one, bench/compare/effects.py
gives the numbers.
"""

from bench import stats, text_table
from bench.compare import differences, effects, eligibility
from bench.record.rows import row_of

MIN_FLOOR_PCT = 0.1  # no machine is calibrated finer: two runs of the same code in one sitting differ by about 0.08 %


def compare(a_runs, b_runs, **options):
    """Records of all started runs of the baseline A and of B -> the comparison as a dict, JSON as it stands.

    Change is of B against A, negative is faster.  options: those of of_rows().
    """
    a_rows, b_rows = [row_of(run) for run in a_runs], [row_of(run) for run in b_runs]
    options.setdefault("differing", differences.of_records(a_runs, b_runs))
    return of_rows(a_rows, b_rows, **options)


def compare_arms(arms, **options):
    """{name: records}, the first is the baseline -> {"baseline": name, "against": {name: comparison}}.

    With several candidates their p values are adjusted together (Holm), and the adjusted ones decide.
    """
    (baseline, a_runs), *candidates = arms.items()
    against = {name: compare(a_runs, b_runs, **options) for name, b_runs in candidates}
    return {"baseline": baseline, "against": adjusted(against)}


def adjusted(against):
    """{name: comparison} of several candidates with one baseline -> the same, decided by Holm's adjusted p."""
    if len(against) < 2:
        return against
    for result, p_holm in zip(
        against.values(), stats.holm([one["time"]["p"] for one in against.values()]), strict=True
    ):
        result["time"]["p_holm"] = p_holm
        _decide(result)
    return against


def of_rows(
    a_rows,
    b_rows,
    floor_pct=None,
    plan=None,
    interleaved=None,
    identical_losses=None,
    target_val_loss=None,
    loss_margin_nats=None,
    force=False,
    differing=(),
    peeked=False,
):
    """Rows (bench/record/rows.py) of all started runs -> the comparison.

    floor_pct: this machine's A/A floor, None if it is not calibrated.  plan: {"n", "looks", "alpha"} made before the
    first run.  interleaved: None finds out from the starts.  identical_losses: every trajectory of B is one of A, bit
    for bit.  force: numbers although the runs are not comparable, still without a verdict.  peeked: somebody looked
    at the race when its plan had no look.
    """
    plan = plan or {}
    answer = eligibility.judge(a_rows, b_rows, interleaved)
    shown = force or not answer.refusals
    arms = [[row for row in rows if eligibility.is_timed(row)] for rows in (a_rows, b_rows)]
    counted, left_out = _without_disturbed_runs(arms)
    looks = plan.get("looks") or ([plan["n"]] if plan.get("n") else [])
    alpha = (effects.ALPHA if plan.get("alpha") is None else plan["alpha"]) / max(1, len(looks))
    floor_used_pct = max(MIN_FLOOR_PCT, floor_pct or 0.0)
    target = _common(arms, "target_val_loss") if target_val_loss is None else target_val_loss
    margin = _first(loss_margin_nats, plan.get("loss_margin_nats"), effects.LOSS_MARGIN_NATS)
    nothing = [[], []]
    result = {
        "comparable": not answer.refusals,
        "reasons": answer.refusals + answer.remarks,
        "time": effects.time(counted if shown else nothing, floor_used_pct, alpha),
        "val_loss": effects.val_loss(a_rows, b_rows, target, margin, identical_losses, force),
        "verdict": None,
        "flags": [*answer.flags, *(["forced"] if force and answer.refusals else [])],
        "words": None,
        **effects.secondary(counted if shown else nothing, alpha),
        "time_all": effects.time(arms, floor_used_pct, alpha) if left_out and shown else None,
        "left_out": left_out,
        "started": [len(a_rows), len(b_rows)],
        "steps": [_common([rows], "num_steps") for rows in counted],
        "plan": {"looks": looks, "alpha": alpha} if looks else None,
        "differences": list(differing),
    }
    result["flags"] += _marks(result, (a_rows, b_rows), arms, floor_pct) + ["peeked"] * bool(peeked)
    if answer.refusals:
        result["val_loss"]["verdict"] = "unknown"
    _decide(result)
    return result


def _without_disturbed_runs(arms):
    """Runs that the machine disturbed are left out of both arms, by their telemetry and never by their times.

    Where fewer than two a side would remain nothing is left out, and the comparison is marked instead.
    """
    kept = [[row for row in rows if not row["machine_doubts"]] for rows in arms]
    if kept == arms or min(map(len, kept)) < 2:
        return arms, []
    out = [
        {"arm": name, "run_id": row["run_id"], "reasons": row["machine_doubts"]}
        for name, rows in zip("AB", arms, strict=True)
        for row in rows
        if row["machine_doubts"]
    ]
    return kept, out


def _marks(result, started, arms, floor_pct):
    """Words for what a reader must know beside the verdict."""
    rows = [row for group in arms for row in group]
    ns = result["time"]["n"]
    marks = {
        "uncalibrated": floor_pct is None,
        "n=1": result["comparable"] and min(ns) == 1,
        "no-spread": min(ns) > 1 and result["time"]["p"] is None,
        "runs-without-a-time": any(len(timed) < len(all_) for timed, all_ in zip(arms, started, strict=True)),
        "suspect-runs": any(row["machine_doubts"] for row in rows) and not result["left_out"],
        "doubtful-runs": any(row["validity"] == "suspect" and not row["machine_doubts"] for row in rows),
        "runs-left-out": bool(result["left_out"]),
        "same-seed": any(
            len(seeds := [row["seed"] for row in group if row["seed"] is not None]) > len(set(seeds)) for group in arms
        ),
        "without-its-plan": not result["plan"] and any(row["race_id"] not in (None, "calibration") for row in rows),
        "not-at-a-planned-look": bool(result["plan"])
        and (len(started[0]) != len(started[1]) or len(started[0]) not in result["plan"]["looks"]),
    }
    return [mark for mark, holds in marks.items() if holds]


# ---- the verdict


def _decide(result):
    """Fill in verdict and words, and mark a verdict that hangs on the runs left out."""
    result["verdict"] = _verdict(result, result["time"])
    mark = "verdict-hangs-on-runs-left-out"
    if result["time_all"] and _verdict(result, result["time_all"]) != result["verdict"] and mark not in result["flags"]:
        result["flags"].append(mark)
    result["words"] = _words(result)


def _verdict(result, time):
    """faster, slower: p < alpha and beyond the floor.  equivalent: shown to be inside the floor.  Else inconclusive."""
    if not result["comparable"]:
        return "not_comparable"
    p = time["p"] if time["p_holm"] is None else time["p_holm"]
    if p is None or "not-at-a-planned-look" in result["flags"]:
        return "inconclusive"
    if p < time["alpha"] and abs(time["change_pct"]) > time["floor_pct"]:
        return "faster" if time["change_pct"] < 0 else "slower"
    return "equivalent" if time["p_equivalent"] < time["alpha"] else "inconclusive"


def _words(result):
    """The verdict as a sentence."""
    time, verdict = result["time"], result["verdict"]
    if verdict == "not_comparable":
        return f"not comparable: {result['reasons'][0]}"
    if time["p"] is None:
        why = (
            "one run has no spread"
            if min(time["n"]) < 2
            else "the times of each arm are all equal, which no clock gives: there is no spread"
        )
        return f"no verdict: {why} to judge by"
    if "not-at-a-planned-look" in result["flags"]:
        looks = ", ".join(map(str, result["plan"]["looks"]))
        a, b = result["started"]
        return f"no verdict: {a} and {b} runs were started, the plan looks at {looks} a side"
    low, high = time["ci95_pct"]
    p = f"p = {time['p']:.2g}" + ("" if time["p_holm"] is None else f", {time['p_holm']:.2g} after Holm")
    numbers = f"95 % interval {low:+.2f} to {high:+.2f} %, {p}, n = {time['n'][0]} and {time['n'][1]}"
    if verdict in ("faster", "slower"):
        return f"B is {abs(time['change_pct']):.2f} % {verdict} than A ({numbers})"
    if verdict == "equivalent":
        floor = text_table.two_digits(time["floor_pct"])
        return f"B is as fast as A: the difference is inside {floor} %, this machine's noise ({numbers})"
    return f"inconclusive: {time['change_pct']:+.2f} % ({numbers}); {_why_inconclusive(time)}"


def _why_inconclusive(time):
    p = time["p"] if time["p_holm"] is None else time["p_holm"]
    if p < time["alpha"]:
        return f"the difference is not beyond the noise floor of {text_table.two_digits(time['floor_pct'])} %"
    return f"these runs can show a change of {text_table.two_digits(time['mde_pct'])} %: run more to see a smaller one"


def _common(arms, column):
    """The value that all rows share, or None."""
    values = {row[column] for rows in arms for row in rows}
    return values.pop() if len(values) == 1 else None


def _first(*values):
    return next(value for value in values if value is not None)
