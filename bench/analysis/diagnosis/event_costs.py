"""Events that cost time: a finished run folder -> run.json["costs"] and ["skew"], and its stalls as events.

    costs   {kind: {"count", "ms"}}; a kind is there only if it was measured; ms null: it has no duration
      stall             steps far above the usual, and the milliseconds above it (stalls.py)
      gc, recompile     in the timed region, of the rank that lost most; the instruments of that work see them
      graph_break       seen by the same instrument
      allocator_retry   of the rank that lost most
      late_rank         steps with a late rank (stalls.py), and the others' waiting over all steps
      non_finite_loss   ends the run
They overlap: a collection that stalls a step is in both.  No sum is given because it would count milliseconds twice.
"""

from datetime import timedelta
from pathlib import Path

from bench.analysis.diagnosis import stalls
from bench.base import utc
from bench.record import step_files

WATCHED_BY = {"gc": "garbage", "recompile": "recompiles", "graph_break": "recompiles", "allocator_retry": "memory"}
NO_DURATION = ("graph_break", "non_finite_loss")


def of(folder: Path | str, run: dict, rows: list[dict]) -> dict:
    """run: its record, finished but for this; rows: steps.csv -> {"costs", "skew", "events": what to append}."""
    events = step_files.read_events(folder)
    flagged = {row["step"] for row in rows if row.get("flags")}
    by_rank = {
        name: [{row: ms for row, ms in of_rank.items() if row not in flagged} for of_rank in of_ranks]
        for name, of_ranks in step_files.read_by_rank(folder).items()
    }
    stalled = stalls.with_causes(stalls.find(rows), rows, events, by_rank)
    skewed = stalls.skew_summary(by_rank)
    costs = {"stall": {"count": len(stalled), "ms": sum(stall["ms"] for stall in stalled)}}
    for kind, instrument in WATCHED_BY.items():
        if instrument in run["instruments"]:
            costs[kind] = _of_worst_rank(kind, events)
    if skewed:
        late = skewed.get("own_ms") or skewed["step_ms"]
        costs["late_rank"] = {"count": late["num_late_steps"], "ms": late["late_ms_sum"]}
    costs["non_finite_loss"] = _of_worst_rank("non_finite_loss", events)
    return {"costs": costs, "skew": skewed, "events": _as_events(stalled, skewed, rows, events)}


def _of_worst_rank(kind, events):
    """Count and milliseconds of the rank that lost most; a total that it recorded has the short ones too."""
    by_rank = {}
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


def _as_events(stalled, skewed, rows, events):
    """Stalls at the time of their steps, then the skew at that of the last one."""
    at_ns = {row["step"]: row.get("t_ns") for row in rows}
    made = [{"t_ns": at_ns[stall["step"]], "event": "stall", **stall} for stall in stalled]
    if skewed and rows:
        made.append({"t_ns": rows[-1].get("t_ns"), "event": "rank_skew", **(skewed.get("own_ms") or skewed["step_ms"])})
    return [{"t_ns": event["t_ns"], "utc": _utc(event["t_ns"], events), **event} for event in made]


def _utc(t_ns, events):
    """The wall clock's time of t_ns, by an event of the same boot that has both."""
    for event in events:
        if t_ns is not None and event.get("utc"):
            return utc.text(utc.parse(event["utc"]) + timedelta(microseconds=(t_ns - event["t_ns"]) / 1e3))
    return None
