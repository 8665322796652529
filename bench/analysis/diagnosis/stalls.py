"""Finds steps that took far longer than their neighbours, by how much and why, and which rank is late.

A step's usual time is the running median of its neighbourhood, so that a schedule's stages, a slow drift and steps that
alternate are not stalls.  A step is stalled if it is above that by more than all of
    6 robust standard deviations of such differences, 1.4826 * median |difference|: the identifier of Hampel (1974,
      JASA 69), local and over the whole run, whichever is larger; 6 because step times have heavier tails than the
      normal distribution, for which 3.5 is usual (Iglewicz and Hoaglin 1993, How to Detect and Handle Outliers)
    a fifth of the usual time, and 1 ms
The last two are chosen, not derived: in 853 logs of modded-nanogpt the stalls that mattered were whole steps long.

Lateness is how many milliseconds the slowest rank's step takes beyond the median rank's.  The median of an even number
of ranks is the lower middle one, so that it is a rank; of two, the faster.

Causes are found in events, columns of steps.csv, ranks and telemetry.  Measured ones come first, the longest leading,
each with the milliseconds that it took:
    gc, recompile, allocator_retry   events of that step
    loader_wait                      data_ms above its running median
    foreign_load                     runqueue_ms above its running median: threads were ready, another program ran
    late_rank                        own work of the latest rank beyond the median rank's, above its running median
then, as far as these do not explain the stall, what the process did in the rest of it:
    computing, waiting               cpu_ms above its running median, or time off the CPU: asleep, I/O, a lock, a device
then what merely coincides, without milliseconds: throttling (slowed_frac of the step), after_validation, first_step.
Causes that overlap are each given in full, so they may add up to more than the stall.

A finished run keeps the totals as run.json["costs"], {kind: {"count", "ms"}}, and ["skew"], and the stalls as events;
docs/profiling.md lists the kinds.  A kind is there only if it was watched for, with the figures of the rank that lost
most; ms is null if it has no duration.  A sum over kinds would count a collection that stalls a step twice.
"""

import math
import statistics
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from bench.base import stats, utc
from bench.record import step_files

REACH_STEPS = 15  # neighbours on either side of a step in the running median
MIN_REACH_STEPS = 5  # the same at the ends of a run
MIN_STEPS = 5  # fewer steps have no usual time
ROBUST_SDS = 6.0
MIN_FRAC = 0.2  # share of the usual time, the least excess of a stall
MIN_MS = 1.0
SD_PER_MAD = 1.4826  # for a normal distribution: 1 / Phi^-1(3/4)
MIN_LATE_MS = 1.0
MIN_LATE_FRAC = 0.1  # share of the median rank's milliseconds
EVENTS = ("gc", "recompile", "allocator_retry")
REGIONS = ("data_ms", "forward_ms", "backward_ms", "optimizer_ms")
COLUMNS = {"loader_wait": "data_ms", "foreign_load": "runqueue_ms"}
UNEXPLAINED = ("unknown", "waiting")  # first causes that do not say what was waited for
SHARE = 0.1  # share of a stall: a cause that explains less is not named
WATCHED_BY = {"gc": "garbage", "recompile": "recompiles", "graph_break": "recompiles", "allocator_retry": "memory"}
NO_DURATION = ("graph_break", "non_finite_loss")


