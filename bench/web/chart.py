"""What is drawn: plain dicts that assets/charts.js draws in a page.

A spec: {"id", "title", "caption", "x_label", "y_label", "x": [...], "series": [{"name", "y": [...], "kind"}],
"marks": [{"x", "label", "kind"}], "sync": key of charts that share their cursor, or None; "dates": x are Unix seconds}.
kind of a series: line, points, bars or area (areas are stacked); of a mark: stall or validation.  None in y is a gap.
"""

import math
from collections.abc import Iterable, Sequence

MAX_POINTS = 4000  # of a series on a page: a screen has fewer columns
MAX_MARKS = 200


def chart(
    id: str,
    title: str,
    caption: str,
    x_label: str,
    y_label: str,
    x: Sequence[float],
    series: Sequence[dict],
    marks: Iterable[dict] = (),
    sync: str | None = None,
) -> dict:
    """A spec, thinned to what a page can show."""
    keep = thin(series[0]["y"] if len(series) == 1 else _envelope(series), MAX_POINTS)
    if keep is not None:
        x = [x[num] for num in keep]
        series = [one | {"y": [one["y"][num] for num in keep]} for one in series]
        caption = "; ".join([*([caption] if caption else []), f"{len(x)} points drawn, extremes kept"])
    return {
        "id": id,
        "title": title,
        "caption": caption,
        "x_label": x_label,
        "y_label": y_label,
        "x": [_short(value) for value in x],
        "series": [one | {"y": [_short(value) for value in one["y"]]} for one in series],
        "marks": list(marks)[:MAX_MARKS],
        "sync": sync,
    }


def thin(values: Sequence[float | None], max_points: int) -> list[int] | None:
    """Indices to keep: the smallest and largest of each of max_points / 2 buckets, in order; None: all."""
    if len(values) <= max_points:
        return None
    keep, size = {0, len(values) - 1}, len(values) / (max_points // 2)
    for bucket in range(max_points // 2):
        indices = range(int(bucket * size), min(len(values), int((bucket + 1) * size)))
        known = [index for index in indices if values[index] is not None] or [indices[0]]
        keep |= {choose(known, key=lambda index: values[index] or 0) for choose in (min, max)}
    return sorted(keep)


def _envelope(series):
    """What thinning must keep of several series: the sum of what is there."""
    return [sum(value for value in column if value is not None) for column in zip(*(one["y"] for one in series))]


def series_of(name: str, values: Sequence[float | None], kind: str) -> dict:
    """A series of a spec, a value for each x; kinds and gaps: see the top of this file."""
    return {"name": name, "y": values, "kind": kind}


def mark_of(x: float, label: str, kind: str) -> dict:
    """A vertical line of a spec at x, in the unit of its axis; kinds: see the top of this file."""
    return {"x": _short(x), "label": label, "kind": kind}


def _short(value):
    """Six significant digits: more than a screen shows, half the bytes.  What is not a number is a gap."""
    if value is None or isinstance(value, (int, str)):
        return value
    return float(f"{value:.6g}") if math.isfinite(value) else None
