"""The clock of the launcher, beside the one that a run keeps of itself: run.json["referee"]["clock"].  Pure.

Of our own runs rank 0 writes a word into a pipe at each edge of its clock (bench/training/clock.py), of scripts the
lines that they print are the edges; another process stamps them as they come (bench/machine/stamped_pipes.py).  What
an arm does outside its own clock is so seen all the same, and bench/compare/effects.py counts it.

What the run claims is held against that within TOLERANCE_S or TOLERANCE_FRAC, whichever is more, and what the reader
says of its own lateness.  A late reader, or one that did not run at all, is the machine's fault and not the run's.
"""

import statistics
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NotRequired, TypedDict, cast

START, PAUSE, GO, STOP = "start", "pause", "go", "stop"  # the edges of our own runs
SAVE = "save"  # a pause for a checkpoint
TOLERANCE_S, TOLERANCE_FRAC = 0.05, 0.001  # of what is claimed; a record of 74 s is beaten by 0.3 s
EDGE_S = 0.001  # between a clock's reading and its word or line, for each validation (assumed)
FROZEN_FRAC = 0.01  # of the timed region, in which the launcher should have run and did not
SPREADS = 3.0  # how many of them validations may be longer than the one at step 0
# And as many times: attention windows that grow make honest ones longer (assumed); so does a machine that gets busy
# meanwhile, 0.14 s became 0.30 s in one of 239 runs at load.
MAX_GROWTH = 3.0
MAX_GROWTH_BUSY = 10.0  # 3.1 was seen of an honest run at load 12; such a run is disturbed
RULES = 2
MACHINE, CLOCK, VALIDATIONS = "launcher", "outside clock", "validations"  # who doubts, in run["doubts"]


class Clock(TypedDict):
    """run.json["referee"]["clock"]."""

    rules: int  # which tolerances hold: 2, those above; 1, others of validations, whose doubts are as recorded
    source: str  # edges of our own clock, or lines of a script
    unknown: str | None  # why there are no times
    outside_s: float | None  # from the first edge, as early as it may have been, to the last
    outside_train_s: float | None  # of it outside validations
    outside_validations_s: float | None
    validations_s: list[float]  # each, as long as it was seen to last
    validation_at_start_s: float | None  # the one at step 0
    claimed_train_s: float | None  # by the run's own clock, of rank 0
    reader_late_s: float  # the most that a stamp may be late
    frozen_s: float  # in which the launcher did not run
    ranks_waited_s: NotRequired[float | None]  # of a script: the most that a rank was ready to run and was not run


def clock_from_edges(
    edges: Sequence[tuple[int, int, str]], gaps_ns: Iterable[tuple[int, int]], claimed_train_s: float | None
) -> Clock:
    """edges: [(t_ns, late_ns, word)] as they came; gaps_ns: of the reader.  The last pause ends with the clock."""
    saves_s, edges = _without_saves(edges)
    kinds = [word for _, _, word in edges]
    num_pauses = kinds.count(PAUSE)
    series = [START, *[PAUSE, GO] * num_pauses]
    if kinds not in ([*series, STOP], [*series[:-1], STOP] if num_pauses else None):
        seen = ", ".join(kinds[:4]) or "none"
        return unknown("edges", f"its clock reported an incomplete series of edges: {seen}", claimed_train_s)
    times_ns = [t_ns for t_ns, _, _ in edges[1:]]  # from the first pause on
    pauses_s = [(end - begin) / 1e9 for begin, end in zip(times_ns[0 : 2 * num_pauses : 2], times_ns[1::2])]
    at_start_s = pauses_s[0] if pauses_s else None
    stamps = [edge[:2] for edge in edges]
    clock = clock_from_times(stamps, gaps_ns, sum(pauses_s), pauses_s, at_start_s, claimed_train_s)
    assert clock["outside_train_s"] is not None
    return {**clock, "outside_train_s": clock["outside_train_s"] - saves_s}


def _without_saves(edges: Sequence[tuple[int, int, str]]) -> tuple[float, list[tuple[int, int, str]]]:
    """(seconds in pauses for checkpoints, the other edges)."""
    kept, saves_ns = [], 0
    since_ns: int | None = None
    for edge in edges:
        if since_ns is not None:
            saves_ns += edge[0] - since_ns
        if edge[2] != SAVE and (since_ns is None or edge[2] != GO):
            kept.append(edge)
        since_ns = edge[0] if edge[2] == SAVE else None
    return saves_ns / 1e9, kept


def joined(clocks: Sequence[Clock | None], claimed_train_s: float) -> Clock:
    """Of a run in segments, in their order; None: nobody kept the clock of that one."""
    for number, clock in enumerate(clocks, 1):
        if clock is None or clock["unknown"]:
            why = clock["unknown"] if clock else "its launcher was killed, or its ranks ended without a checkpoint"
            return unknown("edges", f"segment {number} has no second clock: {why}", claimed_train_s)
    known = cast(Sequence[dict[str, Any]], clocks)
    names = ("outside_s", "outside_train_s", "outside_validations_s", "frozen_s")
    sums = {name: sum(clock[name] for clock in known) for name in names}
    both = {"claimed_train_s": claimed_train_s, "reader_late_s": max(clock["reader_late_s"] for clock in known)}
    validations_s = [second for clock in known for second in clock["validations_s"]]
    return cast(Clock, {**known[0], **sums, **both, "validations_s": validations_s})