def find(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the stalled steps among rows of steps.csv: [{"step", "ms": above the usual, "step_ms", "usual_ms"}].

    Flagged steps are neither judged nor part of the usual time.
    """
    judged = [row for row in rows if row.get("step_ms") is not None and not row.get("flags")]
    values = [row["step_ms"] for row in judged]
    return [
        {"step": judged[num]["step"], "ms": ms, "step_ms": values[num], "usual_ms": values[num] - ms}
        for num, ms in outliers(values)
    ]


def cost(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns {"count", "ms"} for rows of steps.csv: how many steps stalled, and their total excess over the usual."""
    stalls = find(rows)
    return {"count": len(stalls), "ms": math.fsum(stall["ms"] for stall in stalls)}


def outliers(values: list[float]) -> list[tuple[int, float]]:
    """Returns [(index, ms above the usual)] of the values, in milliseconds, that are stalls by the rule above."""
    if len(values) < MIN_STEPS:
        return []
    centres, differences, relative_mad = _usual(values, 1)
    every_second = _usual(values, 2) if len(values) >= 2 * MIN_STEPS else None
    if every_second and every_second[2] < relative_mad / 2:  # an optimizer that updates some weights every other step
        centres, differences, relative_mad = every_second
    local_mads = running_median(differences)
    stalled = []
    for num, (value, centre) in enumerate(zip(values, centres)):
        sd = SD_PER_MAD * max(local_mads[num], relative_mad * centre)
        if value - centre > max(ROBUST_SDS * sd, MIN_FRAC * centre, MIN_MS):
            stalled.append((num, value - centre))
    return stalled


def _usual(values: list[float], period: int) -> tuple[list[float], list[float], float]:
    """Returns (running medians, |value - median|, the median of the latter relative to its running median).

    With a period of 2, values at even and at odd places have separate running medians.
    """
    centres = [0.0] * len(values)
    for first in range(period):
        centres[first::period] = running_median(values[first::period])
    differences = [abs(value - centre) for value, centre in zip(values, centres)]
    relative = [difference / centre if centre else 0.0 for difference, centre in zip(differences, centres)]
    return centres, differences, statistics.median(relative)


def running_median(values: list[float]) -> list[float]:
    """Returns the median of the 31 values around each value, of fewer at the ends, down to 6, so that a drift that
    begins or ends there is not taken for a stall."""
    last = len(values) - 1
    medians = []
    for num in range(len(values)):
        reach = max(MIN_REACH_STEPS, min(REACH_STEPS, num, last - num))
        near = sorted(values[max(0, num - reach) : num + reach + 1])  # as statistics.median, without its overhead
        medians.append((near[(len(near) - 1) // 2] + near[len(near) // 2]) / 2)
    return medians


def excess(rows: list[dict[str, Any]], column: str) -> dict[int, float]:
    """Returns {step: milliseconds above the running median} of a column in unflagged rows; {} without that column."""
    usable = [row for row in rows if row.get(column) is not None and not row.get("flags")]
    values = [row[column] for row in usable]
    return {row["step"]: row[column] - centre for row, centre in zip(usable, running_median(values))} if values else {}


def lateness(by_rank: Sequence[dict[int, float]]) -> dict[int, tuple[float, int]]:
    """Returns {row: (slowest minus median rank's ms, slowest rank)} for rows that all ranks have; {} for one rank."""
    if len(by_rank) < 2:
        return {}
    late = {}
    for row in sorted(set.intersection(*(set(rank_ms) for rank_ms in by_rank))):
        values = [rank_ms[row] for rank_ms in by_rank]
        slowest = max(range(len(values)), key=values.__getitem__)
        late[row] = (values[slowest] - statistics.median_low(values), slowest)
    return late


def skew_summary(by_rank: dict[str, list[dict[int, float]]]) -> dict[str, Any] | None:
    """Returns run.json["skew"], how late the slowest rank was, from step_files.read_by_rank(); None for a single rank.

    num_late_steps counts steps whose lateness is above 1 ms and above a tenth of the median rank's time;
    late_steps_by_rank counts them by the rank that was late.
    """
    columns = {name: _column_skew(ranks) for name, ranks in by_rank.items() if len(ranks) > 1}
    return {name: column for name, column in columns.items() if column} or None


def _column_skew(by_rank: Sequence[dict[int, float]]) -> dict[str, Any] | None:
    late = lateness(by_rank)
    if not late:
        return None
    late_ms = [ms for ms, _ in late.values()]
    late_by_rank = [0] * len(by_rank)
    for row, (ms, slowest) in late.items():
        if ms > max(MIN_LATE_MS, MIN_LATE_FRAC * (by_rank[slowest][row] - ms)):
            late_by_rank[slowest] += 1
    return {
        "late_ms_p50": stats.percentile(late_ms, 50),
        "late_ms_p95": stats.percentile(late_ms, 95),
        "late_ms_max": max(late_ms),
        "late_ms_sum": sum(late_ms),
        "num_late_steps": sum(late_by_rank),
        "late_steps_by_rank": late_by_rank,
    }


def with_causes(
    stalls: list[dict[str, Any]],
    rows: list[dict[str, Any]],
    events: Sequence[dict[str, Any]] = (),
    by_rank: dict[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """Returns the stalls of find(rows) with "what", "causes": [{"what", "ms"}], "where": {region: ms} and "rank".

    rows: of steps.csv; events: of events.jsonl; by_rank: of step_files.read_by_rank().  "what" is the first cause or
    "unknown"; "rank" is the latest rank if its lateness is a cause, else None.
    """
    columns = {name: excess(rows, name) for name in (*REGIONS, *COLUMNS.values(), "cpu_ms")}
    late_by_step = lateness((by_rank or {}).get("own_ms", ()))
    late_ms = excess([{"step": step, "late_ms": ms} for step, (ms, _) in sorted(late_by_step.items())], "late_ms")
    by_step = {row["step"]: row for row in rows}
    late = {step: (ms, late_by_step[step][1]) for step, ms in late_ms.items()}
    return [stall | _explained(stall, by_step, events, columns, late) for stall in stalls]


def _explained(
    stall: dict[str, Any],
    by_step: dict[int, dict[str, Any]],
    events: Sequence[dict[str, Any]],
    columns: dict[str, dict[int, float]],
    late: dict[int, tuple[float, int]],
) -> dict[str, Any]:
    step, enough_ms = stall["step"], SHARE * stall["ms"]
    measured = {name: _event_ms(name, by_step[step], events) for name in EVENTS}
    measured |= {name: min(stall["ms"], columns[column].get(step, 0.0)) for name, column in COLUMNS.items()}
    late_ms, rank = late.get(step, (0.0, None))
    measured["late_rank"] = late_ms
    rest_ms = stall["ms"] - sum(max(0.0, ms) for ms in measured.values())
    measured |= {name: min(ms, rest_ms) for name, ms in _rest(stall, columns["cpu_ms"].get(step), measured).items()}
    longest = sorted((name for name in measured if measured[name] >= enough_ms), key=lambda name: -measured[name])
    causes: list[dict[str, Any]] = [{"what": name, "ms": measured[name]} for name in longest]
    causes += [{"what": name, "ms": None} for name in _coincident(by_step, step)]
    return {
        "what": causes[0]["what"] if causes else "unknown",
        "causes": causes,
        "where": {name: columns[name][step] for name in REGIONS if columns[name].get(step, 0.0) >= enough_ms},
        "rank": rank if late_ms >= enough_ms else None,
    }


def _event_ms(name: str, row: dict[str, Any], events: Sequence[dict[str, Any]]) -> float:
    """Returns the milliseconds that events of a name took in a step, on the rank that lost most; 0 without "ms"."""
    by_rank: dict[int, float] = {}
    begin_ns = row.get("t_ns")
    for event in events:
        is_in_step = event.get("step") == row["step"]  # the host runs ahead of a GPU: time decides only without a step
        if event.get("step") is None and begin_ns is not None:
            is_in_step = 0 <= event["t_ns"] - begin_ns < row["step_ms"] * 1e6
        if event["event"] == name and is_in_step:
            rank = event.get("rank", 0)
            by_rank[rank] = by_rank.get(rank, 0.0) + (event.get("ms") or 0.0)
    return max(by_rank.values(), default=0.0)


def _rest(stall: dict[str, Any], cpu_ms: float | None, measured: dict[str, float]) -> dict[str, float]:
    """Returns {"computing", "waiting"}: ms on and off the CPU that nothing else explains; {} if cpu_ms is not known."""
    if cpu_ms is None:
        return {}
    off_cpu_ms = stall["ms"] - max(0.0, cpu_ms)
    return {
        "computing": cpu_ms - sum(measured[name] for name in EVENTS),
        "waiting": off_cpu_ms - measured["foreign_load"] - measured["loader_wait"] - measured["late_rank"],
    }


def _coincident(by_step: dict[int, dict[str, Any]], step: int) -> Iterator[str]:
    if by_step[step].get("slowed_frac"):
        yield "throttling"
    if step == min(number for number in by_step if number > 0):
        yield "first_step"
    elif by_step.get(step - 1, {}).get("val_loss") is not None:
        yield "after_validation"


# ---- what the record of a finished run keeps


def event_costs(folder: Path | str, run: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns {"costs", "skew", "events": to append} for the record of a run that has ended; rows: of steps.csv."""
    events = step_files.read_events(folder)
    flagged = {row["step"] for row in rows if row.get("flags")}
    by_rank = {
        name: [{row: ms for row, ms in rank_ms.items() if row not in flagged} for rank_ms in ranks]
        for name, ranks in step_files.read_by_rank(folder).items()
    }
    stalled = with_causes(find(rows), rows, events, by_rank)
    skewed = skew_summary(by_rank)
    costs = {"stall": {"count": len(stalled), "ms": sum(stall["ms"] for stall in stalled)}}
    for kind, instrument in WATCHED_BY.items():
        if instrument in run["instruments"]:
            costs[kind] = _worst_rank_cost(kind, events)
    if skewed:
        late = skewed.get("own_ms") or skewed["step_ms"]
        costs["late_rank"] = {"count": late["num_late_steps"], "ms": late["late_ms_sum"]}
    costs["non_finite_loss"] = _worst_rank_cost("non_finite_loss", events)
    at_ns = {row["step"]: row.get("t_ns") for row in rows}
    new = [{"t_ns": at_ns[stall["step"]], "event": "stall", **stall} for stall in stalled]
    if skewed and rows:
        new.append({"t_ns": rows[-1].get("t_ns"), "event": "rank_skew", **(skewed.get("own_ms") or skewed["step_ms"])})
    new = [{"t_ns": event["t_ns"], "utc": _utc(event["t_ns"], events), **event} for event in new]
    return {"costs": costs, "skew": skewed, "events": new}


def _worst_rank_cost(kind: str, events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns count and ms of a kind on the rank that lost most; a recorded total replaces the sum of its events."""
    by_rank: dict[int, dict[str, Any]] = {}
    for event in events:
        if event["event"] == kind:
            cost = by_rank.setdefault(event.get("rank", 0), {"count": 0, "ms": 0.0})
            cost["count"] += event.get("count", 1)
            cost["ms"] += event.get("ms") or 0.0
    for event in events:
        if event["event"] == f"{kind}_total":
            by_rank[event.get("rank", 0)] = {"count": event["count"], "ms": event["ms"]}
    worst = max(by_rank.values(), key=lambda cost: (cost["ms"], cost["count"]), default={"count": 0, "ms": 0.0})
    return worst | ({"ms": None} if kind in NO_DURATION else {})


def _utc(t_ns: int | None, events: Sequence[dict[str, Any]]) -> str | None:
    """Returns the wall-clock time of t_ns, by an event that has both times; None without one."""
    for event in events:
        if t_ns is not None and event.get("utc"):
            return utc.text(utc.parse(event["utc"]) + timedelta(microseconds=(t_ns - event["t_ns"]) / 1e3))
    return None
