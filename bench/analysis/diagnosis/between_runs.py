"""Compares two groups of runs step by step, to show where the time went.  It points at causes and decides nothing.

Steps of one run are not independent measurements (pooled as if they were, they call identical code different in 27 to
30 % of comparisons), so nothing here has a p value.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from bench.analysis.diagnosis import stalls
from bench.base import stats
from bench.base.text_table import counted
from bench.web.document import Block, Lines, Table

LABEL = "within-run"
MAX_RUNS = 10  # per arm: the steps of further runs are not read
NUM_STRETCHES = 4
MAX_SHARE_FRAC = 2  # a region's change over the step's, above which changes of regions cancel each other
OF_LOGS = "steps of logs: the time between two printed lines, which nothing synchronised with the device"
OTHER = "other_ms"  # the time of a step outside all regions
MIN_SHARE_FRAC = 0.5  # share of the change of a step from which a region stands out as its cause
TELEMETRY = {  # {key of the summary: (label, factor)} of the figures that are shown; --json has all
    "mean_power_w": ("power, W", 1),
    "energy_j": ("energy, J", 1),
    "mean_sm_clock_mhz": ("SM clock, MHz", 1),
    "mean_mem_clock_mhz": ("memory clock, MHz", 1),
    "mean_util_pct": ("GPU use, %", 1),
    "mean_cpu_util_pct": ("CPU use, %", 1),
    "mean_cpu_freq_mhz": ("CPU clock, MHz", 1),
    "mean_load": ("load (running and waiting threads)", 1),
    "max_temp_c": ("hottest, °C", 1),
    "sampler_cpu_frac": ("CPU use of the sampler, %", 100),
}


def diagnose(
    a: Iterable[tuple[Mapping[str, Any], list[dict[str, Any]]]],
    b: Iterable[tuple[Mapping[str, Any], list[dict[str, Any]]]],
    names: Sequence[str] = ("A", "B"),
) -> dict[str, Any]:
    """Returns what differs between the runs of two arms.  a, b: [(record, rows of steps.csv)]; names: of the arms.

    Regions and stretches are compared step by step, as medians over runs, so that a stall in one run changes nothing.
    """
    a_runs, b_runs = [_Run(*run) for run in a], [_Run(*run) for run in b]
    num_runs = [len(a_runs), len(b_runs)]
    if not all(num_runs):
        return {"label": LABEL, "arms": list(names), "runs": num_runs, "words": []}
    regions = _regions(a_runs, b_runs)
    diagnosis = {
        "label": LABEL,
        "arms": list(names),
        "runs": num_runs,
        "regions": regions,
        "stretches": _stretches(a_runs, b_runs),
        "costs": _costs(a_runs, b_runs),
        "telemetry": _telemetry(a_runs, b_runs),
    }
    are_logs = any(run.run.get("provenance") == "imported" for run in a_runs + b_runs)
    return diagnosis | {"words": ([OF_LOGS] if are_logs and regions else []) + _sentences(diagnosis, names)}


class _Run:
    def __init__(self, run: Mapping[str, Any], rows: list[dict[str, Any]]) -> None:
        self.run = run
        self.rows = [row for row in rows if row["step"] and row.get("step_ms") is not None and not row.get("flags")]

    def summary(self, instrument: str) -> dict[str, Any]:
        return (self.run.get("instrument_summaries") or {}).get(instrument) or {}

    def by_step(self, column: str) -> dict[int, float]:
        return {row["step"]: row[column] for row in self.rows if row.get(column) is not None}


def _columns(runs: Sequence[_Run]) -> set[str]:
    """Returns the regions that every run of an arm has."""
    return set.intersection(*({*stalls.REGIONS, *run.summary("regions")} & set(*run.rows[:1]) for run in runs))


def _medians(runs: Sequence[_Run], column: str) -> dict[int, float]:
    """Returns {step: median of a column over the runs}, for the steps that all of them have."""
    by_run = [run.by_step(column) for run in runs]
    steps = set.intersection(*(set(run) for run in by_run))
    return {step: stats.percentile([run[step] for run in by_run], 50) or 0.0 for step in sorted(steps)}


def _regions(a: Sequence[_Run], b: Sequence[_Run]) -> dict[str, dict[str, Any]]:
    """Returns {region: {"a_ms", "b_ms", "change_ms", "change_pct", "share_frac"}}, in milliseconds per step.

    They are means, over the steps that both arms have, of medians over the runs.  share_frac is a region's share of the
    change of the whole step, None where changes of regions cancel each other.
    """
    regions: dict[str, dict[str, Any]] = {}
    for name in ("step_ms", *sorted(_columns(a) & _columns(b))):
        a_ms, b_ms = _medians(a, name), _medians(b, name)
        if steps := sorted(a_ms.keys() & b_ms.keys()):
            regions[name] = _pair(a_ms, b_ms, steps)
        elif name == "step_ms":
            return {}
    whole = regions["step_ms"]
    if len(regions) > 1:
        inside = [pair for name, pair in regions.items() if name != "step_ms"]
        rest = [whole[key] - math.fsum(pair[key] for pair in inside) for key in ("a_ms", "b_ms")]
        regions[OTHER] = _change(*rest)
    cancels = any(abs(pair["change_ms"]) > MAX_SHARE_FRAC * abs(whole["change_ms"]) for pair in regions.values())
    for pair in regions.values():
        pair["share_frac"] = pair["change_ms"] / whole["change_ms"] if whole["change_ms"] and not cancels else None
    return regions


def _pair(a_ms: Mapping[int, float], b_ms: Mapping[int, float], steps: Sequence[int]) -> dict[str, Any]:
    return _change(*(stats.mean([arm_ms[step] for step in steps]) for arm_ms in (a_ms, b_ms)))


def _change(a_ms: float, b_ms: float) -> dict[str, Any]:
    """Returns both times and their change.  change_pct is None where a_ms is 0, as in a log of whole milliseconds."""
    pct = 100 * (b_ms - a_ms) / a_ms if a_ms > 0 and b_ms >= 0 else None
    return {"a_ms": a_ms, "b_ms": b_ms, "change_ms": b_ms - a_ms, "change_pct": pct}


def _stretches(a: Sequence[_Run], b: Sequence[_Run]) -> list[dict[str, Any]]:
    """Returns the change in each quarter of the run, to show whether it lies at the start, at the end or everywhere."""
    a_ms, b_ms = _medians(a, "step_ms"), _medians(b, "step_ms")
    steps = sorted(a_ms.keys() & b_ms.keys())
    size = max(1, -(-len(steps) // NUM_STRETCHES))
    parts = [steps[first : first + size] for first in range(0, len(steps), size)]
    return [{"first_step": part[0], "last_step": part[-1], **_pair(a_ms, b_ms, part)} for part in parts]


def _costs(a: Sequence[_Run], b: Sequence[_Run]) -> dict[str, dict[str, list[float | None]]]:
    """Returns {kind: {"count": [a, b], "ms": [a, b]}}, means per run, of stalls and of the kinds in run.json["costs"].

    The mean of an arm is None if one of its runs did not watch for the kind; stalls are found in the steps of any run.
    """
    costs = [[{"stall": stalls.cost(run.rows)} | (run.run.get("costs") or {}) for run in runs] for runs in (a, b)]
    means: dict[str, dict[str, list[float | None]]] = {}
    for kind in dict.fromkeys(kind for arm in costs for run in arm for kind in run):
        for key in ("count", "ms"):
            values: list[list[Any]] = [[(run.get(kind) or {}).get(key) for run in arm] for arm in costs]
            means.setdefault(kind, {})[key] = [None if None in arm else stats.mean(arm) for arm in values]
    return means


def _telemetry(a: Sequence[_Run], b: Sequence[_Run]) -> dict[str, list[float | None]]:
    """Returns {name: [mean of A's runs, of B's]} for numbers in the telemetry's summary, such as clocks and power."""
    summaries = [[run.summary("telemetry") for run in runs] for runs in (a, b)]
    names = dict.fromkeys(name for arm in summaries for summary in arm for name in summary)
    by_name = {
        name: [[summary[name] for summary in arm if type(summary.get(name)) in (int, float)] for arm in summaries]
        for name in names
    }
    means = {name: [stats.mean(values) if values else None for values in arms] for name, arms in by_name.items()}
    return {name: both for name, both in means.items() if any(mean is not None for mean in both)}


