"""Samples and the run's times -> its energy, mean power and clocks, and how often which reason held a clock down.

Pure.  samples: rows of telemetry.csv as read() gives them.  spans: [(begin_ns, end_ns)] in which the race's clock ran.
A figure that no sample gives is None.
"""

import csv
from itertools import pairwise

TEXT = ("device", "throttle_reasons")
MAX_DISAGREEMENT_PCT = 5.0  # between the energy counter and integrated power (DESIGN 4.5)
MAX_GAP_S = 1.0  # between an end of the run and the nearest sample
MIN_POWER_SAMPLES = 20  # below this the integral says nothing about the counter


def read(path):
    """telemetry.csv -> rows, numbers as numbers and empty cells as None; a line that was cut is left out."""
    rows = []
    with open(path, newline="", errors="replace") as file:
        for cells in csv.DictReader(file):
            try:
                row = {name: _cell(name, text) for name, text in cells.items()}
                row["t_ns"] = int(cells["t_ns"])
                rows.append(row)
            except (TypeError, ValueError, KeyError):
                continue
    return rows


def _cell(name, text):
    if not text:
        return None
    return text if name in TEXT else float(text)


def by_device(samples):
    """{device: its samples, in time}."""
    found = {}
    for row in sorted(samples, key=lambda row: row["t_ns"]):
        found.setdefault(row["device"], []).append(row)
    return found


def inside(samples, spans):
    """The samples taken while the clock ran."""
    return [row for row in samples if any(begin_ns <= row["t_ns"] <= end_ns for begin_ns, end_ns in spans)]


def mean(samples, column):
    values = [row[column] for row in samples if row.get(column) is not None]
    return sum(values) / len(values) if values else None


def counted_j(first, last):
    """{device: joules} at both ends -> joules in between, all devices; None if a device has none or its counter began anew."""
    if not first or set(first) != set(last):
        return None
    spent_j = [None if None in (first[name], last[name]) else last[name] - first[name] for name in first]
    return None if any(joules is None or joules < 0 for joules in spent_j) else sum(spent_j)


def integrated_j(samples, begin_ns, end_ns):
    """Trapezoids of power_w of one device from begin to end, held constant beyond its first and last sample."""
    known = [(row["t_ns"], row["power_w"]) for row in samples if row.get("power_w") is not None]
    if not known or end_ns <= begin_ns:
        return None
    longest_ns = max((later[0] - earlier[0] for earlier, later in pairwise(known)), default=0)
    may_miss_ns = max(MAX_GAP_S * 1e9, 3 * longest_ns)
    if known[0][0] - begin_ns > may_miss_ns or end_ns - known[-1][0] > may_miss_ns:  # it was lost
        return None
    known = [(min(begin_ns, known[0][0]), known[0][1]), *known, (max(end_ns, known[-1][0]), known[-1][1])]
    joules = 0.0
    for (t0, w0), (t1, w1) in pairwise(known):
        start, stop = max(t0, begin_ns), min(t1, end_ns)
        if stop > start:
            at = [w0 + (w1 - w0) * (t - t0) / (t1 - t0) for t in (start, stop)]
            joules += sum(at) / 2 * (stop - start) / 1e9
    return joules


def spans_j(samples, spans):
    """Integrated power over the spans, all devices; None if one of them has no power."""
    found = [integrated_j(rows, *span) for rows in by_device(samples).values() for span in spans]
    return None if not found or None in found else sum(found)


def step_energies_j(samples, step_spans):
    """[(begin_ns, end_ns) of each step] -> joules of each, all devices together, from integrated power."""
    return [spans_j(samples, [span]) for span in step_spans]


def disagreement_pct(counter_j, integral_j):
    """How far integrated power is from the counter, in percent of the counter; None without both."""
    return 100 * abs(integral_j - counter_j) / counter_j if counter_j and integral_j is not None else None


