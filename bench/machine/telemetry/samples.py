"""telemetry.csv as rows, and as curves over time.  A figure that no sample gives is None."""

import csv
from bisect import bisect_right
from itertools import accumulate, pairwise
from pathlib import Path

from bench.base.reading import plain_file

TEXT = ("device", "throttle_reasons")
MAX_GAP_S = 1.0  # between an end of what is asked for and the nearest sample


def read(path: Path | str) -> list[dict]:
    """telemetry.csv -> rows, empty cells None, cut lines skipped; read_ns: when the device was read, with late_ms."""
    rows = []
    with plain_file.lines(path) as lines:
        for cells in csv.DictReader(lines):
            try:
                row = {name: (text if name in TEXT else float(text)) if text else None for name, text in cells.items()}
                row["t_ns"] = int(cells["t_ns"])
                row["read_ns"] = row["t_ns"] + round(1e6 * (row.get("late_ms") or 0.0))
                rows.append(row)
            except (TypeError, ValueError, KeyError, OverflowError):
                continue
    return rows


def by_device(samples: list[dict]) -> dict[str, list[dict]]:
    """{device: its samples, in time}."""
    result = {}
    for row in sorted(samples, key=lambda row: row["read_ns"]):
        result.setdefault(row["device"], []).append(row)
    return result


def inside(samples, spans):
    """The samples taken while the clock ran; samples in time, spans too."""
    begins = [begin_ns for begin_ns, _ in spans]
    indexed = [(bisect_right(begins, row["read_ns"]) - 1, row) for row in samples]
    return [row for index, row in indexed if index >= 0 and row["read_ns"] <= spans[index][1]]


def mean(samples, column):
    values = [row[column] for row in samples if row.get(column) is not None]
    return sum(values) / len(values) if values else None


class Curve:
    """A quantity of one device over time: linear between samples, constant for a little beyond them, then unknown."""

    def __init__(self, samples, column):
        points = [(row["read_ns"], row[column]) for row in samples if row.get(column) is not None]
        self._ns, self._values = [ns for ns, _ in points], [value for _, value in points]
        pieces = [(w0 + w1) / 2 * (t1 - t0) / 1e9 for (t0, w0), (t1, w1) in pairwise(points)]
        self._sums = list(accumulate(pieces, initial=0.0))  # the integral from the first sample to each
        longest_ns = max((later - earlier for earlier, later in pairwise(self._ns)), default=0)
        self._may_miss_ns = max(MAX_GAP_S * 1e9, 3 * longest_ns)

    def integral(self, begin_ns, end_ns):
        """Values times seconds; None where the device was not seen."""
        if not self._ns or end_ns <= begin_ns:
            return None
        if self._ns[0] - begin_ns > self._may_miss_ns or end_ns - self._ns[-1] > self._may_miss_ns:  # it was lost
            return None
        return self._until(end_ns) - self._until(begin_ns)

    def mean(self, begin_ns, end_ns):
        total = self.integral(begin_ns, end_ns)
        return None if total is None else total / ((end_ns - begin_ns) / 1e9)

    def _until(self, ns):
        index = min(max(bisect_right(self._ns, ns) - 1, 0), len(self._ns) - 1)
        t0, w0, since_s = self._ns[index], self._values[index], (ns - self._ns[index]) / 1e9
        if ns <= self._ns[0] or index == len(self._ns) - 1:
            return self._sums[index] + w0 * since_s
        t1, w1 = self._ns[index + 1], self._values[index + 1]
        return self._sums[index] + (w0 + (w1 - w0) * (ns - t0) / (t1 - t0) / 2) * since_s


def curves(samples, column):
    """One of each device that has the column anywhere."""
    devices = by_device(samples).values()
    return [Curve(rows, column) for rows in devices if any(row.get(column) is not None for row in rows)]
