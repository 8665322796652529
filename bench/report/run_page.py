"""The page of one run: how it ended and its numbers, then loss and step times, then everything that was recorded."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from bench.analysis.memory import page as memory_page
from bench.analysis.memory import pickles
from bench.base import escape, private, text_table
from bench.base.metric import VAL_LOSS, from_goal
from bench.base.reading.damage import reading_record
from bench.record import race_folder, run_folder, step_files
from bench.record.metrics import score_text, target_of
from bench.record.shape import Record
from bench.report import run_charts, run_facts, trace_page
from bench.web.document import (
    Block,
    Bullets,
    Chart,
    Columns,
    Document,
    Lines,
    Picture,
    Section,
    Shown,
    Verdict,
    code,
    coloured,
    link,
)
from bench.web.page import join, tag, tiles

RANK = re.compile(r"rank(\d+)")  # in the file name of a snapshot
MAX_SHOWN = 3  # most snapshots shown; each adds some 200 KB of charts
NAME = "report.html"  # file name in the run's folder
TILES = (  # (metric, label, decimals)
    ("val_loss", "val_loss, nats per token", 4),
    ("train_s", "train time, s", 2),
    ("step_avg_ms", "step_avg, ms", 2),
    ("tokens_per_s", "tokens/s", 0),
    ("mfu", "MFU", 3),
    ("peak_mem_gib", "peak memory, GiB", 2),
    ("energy_j", "energy, J", 0),
    ("num_steps", "steps", 0),
)
COLOUR = {"valid": "good", "suspect": "doubt", "invalid": "bad"}


def html(
    folder: Path | str,
    assets: str | None = None,
    back: str | None = None,
    at: Path | str | None = None,
    explained: bool = True,
) -> str:
    """Returns the HTML page of a run folder.  assets: as in page.page(); back: link to the site's list.

    at: the folder of the page, None for the run's.  explained: include where a step's time goes, which reads traces and
    takes up to a second.
    """
    with reading_record(folder):  # damage may show only when the page is drawn
        return document(folder, at, back, explained).html(assets)


def document(
    folder: Path | str, at: Path | str | None = None, back: str | None = None, explained: bool = True
) -> Document:
    """Returns the Document from which html() makes the page."""
    folder, at = Path(folder), Path(at or folder)
    run = run_folder.read(folder)
    rows, events = step_files.read(folder), step_files.read_events(folder)
    origin = run_facts.made_of(run)
    log = [run_facts.imported_section(run), run_facts.unknown_section(run)] if run_facts.is_imported(run) else []
    blocks: list[Block] = [
        Section("Verdict", _verdict(run)),
        Picture(tiles(_metrics(run))),
        Columns([Chart(spec) for spec in run_charts.specs_of(folder, run, rows, events)]),
        Columns(
            [
                *log,
                run_facts.script_section(run),
                run_facts.section_of(run, rows, events),
                run_facts.where(folder, run, at),
            ]
        ),
    ]
    if explained:
        from bench.analysis.explain import document as explain  # imports numpy, which races must start without

        blocks.append(explain.section_of_run(folder))
    blocks += [
        run_facts.stages(run),
        run_facts.summaries(run),
        trace_page.section_of_run(folder),
        memory_of_run(folder),
    ]
    blocks.append(run_facts.files(folder, run, at))
    ways: list[list[str]] = [[link("All runs", back)]] if back else []
    ways += [["Race ", _race(run, folder, at)]] if run.get("race") else []
    seed = "" if run["seed"] is None else f" seed {run['seed']}"
    title = f"{run['name']}{seed}, {run['track']}{', imported' if run_facts.is_imported(run) else ''}"
    about = Shown(run["run_id"] + origin, join([tag("code", run["run_id"]), origin]))
    return Document(title, [], blocks, about=[about], ways=ways)


def state(run: Mapping[str, Any], hint: str = "") -> Shown:
    """Returns the status of a record or row, or the validity of a complete one, in its colour."""
    if run["status"] != "complete":
        return coloured(run["status"], "bad", hint)
    return coloured(run["validity"], COLOUR.get(run["validity"], "soft"), hint)


def link_to(folder: Path | str | None, at: Path | str) -> str | None:
    """Returns the link from a page in the folder at to the page of a run, or None without one (folder None: a log)."""
    path = Path(folder).resolve() / NAME if folder else None
    way = private.way(path, at) if path and path.exists() else None
    return way and quote(way)


def block(folder: Path | str) -> str:
    """Returns a run in Markdown, for a pull request."""
    with reading_record(folder):
        return _block(folder)


def _block(folder: Path | str) -> str:
    run = run_folder.read(folder)
    env, source = run["environment"], run["code"].get("source_sha256")
    machine = f"{run_facts.device(env) or 'unknown machine'}, torch {env.get('torch') or 'unknown'}"
    facts = (run["name"], run["track"], sentence(run), run["run_id"], machine)
    name, track, how, run_id, where = (escape.markdown(str(fact)) for fact in facts)
    seed = "" if run["seed"] is None else f", seed {run['seed']}"
    lines = [f"**{name}**{seed}, track {track}: {how}", ""]
    if metrics := _metrics(run):
        labels, values = zip(*metrics)
        lines += [text_table.render(labels, [values], [True] * len(labels), "github"), ""]
    source = f"source {source[:12]}" if source else "source unknown"
    state = run_facts.IMPORTED if run_facts.is_imported(run) else run["validity"]
    return "\n".join([*lines, f"`{run_id}`, {where}, {source}, {state}\n"])


def sentence(run: Record) -> str:
    """Returns a sentence on how the run ended."""
    metrics, failure = run["metrics"], run["failure"]
    if run["status"] == "running":
        return "The run has not ended."
    if failure:
        where = "" if failure.get("step") is None else f" at step {failure['step']}"
        hint = (failure.get("hint") or "see the logs").rstrip(".")
        return f"It ended{where} ({failure['kind']}): {str(failure['message']).rstrip('.')}. Hint: {hint}."
    text = f"{score_text(run)} after {metrics['num_steps']} steps"
    if metrics.get("train_s") is not None:
        text += f" in {metrics['train_s']:.2f} s"
    if run_facts.is_imported(run):
        text += ", as its log says"
    elif run.get("script"):
        wall_s = run["measured"].get("wall_of_lines_s")
        text += ", as the script says" + ("" if wall_s is None else f" (its lines came in {wall_s:.2f} s)")
    if metrics.get("target_reached") is not None:
        goal = run["goal"] or {}
        score, gap = target_of(goal), goal.get("target_gap_nats")
        target = f"{score:.6g}" if score is not None else f"{gap} above the floor"
        text += f"; the target, {target}, was {'reached' if metrics['target_reached'] else 'missed'}"
    return text + ". One run has no interval and no verdict about speed."


def _metrics(run: Record) -> list[tuple[str, str]]:
    """Returns (label, value as text) of the metrics that were measured."""
    goal = from_goal(run.get("goal"))
    score_tile = [("score", ", ".join(filter(None, (goal.name, goal.unit))), 5)] if goal != VAL_LOSS else []
    shown = [(label, run["metrics"].get(name), decimals) for name, label, decimals in (*score_tile, *TILES)]
    return [(label, f"{value:,.{decimals}f}") for label, value, decimals in shown if value is not None]


def _verdict(run: Record) -> list[Block]:
    status, validity = run["status"], run["validity"]
    badges = [(str(status), "good" if status == "complete" else "bad"), (str(validity), COLOUR.get(validity, "soft"))]
    if run_facts.is_imported(run):
        badges = [(run_facts.IMPORTED, "doubt"), (f"log {'' if status == 'complete' else 'in'}complete", "soft")]
        badges += [("suspect", "doubt")] * (validity == "suspect")  # none is green, as the harness did not watch it
    verdict = Verdict(sentence(run), "", badges=[coloured(text, f"badge {colour}") for text, colour in badges])
    changed = [f"Changed against the track: {deviation}" for deviation in run["deviations"]]
    return [verdict, Bullets(run["validity_reasons"]), Bullets(changed)]


def _race(run: Record, folder: Path, at: Path) -> Shown:
    """Returns the run's race and arm, linked to the race's page or folder if that exists."""
    race = run["race"] or {}
    text = f"{race.get('race_id')}, {'warm-up of ' if race.get('discarded') else ''}arm {race.get('arm')}"
    try:
        target = race_folder.of(folder.resolve().parent.parent, str(race.get("race_id")))
    except ValueError:
        return code(text)
    has_ended = (target / "race.json").exists()  # the page is written together with it
    way = private.way(target / "race.html" if has_ended else target, at) if target.exists() else None
    return link(text, way and quote(way))


def memory_of_run(folder: Path) -> Section:
    """Returns the section of a run's memory snapshots; empty without any.  A damaged one is reported in a sentence."""
    paths = sorted(pickles.in_folder(folder), key=lambda path: int("".join(RANK.findall(path.name)[:1]) or 0))
    parts: list[Block] = []
    for num, path in enumerate(paths[:MAX_SHOWN]):
        try:
            parts.append(Section(path.name, memory_page.summary(path, f"memory-{num}")))
        except (OSError, ValueError) as error:
            why = f"It cannot be read: {str(error).replace(str(path), path.name)}"
            parts.append(Section(path.name, [Lines([why], is_soft=True)]))
    notes = [f"Not shown: {len(paths) - MAX_SHOWN} more in the folder."] if len(paths) > MAX_SHOWN else []
    notes.append("./run.sh memory RUN gives each snapshot a page of its own, with stacks and segments.")
    return Section("Memory", [*parts, Lines(notes, is_soft=True)] if paths else [])
