"""The speed of a repository over its commits: a series for each configuration and machine, and where its level changes.

The runs of races, sweeps and single commands are grouped by the commit that they trained: script.rev for a script, the
harness's own commit for our models.  A commit's value is the mean of its runs, geometric for times.
"""

import math
import os
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from bench.base import change_points, private, stats
from bench.base.change_points import Change
from bench.base.paths import REPO, results_root, shown, user_path, working_folder
from bench.base.reading.damage import Damaged
from bench.base.text_table import two_digits
from bench.machine import git
from bench.record import configs, race_folder, run_folder
from bench.record.rows import ListedRow
from bench.web.chart import chart, mark_of, series_of
from bench.web.document import Chart, Document, Lines, Section, Table, Verdict, code, coloured
from bench.web.page import tag

MEASURES = {"step_avg_ms": "ms", "train_s": "s", "val_loss": "nats"}  # {measure: unit}; lower is better
STEADY = {"step_avg_ms": 10.0, "train_s": 10.0, "val_loss": 0.05}  # %, nats: steady if larger changes would be seen
TIME, LOSS = ("slower", "faster"), ("worse", "better")  # verdicts that show a difference
SHORT = 10  # displayed characters of a commit's hash
OF_REVISION = ("script.rev", "script.root")  # settings that may differ within a configuration
PER_COMMIT = ("seed", "script.rev")  # settings that ./run.sh bisect sets itself
METHOD = (
    "A commit's value is the mean of its runs of one configuration on one machine.  Its time is the geometric mean of "
    "the undisturbed runs in the first race that has two of them, or, without such a race, of all runs in its first; "
    "commits whose runs were all disturbed are left out if they are at most half of all and two others remain.  "
    "Later races are ignored, because commits that share races look alike, so that a steady series would show changes.",
    "The ranges of commits that contain a change, at 95 % for all of them together, are found by Narrowest "
    "Significance Pursuit (P. Fryzlewicz, JASA 119, 2024, 1633-1646), which estimates the noise from neighbouring "
    "commits; the interval of a change is that of Welch's t test.",
    "The method assumes that this noise is independent, which it is not on a machine that drifts over days: confirm a "
    "change with its command, which interleaves the runs.  ./run.sh stands for the path of the harness's run.sh.",
)


class Commit(NamedTuple):
    sha: str
    date: str
    subject: str


class Raced(NamedTuple):
    """A race of two commits that shows a difference."""

    before: Commit
    after: Commit
    verdict: str  # slower, faster, worse or better
    size: str  # +3.1 %


@dataclass(frozen=True)
class Point:
    commit: Commit
    value: float  # mean of the measure
    num_runs: int
    num_suspect: int


@dataclass(frozen=True)
class Series:
    """One configuration on one machine."""

    name: str
    machine: str
    measure: str
    points: Sequence[Point]  # in the order of the commits
    changes: Sequence[Change]  # before and after index points; steps of times are logarithmic
    hidden_step: float | None  # change_points.hidden_step(); None for too few commits
    settings: Sequence[str]  # overrides of its newest run, as they were typed
    raced: Raced | None = None  # what its newest race of two commits showed, for a series that is too short for changes

    @property
    def unit(self) -> str:
        return "nats" if self.measure == "val_loss" else "%"

    def sized(self, step: float) -> float:
        """Returns a step in the series' unit."""
        return step if self.measure == "val_loss" else 100 * math.expm1(step)

    @property
    def is_steady(self) -> bool:
        """Whether no change is shown, and one of STEADY or more would probably have been."""
        hidden = None if self.changes else self.hidden_step
        return hidden is not None and self.sized(hidden) <= STEADY[self.measure]

    def step_of(self, change: Change) -> str:
        """Returns a change as text, such as "+4.2 % [+3.9, +4.5]", in nats for a loss."""
        values = [self.sized(value) for value in (change.step, change.low, change.high) if value is not None]
        step, *ends = (f"{value:+.{4 if self.measure == 'val_loss' else 2}f}" for value in values)
        return f"{step} {self.unit}" + (f" [{', '.join(ends)}]" if ends else "")

    @property
    def possible_change(self) -> Change | None:
        """What may have become worse since the best commit of an undecided series."""
        values = [point.value for point in self.points]
        best = values.index(min(values))
        is_open = not self.changes and not self.is_steady and values[-1] > values[best]
        return Change(best, len(values) - 1, values[-1] - values[best], None, None) if is_open else None

    def command_of(self, change: Change) -> str:
        """Returns the command that finds the commit of a change, or confirms it if it is known already."""
        before, after = (self.points[index].commit.sha[:SHORT] for index in (change.before, change.after))
        verb, on = f"bisect {before} {after}", ["--on", "val_loss"] * (self.measure == "val_loss")
        if change.step < 0:  # bisect looks for what made it worse
            verb, on = f"race {before}..{after}", ["on=loss"] * (self.measure == "val_loss")
        cwd, settings = working_folder(), []  # where the command is typed
        for key, _, value in (pair.partition("=") for pair in self.settings):
            if key not in PER_COMMIT:  # a script gets its arguments as they are
                value = os.path.relpath(value, cwd) if f"{value}/".startswith(f"{cwd}/") else value
                settings.append(f"{key}={value}")
        return f"./run.sh {verb} {shlex.join([*on, *settings])}".rstrip()


