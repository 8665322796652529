"""Renders comparisons with one baseline as a Document: verdicts, arms, what the verdicts rest on, numbers, diagnosis.

All content comes from the Comparisons.  The document of a race (race_page.py) has the same parts.  The argument against
is always {name of the candidate: bench.compare.verdict.Comparison}, as in race.json, which may be of an older version.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.analysis.diagnosis import between_runs
from bench.base import escape
from bench.base.paths import brief
from bench.base.text_table import counted
from bench.compare import wording
from bench.compare.selection import Arm
from bench.record.race_folder import WHOLE_HASH
from bench.record.rows import metric_of
from bench.report import curves, run_page
from bench.report.basis import basis, differences, in_brief, once
from bench.web import document, forest
from bench.web.document import Block, Chart, Columns, Document, Hint, Lines, Section, Table, code, link

Against = Mapping[str, Mapping[str, Any]]  # {candidate: Comparison}; an older race lacks some keys

CSV_COLUMNS = (
    *("against", "metric", "verdict", "a_mean", "b_mean", "change", "unit"),
    *("ci95_low", "ci95_high", "p", "p_holm", "n_a", "n_b", "mde_pct", "baseline", "candidate"),
)
REVISION = re.compile(r"\brev=([0-9a-f]{7})[0-9a-f]{33}\b")
WITHIN_RUN = "within-run times, for diagnosis only"
PANELS = (  # (key of the comparison, title, (meaning of a negative change, of a positive one))
    ("time", "Train time", ("faster", "slower")),
    ("val_loss", "val_loss", ("better", "worse")),
    ("memory", "Peak memory", ("less", "more")),
    ("energy", "Energy", ("less", "more")),
)


@dataclass(frozen=True)
class Options:
    """What a document includes."""

    patch: bool = False  # the full diff of the source
    why: bool = False  # where the time went
    command: str = ""  # of which --why and --diff are options, with a space at its end; "": the one just typed


SHORT = Options()


def document_of(
    arms: Sequence[Arm], results: Sequence[Mapping[str, Any]], at: Path | str | None = None, options: Options = SHORT
) -> Document:
    """Returns the answer of ./run.sh compare.  arms: the baseline first; results: each other arm's comparison with it.

    at: the folder of the page, for links; None to omit what only a page shows.
    """
    first = results[0]
    names = [first["arms"][0], *(comparison["arms"][1] for comparison in results)]
    about = [first["about"][0], *(comparison["about"][1] for comparison in results)]
    against = dict(zip(names[1:], results, strict=True))
    title = f"{document.and_(names[1:])} against {names[0]}"
    named = [replace(arm, name=name) for arm, name in zip(arms, names, strict=True)] if at is not None else []
    about = [brief(text) for text in about]  # without local paths, because answers are sent to others
    who = document.Arms(
        [
            (name, [WHOLE_HASH.sub(r"\1", setting)], counts(against, name))
            for name, setting in zip(names, about, strict=True)
        ]
    )
    charts = [Chart(spec) for spec in curves.charts_of_arms(named)]
    blocks = [
        *answer(who, (), against, options),
        Section("Curves", [Columns(charts)]),
        excluded(against),
        Section("Runs", [_runs(arm, at) for arm in named if at is not None]),
        diagnosis(against, options),
    ]
    return Document(
        title, verdicts(against, dict(zip(names, about, strict=True))), blocks, page_title=f"Comparison: {title}"
    )


def answer(who: document.Arms, extra: Sequence[Block], against: Against, options: Options) -> list[Block]:
    """Returns arms, what the verdicts rest on, the picture of the changes and the numbers.

    Of several candidates the picture and the numbers come first; a page folds what is about one of them, and a text
    without the diffs says once what several verdicts rest on.
    """
    baseline, *_ = names = [name for name, *_ in who.arms]
    changes = {
        name: differences(baseline, name, facts, options.patch, options.command) for name, facts in against.items()
    }
    drawn, numbered = panels(against, names), numbers(baseline, against)
    picture = document.Drawn("verdict", "Verdict", forest.plot(drawn), forest.height_px(drawn))
    pictures = [document.Picture(picture)] if drawn else []
    if len(against) > 1:
        rests = "What each verdict rests on"
        if not options.patch:
            others = {name: [*_sentences(baseline, name, facts, False)] for name, facts in against.items()}
            hint = Hint(f"{options.command}--diff shows this for each arm, and the lines that it changes")
            pairs: list[Block] = [*in_brief(baseline, against, others), hint]
        else:
            pairs = [
                Section(
                    f"{name} against {baseline}",
                    [Lines([*_sentences(baseline, name, facts)]), *basis(facts), *changes[name]],
                    is_folded=True,
                )
                for name, facts in against.items()
            ]
        return [*pictures, numbered, Section("Arms", [who, *extra]), Section(rests, pairs)]
    sides = [Section("Arms", [who, *extra, *(block for blocks in changes.values() for block in blocks)])]
    sides += [Section("What the verdict rests on", basis(facts)) for facts in against.values()]
    return [Columns(sides), *pictures, numbered]


def _runs(arm: Arm, at: Path | str) -> Section:
    rows = []
    for row, folder in zip(arm.rows, arm.folders, strict=True):
        numbers = [None if row[key] is None else f"{row[key]:.4f}" for key in ("train_s", "score", "step_avg_ms")]
        seed = None if row["seed"] is None else str(row["seed"])
        rows.append([link(row["run_id"], run_page.link_to(folder, at)), seed, *numbers, row["status"], row["device"]])
    heads = ("run", "seed", "train time, s", metric_of(arm.rows).name, "step_avg, ms", "status", "device")
    listed = Table(heads, rows, [False, *[True] * 4, False, False], style="tight")
    return Section(f"{arm.name}: {counted(len(arm.rows), 'run')}", [listed], is_folded=True)


# ---- the verdicts, and what they rest on


def verdicts(against: Against, about: Mapping[str, str]) -> list[document.Verdict]:
    """Returns the verdict on each candidate, with how many runs it rests on if any was disturbed, and earlier races.

    about: {arm: its overrides}; a candidate that is a commit is called "B (d459b8a)".
    """
    commits = {name: REVISION.search(text) for name, text in about.items()}
    shown = []
    for name, comparison in against.items():
        commit, words = commits.get(name), str(comparison.get("words"))
        label = f"{name} ({commit[1]})" if commit else name
        sentence = f"{label}{words.removeprefix(name)}" if words.startswith(f"{name} ") else words
        notes = [*_counted(comparison), *_unclaimable(name, comparison), *_earlier(comparison.get("earlier_races"))]
        shown.append(document.Verdict(sentence, str(comparison.get("verdict")), label, notes))
    return shown


def _counted(comparison: Mapping[str, Any]) -> list[str]:
    num_excluded, n = len(comparison.get("excluded") or ()), (comparison.get("time") or {}).get("n")
    sides: Any = n, comparison.get("started"), comparison.get("arms")
    is_about_loss = comparison.get("on") == "loss"  # of which all runs count
    if not all(sides) or not comparison.get("comparable") or is_about_loss:
        return []
    if "suspect-runs" in comparison.get("flags", ()):
        few = "" if comparison.get("all_disturbed") else ", and too few others remain"
        disturbed = f"{'Some runs were' if few else 'Every run was'} disturbed by the machine{few}"
        return [f"{disturbed}. They count here, but a claim needs undisturbed runs."]
    if not num_excluded:
        return []
    rests = document.and_(f"{n} of {counted(num, 'run')} of {name}" for n, num, name in zip(*sides, strict=True))
    are = f"{counted(num_excluded, 'disturbed run')} {'is' if num_excluded == 1 else 'are'}"
    return [f"It rests on {rests}; {are} excluded."]


def _unclaimable(name: str, comparison: Mapping[str, Any]) -> list[str]:
    """Returns that a faster arm's losses are not shown to reach the target, which ./run.sh judge requires."""
    loss = comparison.get("val_loss") or {}
    p = (loss.get("p_target") or [None])[-1]
    if comparison.get("verdict") != "faster" or p is None or loss["below_target"][-1]:
        return []
    metric = wording.metric_of(loss)
    target = f"{metric.better} the target of {loss['target']:g}"
    p = f"{wording.p_sentence(p)}, needed p < {loss['target_p_value']:g}"
    return [f"It cannot be claimed: the mean {metric.name} of {name} is not shown to be {target} ({p})."]