def _sentences(diagnosis: dict[str, Any], names: Sequence[str]) -> list[str]:
    """Returns sentences about what to look at first."""
    sentences = []
    whole = diagnosis["regions"].get("step_ms")
    inside = {name: pair for name, pair in diagnosis["regions"].items() if name != "step_ms"}
    if whole and inside and whole["change_ms"]:
        sign = math.copysign(1, whole["change_ms"])
        cancels = whole["share_frac"] is None
        changes = {name: pair["change_ms"] for name, pair in inside.items()}
        name = max(changes, key=lambda name: abs(changes[name]) if cancels else sign * changes[name])
        part = "the changes of the regions cancel; the largest" if cancels else "the largest part of the change"
        ms = f"{changes[name]:+.3f} ms of {whole['change_ms']:+.3f} ms per step"
        sentences.append(f"{part} is in {name.removesuffix('_ms')}: {ms}")
    for kind, cost in diagnosis["costs"].items():
        if any(cost["count"]) and any(cost["ms"]):
            phrases = []
            for name, count, ms in zip(names, cost["count"], cost["ms"]):
                per_run = "not recorded" if count is None else f"{count:.3g}" + f" ({ms:.3g} ms)" * bool(ms)
                phrases.append(f"{name} {per_run}")
            sentences.append(f"{kind.replace('_', ' ')} events per run: {', '.join(phrases)}")
    return sentences


