"""Writes and reads the files of a sweep, in results/sweeps/<sweep_id>/:

    sweep.json     what was requested and how the sweep ended; written before its first run and at its end
    points.jsonl   {"number", "overrides", "folder"} of each point that has a record, the newest last;
                   points.NUMBER.jsonl if another process ran the point, so that two machines never append to one file
    sweep.html     its page (bench/report/sweep_page.py)
    study.json     only for ./run.sh study: what it compares and how; study.html, .md, .tex and .csv are its answer

Each run that a sweep starts names it in run.json["sweep"]; a run that was complete before is only in points.jsonl.
"""

import contextlib
import hashlib
import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NotRequired, TypedDict, TypeVar, cast

from bench.base import atomic, credentials, private, utc
from bench.base.metric import VAL_LOSS, Metric, named
from bench.base.paths import REPO, results_root, shown
from bench.base.reading import damage, json_file, plain_file
from bench.config import overrides as config_overrides
from bench.record import race_folder, run_folder

FOLDER, NAME, POINTS = "sweeps", "sweep.json", "points.jsonl"
LOCAL = ".local.tmp"  # {override as the other files have it: as typed, with private paths}; stays on this machine
STUDY = "study.json"
SCHEMA_VERSION = 1
RowT = TypeVar("RowT", bound=Mapping[str, Any])


class Facts(TypedDict):
    """sweep.json."""

    schema_version: int
    sweep_id: str
    command: list[str]  # what the user typed
    points: list[list[str]]  # the overrides of every requested run
    budget_s: float | None  # of the last call; None: no limit
    started_at: str  # UTC, of the last call, like ended_at
    ended_at: str | None  # None: it is running, or was killed
    why: str | None  # why not every point has a run; None: all have


class Study(TypedDict):
    """study.json: arms that are tuned with equal budgets, and the race of their best settings."""

    schema_version: int
    arms: dict[str, list[str]]  # {name in the race: the override that makes the arm}, the baseline first
    common: list[str]  # overrides that all arms share
    tune: str  # the setting that is tuned
    starts: dict[str, float]  # {arm: the first value of that setting}
    seed: int  # of every trial; the race uses others
    n: int  # runs per arm of the race
    alpha: float  # shared by the verdicts on loss and on time
    tokens: int  # per run; 0: not known, as of a script
    metric: NotRequired[list[str]]  # name, unit and direction of the goal's metric; missing: val_loss
    num_trials: int | None  # per arm; None: the budget is a duration, and that of a run is not known yet
    race_id: str | None  # None: the race has not begun


class Kept(TypedDict):
    """A line of points.jsonl: a point that has a record."""

    number: int
    overrides: list[str]
    folder: str


class Point(NamedTuple):
    """A requested run of a sweep.  folder: that of its record, None without one."""

    number: int
    overrides: list[str]
    folder: Path | None


def id_of(overrides: Iterable[str], config_ids: Iterable[str], source_sha256: str) -> str:
    """Returns the id of a sweep, so that the same command continues it as long as code, yamls and data are the same.

    config_ids: of its points, or of a search's own settings, each with what tells its data apart.  As with these, the
    price of the hardware does not matter.
    """
    settings = sorted(text for text in overrides if not text.lstrip("+").startswith("hardware.price_usd_per_hour="))
    content = [settings, sorted(config_ids), source_sha256]
    return f"sweep-{hashlib.sha256(json.dumps(content).encode()).hexdigest()[:8]}"


def public(overrides: Iterable[str]) -> list[str]:
    """Returns overrides without private paths and names, as the files of a sweep have them."""
    return [private.redact(text, REPO) for text in overrides]


def typed(folder: Path, overrides: Iterable[str]) -> list[str]:
    """Returns public() overrides of a sweep as its user typed them, as far as this machine knows."""
    known = {text: own for text, own in _typed_by_public(folder).items() if public([str(own)]) == [text]}
    return [str(known.get(text, text)) for text in overrides]


def _typed_by_public(folder: Path) -> dict[str, Any]:
    return cast(dict[str, Any], atomic.read_json(folder / LOCAL, {}))


def _remember(folder: Path, overrides: Iterable[str]) -> None:
    """Keeps for typed() what public() changes."""
    known, overrides = _typed_by_public(folder), list(overrides)
    pairs = zip(public(overrides), overrides, strict=True)
    changed = {short: text for short, text in pairs if short != text == credentials.redacted(text)}  # no credential
    if changed.items() - known.items():
        atomic.write_for_owner(folder / LOCAL, known | changed)


