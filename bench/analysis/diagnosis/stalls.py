"""Steps that took far longer than their neighbours: which, and how much longer.  Numbers in, numbers out.

stall_causes.py says what happened in them.  A step's usual time is the running median of
its neighbourhood, so that a schedule's stages, a slow drift and steps that alternate are not stalls.  A step is stalled
if it is above that by more than all of
    6 robust standard deviations of such differences, 1.4826 * median |difference|: the identifier of Hampel (1974,
      JASA 69), local and over the whole run, whichever is larger; 6 because step times have heavier tails than the
      normal distribution, for which 3.5 is usual (Iglewicz and Hoaglin 1993, How to Detect and Handle Outliers)
    a fifth of the usual time, and 1 ms
The last two are chosen, not derived: in 853 logs of modded-nanogpt the stalls that mattered were whole steps long.
"""

import math
import statistics

REACH_STEPS = 15  # to either side
MIN_REACH_STEPS = 5  # at the ends
MIN_STEPS = 5  # fewer show no usual time
ROBUST_SDS = 6.0
MIN_FRAC = 0.2  # of the usual time
MIN_MS = 1.0
SD_PER_MAD = 1.4826  # of a normal distribution: 1 / Phi^-1(3/4)


def find(rows: list[dict]) -> list[dict]:
    """Rows of steps.csv -> the stalled steps, [{"step", "ms": above the usual, "step_ms", "usual_ms"}] in order.

    Flagged steps are neither judged nor part of what is usual.
    """
    judged = [row for row in rows if row.get("step_ms") is not None and not row.get("flags")]
    values = [row["step_ms"] for row in judged]
    return [
        {"step": judged[num]["step"], "ms": ms, "step_ms": values[num], "usual_ms": values[num] - ms}
        for num, ms in outliers(values)
    ]


def cost(rows: list[dict]) -> dict:
    """Rows of steps.csv -> {"count", "ms"}: how many steps stalled, and the milliseconds above the usual of all."""
    result = find(rows)
    return {"count": len(result), "ms": math.fsum(stall["ms"] for stall in result)}


def outliers(values):
    """list of milliseconds -> [(index, ms above the usual)] of those that are stalled by the rule above."""
    if len(values) < MIN_STEPS:
        return []
    centres, differences, relative_mad = _usual(values, 1)
    of_two = _usual(values, 2) if len(values) >= 2 * MIN_STEPS else None
    if of_two and of_two[2] < relative_mad / 2:  # an optimizer that updates some weights every other step
        centres, differences, relative_mad = of_two
    local_mads = running_median(differences)
    result = []
    for num, (value, centre) in enumerate(zip(values, centres)):
        sd = SD_PER_MAD * max(local_mads[num], relative_mad * centre)
        if value - centre > max(ROBUST_SDS * sd, MIN_FRAC * centre, MIN_MS):
            result.append((num, value - centre))
    return result


def _usual(values, period):
    """(running medians, |value - median|, median of that relative to the median), of every period-th value apart."""
    centres = [0.0] * len(values)
    for first in range(period):
        centres[first::period] = running_median(values[first::period])
    differences = [abs(value - centre) for value, centre in zip(values, centres)]
    relative = [difference / centre if centre else 0.0 for difference, centre in zip(differences, centres)]
    return centres, differences, statistics.median(relative)


def running_median(values):
    """The median of each value's neighbourhood: 31 values around it, at the ends fewer, down to 6, so that a drift that
    begins or ends there is not taken for a stall."""
    last = len(values) - 1
    medians = []
    for num in range(len(values)):
        reach = max(MIN_REACH_STEPS, min(REACH_STEPS, num, last - num))
        near = sorted(values[max(0, num - reach) : num + reach + 1])  # statistics.median asks more than it computes
        medians.append((near[(len(near) - 1) // 2] + near[len(near) // 2]) / 2)
    return medians


def excess(rows, column):
    """{step: milliseconds above the running median} of a column of the unflagged rows; {} without that column."""
    known = [row for row in rows if row.get(column) is not None and not row.get("flags")]
    values = [row[column] for row in known]
    return {row["step"]: row[column] - centre for row, centre in zip(known, running_median(values))} if values else {}