# ---- presentation


def blocks(diagnosis: Mapping[str, Any]) -> list[Block]:
    """Returns a diagnosis of any version as blocks, [] if nothing is known; "traces" without "parts" are skipped."""
    shown = [*(_steps(diagnosis) if diagnosis.get("regions") else [])]
    if (traces := diagnosis.get("traces")) and "parts" in traces:
        from bench.analysis.explain import document  # it imports numpy, which a race needs for nothing else

        shown += document.difference_blocks(traces)
    return shown


def cause(diagnosis: Mapping[str, Any]) -> str | None:
    """Returns a sentence that names the region with most of the change of a step; None if none stands out."""
    shares = {
        name: pair["share_frac"] or 0 for name, pair in (diagnosis.get("regions") or {}).items() if name != "step_ms"
    }
    name = max(shares, key=lambda name: shares[name], default=None)
    if name is None or shares[name] < MIN_SHARE_FRAC:
        return None
    return f"{name.removesuffix('_ms')} makes {100 * shares[name]:.0f} % of the change of a step"


def _steps(diagnosis: Mapping[str, Any]) -> Iterator[Block]:
    pairs = {name.removesuffix("_ms"): pair for name, pair in diagnosis["regions"].items()}
    pairs |= {f"steps {stretch['first_step']} to {stretch['last_step']}": stretch for stretch in diagnosis["stretches"]}
    rows = []
    for name, pair in pairs.items():
        pct, share = pair["change_pct"], pair.get("share_frac")
        times = f"{pair['a_ms']:.3f}", f"{pair['b_ms']:.3f}", f"{pair['change_ms']:+.3f}"
        shares = None if pct is None else f"{pct:+.1f}", None if share is None else f"{100 * share:.0f}"
        rows.append([name, *times, *shares])
    (num_a, num_b), (a, b) = diagnosis["runs"], diagnosis.get("arms", "AB")  # an older race.json has no names
    heads = ("ms per step", f"{a}, {counted(num_a, 'run')}", f"{b}, {num_b}", "change", "change %", "share %")
    yield Table(heads, rows, [False] + [True] * 5)
    yield Lines(diagnosis["words"])
    telemetry = [(label, per, diagnosis["telemetry"].get(name)) for name, (label, per) in TELEMETRY.items()]
    lines = [
        [label, *(None if mean is None else f"{per * mean:,.4g}" for mean in means)]
        for label, per, means in telemetry
        if means
    ]
    if lines:
        yield Table(("telemetry, mean of runs", a, b), lines, (False, True, True))
