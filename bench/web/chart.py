"""What is drawn: plain dicts that assets/charts.js draws in a page.

A spec: {"id", "title", "caption", "x_label", "y_label", "x": [...], "series": [{"name", "y": [...], "kind"}],
"marks": [{"x", "label", "kind"}], "sync": key of charts that share their cursor, or None; "dates": x are Unix seconds}.
kind of a series: line, stepped, points, bars or area (areas are stacked); of a mark: stall or validation.  None in y is
a gap.  A series may have "labels" and "links", one for each x or None: hover shows the label, a click opens the link.
Instead of x and series a spec may have "arms", see chart_of_arms().  "log_x", "log_y": axes that are logarithmic.
"""

from collections.abc import Iterable, Sequence
from math import isfinite
from typing import Any

Spec = dict[str, Any]  # one chart, see above
MAX_POINTS = 4000  # of a series on a page: a screen has fewer columns
MAX_MARKS = 200


def chart(
    id: str,
    title: str,
    caption: str,
    x_label: str,
    y_label: str,
    x: Sequence[float],
    series: Sequence[Spec],
    marks: Iterable[Spec] = (),
    sync: str | None = None,
) -> Spec:
    """A spec, thinned to what a page can show."""
    envelope = series[0]["y"]
    if len(series) > 1:  # thinning must keep the extremes of the sum of what is there
        envelope = [
            sum(value for value in column if value is not None) for column in zip(*(line["y"] for line in series))
        ]
    keep = thin(envelope, MAX_POINTS)
    if keep is not None:
        x = [x[num] for num in keep]
        each = ("y", "labels", "links")
        series = [line | {key: [line[key][num] for num in keep] for key in each if key in line} for line in series]
        caption = "; ".join([*([caption] if caption else []), f"{len(x)} points drawn, extremes kept"])
    about = {"id": id, "title": title, "caption": caption, "x_label": x_label, "y_label": y_label}
    series = [line | {"y": short(line["y"])} for line in series]
    return about | {"x": short(x), "series": series, "marks": list(marks)[:MAX_MARKS], "sync": sync}


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


def chart_of_arms(
    id: str, title: str, caption: str, x_label: str, y_label: str, arms: Sequence[Spec], band: str = "range"
) -> Spec:
    """A spec of arms, [{"name", "runs": [{"x": [...], "y": [...]}]}]: one line an arm, the mean of its runs.

    The page takes the mean to the end of the longest run, linear between a run's points; one that has ended keeps its
    last value.  band around it: range (the smallest to the largest run), sd (one standard deviation each way) or none.
    """
    arms = [arm | {"runs": [{key: short(run[key]) for key in ("x", "y")} for run in arm["runs"]]} for arm in arms]
    about = {"id": id, "title": title, "caption": caption, "x_label": x_label, "y_label": y_label}
    return about | {"arms": arms, "band": band}


def series_of(
    name: str,
    values: Sequence[float | None],
    kind: str,
    labels: Sequence[str | None] | None = None,
    links: Sequence[str | None] | None = None,
) -> Spec:
    """A series of a spec, a value for each x; kinds, gaps, labels and links: see the top of this file."""
    extras = {"labels": labels, "links": links}
    return {"name": name, "y": values, "kind": kind} | {key: list(extra) for key, extra in extras.items() if extra}


def mark_of(x: float, label: str, kind: str) -> Spec:
    """A vertical line of a spec at x, in the unit of its axis; kinds: see the top of this file."""
    return {"x": short([x])[0], "label": label, "kind": kind}


def short(values: Iterable[float | str | None]) -> list[Any]:
    """Six significant digits: more than a screen shows, half the bytes.  What is not a number is a gap."""
    form = "{:.6g}".format
    return [
        value if value is None or isinstance(value, (int, str)) else float(form(value)) if isfinite(value) else None
        for value in values
    ]
