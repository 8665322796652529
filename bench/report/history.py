"""The speed of a repository over its commits: a series for each configuration and machine, and where its level changes.

The runs of races, sweeps and single commands are grouped by the commit that they trained: script.rev for a script, the
harness's own commit for our models.  A commit's value is the mean of its runs, geometric for times.
"""

import math
import os
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from bench.base import change_points, stats
from bench.base.change_points import Change
from bench.base.paths import user_path, working_folder
from bench.base.reading.damage import Damaged
from bench.machine import git
from bench.record import configs, race_folder, run_folder
from bench.record.rows import ListedRow
from bench.web.chart import chart, mark_of, series_of
from bench.web.document import Block, Chart, Document, Hint, Lines, Section, Table, Verdict, code, coloured
from bench.web.page import tag

MEASURES = {"step_avg_ms": "ms", "train_s": "s", "val_loss": "nats"}  # {measure: unit}; lower is better
SHORT = 10  # displayed characters of a commit's hash
OF_REVISION = ("script.rev", "script.root")  # settings that may differ within a configuration
PER_COMMIT = ("seed", "script.rev")  # settings that ./run.sh bisect sets itself
METHOD = (
    "A commit's value is the mean of its valid and suspect runs of one configuration on one machine; for times it is "
    "the geometric mean.",
    "The ranges of commits that contain a change, at 95 % for all of them together, are found by Narrowest "
    "Significance Pursuit (P. Fryzlewicz, JASA 119, 2024, 1633-1646), which estimates the noise from neighbouring "
    "commits; the interval of a change is that of Welch's t test.",
    "The method assumes that this noise is independent, which it is not on a machine that drifts over days: confirm a "
    "change with the command beside it, which interleaves its runs.",
)


class Commit(NamedTuple):
    sha: str
    date: str
    subject: str


@dataclass(frozen=True)
class Point:
    commit: Commit
    value: float  # mean of the measure
    num_runs: int


@dataclass(frozen=True)
class Series:
    """One configuration on one machine."""

    name: str
    machine: str
    measure: str
    points: Sequence[Point]  # in the order of the commits
    changes: Sequence[Change]  # before and after index points; steps of times are logarithmic
    settings: Sequence[str]  # overrides of its newest run, as they were typed

    def step_of(self, change: Change) -> str:
        """Returns a change as text, such as "+4.2 % [+3.9, +4.5]", in nats for a loss."""
        values = [value for value in (change.step, change.low, change.high) if value is not None]
        if self.measure != "val_loss":
            values = [100 * math.expm1(value) for value in values]
        digits, unit = (4, "nats") if self.measure == "val_loss" else (2, "%")
        step, *ends = (f"{value:+.{digits}f}" for value in values)
        return f"{step} {unit}" + (f" [{', '.join(ends)}]" if ends else "")

    def command_of(self, change: Change) -> str:
        """Returns the command that finds the commit of a change, or confirms it if it is known already."""
        before, after = (self.points[index].commit.sha[:SHORT] for index in (change.before, change.after))
        on = ["--on", "val_loss"] if self.measure == "val_loss" else []
        cwd, settings = working_folder(), []  # where the command is typed
        for key, _, value in (pair.partition("=") for pair in self.settings):
            if key not in PER_COMMIT:  # a script gets its arguments as they are
                value = os.path.relpath(value, cwd) if f"{value}/".startswith(f"{cwd}/") else value
                settings.append(f"{key}={value}")
        return f"./run.sh bisect {before} {after} {shlex.join([*on, *settings])}".rstrip()


def commits_of(repo: Path, rev: str) -> list[Commit]:
    """Returns the last first-parent commits of a revision, oldest first.  Raises ValueError if it does not exist."""
    form = ("--first-parent", "--reverse", f"-n{change_points.MAX_VALUES}", "--format=%H%x09%cs%x09%s")
    try:
        lines = git.run(repo, "log", *form, rev, "--")
    except git.Failed as error:
        why = f"{repo} is in no repository with this revision ({error})"
        raise ValueError(f"{rev}: {why}: change the folder, or use --rev") from None
    return [Commit(*line.split("\t", 2)) for line in lines.split("\n")[:-1]]


