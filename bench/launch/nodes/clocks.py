"""How far a node's clocks are from node 0's, asked over the connection between them.

Cristian's method ("Probabilistic clock synchronization", Distributed Computing 3, 1989): of several questions the one
that was answered soonest; the other clock read what it read in the middle, give or take half of that round trip.
"""

import time
from collections.abc import Callable

NUM_QUESTIONS = 12


def answer(message: dict) -> dict:
    """Node 0's: to {"kind": "clock", "number"}."""
    now = {"t_ns": time.perf_counter_ns(), "utc_s": time.time()}
    return {"kind": "clock_is", "number": message["number"], **now}


def measure(ask: Callable[[int], dict], now_ns=time.perf_counter_ns, utc_s=time.time) -> dict:
    """{"offset_ns", "round_trip_ns", "utc_offset_s"}: what to add to this node's clock readings to have node 0's.

    ask(number) -> the answer.  The offset's error is at most half of round_trip_ns.
    """
    best = None
    for number in range(NUM_QUESTIONS):
        asked_ns = now_ns()
        result = ask(number)
        back_ns, back_utc_s = now_ns(), utc_s()
        trip_ns = back_ns - asked_ns
        if best is None or trip_ns < best["round_trip_ns"]:
            best = {
                "offset_ns": result["t_ns"] - (asked_ns + back_ns) // 2,
                "round_trip_ns": trip_ns,
                "utc_offset_s": round(result["utc_s"] - back_utc_s + trip_ns / 2e9, 6),
            }
    return best