def reason_shares(samples):
    """{reason: share of these samples in which it held the clocks, 0 to 1}; {} where reasons are not told."""
    told = [row["throttle_reasons"].split("|") for row in samples if row.get("throttle_reasons")]
    counts = {}
    for reasons in told:
        for reason in reasons:
            if reason != "none":
                counts[reason] = counts.get(reason, 0) + 1
    return {reason: count / len(told) for reason, count in sorted(counts.items())}


def summary(samples, spans, started, stopped):
    """All that the record says of them.  started, stopped: {"t_ns", "energy_j": {device: joules}} at both ends of the run.

    energy_j is the run's, validations included; train_energy_j only while the clock ran: the counter's figure shared out
    as the integrated power is, or the integral itself where there is no counter.
    """
    timed, devices = inside(samples, spans), by_device(samples)
    train_s = sum(end_ns - begin_ns for begin_ns, end_ns in spans) / 1e9
    whole_j = spans_j(samples, [(started["t_ns"], stopped["t_ns"])])
    counter_j = counted_j(started["energy_j"], stopped["energy_j"])
    train_j = spans_j(samples, spans)
    if counter_j is not None and whole_j and train_j is not None:
        train_j *= counter_j / whole_j
    num_power = min((sum(row.get("power_w") is not None for row in rows) for rows in devices.values()), default=0)
    apart_pct = disagreement_pct(counter_j, whole_j) if num_power >= MIN_POWER_SAMPLES else None
    return {
        "energy_j": whole_j if counter_j is None else counter_j,
        "energy_from": None if whole_j is None and counter_j is None else "power" if counter_j is None else "counter",
        "integrated_energy_j": whole_j,
        "energy_disagreement_pct": apart_pct,
        "energy_agrees": None if apart_pct is None else apart_pct <= MAX_DISAGREEMENT_PCT,
        "train_energy_j": train_j,
        "mean_power_w": train_j / train_s if train_j is not None and train_s else None,
        "num_timed_samples": len(timed),
        **{f"mean_{column}": mean(timed, column) for column in MEANS},
        "max_temp_c": max((row["temp_c"] for row in timed if row.get("temp_c") is not None), default=None),
        "throttle_frac": reason_shares(timed),
        "by_device": {name: _of_device(inside(rows, spans)) for name, rows in devices.items()},
    }


MEANS = ("sm_clock_mhz", "mem_clock_mhz", "util_pct", "cpu_util_pct", "cpu_freq_mhz", "load")


def _of_device(rows):
    columns = ("power_w", "sm_clock_mhz", "power_limit_w", "temp_c")
    found = {f"mean_{column}": mean(rows, column) for column in columns}
    return {"num_timed_samples": len(rows), **{name: value for name, value in found.items() if value is not None},
            "throttle_frac": reason_shares(rows)}  # fmt: skip


def doubts(told):
    """The record's summary -> sentences, each a reason with its figure (DESIGN 4.5)."""
    found = []
    for name, device in told["by_device"].items():
        for reason, frac in device["throttle_frac"].items():
            if reason in SLOWDOWNS and frac > MAX_SLOWED_FRAC:
                found.append(f"telemetry: {name} was slowed by {reason} in {100 * frac:.1f} % of its samples, over 1 %")
    for name, num in told["foreign_processes"].items():
        found.append(f"telemetry: {num} foreign process{'es' if num > 1 else ''} on {name} during the run")
    limits_w = {
        name: device["mean_power_limit_w"] for name, device in told["by_device"].items() if "mean_power_limit_w" in device
    }
    if len(set(limits_w.values())) > 1:
        words = ", ".join(f"{name} {limit_w:.0f} W" for name, limit_w in limits_w.items())
        found.append(f"telemetry: the GPUs have unequal power limits: {words}")
    return found


SLOWDOWNS = ("hw_slowdown", "sw_thermal", "hw_thermal", "hw_power_brake")  # a power cap is normal under load
MAX_SLOWED_FRAC = 0.01