def all_series(rows: Iterable[ListedRow], commits: Sequence[Commit], measure: str) -> list[Series]:
    """Returns the series that have runs of two commits or more, the longest first."""
    order = {commit.sha: number for number, commit in enumerate(commits)}
    groups: dict[tuple[Any, ...], list[tuple[int, ListedRow]]] = {}
    for row in rows:
        sha = _commit_of(row)
        value = row[measure]  # type: ignore[literal-required]
        is_doubtful = measure != "val_loss" and (row["script_doubt"] is not None or (value or 0) <= 0)  # its clock lies
        if sha in order and value is not None and not is_doubtful:
            groups.setdefault(_key(row), []).append((order[sha], row))
    candidates = (_series(runs, commits, measure) for runs in groups.values())
    return sorted((series for series in candidates if len(series.points) > 1), key=lambda series: -len(series.points))


def _commit_of(row: ListedRow) -> str | None:
    """Returns the commit whose speed a run measured, or None for uncommitted changes, warm-ups, invalid runs and those
    of a race that has not ended."""
    if row["status"] != "complete" or row["validity"] == "invalid" or row["discarded"]:
        return None
    if row["race_id"] and race_folder.is_open(user_path(row["folder"]).parent.parent, row["race_id"]):
        return None
    script = configs.group(row["config"], "script")
    if script.get("script.root") or script.get("script.path"):
        return script.get("script.rev")
    if row["commit"] is None or run_folder.read(user_path(row["folder"]))["code"].get("dirty"):
        return None
    return row["commit"]


def _key(row: ListedRow) -> tuple[Any, ...]:
    settings = configs.settings(row["config"])
    return (
        row["track"],
        row["comparability_id"],
        *(f"{key}={value}" for key, value in settings.items() if key not in OF_REVISION),
    )


def mean_of(values: Iterable[float], measure: str) -> float:
    """Returns the geometric mean of times, or the arithmetic mean of losses."""
    return stats.mean(values) if measure == "val_loss" else math.exp(stats.mean(map(math.log, values)))


def _series(runs: Sequence[tuple[int, ListedRow]], commits: Sequence[Commit], measure: str) -> Series:
    values: dict[int, list[float]] = {}
    for number, row in runs:
        values.setdefault(number, []).append(row[measure])  # type: ignore[literal-required]
    points = [
        Point(commits[number], mean_of(values[number], measure), len(values[number])) for number in sorted(values)
    ]
    scaled = [point.value if measure == "val_loss" else math.log(point.value) for point in points]
    _, newest = max(runs, key=lambda run: run[1]["started_at"] or "")
    optim = None if newest["optim"] == "unknown" else newest["optim"]
    name = ", ".join(filter(None, [newest["model"], optim, f"track {newest['track']}"]))
    machine = ", ".join(filter(None, [newest["device"], f"torch {newest['torch']}" if newest["torch"] else ""]))
    typed = _typed(sorted((row for _, row in runs), key=lambda row: row["started_at"] or "", reverse=True))
    return Series(name, machine, measure, points, change_points.find(scaled), typed)


def _typed(rows: Sequence[ListedRow]) -> list[str]:
    """Returns the settings of the first of these runs whose overrides.yaml is not damaged, as they were typed."""
    for row in rows:
        try:
            return configs.as_typed(user_path(row["folder"]))
        except Damaged as error:
            print(f"history: {error}", file=sys.stderr)
    return []


def document(series: Sequence[Series], where: str) -> Document:
    """Returns the page of a repository.  where: its name and revision.  Raises ValueError if there is no series."""
    if not series:
        raise ValueError(f"{where}: no two commits have runs yet: ./run.sh race HEAD~1 HEAD script=... measures them")
    verdicts = [verdict for curve in series for verdict in _verdicts(curve)]
    blocks = [block for number, curve in enumerate(series) for block in _blocks(curve, number)]
    data = [_data(curve) for curve in series]
    return Document(f"Speed of {where}", verdicts, [*blocks, Section("Method", [Lines(METHOD)])], data)


def _verdicts(series: Series) -> Iterator[Verdict]:
    """Yields a verdict for each change, the newest first, or one that says that there is none."""
    for change in reversed(series.changes):
        before, after = (series.points[index].commit for index in (change.before, change.after))
        between = f"between {before.sha[:SHORT]} and {after.sha[:SHORT]} ({after.date})"
        sentence = f"{series.measure} changed by {series.step_of(change)} {between}"
        labels = ("better", "worse") if series.measure == "val_loss" else ("faster", "slower")
        yield Verdict(sentence, labels[change.step > 0], series.name)
    if not series.changes:
        num = len(series.points)
        why = "" if num >= change_points.MIN_VALUES else f"; it takes {change_points.MIN_VALUES} to show one"
        badge = coloured("unknown", "badge soft") if why else coloured("steady", "badge good")
        yield Verdict(f"no change of {series.measure} is shown in {num} commits{why}", "", series.name, badges=[badge])


