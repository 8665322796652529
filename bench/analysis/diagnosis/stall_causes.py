"""What happened in a stalled step: its milliseconds joined with events, columns, ranks and telemetry.

Measured causes first, each with the milliseconds that it took, the longest leading:
    gc, recompile, allocator_retry   events of that step
    loader_wait                      data_ms above its running median
    foreign_load                     runqueue_ms likewise: threads were ready to run and another program ran
    late_rank                        what the latest rank did before the others could wait for it, above the usual
then, as far as these do not explain the stall, what the process did in the rest of it:
    computing, waiting               cpu_ms above its running median, or time off the CPU: asleep, I/O, a lock, a device
then what only coincides, without milliseconds: throttling (slowed_frac of the step), after_validation, first_step.
Causes that overlap are each given in full, so they may add up to more than the stall.
"""

from bench.analysis.diagnosis import rank_skew, stalls

EVENTS = ("gc", "recompile", "allocator_retry")
REGIONS = ("data_ms", "forward_ms", "backward_ms", "optimizer_ms")
COLUMNS = {"loader_wait": "data_ms", "foreign_load": "runqueue_ms"}
UNEXPLAINED = ("unknown", "waiting")  # first causes that do not say what was waited for
SHARE = 0.1  # of a stall: what explains less of it is not named


def explain(result, rows, events=(), by_rank=None):
    """result: of stalls.find(rows) -> the same with "what", "causes" [{"what", "ms"}], "where" {region: ms}, "rank".

    rows of steps.csv, events of events.jsonl, by_rank of steps.read_by_rank.  "what" is the first cause, or unknown;
    rank is the latest one, None where it is unknown.
    """
    columns = {name: stalls.excess(rows, name) for name in (*REGIONS, *COLUMNS.values(), "cpu_ms")}
    lateness = rank_skew.lateness((by_rank or {}).get("own_ms", ()))
    late_ms = stalls.excess([{"step": step, "late_ms": ms} for step, (ms, _) in sorted(lateness.items())], "late_ms")
    by_step = {row["step"]: row for row in rows}
    late = {step: (ms, lateness[step][1]) for step, ms in late_ms.items()}
    return [stall | _explained(stall, by_step, events, columns, late) for stall in result]


def _explained(stall, by_step, events, columns, late):
    step, enough_ms = stall["step"], SHARE * stall["ms"]
    measured = {name: _event_ms(name, by_step[step], events) for name in EVENTS}
    measured |= {name: min(stall["ms"], columns[column].get(step, 0.0)) for name, column in COLUMNS.items()}
    late_ms, rank = late.get(step, (0.0, None))
    measured["late_rank"] = late_ms
    rest_ms = stall["ms"] - sum(max(0.0, ms) for ms in measured.values())
    measured |= {name: min(ms, rest_ms) for name, ms in _rest(stall, columns["cpu_ms"].get(step), measured).items()}
    causes = [{"what": name, "ms": ms} for name, ms in measured.items() if ms >= enough_ms]
    causes.sort(key=lambda cause: -cause["ms"])
    causes += [{"what": name, "ms": None} for name in _coincident(by_step, step)]
    return {
        "what": causes[0]["what"] if causes else "unknown",
        "causes": causes,
        "where": {name: columns[name][step] for name in REGIONS if columns[name].get(step, 0.0) >= enough_ms},
        "rank": rank if late_ms >= enough_ms else None,
    }


def _event_ms(name, row, events):
    """Milliseconds of such events in the step, of the rank that lost most; an event without ms counts 0."""
    by_rank = {}
    for event in events:
        if event["event"] == name and _is_in(event, row):
            rank = event.get("rank", 0)
            by_rank[rank] = by_rank.get(rank, 0.0) + (event.get("ms") or 0.0)
    return max(by_rank.values(), default=0.0)


def _is_in(event, row):
    """By the step that the event names (a GPU's host runs ahead of it), else by time."""
    if event.get("step") is not None:
        return event["step"] == row["step"]
    return row.get("t_ns") is not None and 0 <= event["t_ns"] - row["t_ns"] < row["step_ms"] * 1e6


def _rest(stall, cpu_ms, measured):
    """What the process did in the time that nothing above accounts for: {} where cpu_ms was not measured."""
    if cpu_ms is None:
        return {}
    off_cpu_ms = stall["ms"] - max(0.0, cpu_ms)
    return {
        "computing": cpu_ms - sum(measured[name] for name in EVENTS),
        "waiting": off_cpu_ms - measured["foreign_load"] - measured["loader_wait"] - measured["late_rank"],
    }


def _coincident(by_step, step):
    if by_step[step].get("slowed_frac"):
        yield "throttling"
    if step == min(number for number in by_step if number > 0):
        yield "first_step"
    elif by_step.get(step - 1, {}).get("val_loss") is not None:
        yield "after_validation"