def commits_of(repo: Path, rev: str) -> list[Commit]:
    """Returns the last first-parent commits of a revision, oldest first.  Raises ValueError if it does not exist."""
    form = ("--first-parent", "--reverse", f"-n{change_points.MAX_VALUES}", "--format=%H%x09%cs%x09%s")
    try:
        lines = git.run(repo, "log", *form, "--end-of-options", rev, "--")
    except git.Failed as error:
        why = f"{repo} is in no repository with this revision ({error})"
        raise ValueError(f"{rev}: {why}: change the folder, or use --rev") from None
    parts = (line.split("\t", 2) for line in lines.split("\n")[:-1])
    return [Commit(sha, date, private.redact(subject, REPO)) for sha, date, subject in parts]


def all_series(rows: Iterable[ListedRow], commits: Sequence[Commit], measure: str) -> list[Series]:
    """Returns the series that have runs of two commits or more, the longest first."""
    order = {commit.sha: number for number, commit in enumerate(commits)}
    groups: dict[tuple[Any, ...], dict[int, list[ListedRow]]] = {}
    for row in sorted(rows, key=lambda row: row["started_at"] or ""):
        sha = _commit_of(row)
        value = row[measure]  # type: ignore[literal-required]
        is_doubtful = measure != "val_loss" and (row["script_doubt"] is not None or (value or 0) <= 0)  # its clock lies
        if sha in order and value is not None and not is_doubtful:
            groups.setdefault(_key(row), {}).setdefault(order[sha], []).append(row)
    candidates = (_series(by_commit, commits, measure) for by_commit in groups.values())
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
        # two clones lie in different folders, and so does what describes their lines
        *(
            f"{key}={PurePath(str(value)).name if key == 'script.dialect' else value}"
            for key, value in settings.items()
            if key not in OF_REVISION
        ),
    )


def mean_of(values: Iterable[float], measure: str) -> float:
    """Returns the geometric mean of times, or the arithmetic mean of losses."""
    return stats.mean(values) if measure == "val_loss" else math.exp(stats.mean(map(math.log, values)))


def _series(rows: Mapping[int, Sequence[ListedRow]], commits: Sequence[Commit], measure: str) -> Series:
    """rows: {index of a commit: its runs in the order of their starts}."""
    points, counted_rows = [], {number: _counted(of_commit) for number, of_commit in rows.items()}
    disturbed = {
        number for number, of_commit in counted_rows.items() if all(row["machine_doubts"] for row in of_commit)
    }
    if measure == "val_loss" or len(rows) - len(disturbed) < max(2, len(disturbed)):  # what is left is no history
        disturbed = set()
    for number, of_commit in sorted(rows.items()):
        if number in disturbed:
            continue
        of_commit = of_commit if measure == "val_loss" else counted_rows[number]
        value = mean_of((row[measure] for row in of_commit), measure)  # type: ignore[literal-required]
        num_suspect = sum(row["validity"] == "suspect" for row in of_commit)
        points.append(Point(commits[number], value, len(of_commit), num_suspect))
    scaled = [point.value if measure == "val_loss" else math.log(point.value) for point in points]
    newest, *_ = newest_first = sorted(chain(*rows.values()), key=lambda row: row["started_at"] or "", reverse=True)
    optim = None if newest["optim"] == "unknown" else newest["optim"]
    name = ", ".join(filter(None, [newest["model"], optim, f"track {newest['track']}"]))
    machine = ", ".join(filter(None, [newest["device"], f"torch {newest['torch']}" if newest["torch"] else ""]))
    hidden = change_points.hidden_step(scaled) if len(scaled) >= change_points.MIN_VALUES else None
    raced = _raced(newest_first, commits, measure) if hidden is None else None
    return Series(name, machine, measure, points, change_points.find(scaled), hidden, _typed(newest_first), raced)