def _earlier(before: Mapping[str, int] | None) -> list[str]:
    if not before:
        return []
    outcomes = ", ".join(f"{num} {'without a verdict' if name == 'none' else name}" for name, num in before.items())
    return [f"{counted(sum(before.values()), 'earlier race')} of these arms in this ledger: {outcomes}"]


def counts(against: Against, name: str) -> str:
    """Returns text on how many runs an arm has, how many of them are counted, and their number of steps."""
    comparison = against.get(name) or next(iter(against.values()), {})
    index = int(name in against)
    pairs = (
        comparison.get("started"),
        (comparison.get("time") or {}).get("n"),
        comparison.get("steps"),
        comparison.get("certificates"),
    )
    started, timed, num_steps, certificate = (values[index] if values else None for values in pairs)
    if started is None:  # in an older race.json
        return ""
    text = counted(started, "run")
    text += f", {timed} counted" if comparison.get("comparable") and timed not in (None, started) else ""
    text += "" if num_steps is None else f", {num_steps} steps"
    return text + ("" if certificate is None else f"; replayed: {certificate}")


# ---- the picture


def panels(against: Against, names: Sequence[str]) -> list[forest.Panel]:
    """Returns a panel per measure with a change, a row per candidate.  names: all arms, ordered as chart series."""
    metric = wording.metric_of(next(iter(against.values()), {}))
    metric_panel = ("val_loss", metric.name, ("better", "worse") if metric.sign > 0 else ("worse", "better"))
    chosen = [metric_panel if panel[0] == "val_loss" else panel for panel in PANELS]
    shown = [_panel(key, title, ways, against, names) for key, title, ways in chosen]
    return [panel for panel in shown if panel.rows]


