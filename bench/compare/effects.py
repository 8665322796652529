"""How much B differs from A: rows of runs in (bench/record/rows.py), numbers with their uncertainty out.

The run is the unit: Welch t on the logarithm of run times, never steps pooled as if they were runs.
"""

import json
import math

from bench import stats

ALPHA = 0.05
WANTED_POWER = 0.8
TARGET_ALPHA = 0.01  # modded-nanogpt's rule
MAX_FASTER_PCT = 99.9  # nothing gets 100 % faster, however noisy the machine
LOSS_MARGIN_NATS = 0.002  # a rise of the mean val_loss that still passes as "no worse"
SECONDARY = {
    "energy": ("energy_j", "mean_j"),
    "memory": ("peak_mem_gib", "mean_gib"),
    "compile": ("compile_s", "mean_s"),
}


def time(arms, floor_pct, alpha):
    values = [[row["train_s"] for row in rows] for rows in arms]
    found, test = _change(values, alpha)
    edges = (math.log1p(-min(floor_pct, MAX_FASTER_PCT) / 100), math.log1p(floor_pct / 100))
    return found | {
        "mean_s": _means(values),
        "ci90_pct": _pct_interval(test, 0.90),
        "p_equivalent": stats.equivalence_p(test, *edges) if test else None,
        "p_holm": None,
        "floor_pct": floor_pct,
        "alpha": alpha,
    }


def _change(values, alpha=ALPHA):
    """Two lists of positive numbers -> (change of b against a in per cent, the Welch test of their logarithms or None).

    The change is that of the geometric means, which is what a difference of mean logarithms is.
    """
    logs = [[math.log(value) for value in group] for group in values]
    test = stats.welch(*logs) if all(logs) else None
    sds, ns = [stats.sd(group) for group in logs], [len(group) for group in values]
    smallest = stats.smallest_difference(sds, ns, alpha, WANTED_POWER) if test else None
    found = {
        "change_pct": 100 * math.expm1(test.difference) if test else None,
        "ci95_pct": _pct_interval(test, 0.95),
        "p": test.p if test else None,
        "n": ns,
        "cv_pct": [stats.cv_pct(group) if group else None for group in values],
        "mde_pct": None if smallest is None else 100 * math.expm1(smallest),
    }
    return found, test


def _pct_interval(test, confidence):
    found = stats.interval(test, confidence) if test else None
    return found and [100 * math.expm1(edge) for edge in found]


def _means(values):
    return [stats.mean(group) if group else None for group in values]


def secondary(arms, alpha):
    """Energy, memory, compile time: the same test, with p adjusted among the three (Holm); no verdict of their own."""
    found = {}
    for name, (column, mean_name) in SECONDARY.items():
        values = [[row[column] for row in rows if row[column] is not None and row[column] > 0] for rows in arms]
        found[name] = _change(values, alpha)[0] | {mean_name: _means(values)}
    for numbers, p_holm in zip(found.values(), stats.holm([one["p"] for one in found.values()]), strict=True):
        numbers["p_holm"] = p_holm
    return found


# ---- loss


def val_loss(a_rows, b_rows, target, margin_nats, identical, force):
    """Final val_loss, unrounded: change of the mean, test against the target, non-inferiority.

    One value a seed: repeats of one seed are no independent losses.  Runs whose seed is unknown count one by one.
    """
    arms = [
        [row for row in rows if row["status"] == "complete" and row["validity"] != "invalid"]
        for rows in (a_rows, b_rows)
    ]
    together = arms[0] + arms[1]
    refused = [
        f"{what} differ"
        for what, values in (
            ("validation data", _val_data(together)),
            ("numbers of validation tokens", {row["val_tokens"] for row in together} - {None}),
        )
        if len(values) > 1
    ]
    values = [[] if refused and not force else _by_seed(rows) for rows in arms]
    test = stats.welch(*values) if all(values) else None
    edges = stats.interval(test) if test else None
    p_margin = stats.non_inferiority_p(test, margin_nats) if test else None
    p_target = [None if target is None else stats.one_sample_t_less(group, target)[1] for group in values]
    return {
        "change_nats": test.difference if test else None,
        "ci95_nats": list(edges) if edges else None,
        "p": test.p if test else None,
        "n": [len(group) for group in values],
        "mean": _means(values),
        "sd": [stats.sd(group) for group in values],
        "target": target,
        "p_target": p_target,
        "below_target": [None if p is None else p < TARGET_ALPHA for p in p_target],
        "margin_nats": margin_nats,
        "p_not_worse": p_margin,
        "identical": identical,
        "verdict": _loss_verdict(edges, p_margin, identical),
        "reasons": refused,
    }


def _val_data(rows):
    """The different validation data of these runs, those unknown left out."""
    return {json.dumps(json.loads(text).get("val_data")) for text in {row["setting"] for row in rows}} - {"null"}


def _by_seed(rows):
    groups = {}
    for place, row in enumerate(rows):
        if row["val_loss"] is not None:
            seed = ("unknown", place) if row["seed"] is None else row["seed"]
            groups.setdefault(seed, []).append(row["val_loss"])
    return [stats.mean(group) for group in groups.values()]


def _loss_verdict(edges, p_not_worse, identical):
    if identical:
        return "waived"  # the same trajectories, bit for bit: there is nothing to test
    if edges is None:
        return "unknown"
    if p_not_worse < ALPHA:
        return "not_worse"
    return "worse" if edges[0] > 0 else "inconclusive"
