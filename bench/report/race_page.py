"""The page of a race: verdict, arms, picture, every run in its order, curves and plan.

Reads race.json (written by bench/plans/race/runner.py) and the records of the race's runs.
"""

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from bench.base import atomic, metric, private
from bench.base.reading import plain_file
from bench.base.reading.damage import Damaged, reading_record
from bench.base.text_table import counted
from bench.record import race_folder, run_folder
from bench.record.shape import Record
from bench.report import curves, run_facts, run_page, verdicts
from bench.report.verdicts import SHORT, Against, Options
from bench.web.chart import chart, series_of
from bench.web.document import (
    Arms,
    Block,
    Bullets,
    Chart,
    Columns,
    Document,
    Lines,
    Section,
    Shown,
    Table,
    Verbatim,
    Verdict,
    and_,
    code,
    link,
)

Run = dict[str, Any]  # {"arm", "discarded", "run": record, "folder"}

NAME, TEXT = "race.html", "race.md"


def write(folder: Path | str) -> None:
    """Writes race.md and race.html beside race.json, and report.html of each run."""
    folder, race = Path(folder), race_folder.vouched(folder)
    atomic.write_text(folder / TEXT, document_of(race, options=Options(why=True)).markdown() + "\n")
    write_run_pages(folder)
    atomic.write_text(folder / NAME, document(folder).html())


def write_run_pages(folder: Path | str) -> None:
    """Writes report.html in each run's folder, for the race's page to link; damaged records get none."""
    race = race_folder.vouched(folder)
    for run in _in_order(race, folder):
        if run["folder"].is_symlink() or run["folder"].parent.is_symlink():
            continue  # in a race sent by others, a link may lead to the reader's own files
        with contextlib.suppress(Damaged, OSError):
            atomic.write_text(run["folder"] / run_page.NAME, run_page.html(run["folder"]), durable=False)


def block(folder: Path | str) -> str:
    """Returns the verdict in Markdown, for a pull request."""
    path = Path(folder) / TEXT
    if path.is_symlink() or not path.exists():
        raise ValueError(f"--md {folder}: the race has no race.md yet: it is written when the race ends")
    return plain_file.text(path)


def document(folder: Path | str, at: Path | str | None = None) -> Document:
    """Returns the document of a race with everything that a page shows.  at: folder of the page, None: the race's."""
    with reading_record(folder):
        return document_of(race_folder.vouched(folder), folder, at or folder, Options(patch=True, why=True))


def document_of(
    race: race_folder.Race, folder: Path | str | None = None, at: Path | str | None = None, options: Options = SHORT
) -> Document:
    """Returns the document of a race.  folder: None for a text without single runs; at: folder of the page."""
    against = race_folder.verdicts_of(race)
    names, baseline = list(race["arms"]), race.get("baseline") or next(iter(race["arms"]))
    runs = [] if folder is None else _in_order(race, folder)
    at = at or folder or "."
    others = [name for name in names if name != baseline]
    who, common = _arms(race, baseline, against)
    counted_runs = [run for run in runs if not run["discarded"] and run["run"]["status"] == "complete"]
    complete = {name: [run["folder"] for run in counted_runs if run["arm"] == name] for name in names}
    blocks = [
        *verdicts.answer(who, common, against, options),
        *([_runs(runs, names, at)] if folder is not None else []),
        Section("Curves", [Columns([*map(Chart, curves.arm_charts(complete))])]),
        Bullets([f"The machine was not as before: {fault}." for fault in race.get("machine") or ()]),
        verdicts.excluded(against),
        verdicts.diagnosis(against, options),
        _plan(race),
    ]
    title = f"Race: {and_(others)} against {baseline}"
    page_title = f"{title}, track {race.get('track')}"
    way = staircase(folder, at, race) if folder is not None else None
    trained = run_facts.training(folders[0] for folders in complete.values() if folders)
    state = [trained, f"track {race.get('track')}", str(race.get("status")).replace("_", " ")]
    why = race.get("why") if against else None  # else the verdict says it
    facts = [*state, why, race.get("started_at"), code(str(race.get("race_id"))), way]
    return Document(title, _verdicts(race, against), blocks, race, page_title, [fact for fact in facts if fact])


