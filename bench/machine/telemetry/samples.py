"""Joins samples with the run's times: energy, mean power and clocks, and how often which reason limited a clock.

Performs no I/O, except read().  samples: rows of telemetry.csv, from read().  spans: [(begin_ns, end_ns)] in which the
run's clock ran.  A figure without samples is None.
"""

import csv
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from bench.base.reading import plain_file

TEXT = ("device", "throttle_reasons")
Row = dict[str, Any]
Span = tuple[int, int]  # (begin_ns, end_ns)
MAX_GAP_S = 1.0  # between either end of the requested interval and the nearest sample
SLOWDOWNS = ("hw_slowdown", "sw_thermal", "hw_thermal", "hw_power_brake")  # a power cap is normal under load
MAX_SLOWED_FRAC = 0.01
LIMIT_SLACK_W = 1.0  # the driver rounds
MAX_DISAGREEMENT_PCT = 5.0  # between the energy counter and integrated power
MIN_POWER_SAMPLES = 20  # with fewer, the integral does not test the counter
MEANS = ("sm_clock_mhz", "mem_clock_mhz", "util_pct", "cpu_util_pct", "cpu_freq_mhz", "load")


def read(path: Path | str) -> list[Row]:
    """Reads telemetry.csv; empty cells are None, cut lines are skipped.  read_ns: t_ns plus late_ms."""
    rows = []
    with plain_file.lines(path) as lines:
        for cells in csv.DictReader(lines):
            try:
                row: Row = {
                    name: None if not text else text if name in TEXT else float(text) for name, text in cells.items()
                }
                row["t_ns"] = int(cells["t_ns"])
                row["read_ns"] = row["t_ns"] + round(1e6 * (row.get("late_ms") or 0.0))
                rows.append(row)
            except (TypeError, ValueError, KeyError, OverflowError):
                continue
    return rows


def by_device(samples: list[Row]) -> dict[str, list[Row]]:
    """Returns {device: its samples, in order of time}."""
    devices: dict[str, list[Row]] = {}
    for row in sorted(samples, key=lambda row: row["read_ns"]):
        devices.setdefault(row["device"], []).append(row)
    return devices


def inside(samples: list[Row], spans: Sequence[Span]) -> list[Row]:
    """Returns the samples taken while the clock ran.  samples, spans: in order of time."""
    begins = [begin_ns for begin_ns, _ in spans]
    indexed = [(bisect_right(begins, row["read_ns"]) - 1, row) for row in samples]
    return [row for index, row in indexed if index >= 0 and row["read_ns"] <= spans[index][1]]


def mean(samples: Iterable[Row], column: str) -> float | None:
    values = [row[column] for row in samples if row.get(column) is not None]
    return sum(values) / len(values) if values else None


class Curve:
    """A quantity of one device over time: linear between samples, constant for a little beyond them, then unknown."""

    def __init__(self, samples: Iterable[Row], column: str):
        points = [(row["read_ns"], row[column]) for row in samples if row.get(column) is not None]
        self._ns, self._values = [ns for ns, _ in points], [value for _, value in points]
        pieces = [(w0 + w1) / 2 * (t1 - t0) / 1e9 for (t0, w0), (t1, w1) in pairwise(points)]
        self._sums = list(accumulate(pieces, initial=0.0))  # the integral from the first sample to each sample
        longest_ns = max((later - earlier for earlier, later in pairwise(self._ns)), default=0)
        self._may_miss_ns = max(MAX_GAP_S * 1e9, 3 * longest_ns)

    def integral(self, begin_ns: int, end_ns: int) -> float | None:
        """Returns the sum of values times seconds, or None if the device was not sampled there."""
        if not self._ns or end_ns <= begin_ns:
            return None
        if self._ns[0] - begin_ns > self._may_miss_ns or end_ns - self._ns[-1] > self._may_miss_ns:  # device lost
            return None
        return self._until(end_ns) - self._until(begin_ns)

    def mean(self, begin_ns: int, end_ns: int) -> float | None:
        total = self.integral(begin_ns, end_ns)
        return None if total is None else total / ((end_ns - begin_ns) / 1e9)

    def _until(self, ns: int) -> float:
        index = min(max(bisect_right(self._ns, ns) - 1, 0), len(self._ns) - 1)
        t0, w0, since_s = self._ns[index], self._values[index], (ns - self._ns[index]) / 1e9
        if ns <= self._ns[0] or index == len(self._ns) - 1:
            return self._sums[index] + w0 * since_s
        t1, w1 = self._ns[index + 1], self._values[index + 1]
        return self._sums[index] + (w0 + (w1 - w0) * (ns - t0) / (t1 - t0) / 2) * since_s