def clock_from_times(
    stamps: Sequence[tuple[int, int]],
    gaps_ns: Iterable[tuple[int, int]],
    outside_validations_s: float,
    validations_s: list[float],
    validation_at_start_s: float | None,
    claimed_train_s: float | None,
    source: str = "edges",
) -> Clock:
    """stamps: [(t_ns, late_ns)] of every edge or line, in order, two at least; the rest as in Clock."""
    (first_ns, first_late_ns), (last_ns, _) = stamps[0], stamps[-1]
    outside_s = (last_ns - first_ns + first_late_ns) / 1e9
    frozen_ns = sum(max(0, min(end, last_ns) - max(begin, first_ns - first_late_ns)) for begin, end in gaps_ns)
    return {
        "rules": RULES,
        "source": source,
        "unknown": None,
        "outside_s": outside_s,
        "outside_train_s": (last_ns - first_ns) / 1e9 - outside_validations_s,
        "outside_validations_s": outside_validations_s,
        "validations_s": validations_s,
        "validation_at_start_s": validation_at_start_s,
        "claimed_train_s": claimed_train_s,
        "reader_late_s": max(late_ns for _, late_ns in stamps) / 1e9,
        "frozen_s": frozen_ns / 1e9,
    }


def unknown(source: str, why: str, claimed_train_s: float | None = None) -> Clock:
    """Without times."""
    facts = {"rules": RULES, "source": source, "unknown": why, "claimed_train_s": claimed_train_s}
    nothing = {"validations_s": [], "reader_late_s": 0.0, "frozen_s": 0.0}
    return cast(Clock, {**dict.fromkeys(Clock.__annotations__), **facts, **nothing})


def tolerance_s(counted_s: float, num_validations: int, reader_late_s: float) -> float:
    """How far what is claimed may be from what was seen.

    Each validation has two edges.  Where the reader waits for a core, who writes an edge after reading its clock may
    wait as long.
    """
    edges_s = EDGE_S * num_validations + reader_late_s * (1 + 2 * num_validations)
    return max(TOLERANCE_S, TOLERANCE_FRAC * abs(counted_s)) + edges_s


def doubts(clock: Clock, is_busy: bool = False) -> list[tuple[str, str]]:
    """[(instrument, sentence)] of a record's outside clock; MACHINE: the machine disturbed the run.

    is_busy: validity.is_busy() of the run, whose times do not count then.
    """
    if clock["unknown"]:
        return [(CLOCK, clock["unknown"])] if clock["source"] == "edges" else []
    return [
        *_claimed(clock),
        *(_validations(clock, MAX_GROWTH_BUSY if is_busy else MAX_GROWTH) if clock["rules"] >= RULES else ()),
        *_machine(clock),
    ]


def _claimed(clock: Clock) -> Iterator[tuple[str, str]]:
    """Of our own runs: a script's claim is held against its lines, one by one (printed_times.py)."""
    claimed_s, outside_s = clock["claimed_train_s"], clock["outside_train_s"]
    if clock["source"] != "edges" or claimed_s is None or outside_s is None:
        return
    limit_s = tolerance_s(claimed_s, len(clock["validations_s"]), clock["reader_late_s"])
    if abs(outside_s - claimed_s) > limit_s:
        more = "less" if claimed_s < outside_s else "more"
        both = f"it counts {claimed_s:.3f} s of training, but {outside_s:.3f} s passed by the launcher's clock"
        yield CLOCK, f"its clock counts {more} time than passed: {both} (tolerance {limit_s:.3f} s)"


def _validations(clock: Clock, max_growth: float) -> Iterator[tuple[str, str]]:
    """Usually more than max_growth times as long as the one at step 0; bench/compare/ counts all of it, whatever it is.

    Of two the shorter one: one that the machine held up is no reproach.
    """
    first = 1 if clock["source"] == "edges" else 0  # a script's at step 0 ends with its first line
    at_start_s, others_s = clock["validation_at_start_s"], clock["validations_s"][first:]
    if at_start_s is None or not others_s:
        return
    usual_s = statistics.median_low(others_s)
    excess_s = usual_s - at_start_s
    spread_s = statistics.stdev(others_s[:-1]) if len(others_s) > 2 else 0.0  # the last holds checks of the referee
    spread_s = max(spread_s, (max_growth - 1) / SPREADS * at_start_s, clock["reader_late_s"])
    if excess_s > max(SPREADS * spread_s, TOLERANCE_S):
        both = f"{usual_s:.3f} s, against {at_start_s:.3f} s at step 0"
        yield VALIDATIONS, f"its validations take longer once it has trained: {both} (spread {spread_s:.3f} s)"


def _machine(clock: Clock) -> Iterator[tuple[str, str]]:
    late_s, frozen_s, outside_s = clock["reader_late_s"], clock["frozen_s"], clock["outside_s"]
    if outside_s is None:
        return
    limit_s = max(TOLERANCE_S, TOLERANCE_FRAC * outside_s)
    if frozen_s > max(limit_s, FROZEN_FRAC * outside_s):
        part = f"the launcher did not run for {frozen_s:.2f} of the {outside_s:.2f} s that it timed"
        yield MACHINE, f"{part}: the machine was frozen or overloaded, or the launcher was stopped"
    elif late_s > limit_s:
        read = f"edges or lines were read up to {late_s:.3f} s late (limit {limit_s:.3f} s)"
        yield MACHINE, f"{read}: the machine was busy, or the run printed a lot"