def _raced(newest_first: Sequence[ListedRow], commits: Sequence[Commit], measure: str) -> Raced | None:
    """Returns what races show of the two nearest of these commits that differ, the newest of several, or None.

    A later race of the same two commits that shows no difference refutes an earlier one.
    """
    key, end, shows = ("val_loss", "", LOSS) if measure == "val_loss" else ("time", "_pct", TIME)
    place = {commit: number for number, commit in enumerate(commits)}
    found: list[Raced] = []
    by_sha, compared_before = {commit.sha: commit for commit in commits}, set[tuple[Commit, Commit]]()
    ids = dict.fromkeys(
        (user_path(row["folder"]).parent.parent, str(row["race_id"])) for row in newest_first if row["race_id"]
    )
    for results, race_id in ids:
        try:
            race = race_folder.vouched(race_folder.of(results, race_id))
        except (Damaged, ValueError):
            continue
        baseline = race.get("baseline") or next(iter(race["arms"]), "")
        before = by_sha.get(race_folder.commit_of(race["arms"].get(baseline, {})) or "")
        for name, compared in race_folder.verdicts_of(race).items():
            after = by_sha.get(race_folder.commit_of(race["arms"].get(name, {})) or "")
            if not before or not after or (before, after) in compared_before:
                continue
            compared_before.add((before, after))
            if compared["verdict"] in shows:
                size = compared[key][f"change{end}"]
                shown_size = f"{size:+.4f} nats" if key == "val_loss" else f"{size:+.2f} %"
                found.append(Raced(before, after, compared["verdict"], shown_size))
    return min(found, key=lambda raced: abs(place[raced.after] - place[raced.before]), default=None)


def _counted(rows: Sequence[ListedRow]) -> list[ListedRow]:
    """Returns the runs of a commit whose times count, as METHOD says; those outside of races are as one race."""
    races: dict[str | None, list[ListedRow]] = {}
    for row in rows:
        races.setdefault(row["race_id"], []).append(row)
    undisturbed = ([row for row in race if not row["machine_doubts"]] for race in races.values())
    return next((race for race in undisturbed if len(race) > 1), next(iter(races.values())))


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
        remedy = "race them (./run.sh race HEAD~1 HEAD script=...), or name a folder with their runs (speedrun/results)"
        raise ValueError(f"{where}: no two commits have runs with this value in {shown(results_root())}: {remedy}")
    verdicts = [verdict for curve in series for verdict in _verdicts(curve)]
    blocks = [_section(curve, number) for number, curve in enumerate(series)]
    data = [_data(curve) for curve in series]
    return Document(f"Speed of {where}", verdicts, [*blocks, Section("Method", [Lines(METHOD)])], data)