def begin(
    results: Path | str, sweep_id: str, command: Sequence[str], points: Sequence[Sequence[str]], budget_s: float | None
) -> Path:
    """Writes sweep.json of a sweep that starts or continues.  Returns the absolute path of its folder."""
    folder = Path(results).absolute() / FOLDER / sweep_id
    folder.mkdir(parents=True, exist_ok=True)
    _remember(folder, itertools.chain(command, *points))
    facts: Facts = {
        "schema_version": SCHEMA_VERSION,
        "sweep_id": sweep_id,
        "command": public(command),
        "points": list(map(public, points)),
        "budget_s": budget_s,
        "started_at": utc.now(),
        "ended_at": None,
        "why": None,
    }
    atomic.write_json(folder / NAME, facts)
    return folder


def keep(folder: Path, number: int, overrides: Sequence[str], run: Mapping[str, Any], apart: bool = False) -> None:
    """Notes that a point has a record.  run: with "folder", as from launch(); apart: other processes write too."""
    path = Path(run["folder"]).absolute()
    results = folder.parent.parent
    name = path.relative_to(results).as_posix() if path.is_relative_to(results) else str(path)
    path = folder / (f"points.{number}.jsonl" if apart else POINTS)
    with open(path, "a", opener=plain_file.open_here) as file:
        file.write(json.dumps({"number": number, "overrides": public(overrides), "folder": name}) + "\n")


def end(folder: Path, why: str | None = None) -> None:
    """Notes that the sweep has ended.  why: the reason if not every point has a run, else None."""
    hide(folder)
    atomic.write_json(folder / NAME, {**read(folder), "ended_at": utc.now(), "why": why})


def hide(folder: Path) -> None:
    """Redacts Hydra's own file of a sweep, which nothing of ours reads."""
    path = folder / "multirun.yaml"
    with contextlib.suppress(OSError, ValueError):
        if (text := plain_file.text(path)) != (public_text := private.redact(text, REPO)):
            atomic.write_text(path, public_text)


def read(folder: Path | str) -> Facts:
    """Reads sweep.json.  Raises ValueError if it is missing or damaged."""
    return cast(Facts, json_file.read(Path(folder) / NAME, Facts))


def read_study(folder: Path | str) -> Study:
    """Reads study.json.  Raises ValueError if it is missing or damaged."""
    path = Path(folder) / STUDY
    study = cast(Study, json_file.read(path, Study))
    if unfit := [name for name in study["arms"] if not race_folder.ARM.fullmatch(name)]:  # a race would read settings
        raise damage.Damaged(f"{path}: arms: {unfit[0]!r} is no name of an arm: the file was damaged, restore it")
    return study


def tokens_text(study: Study) -> str:
    """Returns " of 1,000 tokens each", "" if the number is not known."""
    return f" of {study['tokens']:,} tokens each" if study["tokens"] else ""


def write_study(folder: Path, study: Study) -> None:
    """Writes study.json, with overrides as public() has them."""
    _remember(folder, itertools.chain(study["common"], *study["arms"].values()))
    arms = {name: public(arm) for name, arm in study["arms"].items()}
    atomic.write_json(folder / STUDY, study | {"arms": arms, "common": public(study["common"])})


def trials(folder: Path | str, study: Study) -> dict[str, dict[float, float]]:
    """Returns {arm: {value of the setting: metric}} of a study's trials that have ended, in the order of the values.

    The metric is that of the goal; for a run that diverged, it is infinite.  A trial that failed is to be made again.
    Raises ValueError if one has no metric to compare.
    """
    metric = metric_of(study)
    metric_by_value: dict[str, dict[float, float]] = {name: {} for name in study["arms"]}
    code_of: dict[str, str | None] = {}
    for point in points(folder):
        name = next(name for name, settings in study["arms"].items() if set(public(settings)) <= set(point.overrides))
        run = point.folder and run_folder.read(point.folder)
        if not run:
            continue
        if code_of.setdefault(name, run["code"]["source_sha256"]) != run["code"]["source_sha256"]:
            raise ValueError(f"{folder}: the code of {name} changed between its trials: remove it, repeat the command")
        loss = trial_metric(run, metric)
        if (run["failure"] or {}).get("kind") == "non_finite_loss":
            loss = metric.sign * math.inf
        elif run["status"] != "complete":
            continue
        elif run["validity"] == "invalid" or loss is None:
            raise ValueError(f"{name}: {run['run_id']} has no {metric.name}: {'; '.join(run['validity_reasons'])}")
        metric_by_value[name][float(values(point.overrides)[study["tune"]])] = float(loss)
    return {name: dict(sorted(tried.items())) for name, tried in metric_by_value.items()}


