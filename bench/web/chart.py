"""Specifies charts as plain dicts, which assets/charts.js draws in a page.

A spec: {"id", "title", "caption", "x_label", "y_label", "x": [...], "series": [{"name", "y": [...], "kind"}],
"marks": [{"x", "label", "kind"}], "sync": key of charts that share their cursor, or None; "dates": x are Unix seconds;
"names": of each x, which count from 0}.
The kind of a series is line, stepped, points, bars or area (areas are stacked); that of a mark stall or validation.
None in y is a gap.  A series may have "labels" and "links", each with an entry or None for every x: hovering shows the
label, a click opens the link.  Instead of x and series a spec may have "arms", see chart_of_arms().  "log_x" and
"log_y" make an axis logarithmic.
"""

from collections.abc import Iterable, Sequence
from math import isfinite
from typing import Any

Spec = dict[str, Any]  # a chart, see above
MAX_POINTS = 4000  # per series: screens have fewer columns
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
    """Returns the spec of a chart, with long series thinned to MAX_POINTS."""
    envelope = series[0]["y"]
    if len(series) > 1:  # thinning must keep the extremes of the sum of the series
        envelope = [
            sum(value for value in column if value is not None) for column in zip(*(line["y"] for line in series))
        ]
    keep = thin(envelope, MAX_POINTS)
    if keep is not None:
        x = [x[num] for num in keep]
        keys = ("y", "labels", "links")
        series = [line | {key: [line[key][num] for num in keep] for key in keys if key in line} for line in series]
        caption = "; ".join([*([caption] if caption else []), f"{len(x)} points drawn, extremes kept"])
    about = {"id": id, "title": title, "caption": caption, "x_label": x_label, "y_label": y_label}
    series = [line | {"y": short(line["y"])} for line in series]
    return about | {"x": short(x), "series": series, "marks": list(marks)[:MAX_MARKS], "sync": sync}


def thin(values: Sequence[float | None], max_points: int) -> list[int] | None:
    """Returns the indices to keep, in order: the minimum and maximum of each of max_points / 2 buckets; None: all."""
    if len(values) <= max_points:
        return None
    keep, size = {0, len(values) - 1}, len(values) / (max_points // 2)
    for bucket in range(max_points // 2):
        indices = range(int(bucket * size), min(len(values), int((bucket + 1) * size)))
        present = [index for index in indices if values[index] is not None] or [indices[0]]
        keep |= {choose(present, key=lambda index: values[index] or 0) for choose in (min, max)}
    return sorted(keep)


def chart_of_arms(
    id: str, title: str, caption: str, x_label: str, y_label: str, arms: Sequence[Spec], band: str = "range"
) -> Spec:
    """Returns the spec of a chart with one line per arm, the mean of its runs.

    arms: [{"name", "runs": [{"x": [...], "y": [...]}]}].  The page computes the mean up to the end of the longest run,
    by linear interpolation; a run that has ended keeps its last value.  band: what is drawn around the mean, range
    (from the smallest to the largest run), sd (one standard deviation on either side) or none.
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
    """Returns a series for a spec, with a value for each x.  Kinds, labels and links: see the top of this file."""
    extras = {"labels": labels, "links": links}
    return {"name": name, "y": values, "kind": kind} | {key: list(extra) for key, extra in extras.items() if extra}


def mark_of(x: float, label: str, kind: str) -> Spec:
    """Returns a vertical line for a spec at x, in the unit of the axis.  Kinds: see the top of this file."""
    return {"x": short([x])[0], "label": label, "kind": kind}


def short(values: Iterable[float | str | None]) -> list[Any]:
    """Rounds to six significant digits, more than a screen shows, which halves the bytes; nan and inf become gaps."""
    form = "{:.6g}".format
    return [
        value if value is None or isinstance(value, (int, str)) else float(form(value)) if isfinite(value) else None
        for value in values
    ]