def staircase(folder: Path | str, at: Path | str, race: Mapping[str, Any]) -> Shown | None:
    """Returns the link from a page in the folder at to the staircase of a ladder's race; None for other races."""
    if not ((race.get("plan") or {}).get("ladder") and race.get("result")):
        return None
    way = private.way(Path(folder) / race_folder.STAIRCASE, at)  # which is written later
    return link("its staircase", way and quote(way))


# ---- who raced, and how it ended


def _arms(race: race_folder.Race, baseline: str, against: Against) -> tuple[Arms, list[Block]]:
    """Returns each arm with what only it has, and a line with what all arms share."""
    arms, shared = race["arms"], race_folder.shared(race["arms"])
    codes = {_code(arm) for arm in arms.values()}
    rows = [(name, *_arm(name, arm, baseline, shared, len(codes) > 1, against)) for name, arm in arms.items()]
    common = [code(" ".join(shared))] * bool(shared) + [*codes] * (len(codes) == 1 and codes != {""})
    between = [", "] * (len(common) > 1)
    return Arms(rows), [Lines([["All arms: ", *common[:1], *between, *common[1:]]], is_soft=True)] if common else []


def _arm(
    name: str, arm: race_folder.Arm, baseline: str, shared: Sequence[str], with_code: bool, against: Against
) -> tuple[list[str], str]:
    own = " ".join(override for override in arm.get("overrides") or [] if override not in shared)
    own = race_folder.WHOLE_HASH.sub(r"\1", own)
    facts = [fact for fact in (arm.get("name"), code(own)) if fact]
    counts = ["baseline" if name == baseline else "", _code(arm) if with_code else ""]
    counts += [f"config {arm['config_id']}" if arm.get("config_id") else ""]
    counts += [verdicts.counts(against, name) or counted(len(arm.get("runs") or []), "run")]
    return facts, ", ".join(filter(None, counts))


def _code(arm: race_folder.Arm) -> str:
    """Returns text on the code that an arm ran; "" if it is unknown."""
    parts = [f"revision {arm['rev']}"] if arm.get("rev") else []
    if commit := arm.get("commit"):
        owner = "harness " if any(override.startswith("script") for override in arm.get("overrides") or ()) else ""
        parts.append(f"{owner}commit {commit[:8]}{' with changes' if arm.get('dirty') else ''}")
    return ", ".join(parts)


def _verdicts(race: race_folder.Race, against: Against) -> list[Verdict]:
    none = Verdict(f"no verdict: {race.get('why') or 'the race has not ended'}", "")
    num = sum(not look.get("planned") for look in race.get("looks") or [])
    about = {name: f"rev={race_folder.commit_of(arm)}" for name, arm in race["arms"].items()}
    *most, last = verdicts.verdicts(against, about) or [none]
    if race.get("unplanned_look") and num:
        doubt = f"Interim looks that were not planned: {num}. The verdict is not evidence."
        last = replace(last, notes=[*last.notes, doubt])
    return [*most, last]


def _plan(race: race_folder.Race) -> Section:
    """Returns the plan that was fixed before the first run, and how far it was followed."""
    plan, arms = race.get("plan") or {}, race["arms"]
    order = [entry["arm"] for entry in race.get("order") or () if not entry.get("discarded")]
    lines = [f"sha256 {race.get('plan_sha256')}"]
    if order:
        started = ", ".join(f"{len(arm.get('runs') or ())} {name}" for name, arm in arms.items())
        in_turn = "".join(name if len(name) == 1 else f" {name}" for name in order).strip()
        planned = f"planned {plan['n']} runs per arm, " if plan.get("n") else ""
        lines.append(f"{planned}started {started}; order {in_turn}, after a warm-up per arm")
    rules = [f"alpha {plan['alpha']:g}"] if plan.get("alpha") else []
    looks = plan.get("looks") or []
    at = f"{looks[0]}, and after every round" if plan.get("sequential") else ", ".join(map(str, looks))
    rules += [f"looks at {at}"] if looks else []
    lines += [", ".join(rules)] if order and rules else []
    if again := [run for arm in arms.values() for run in arm.get("interrupted_runs") or ()]:
        lines.append(f"interrupted and run again: {', '.join(again)}")
    whole = [Verbatim(json.dumps(race.get("plan"), indent=1), "json")]
    kept = Section("plan.json: fixed before the first run", whole, is_folded=True, is_page_only=True)
    return Section("Plan", [Lines(lines, is_soft=True), kept])


