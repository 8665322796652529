"""The leaderboard on the results site: how the record came down, by track and device, as a table and a stepped chart.

What is a record is decided in bench/claims/; here it is drawn, so that site and `table --leaderboard` agree.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import TypedDict

from bench.base import utc
from bench.report.site import packed_pages
from bench.web import forest
from bench.web.page import Safe, details, section, soft, table, tag

Scale = Callable[[float], float]  # a value -> its place in the drawing

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 900, 260, 70, 20, 16, 40
HOUR_S, DAY_S = 3600, 86400
TIME_STEPS_S = [60, 300, 900, HOUR_S, 3 * HOUR_S, 6 * HOUR_S, 12 * HOUR_S]
TIME_STEPS_S += [days * DAY_S for days in (1, 2, 7, 14, 30, 60, 90, 180, 365, 730)]
HEAD = ("#", "train_s", "change", "what changed", "who", "date", "runs", "val_loss", "certificate", "logs")
ENTRIES = ("entry", "config_id", "n", "train_s", "sd", "val_loss", "p", "status", "certificate", "last run")
MAX_LOGS = 3  # linked of a record
MAX_ENTRIES = 50


class Entry(TypedDict):
    """Repeats of one config and code on one kind of machine."""

    name: str | None
    config_id: str | None
    run_ids: list[str]  # of those whose times count
    n: int
    num_lost: int
    train_s: float | None  # mean
    score: float | None  # by which it is placed: train_s, or steps where they are judged
    sd_s: float | None
    val_loss: float | None  # mean, nats a token
    p: float | None  # of the target's test
    status: str  # record, was a record, or why it is none
    certificate: str | None  # what the replays of its runs showed
    last_run: str  # UTC
    commit: str | None


class Record(Entry):
    number: int
    since: str  # UTC
    what: str | None  # changed against the record before; None: the first, or nothing known
    who: str | None
    change_pct: float | None
    measured: str  # how change_pct was


class Board(TypedDict):
    """A track on one device."""

    track: str
    device: str | None
    judged: str  # time or steps
    about: str
    records: list[Record]  # oldest first
    entries: list[Entry]


def leaderboard(boards: Iterable[Board], tracks: Iterable[str]) -> Safe:
    """The section of these boards.  tracks: of all runs; those without a board are named."""
    boards = list(boards)
    others = sorted(set(tracks) - {board["track"] for board in boards})
    shown = [part for board in boards for part in _board(board)]
    if others:
        shown.append(soft(f"No record is kept of {', '.join(others)}: this project has no rules for it."))
    return section("Records", *shown, id="records") if shown else Safe("")


def linked(boards: Iterable[Board]) -> set[str]:
    """The run_ids that leaderboard() links."""
    run_ids = {run_id for board in boards for record in board["records"] for run_id in record["run_ids"][:MAX_LOGS]}
    return run_ids | {entry["run_ids"][0] for board in boards for entry in board["entries"][:MAX_ENTRIES]}


def _board(board: Board) -> list[Safe]:
    title = tag("h3", f"{board['track']} on {board['device'] or 'an unknown device'}")
    lines = [_entry(entry, board) for entry in board["entries"][:MAX_ENTRIES]]
    entries = details(f"All entries ({len(board['entries'])})", table(_head(ENTRIES, board), lines))
    records = board["records"]
    if not records:
        return [title, soft(f"{board['about']} No record yet."), entries]
    chart = stepped(records, board["judged"]) if len(records) > 1 else Safe("")
    listed = table(_head(HEAD, board), [_line(record, board) for record in reversed(records)], class_="records")
    return [title, soft(board["about"]), chart, listed, entries]


def _head(names: Sequence[str], board: Board) -> list[str]:
    return ["steps" if name == "train_s" and board["judged"] == "steps" else name for name in names]


def _score(entry: Entry, board: Board) -> str | None:
    return _number(entry["score"], "," if board["judged"] == "steps" else ",.3f")


def _line(record: Record, board: Board) -> tuple[object, ...]:
    what = record["what"] or ("the first" if record["change_pct"] is None else None)
    change = None if record["change_pct"] is None else f"{record['change_pct']:+.2f} %"
    run_ids = enumerate(record["run_ids"][:MAX_LOGS], 1)
    logs = [tag("a", str(number), href=packed_pages.link(run_id)) for number, run_id in run_ids]
    return (
        record["number"],
        tag("b", _score(record, board)),
        change and tag("span", change, title=record["measured"]),
        tag("span", tag("b", record["name"]), f": {what}" if what else ""),
        record["who"],
        record["since"][:10],
        record["n"],
        _number(record["val_loss"], ".4f"),
        record["certificate"],
        tag("span", *(part for link in logs for part in (link, " "))),
    )


def _entry(entry: Entry, board: Board) -> tuple[object, ...]:
    lost = f", {entry['num_lost']} failed" if entry["num_lost"] else ""
    return (
        tag("a", entry["name"], href=packed_pages.link(entry["run_ids"][0])),
        entry["config_id"],
        f"{entry['n']}{lost}",
        _score(entry, board),
        _number(None if board["judged"] == "steps" else entry["sd_s"], ".3f"),
        _number(entry["val_loss"], ".4f"),
        _number(entry["p"], ".2g"),
        entry["status"],
        entry["certificate"],
        entry["last_run"][:10],
    )


def _number(value: float | None, form: str) -> str | None:
    return None if value is None else f"{value:{form}}"


# ---- the chart


def stepped(records: list[Record], judged: str = "time") -> Safe:
    """Train time, or steps where they are judged, by date: an SVG that needs no script.

    A step at each record, each a link to its first run.
    """
    dates_s, scores = (
        [utc.seconds(record["since"]) for record in records],
        [record["score"] or 0.0 for record in records],
    )
    what, unit, form = ("steps", "steps", ",") if judged == "steps" else ("train time", "s", ",.3f")
    across = _scale(*_padded(dates_s, HOUR_S), LEFT, WIDTH - RIGHT)
    up = _scale(*_padded(scores, 1e-3), HEIGHT - BOTTOM, TOP)
    points = [(across(date_s), up(score)) for date_s, score in zip(dates_s, scores, strict=True)]
    path = f"M{points[0][0]:.1f},{points[0][1]:.1f}"
    path += "".join(f"H{x:.1f}V{y:.1f}" for x, y in points[1:]) + f"H{WIDTH - RIGHT}"
    axis = what if what == unit else f"{what}, {unit}"
    shapes = [*_grid(dates_s, scores, across, up, axis), tag("path", d=path, class_="step")]
    shapes += [
        _dot(record, f"{score:{form}} {unit}", *point)
        for record, score, point in zip(records, scores, points, strict=True)
    ]
    low_high = f"from {scores[0]:{form}} to {scores[-1]:{form}} {unit}"
    label = f"Record {what} by date: {low_high} in {len(records)} records"
    svg = tag("svg", *shapes, viewBox=f"0 0 {WIDTH} {HEIGHT}", role="group", aria_label=label)
    return tag("figure", svg, class_="history")


def _dot(record: Record, score: str, x: float, y: float) -> Safe:
    """Its label shows while the pointer or the focus is on it, on the side where there is room."""
    label = f"#{record['number']}  {score}  {record['name']}  {record['since'][:10]}"
    side = "end" if x > WIDTH / 2 else "start"
    text = tag("text", label, x=f"{x:.1f}", y=f"{y - 12 if y > TOP + 20 else y + 24:.1f}", text_anchor=side)
    circle = tag("circle", cx=f"{x:.1f}", cy=f"{y:.1f}", r=6)
    return tag("a", tag("title", label), circle, text, href=packed_pages.link(record["run_ids"][0]), aria_label=label)


def _grid(dates_s: Sequence[float], scores: Sequence[float], across: Scale, up: Scale, axis: str) -> Iterator[Safe]:
    for score in forest.ticks(*_padded(scores, 1e-3)):
        y = f"{up(score):.1f}"
        yield tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=y, y2=y, class_="grid")
        yield tag("text", f"{score:,.6g}", x=LEFT - 8, y=y, dy="0.35em", text_anchor="end")
    low_s, high_s = _padded(dates_s, HOUR_S)
    for date_s, label in time_ticks(low_s, high_s):
        yield tag("text", label, x=f"{across(date_s):.1f}", y=HEIGHT - BOTTOM + 20, text_anchor="middle")
    middle = HEIGHT / 2
    style = {"class_": "axis", "text_anchor": "middle"}
    yield tag("text", axis, x=14, y=middle, transform=f"rotate(-90 14 {middle})", **style)
    yield tag("text", "date (UTC)", x=(LEFT + WIDTH - RIGHT) / 2, y=HEIGHT - 4, **style)


def _padded(values: Sequence[float], least: float) -> tuple[float, float]:
    low, high = min(values), max(values)
    margin = 0.06 * max(high - low, least)
    return low - margin, high + margin


def _scale(low: float, high: float, start: float, end: float) -> Scale:
    return lambda value: start + (end - start) * (value - low) / (high - low)


def time_ticks(low_s: float, high_s: float) -> list[tuple[float, str]]:
    """[(seconds since 1970, its label)]: times of day within a day, else dates."""
    step_s = next(
        (step_s for step_s in TIME_STEPS_S if (high_s - low_s) / step_s <= forest.NUM_TICKS), TIME_STEPS_S[-1]
    )
    form = "%m-%d %H:%M" if step_s < DAY_S else "%Y-%m-%d"
    numbers = range(math.ceil(low_s / step_s), math.floor(high_s / step_s) + 1)
    return [(number * step_s, datetime.fromtimestamp(number * step_s, UTC).strftime(form)) for number in numbers]