def reason_shares(samples: Iterable[Row]) -> dict[str, float]:
    """Returns {reason: fraction of these samples in which it limited the clocks}; {} if reasons are unknown."""
    sampled = [row["throttle_reasons"].split("|") for row in samples if row.get("throttle_reasons")]
    counts = Counter(reason for reasons in sampled for reason in reasons if reason != "none")
    return {reason: count / len(sampled) for reason, count in sorted(counts.items())}


def slows(sample: Row) -> bool | None:
    """Whether heat or hardware limited the clocks; None if unknown."""
    reasons = sample.get("throttle_reasons")
    return any(reason in SLOWDOWNS for reason in reasons.split("|")) if reasons else None


def slowed_frac(samples: Iterable[Row]) -> float | None:
    """Returns the fraction of the samples in which something slowed the device down, or None if unknown."""
    flags = [slowed for sample in samples if (slowed := slows(sample)) is not None]
    return sum(flags) / len(flags) if flags else None


def doubts(summary: Row) -> list[str]:
    """Returns sentences, each a doubt with its figure.  summary: the record's summary of telemetry."""
    sentences = []
    for name, device in summary["by_device"].items():
        if (device["slowed_frac"] or 0.0) > MAX_SLOWED_FRAC:
            reasons = ", ".join(reason for reason in device["throttle_frac"] if reason in SLOWDOWNS)
            share = f"{100 * device['slowed_frac']:.1f} % of {device['num_timed_samples']} samples"
            sentences.append(f"{name} was slowed down by {reasons} in {share} (limit {100 * MAX_SLOWED_FRAC:g} %)")
    for name, num in summary["foreign_processes"].items():
        sentences.append(f"{num} other process{'es' if num > 1 else ''} computed on {name} during the run")
    return sentences + _unequal_limits(summary["by_device"])


def _unequal_limits(devices: Mapping[str, Row]) -> list[str]:
    limited = {name: device for name, device in devices.items() if "min_power_limit_w" in device}
    for name, device in limited.items():
        if device["max_power_limit_w"] - device["min_power_limit_w"] > LIMIT_SLACK_W:
            ends = f"{device['min_power_limit_w']:.0f} and {device['max_power_limit_w']:.0f} W"
            return [f"the power limit of {name} was changed in the run, between {ends}"]
    limits_w = {name: device["min_power_limit_w"] for name, device in limited.items()}
    if limits_w and max(limits_w.values()) - min(limits_w.values()) > LIMIT_SLACK_W:
        limits = ", ".join(f"{name} {limit_w:.0f} W" for name, limit_w in limits_w.items())
        return [f"the GPUs have unequal power limits: {limits}"]
    return []


def spans_j(samples: list[Row], spans: Sequence[Span]) -> float | None:
    """Returns the power integrated over the spans, of all devices; None if it is unknown for one of them."""
    curves = [Curve(rows, "power_w") for rows in by_device(samples).values()]
    return _total([curve.integral(*span) for curve in curves for span in spans])


def _total(parts: Sequence[float | None]) -> float | None:
    """Returns the sum, or None if a part is unknown or there is none."""
    numbers = [part for part in parts if part is not None]
    return sum(numbers) if numbers and len(numbers) == len(parts) else None


def counted_j(first: Mapping[str, float | None], last: Mapping[str, float | None]) -> float | None:
    """Returns the joules between two readings {device: joules}; None if a device has no counter or was reset."""
    if set(first) != set(last):
        return None
    pairs = [(first[name], last[name]) for name in first]
    return _total(
        [
            after - before if before is not None and after is not None and after >= before else None
            for before, after in pairs
        ]
    )