def _panel(key: str, title: str, ways: tuple[str, str], against: Against, names: Sequence[str]) -> forest.Panel:
    is_loss = key == "val_loss"
    end = "" if is_loss else "_pct"
    rows = []
    for name, comparison in against.items():
        measure = comparison.get(key) or {}
        if (change := measure.get(f"change{end}")) is not None:
            low, high = measure.get(f"ci95{end}") or (None, None)
            rows.append(forest.Row(name, change, low, high, names.index(name)))
    first = next(iter(against.values()), {}).get(key) or {}
    margin = first.get("margin" if is_loss else "margin_pct")
    metric = wording.metric_of(first if is_loss else {})
    edges = None if margin is None else sorted((0.0, metric.sign * margin)) if is_loss else [-margin, margin]
    unit = metric.unit_in_full if is_loss else "%"
    margin = None if edges is None else (edges[0], edges[1])
    return forest.Panel(title, unit, rows, margin, first.get("floor_pct"), ways, 4 if is_loss else 2)


# ---- the numbers


def numbers(baseline: str, against: Against) -> Section:
    """Returns a table with a row per measure and candidate; below it sentences, of several the losses' alone."""
    measures = {name: wording.known_measures(comparison) for name, comparison in against.items()}
    is_one = len(against) == 1
    rows = [
        [
            wording.name_of(key, comparison),
            *([] if is_one else [name]),
            *(cell or None for cell in wording.cells(comparison, key)),
        ]
        for key in wording.MEASURES
        for name, comparison in against.items()
        if key in measures[name]
    ]
    heads = [*against] if is_one else [f"mean of {baseline}", "of the arm"]
    heads = ["", baseline, *heads, *wording.HEAD] if is_one else ["", "arm", *heads, *wording.HEAD]
    if not is_one:
        heads = ["p, of times after Holm" if head == "p" else head for head in heads]
    right = [False] * (1 if is_one else 2) + [True] * 8
    losses = {name: [*_loss_sentences(baseline, name, facts)] for name, facts in against.items()}
    lines = [*_sentences(baseline, *next(iter(against.items())))] if is_one else once(losses)
    return Section("Numbers", [*([Table(heads, rows, right, style="tight")] if rows else []), Lines(lines)])


