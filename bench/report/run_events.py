"""What cost time in a run, and what was warned of: of what was watched, and never of what could not be seen."""

import json

from bench.analysis.diagnosis import event_costs, stalls
from bench.base.terminal.text_table import counted
from bench.web.page import Safe, bullets, details, section, soft, table, tag

QUIET_EVENTS = ("init_start", "run_start", "run_stop", "run_end", "eval_stop")
MAX_EVENTS = 200
MAX_OPEN_EVENTS = 12  # more are folded
STALL = ("ms", "step_ms", "usual_ms", "what")


def section_of(run: dict, rows: list[dict], events: list[dict]) -> Safe:
    """run: its record; rows of steps.csv; events of events.jsonl."""
    costs = costs_of(run, rows)
    lines = [[_kind(kind), cost["count"], _rounded(cost.get("ms"), 3)] for kind, cost in costs.items() if cost["count"]]
    caption = "What cost time in the timed region"
    parts = [table(("what", "count", "cost, ms"), lines, caption=caption)] if lines else []
    quiet = [_kind(kind) for kind, cost in costs.items() if not cost["count"]]
    until = "" if run["status"] == "complete" else " until it ended"
    parts += [tag("p", f"Watched for{until}, and there was none: {', '.join(quiet)}.")] if quiet else []
    parts.append(soft(_unwatched(run, costs)))
    loud = [event for event in events if event["event"] not in QUIET_EVENTS]
    if loud:
        facts = [[event["event"], event.get("step"), event.get("rank"), what(event)] for event in loud[:MAX_EVENTS]]
        rest = f", the first {MAX_EVENTS} shown" if len(loud) > MAX_EVENTS else ""
        listed = table(("event", "step", "rank", "facts"), facts)
        title = counted(len(loud), "event") + rest
        parts.append(details(title, listed) if len(loud) > MAX_OPEN_EVENTS else listed)
    warnings = [
        f"{one.get('instrument')}, rank {one.get('rank')}: {one.get('error')}" for one in run.get("warnings") or []
    ]
    return section("What happened", *parts, bullets(warnings, "Instrument warning: "))


def costs_of(run: dict, rows: list[dict]) -> dict[str, dict]:
    """{kind: {"count", "ms"}} of the record; stalls also where it has none, from its steps, as compare finds them."""
    kept = {kind: cost for kind, cost in (run.get("costs") or {}).items() if isinstance(cost, dict) and "count" in cost}
    if "stall" in kept:
        return kept
    timed = [row for row in rows if row["step"] and row.get("step_ms") is not None]
    return ({"stall": stalls.cost(timed)} if len(timed) >= stalls.MIN_STEPS else {}) | kept


def _unwatched(run, costs):
    missing = [_kind(kind) for kind in event_costs.WATCHED_BY if kind not in costs]
    if not missing and "stall" in costs:
        return ""
    words = ["stall (too few timed steps)"] * ("stall" not in costs) + missing
    why = "a log does not say" if run.get("provenance") == "imported" else "no instrument recorded it to an end"
    return f"Not watched, so unknown: {', '.join(words)} ({why})."


def _kind(kind):
    return kind.replace("_", " ")


def what(event: dict) -> str:
    """An event's own facts, as words; of a stall first how long, and why as far as that is known."""
    skipped, words = ("t_ns", "utc", "event", "rank", "step"), []
    if event["event"] == "stall" and all(name in event for name in STALL):
        skipped += STALL
        words = [f"{event['ms']:.4g} ms above the usual {event['usual_ms']:.4g} ms", f"cause {_kind(event['what'])}"]
    shown = {key: value for key, value in event.items() if key not in skipped and value not in (None, [], {})}
    return ", ".join([*words, *(f"{key} {plain(value)}" for key, value in shown.items())])


def plain(value: object) -> str | None:
    """A value of a record as text; None stays None."""
    if value is None:
        return None
    if isinstance(value, float):
        return f"{value:.6g}"
    return json.dumps(value) if isinstance(value, (dict, list)) else str(value)


def _rounded(value, decimals):
    return round(value, decimals) if isinstance(value, float) else value