def step_spans(rows: Iterable[Row], spans: Sequence[Span], ends: Sequence[int]) -> dict[int, Span]:
    """Returns {row: (begin_ns, end_ns)} of every step, by the device's own time.

    rows: {"step", "step_ms"}; ends: the last row of each span.  A GPU runs behind the host that submits its work, so
    steps are placed by the synchronised edges of their span and by their own times (from CUDA events): one after
    another from the beginning of the span, stretched together to its length.
    """
    step_ms, first = {row["step"]: row["step_ms"] for row in rows}, 1
    steps: dict[int, Span] = {}
    for (begin_ns, end_ns), last in zip(spans, ends):
        numbers = range(first, last + 1)
        first = last + 1
        if not numbers or any(step_ms.get(number) is None for number in numbers):
            continue
        edges_ms = list(accumulate((step_ms[number] for number in numbers), initial=0.0))
        if not edges_ms[-1]:  # the clock stands still
            continue
        ns_per_ms = (end_ns - begin_ns) / edges_ms[-1]
        edges_ns = [begin_ns + round(ms * ns_per_ms) for ms in edges_ms]
        steps |= dict(zip(numbers, pairwise(edges_ns)))
    return steps


def columns(samples: list[Row], steps: dict[int, Span], joined: Row) -> dict[str, dict[int, float]]:
    """Returns {column: {row: value}} for steps.csv.  steps: as from step_spans(); joined: summary() of these samples.

    energy_j: of all GPUs, adding up to joined["energy_j"]; clocks: mean of the devices; slowed_frac: fraction of the
    step in which heat or hardware limited the clocks of the worst device.
    """
    values: dict[str, dict[int, float]] = {}
    if joined["energy_j"] is not None:
        joules = _by_row(samples, "power_w", steps, Curve.integral, sum)
        if len(joules) == len(steps) and (total_j := sum(joules.values())) > 0:
            values["energy_j"] = {row: joined["energy_j"] / total_j * energy_j for row, energy_j in joules.items()}
    for column in ("sm_clock_mhz", "cpu_freq_mhz"):
        values[column] = _by_row(samples, column, steps, Curve.mean, lambda means: round(sum(means) / len(means), 3))
    slowed = [row | {"slowed": slows(row)} for row in samples]
    values["slowed_frac"] = _by_row(slowed, "slowed", steps, Curve.mean, lambda means: round(max(means), 3))
    return {column: by_row for column, by_row in values.items() if by_row}


def _by_row(
    samples: list[Row],
    column: str,
    steps: Mapping[int, Span],
    figure_of: Callable[[Curve, int, int], float | None],
    reduced: Callable[[list[float]], float],
) -> dict[int, float]:
    """Returns {row: figure of all devices}, for the steps in which every device has one."""
    devices = [rows for rows in by_device(samples).values() if any(row.get(column) is not None for row in rows)]
    curves = [Curve(rows, column) for rows in devices]
    figures: dict[int, float] = {}
    for row, span in steps.items():
        values = [figure for curve in curves if (figure := figure_of(curve, *span)) is not None]
        if values and len(values) == len(curves):
            figures[row] = reduced(values)
    return figures