def _verdicts(series: Series) -> Iterator[Verdict]:
    """Yields a verdict for each change, the newest first, or one that says that there is none."""
    for change in reversed(series.changes):
        before, after = (series.points[index].commit for index in (change.before, change.after))
        between = f"between {before.sha[:SHORT]} and {after.sha[:SHORT]} ({after.date})"
        sentence = f"{series.measure} changed by {series.step_of(change)} {between}"
        labels = ("better", "worse") if series.measure == "val_loss" else ("faster", "slower")
        is_found = change.after == change.before + 1
        way = f"to confirm {after.sha[:SHORT]} ({after.subject})" if is_found else "to find the commit"
        yield Verdict(sentence, labels[change.step > 0], series.name, [f"{way}: {series.command_of(change)}"])
    if not series.changes:
        num = len(series.points)
        sentence, about = f"no change of {series.measure} is shown in {num} commits", "undecided"
        if series.hidden_step is None:
            sentence = f"{sentence}; it takes {change_points.MIN_VALUES} to show one"
        elif series.is_steady:
            about = "steady"
        else:
            step = series.sized(series.hidden_step)
            size = f"{step:.2g} nats" if series.unit == "nats" else f"{two_digits(step)} {series.unit}"
            sentence = f"{sentence}; a change of {size} would be missed half of the time"
        badge = coloured(about, f"badge {'good' if series.is_steady else 'soft'}")
        possible = series.possible_change
        remedy = [f"to see if a commit since the best made it worse: {series.command_of(possible)}"] if possible else []
        if raced := series.raced:
            first, second = (commit.sha[:SHORT] for commit in (raced.before, raced.after))
            named = f"{series.measure} of {second} ({raced.after.subject})"
            alone = (
                f"from {change_points.MIN_VALUES} commits on a series shows changes without races; this one has {num}"
            )
            words = f"{named} differs by {raced.size} from {first}, by their race"
            yield Verdict(words, raced.verdict, series.name, [alone])
        else:
            yield Verdict(sentence, "", series.name, remedy, [badge])


def _section(series: Series, number: int) -> Section:
    levels, has_level = _levels(series), bool(series.changes) or series.is_steady
    labels = [f"{point.commit.sha[:SHORT]} {point.commit.subject}" for point in series.points]
    unit = MEASURES[series.measure]
    drawn = chart(
        f"history-{number}",
        f"{series.measure} by commit",
        "a point is the mean of a commit's runs" + "; the line is their level, and slopes where it changes" * has_level,
        "commit, oldest first",
        f"{series.measure}, {unit}" if not series.measure.endswith(unit) else series.measure,
        list(range(len(series.points))),
        [
            series_of("commits", [point.value for point in series.points], "points", labels),
            *([series_of("level", levels, "line")] if has_level else []),
        ],
        [mark_of(change.after, f"{series.step_of(change)}", "stall") for change in series.changes],
    ) | {"names": [point.commit.sha[:7] for point in series.points]}
    commits = [
        [
            code(point.commit.sha[:SHORT]),
            f"{point.value:.6g}",
            *(str(point.num_runs), str(point.num_suspect or "")),
            point.commit.date,
            point.commit.subject,
        ]
        for point in reversed(series.points)
    ]
    right = (False, True, True, True, False, False)
    heads = ("commit", series.measure, "runs", "suspect", "date", "subject")
    table = Table(heads, commits, right, limit=20, more=": --json has all", style="tight")
    return Section(f"{series.name}: {series.machine}", [Chart(drawn), table])


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
    command = series.possible_change and series.command_of(series.possible_change)
    about = {"name": series.name, "machine": series.machine, "measure": series.measure, "command": command}
    values = [
        {series.measure: point.value, "num_runs": point.num_runs, "num_suspect": point.num_suspect}
        for point in series.points
    ]
    points = [point.commit._asdict() | value for point, value in zip(series.points, values, strict=True)]
    ends = [{end: points[getattr(change, end)]["sha"] for end in ("before", "after")} for change in series.changes]
    changes = [{"change": series.step_of(change), "command": series.command_of(change)} for change in series.changes]
    return about | {"points": points, "changes": [end | change for end, change in zip(ends, changes, strict=True)]}


BADGE_MARK = b'aria-label="speed: '  # near the beginning of every badge


def badge(series: Sequence[Series]) -> str:
    """Returns an SVG badge for a README with the newest change of the longest series."""
    first = series[0]
    message, colour = f"undecided, {len(first.points)} commits", "#5f6368"
    if first.is_steady:
        message, colour = f"steady, {len(first.points)} commits", "#2e7d32"
    elif first.changes:
        newest = first.changes[-1]
        between = "..".join(first.points[at].commit.sha[:7] for at in (newest.before, newest.after))
        message = f"{first.step_of(newest).partition(' [')[0]} in {between}"
        colour = "#b3261e" if newest.step > 0 else "#2e7d32"
    elif raced := first.raced:
        message = f"{raced.size} in {raced.before.sha[:7]}..{raced.after.sha[:7]}"
        colour = "#b3261e" if raced.verdict in ("slower", "worse") else "#2e7d32"
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