def _blocks(series: Series, number: int) -> Iterator[Block]:
    rows = [
        [
            series.step_of(change),
            *(code(series.points[index].commit.sha[:SHORT]) for index in (change.before, change.after)),
            str(change.after - change.before),
            code(series.command_of(change)),
        ]
        for change in reversed(series.changes)  # as the verdicts above: the newest first
    ]
    levels = _levels(series)
    labels = [f"{point.commit.sha[:SHORT]} {point.commit.subject}" for point in series.points]
    unit = MEASURES[series.measure]
    drawn = chart(
        f"history-{number}",
        f"{series.measure} by commit",
        "a point is the mean of a commit's runs; the line is their level, and slopes where it changes",
        "commit, oldest first",
        f"{series.measure}, {unit}" if not series.measure.endswith(unit) else series.measure,
        list(range(len(series.points))),
        [
            series_of("commits", [point.value for point in series.points], "points", labels),
            series_of("level", levels, "line"),
        ],
        [mark_of(change.after, f"{series.step_of(change)}", "stall") for change in series.changes],
    )
    heads = ("change [95 % interval]", "between", "and", "commits", "to find or confirm it")
    changes: list[Block] = [Table(heads, rows, (True, False, False, True, False), style="tight")] if rows else []
    commits = [
        [
            code(point.commit.sha[:SHORT]),
            f"{point.value:.6g}",
            str(point.num_runs),
            point.commit.date,
            point.commit.subject,
        ]
        for point in reversed(series.points)
    ]
    right = (False, True, True, False, False)
    table = Table(("commit", series.measure, "runs", "date", "subject"), commits, right, limit=10, style="tight")
    yield Section(f"{series.name}: {series.machine}", [*changes, Chart(drawn), table])
    if series.changes:
        yield Hint(f"to find or confirm the newest change: {series.command_of(series.changes[-1])}")


def _levels(series: Series) -> list[float | None]:
    """Returns the mean level between changes at each commit; None inside a range that contains a change."""
    levels: list[float | None] = [None] * len(series.points)
    starts = [0, *(change.after for change in series.changes)]
    ends = [*(change.before for change in series.changes), len(series.points) - 1]
    for start, end in zip(starts, ends, strict=True):
        mean = mean_of((point.value for point in series.points[start : end + 1]), series.measure)
        levels[start : end + 1] = [mean] * (end + 1 - start)
    return levels


def _data(series: Series) -> dict[str, Any]:
    about = {"name": series.name, "machine": series.machine, "measure": series.measure}
    values = [{series.measure: point.value, "num_runs": point.num_runs} for point in series.points]
    points = [point.commit._asdict() | value for point, value in zip(series.points, values, strict=True)]
    ends = [{end: points[getattr(change, end)]["sha"] for end in ("before", "after")} for change in series.changes]
    changes = [{"change": series.step_of(change), "command": series.command_of(change)} for change in series.changes]
    return about | {"points": points, "changes": [end | change for end, change in zip(ends, changes, strict=True)]}


def badge(series: Sequence[Series]) -> str:
    """Returns an SVG badge for a README with the newest change of the longest series."""
    first = series[0]
    message, colour = f"steady, {len(first.points)} commits", "#2e7d32"
    if first.changes:
        newest = first.changes[-1]
        message = f"{first.step_of(newest).partition(' [')[0]} at {first.points[newest.after].commit.sha[:7]}"
        colour = "#b3261e" if newest.step > 0 else "#2e7d32"
    elif len(first.points) < change_points.MIN_VALUES:
        message, colour = f"{len(first.points)} commits", "#5f6368"
    widths_px = left_px, right_px = [7 * len(text) + 12 for text in ("speed", message)]  # for Verdana at 11 px
    look = {"y": 14, "fill": "#fff", "font_family": "Verdana,Geneva,sans-serif", "font_size": 11}
    parts = [
        tag("title", f"speed: {message}"),
        tag("rect", width=left_px, height=20, fill="#444"),
        tag("rect", x=left_px, width=right_px, height=20, fill=colour),
        tag("text", "speed", x=6, textLength=left_px - 12, **look),
        tag("text", message, x=left_px + 6, textLength=right_px - 12, **look),
    ]
    size = {"xmlns": "http://www.w3.org/2000/svg", "width": sum(widths_px), "height": 20}
    return tag("svg", *parts, **size, role="img", aria_label=f"speed: {message}") + "\n"