def summary(samples: list[Row], spans: Sequence[Span], started: Row, stopped: Row) -> Row:
    """Returns the record's summary of the samples, with the sampler's own report.  started, stopped: {"t_ns",
    "energy_j": {device: joules}} at both ends of the run; stopped also has "report".

    energy_j is what all devices used while the clock ran: the counters' figure for the whole run (run_energy_j, with
    the validations), divided in proportion to the integrated power; or the integral itself if there is no counter.
    """
    run_s = (stopped["t_ns"] - started["t_ns"]) / 1e9
    report = {name: value for name, value in stopped.get("report", {}).items() if name != "warnings"}
    devices = by_device(samples)
    timed_rows = {name: inside(rows, spans) for name, rows in devices.items()}
    timed = [row for rows in timed_rows.values() for row in rows]
    train_s = sum(end_ns - begin_ns for begin_ns, end_ns in spans) / 1e9
    whole_j = spans_j(samples, [(started["t_ns"], stopped["t_ns"])])
    counter_j = counted_j(started["energy_j"], stopped["energy_j"])
    train_j = spans_j(samples, spans)
    if not report.get("sees_all", True):  # the energy of some of the GPUs is not the run's
        whole_j = counter_j = train_j = None
    counted = counter_j is not None and bool(whole_j)
    if train_j is not None and counter_j is not None and whole_j:
        train_j *= counter_j / whole_j
    num_power = min((sum(row.get("power_w") is not None for row in rows) for rows in devices.values()), default=0)
    apart_pct = None  # as a percentage of the counter
    if counter_j and whole_j is not None and num_power >= MIN_POWER_SAMPLES:
        apart_pct = 100 * abs(whole_j - counter_j) / counter_j
    return {
        "energy_j": train_j,
        "energy_from": None if train_j is None else "counter" if counted else "power",
        "run_energy_j": whole_j if counter_j is None else counter_j,
        "integrated_run_energy_j": whole_j,
        "energy_disagreement_pct": apart_pct,
        "energy_agrees": None if apart_pct is None else apart_pct <= MAX_DISAGREEMENT_PCT,
        "mean_power_w": train_j / train_s if train_j is not None and train_s else None,
        "num_timed_samples": len(timed),
        # every device has the same weight, even one that was lost early or sampled less often
        **{
            f"mean_{column}": mean([{column: mean(rows, column)} for rows in timed_rows.values()], column)
            for column in MEANS
        },
        "max_temp_c": max((row["temp_c"] for row in timed if row.get("temp_c") is not None), default=None),
        "throttle_frac": reason_shares(timed),
        "by_device": {name: _device_summary(rows) for name, rows in timed_rows.items()},
        **report,
        "sampler_cpu_frac": report["sampler_cpu_s"] / run_s if "sampler_cpu_s" in report and run_s > 0 else None,
    }


def total_of_nodes(summaries: list[Row]) -> Row:
    """Combines the nodes' summaries: sums of energies and powers (None if a part is unknown), and by_node."""
    total = dict(summaries[0])
    for name in ("energy_j", "run_energy_j", "integrated_run_energy_j", "mean_power_w"):
        total[name] = _total([summary.get(name) for summary in summaries])
    return total | {"by_node": summaries}


def warnings(joined: Row, report: Row) -> list[str]:
    """Returns sentences: what the sampler could not read, counters that disagree, memory that fails."""
    sentences = list(report["warnings"])
    if joined["energy_agrees"] is False:
        apart = f"{joined['energy_disagreement_pct']:.1f} % apart (limit {MAX_DISAGREEMENT_PCT:g} %)"
        sentences.append(f"the energy counter and integrated power are {apart}")
    for name, device in joined["by_device"].items():
        for column in ("ecc_uncorrected", "remapped_rows"):
            if device.get(f"new_{column}"):
                sentences.append(f"{name}: {device[f'new_{column}']} new {column} during training: its memory fails")
    return sentences


def _device_summary(rows: list[Row]) -> Row:
    figures = {f"mean_{column}": mean(rows, column) for column in ("power_w", "sm_clock_mhz", "temp_c")}
    limits_w = [row["power_limit_w"] for row in rows if row.get("power_limit_w") is not None]
    if limits_w:
        figures |= {"min_power_limit_w": min(limits_w), "max_power_limit_w": max(limits_w)}
    for column in ("ecc_uncorrected", "remapped_rows"):
        counts = [row[column] for row in rows if row.get(column) is not None]
        if counts:
            figures[f"new_{column}"] = round(counts[-1] - counts[0])
    measured = {name: value for name, value in figures.items() if value is not None}
    return {
        "num_timed_samples": len(rows),
        **measured,
        "throttle_frac": reason_shares(rows),
        "slowed_frac": slowed_frac(rows),
    }