# ---- its runs


def _in_order(race: race_folder.Race, folder: Path | str) -> list[Run]:
    """Returns the runs that exist and can be read, in the order of their starts."""
    folder, runs = Path(folder).resolve(), []
    for arm, facts in race["arms"].items():
        for discarded, names in ((True, facts.get("warm_up_runs")), (False, facts.get("runs"))):
            paths = [race_folder.run_folder_of(folder, str(name)) for name in names or ()]
            for path in filter(None, paths):
                with contextlib.suppress(ValueError):
                    run = run_folder.read(path)
                    runs.append({"arm": arm, "discarded": discarded, "run": run, "folder": path})
    return sorted(runs, key=lambda entry: str(entry["run"]["started_at"]))


def _score_key(run: Record) -> str:
    return "score" if "score" in run["metrics"] else "val_loss"


def _points(runs: Sequence[Run], names: Sequence[str], at: Path | str) -> list[Chart]:
    """Draws each run's numbers as points of its arm, labelled with the run's id and linked to its page."""
    runs, charts = [run for run in runs if not run["discarded"]], []
    caption = "each run in the order it was started; warm-up runs are not drawn"
    pages = [run_page.link_to(run["folder"], at) for run in runs]
    goal = metric.from_goal(runs[0]["run"].get("goal") if runs else None)
    for id, title, key, unit in (
        ("train-time", "Train time", "train_s", "train time, s"),
        ("val-loss", f"Final {goal.name}", "score", goal.unit_in_full),
    ):
        keys = [_score_key(run["run"]) if key == "score" else key for run in runs]
        values = [(run["arm"], run["run"]["metrics"].get(key)) for run, key in zip(runs, keys, strict=True)]
        labels = [f"{run['run']['run_id']}\n{value}" for run, (_, value) in zip(runs, values, strict=True)]
        series = [
            series_of(name, [value if arm == name else None for arm, value in values], "points", labels, pages)
            for name in names
        ]
        if runs:
            spec = chart(id, title, caption, "run", unit, list(range(1, len(runs) + 1)), series)
            charts.append(Chart(spec))
    return charts


def _runs(runs: Sequence[Run], names: Sequence[str], at: Path | str) -> Section:
    rows, number = [], 0
    for entry in runs:
        number += not entry["discarded"]
        run, page = entry["run"], run_page.link_to(entry["folder"], at)
        metrics = [run["metrics"].get(key) for key in ("train_s", _score_key(run), "step_avg_ms")]
        metrics = [None if value is None else f"{value:.4f}" for value in metrics]
        nth = link("warm-up" if entry["discarded"] else str(number), page)  # a narrow screen shows the first columns
        seed = None if run["seed"] is None else str(run["seed"])
        rows.append(
            [
                nth,
                entry["arm"],
                seed,
                *metrics,
                run_page.state(run, "; ".join(run["validity_reasons"])),
                link(run["run_id"], page),
            ]
        )
    if not rows:
        return Section("Runs in order", [Lines(["The records of its runs are not here."], is_soft=True)])
    score = metric.from_goal(runs[0]["run"].get("goal")).name
    heads = ("run", "arm", "seed", "train time, s", score, "step_avg, ms", "status", "run id")
    listed: Block = Table(heads, rows, [False, False, *[True] * 4, False, False], style="tight")
    if len(names) > 2:
        listed = Section(f"All {len(rows)} runs", [listed], is_folded=True)
    return Section("Runs in order", [Columns(_points(runs, names, at)), listed])
