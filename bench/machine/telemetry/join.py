"""Samples and the run's times -> its energy, mean power and clocks, and how often which reason held a clock down.

Pure.  samples: rows of telemetry.csv as read() gives them.  spans: [(begin_ns, end_ns)] in which the run's clock ran.
A figure that no sample gives is None.
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise

from bench.machine.telemetry.samples import Curve, by_device, curves, inside, mean
from bench.machine.telemetry.throttling import reason_shares, slowed_frac, slows

MAX_DISAGREEMENT_PCT = 5.0  # between the energy counter and integrated power
MIN_POWER_SAMPLES = 20  # below this the integral says nothing about the counter
MEANS = ("sm_clock_mhz", "mem_clock_mhz", "util_pct", "cpu_util_pct", "cpu_freq_mhz", "load")


def spans_j(samples, spans):
    """Integrated power over the spans, all devices; None if one of them has no power."""
    of_power = [Curve(rows, "power_w") for rows in by_device(samples).values()]
    result = [curve.integral(*span) for curve in of_power for span in spans]
    return None if not result or None in result else sum(result)


def counted_j(first, last):
    """{device: joules} at both ends -> joules in between, all devices; None if one has no counter, or it was reset."""
    if not first or set(first) != set(last):
        return None
    spent_j = [None if None in (first[name], last[name]) else last[name] - first[name] for name in first]
    return None if any(joules is None or joules < 0 for joules in spent_j) else sum(spent_j)


def disagreement_pct(counter_j, integral_j):
    """How far integrated power is from the counter, in percent of the counter; None without both."""
    return 100 * abs(integral_j - counter_j) / counter_j if counter_j and integral_j is not None else None


def step_spans(
    rows: Iterable[dict], spans: Sequence[tuple[int, int]], ends: Sequence[int]
) -> dict[int, tuple[int, int]]:
    """{row: (begin_ns, end_ns)} of every step, by the device's own time.

    rows: {"step", "step_ms"}; ends: the last row of each span.  A GPU is behind the host that submits its work, so a
    step lies where the synchronised edges of its span and the steps' own times (of CUDA events) put it: one after the
    other from the span's beginning, stretched together to its length.
    """
    result, step_ms, first = {}, {row["step"]: row["step_ms"] for row in rows}, 1
    for (begin_ns, end_ns), last in zip(spans, ends):
        numbers = range(first, last + 1)
        first = last + 1
        if not numbers or any(step_ms.get(number) is None for number in numbers):
            continue
        edges_ms = list(accumulate((step_ms[number] for number in numbers), initial=0.0))
        if not edges_ms[-1]:  # a clock that stands still
            continue
        ns_per_ms = (end_ns - begin_ns) / edges_ms[-1]
        edges_ns = [begin_ns + round(ms * ns_per_ms) for ms in edges_ms]
        result |= dict(zip(numbers, pairwise(edges_ns)))
    return result


def columns(samples: list[dict], steps: dict[int, tuple[int, int]], joined: dict) -> dict[str, dict[int, float]]:
    """{column: {row: value}} of steps.csv.  steps: {row: (begin_ns, end_ns)}; joined: summary() of the same samples.

    energy_j of all GPUs, adding up to joined["energy_j"]; clocks, mean of the devices; slowed_frac, the share of the
    step in which heat or hardware held the clocks of the worst device down, 0 to 1.
    """
    result = {}
    if joined["energy_j"] is not None:
        joules = _by_row(samples, "power_w", steps, Curve.integral, sum)
        if len(joules) == len(steps) and (total_j := sum(joules.values())) > 0:
            result["energy_j"] = {row: joined["energy_j"] / total_j * energy_j for row, energy_j in joules.items()}
    for column in ("sm_clock_mhz", "cpu_freq_mhz"):
        result[column] = _by_row(samples, column, steps, Curve.mean, lambda each: round(sum(each) / len(each), 3))
    slowed = [row | {"slowed": slows(row)} for row in samples]
    result["slowed_frac"] = _by_row(slowed, "slowed", steps, Curve.mean, lambda each: round(max(each), 3))
    return {column: values for column, values in result.items() if values}


def _by_row(samples, column, steps, of_curve, reduced):
    """{row: one figure of all devices}, of the steps in which each has one."""
    of_each = curves(samples, column)
    result = {row: [of_curve(curve, *span) for curve in of_each] for row, span in steps.items()}
    return {row: reduced(each) for row, each in result.items() if each and None not in each}


def summary(samples: list[dict], spans: Sequence[tuple[int, int]], started: dict, stopped: dict) -> dict:
    """What the record says of them.  started, stopped: {"t_ns", "energy_j": {device: joules}} at both ends of the run.

    energy_j is what all devices took while the clock ran: the counters' figure for the whole run (run_energy_j, which
    holds the validations), divided as the integrated power is; or the integral itself where there is no counter.
    """
    devices = by_device(samples)
    timed_rows = {name: inside(rows, spans) for name, rows in devices.items()}
    timed = [row for rows in timed_rows.values() for row in rows]
    train_s = sum(end_ns - begin_ns for begin_ns, end_ns in spans) / 1e9
    whole_j = spans_j(samples, [(started["t_ns"], stopped["t_ns"])])
    counter_j = counted_j(started["energy_j"], stopped["energy_j"])
    train_j = spans_j(samples, spans)
    counted = counter_j is not None and bool(whole_j)
    if counted and train_j is not None:
        train_j *= counter_j / whole_j
    num_power = min((sum(row.get("power_w") is not None for row in rows) for rows in devices.values()), default=0)
    apart_pct = disagreement_pct(counter_j, whole_j) if num_power >= MIN_POWER_SAMPLES else None
    return {
        "energy_j": train_j,
        "energy_from": None if train_j is None else "counter" if counted else "power",
        "run_energy_j": whole_j if counter_j is None else counter_j,
        "integrated_run_energy_j": whole_j,
        "energy_disagreement_pct": apart_pct,
        "energy_agrees": None if apart_pct is None else apart_pct <= MAX_DISAGREEMENT_PCT,
        "mean_power_w": train_j / train_s if train_j is not None and train_s else None,
        "num_timed_samples": len(timed),
        # every device counts alike, also one that was lost early or not sampled as often
        **{
            f"mean_{column}": mean([{column: mean(rows, column)} for rows in timed_rows.values()], column)
            for column in MEANS
        },
        "max_temp_c": max((row["temp_c"] for row in timed if row.get("temp_c") is not None), default=None),
        "throttle_frac": reason_shares(timed),
        "by_device": {name: _of_device(rows) for name, rows in timed_rows.items()},
    }


def of_all_nodes(summaries: list[dict]) -> dict:
    """whole() of each node -> of the run: sums of energies and powers (None: a part is unknown), and by_node."""
    total = dict(summaries[0])
    for name in ("energy_j", "run_energy_j", "integrated_run_energy_j", "mean_power_w"):
        parts = [summary.get(name) for summary in summaries]
        total[name] = None if None in parts else sum(parts)
    return total | {"by_node": summaries}


def whole(joined: dict, started: dict, stopped: dict) -> dict:
    """summary() with the sampler's own report, for the record."""
    report, run_s = stopped["report"], (stopped["t_ns"] - started["t_ns"]) / 1e9
    cpu_s = report.get("sampler_cpu_s")
    return {
        **joined,
        **{name: value for name, value in report.items() if name != "warnings"},
        "sampler_cpu_frac": cpu_s / run_s if cpu_s is not None and run_s > 0 else None,
    }