def trial_metric(run: Mapping[str, Any], metric: Metric) -> float | None:
    """Returns the metric of a trial's record; None if it has none."""
    return cast(float | None, run["metrics"].get("val_loss" if metric == VAL_LOSS else "score"))


def metric_of(study: Study) -> Metric:
    """Returns the metric by which a study's trials are compared."""
    return named(*study.get("metric", ()))


def best_of(tried: Mapping[float, float], metric: Metric = VAL_LOSS) -> float:
    """Returns the value with the best metric among an arm's trials(); the lowest one if several are equally good."""
    return min(tried, key=lambda value: (metric.sign * tried[value], value))


def points(folder: Path | str) -> list[Point]:
    """Returns all requested points in order, with public() overrides and their newest records."""
    folder = Path(folder)
    kept: dict[tuple[str, ...], str] = {}
    for line in _lines(folder):
        kept[tuple(public(line["overrides"]))] = line["folder"]
    requested = [tuple(public(overrides)) for overrides in read(folder)["points"]]
    points = []
    for number, overrides in enumerate(dict.fromkeys([*requested, *kept])):  # a search adds points as it goes
        results, name = folder.parent.parent, kept.get(overrides, "")
        places = (results / name, results.joinpath(*Path(name).parts[-2:]))  # the results folder may have been moved
        path = next((path for path in places if name and (path / "run.json").is_file()), None)
        points.append(Point(number, list(overrides), path))
    return points


def _lines(folder: Path) -> Iterator[Kept]:
    for path in sorted(folder.glob("points*.jsonl"), key=lambda path: path.stat().st_mtime_ns):
        for number, line in enumerate(plain_file.text(path).splitlines(), 1):
            yield json_file.parsed(line, f"{path}, line {number}", Kept)


def axes(points: Sequence[Sequence[str]]) -> dict[str, list[Any]]:
    """Returns {key: its values in order} of the overrides in which the points differ."""
    by_key: dict[str, dict[str, Any]] = {}
    for overrides in points:
        for key, value in values(overrides).items():
            by_key.setdefault(key, {})[json.dumps(value)] = value
    return {key: list(by_text.values()) for key, by_text in by_key.items() if len(by_text) > 1}


def its_own(overrides: Sequence[str], points: Iterable[Sequence[str]]) -> str:
    """Returns the overrides of a point in which the points differ, as text; all of them if they do not differ."""
    differing = axes([overrides, *points])
    return " ".join([override for override in overrides if override.partition("=")[0] in differing] or overrides)


def values(overrides: Iterable[str]) -> dict[str, Any]:
    """Parses overrides into {key: value}, with numbers as numbers."""
    return {key: config_overrides.value_of(text) for key, _, text in (pair.partition("=") for pair in overrides)}


# ---- finding


def folders(results: Path | str | None = None) -> list[Path]:
    """Returns the folders of all sweeps in a results folder; None: in this machine's own."""
    return sorted(path.parent for path in Path(results or results_root()).glob(f"{FOLDER}/*/{NAME}"))


def chosen(rows: Sequence[RowT], part: str, own_ids: Iterable[str]) -> list[RowT]:
    """Returns the rows of the runs of a sweep: those with its id and those in its points.jsonl.

    part: of the id; own_ids: those in records.  Raises ValueError if it is part of no id, or of several.
    """
    ids = sorted({folder.name for folder in folders()} | set(own_ids))
    fitting = [part] if part in ids else [sweep_id for sweep_id in ids if part in sweep_id]
    if len(fitting) != 1:
        place = shown(results_root())
        why = f"is part of {len(fitting)} ids" if fitting else f"there is no such sweep in {place} (SPEEDRUN_RESULTS)"
        raise ValueError(f"--sweep {part}: {why}; choose from {', '.join(fitting or ids) or 'none: run -m makes one'}")
    members = {Path(line["folder"]).name for line in _lines(results_root() / FOLDER / fitting[0])}
    return [row for row in rows if row["sweep_id"] == fitting[0] or row["run_id"] in members]
