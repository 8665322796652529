"""The launcher's clock, which checks the clock that a run keeps itself: run.json["referee"]["clock"].

In our own runs, rank 0 writes a word into a pipe at each edge of its clock (bench/training/timing/clock.py); the
edges of a script are its lines.  Another process timestamps them on arrival (bench/machine/stamped_pipes.py).  So work
that a run does outside its own clock is measured too, and bench/compare/effects.py counts it.

The time that the run claims may differ from this by TOLERANCE_S or TOLERANCE_FRAC, whichever is more, plus the lateness
that the reader measured of itself.  If the reader was late, or not scheduled, the machine is doubted and not the run.
"""

import statistics
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NotRequired, TypedDict, cast

START, PAUSE, GO, STOP = "start", "pause", "go", "stop"  # the edges of our own runs
SAVE = "save"  # a pause for a checkpoint
TOLERANCE_S, TOLERANCE_FRAC = 0.05, 0.001  # relative to the claimed time; records of 74 s are beaten by 0.3 s
EDGE_S = 0.001  # between reading the clock and writing the word or line, for each validation (assumed)
FROZEN_FRAC = 0.01  # the launcher may be suspended for this fraction of the timed region
SPREADS = 3.0  # validations may be longer than the one at step 0 by this many standard deviations
# Validations may also take this many times as long: attention windows that grow make honest ones longer (assumed), and
# so does a machine that becomes busy: 0.14 s became 0.30 s in one of 239 runs under load.
MAX_GROWTH = 3.0
MAX_GROWTH_BUSY = 10.0  # 3.1 was measured for an honest run at load 12; such a run is disturbed
RULES = 2
MACHINE, CLOCK, VALIDATIONS = "launcher", "outside clock", "validations"  # names of instruments in run["doubts"]


class Clock(TypedDict):
    """The launcher's clock in a record, run.json["referee"]["clock"]."""

    rules: int  # 2: the tolerances above hold; 1: validations had others, so their doubts stay as recorded
    source: str  # edges (of our own clock) or lines (of a script)
    unknown: str | None  # why there are no times
    outside_s: float | None  # from the earliest possible time of the first edge to the last edge
    outside_train_s: float | None  # the part of outside_s that is not in validations
    outside_validations_s: float | None
    validations_s: list[float]  # the duration of each validation, as observed
    validation_at_start_s: float | None  # the duration of the one at step 0
    claimed_train_s: float | None  # by the clock of rank 0
    reader_late_s: float  # by how much a time stamp may be late, at most
    frozen_s: float  # how long the launcher was not scheduled
    ranks_waited_s: NotRequired[float | None]  # for a script: how long a rank waited for a core, at most


def clock_from_edges(
    edges: Sequence[tuple[int, int, str]], gaps_ns: Iterable[tuple[int, int]], claimed_train_s: float | None
) -> Clock:
    """Computes the clock of one of our own runs.

    edges: [(t_ns, late_ns, kind)] in order of arrival; gaps_ns: [(begin, end)] of times at which the reader was not
    scheduled.  The last pause may end with the clock instead of with GO.
    """
    saves_s, edges = _without_saves(edges)
    kinds = [kind for _, _, kind in edges]
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
    """Returns the seconds of the pauses for checkpoints, and the other edges."""
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
    """Joins the clocks of a run's segments, in order.  None stands for a segment whose clock was lost."""
    for number, clock in enumerate(clocks, 1):
        if clock is None or clock["unknown"]:
            why = clock["unknown"] if clock else "its launcher was killed, or its ranks ended without a checkpoint"
            return unknown("edges", f"segment {number} has no second clock: {why}", claimed_train_s)
    whole = cast(Sequence[dict[str, Any]], clocks)
    names = ("outside_s", "outside_train_s", "outside_validations_s", "frozen_s")
    sums = {name: sum(clock[name] for clock in whole) for name in names}
    both = {"claimed_train_s": claimed_train_s, "reader_late_s": max(clock["reader_late_s"] for clock in whole)}
    validations_s = [second for clock in whole for second in clock["validations_s"]]
    return cast(Clock, {**whole[0], **sums, **both, "validations_s": validations_s})


def clock_from_times(
    stamps: Sequence[tuple[int, int]],
    gaps_ns: Iterable[tuple[int, int]],
    outside_validations_s: float,
    validations_s: list[float],
    validation_at_start_s: float | None,
    claimed_train_s: float | None,
    source: str = "edges",
) -> Clock:
    """Computes a clock.  stamps: [(t_ns, late_ns)] of all edges or lines in order, at least two.  Others: see Clock."""
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
    """Returns a clock without times, with the reason."""
    facts = {"rules": RULES, "source": source, "unknown": why, "claimed_train_s": claimed_train_s}
    nothing = {"validations_s": [], "reader_late_s": 0.0, "frozen_s": 0.0}
    return cast(Clock, {**dict.fromkeys(Clock.__annotations__), **facts, **nothing})


def tolerance_s(counted_s: float, num_validations: int, reader_late_s: float) -> float:
    """Returns by how many seconds the claimed time may differ from the launcher's.

    Each validation has two edges.  If the reader had to wait for a core, the writer of an edge may have waited as long
    between reading its clock and writing.
    """
    edges_s = EDGE_S * num_validations + reader_late_s * (1 + 2 * num_validations)
    return max(TOLERANCE_S, TOLERANCE_FRAC * abs(counted_s)) + edges_s


def doubts(clock: Clock, is_busy: bool = False) -> list[tuple[str, str]]:
    """Returns the doubts that follow from the launcher's clock: [(instrument, sentence)].

    The instrument MACHINE means that the machine disturbed the run.  is_busy: validity.is_busy() of the run; if it is
    true, the run's times do not count.
    """
    if clock["unknown"]:
        return [(CLOCK, clock["unknown"])] if clock["source"] == "edges" else []
    return [
        *_claimed(clock),
        *(_validations(clock, MAX_GROWTH_BUSY if is_busy else MAX_GROWTH) if clock["rules"] >= RULES else ()),
        *_machine(clock),
    ]


def _claimed(clock: Clock) -> Iterator[tuple[str, str]]:
    """Doubts the time that one of our own runs claims.  A script's is compared line by line (printed_times.py)."""
    claimed_s, outside_s = clock["claimed_train_s"], clock["outside_train_s"]
    if clock["source"] != "edges" or claimed_s is None or outside_s is None:
        return
    limit_s = tolerance_s(claimed_s, len(clock["validations_s"]), clock["reader_late_s"])
    if abs(outside_s - claimed_s) > limit_s:
        less_or_more = "less" if claimed_s < outside_s else "more"
        both = f"it counts {claimed_s:.3f} s of training, but {outside_s:.3f} s passed by the launcher's clock"
        yield CLOCK, f"its clock counts {less_or_more} time than passed: {both} (tolerance {limit_s:.3f} s)"


def _validations(clock: Clock, max_growth: float) -> Iterator[tuple[str, str]]:
    """Doubts a run whose validations usually take more than max_growth times as long as the one at step 0.

    Of two, the shorter one decides, as the machine may have delayed the other.  bench/compare/ counts all of the time.
    """
    first = 1 if clock["source"] == "edges" else 0  # a script's validations_s lacks the one at step 0
    at_start_s, others_s = clock["validation_at_start_s"], clock["validations_s"][first:]
    if at_start_s is None or not others_s:
        return
    usual_s = statistics.median_low(others_s)
    excess_s = usual_s - at_start_s
    spread_s = statistics.stdev(others_s[:-1]) if len(others_s) > 2 else 0.0  # the last includes the referee's checks
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