def _loss_sentences(baseline: str, name: str, comparison: Mapping[str, Any]) -> Iterable[str]:
    return wording.loss_sentences(comparison.get("val_loss") or {}, (baseline, name))


def _sentences(baseline: str, name: str, comparison: Mapping[str, Any], with_losses: bool = True) -> Iterator[str]:
    """Yields what the table does not say: the other questions, the losses, both clocks."""
    for question, answer in (comparison.get("answers") or {}).items():
        is_said = question == comparison["on"] or (question == "loss" and answer["verdict"] not in ("better", "worse"))
        if not is_said:
            yield f"{question}, {answer['verdict'].replace('_', ' ')}: {answer['words']}"
    if with_losses:
        yield from _loss_sentences(baseline, name, comparison)
    if by_launcher := (comparison.get("time") or {}).get("outside"):
        yield f"by the launcher's clock, from start to end without validations: {wording.outside_text(by_launcher)}"
    if everything := comparison.get("time_all"):
        low, high = everything["ci95_pct"] or (None, None)
        change = f"{everything['change_pct']:+.2f} % [{low:+.2f}, {high:+.2f}]" if low is not None else "no interval"
        yield f"including the excluded runs: {change}, n = {everything['n'][0]} and {everything['n'][1]}"


# ---- what is excluded, where the time went


def excluded(against: Against) -> Section:
    """Returns a table of the runs that are in no mean, and the rules that excluded them."""
    rows = {}
    for comparison in against.values():
        for run in comparison.get("excluded") or ():
            rows[run.get("run_id")] = [run.get("arm"), code(run.get("run_id")), "; ".join(run.get("reasons") or [])]
    return Section("Excluded runs", [Table(("arm", "run", "reason"), list(rows.values()))] if rows else [])


def diagnosis(against: Against, options: Options) -> Section | Columns:
    """Returns where the time went, or, without options.why, a cause that stands out and the option that shows more."""
    diagnoses = {name: comparison["diagnosis"] for name, comparison in against.items() if comparison.get("diagnosis")}
    if options.why:
        title = f"where the time went ({WITHIN_RUN})"
        parts = [
            Section(f"{name}: {title}", between_runs.blocks(facts), is_folded=True) for name, facts in diagnoses.items()
        ]
        return Section("Diagnosis", parts)
    diagnoses = {name: facts for name, facts in diagnoses.items() if facts.get("regions") or facts.get("traces")}
    hint = [Hint(f"{options.command}--why shows where the time went")] if diagnoses else []
    on_time = {name: (facts.get("answers") or {}).get("time", facts)["verdict"] for name, facts in against.items()}
    diagnoses = {name: facts for name, facts in diagnoses.items() if on_time[name] in ("faster", "slower")}
    causes = {name: cause for name, facts in diagnoses.items() if (cause := between_runs.cause(facts))}
    lines = [f"why: {why}" if len(against) == 1 else f"why {name}: {why}" for name, why in causes.items()]
    return Columns([Lines(lines), *hint])


# ---- for spreadsheets


def as_csv(results: Iterable[tuple[str, Mapping[str, Any]]]) -> str:
    """Returns CSV with a header from (name of B, Comparison) pairs; the column "unit" is that of the change."""
    rows: list[Sequence[object]] = [CSV_COLUMNS]
    for name, compared in results:
        verdicts = {"time": compared["answers"]["time"]["verdict"], "val_loss": compared["val_loss"]["verdict"]}
        for key, (metric, mean_key, *_) in wording.MEASURES.items():
            measure, (end, unit, _) = compared[key], wording.unit_of(key)
            numbers = [*measure[mean_key], measure[f"change{end}"], unit.strip() or wording.metric_of(compared).unit]
            numbers += [*(measure[f"ci95{end}"] or ("", "")), measure["p"], measure.get("p_holm"), *measure["n"]]
            rows.append([name, metric, verdicts.get(key, ""), *numbers, measure.get("mde_pct"), *compared["arms"]])
    return escape.csv_text(rows)