def warnings(joined: dict, report: dict) -> list[str]:
    """Sentences: what the sampler could not read, counters that disagree, memory that fails."""
    result = list(report["warnings"])
    if joined["energy_agrees"] is False:
        apart = f"{joined['energy_disagreement_pct']:.1f} % apart (limit {MAX_DISAGREEMENT_PCT:g} %)"
        result.append(f"the energy counter and integrated power are {apart}")
    for name, device in joined["by_device"].items():
        for column in ("ecc_uncorrected", "remapped_rows"):
            if device.get(f"new_{column}"):
                result.append(f"{name}: {device[f'new_{column}']} new {column} during training: its memory fails")
    return result


def _of_device(rows):
    result = {f"mean_{column}": mean(rows, column) for column in ("power_w", "sm_clock_mhz", "temp_c")}
    limits_w = [row["power_limit_w"] for row in rows if row.get("power_limit_w") is not None]
    if limits_w:
        result |= {"min_power_limit_w": min(limits_w), "max_power_limit_w": max(limits_w)}
    for column in ("ecc_uncorrected", "remapped_rows"):
        counts = [row[column] for row in rows if row.get(column) is not None]
        if counts:
            result[f"new_{column}"] = round(counts[-1] - counts[0])
    known = {name: value for name, value in result.items() if value is not None}
    return {
        "num_timed_samples": len(rows),
        **known,
        "throttle_frac": reason_shares(rows),
        "slowed_frac": slowed_frac(rows),
    }
