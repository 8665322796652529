"""The page of a study: verdicts on loss and on time to the same loss, a table and a figure for a paper.

Reads study.json, the trials and the race of ./run.sh study; writes study.html, study.md, study.tex and study.csv.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from bench.base import atomic, escape, private, stats
from bench.base.metric import Metric
from bench.base.text_table import counted
from bench.compare import same_loss, wording
from bench.compare.same_loss import SameLoss
from bench.record import race_folder, run_folder, sweep
from bench.record.rows import Row, row_of
from bench.report import curves, race_page, run_facts, verdicts
from bench.report.basis import basis
from bench.web.chart import Spec, chart_of_arms
from bench.web.document import Block, Chart, Columns, Document, Lines, Section, Table, Verdict, and_, link

NAME = "study.html"
HEADS = (  # {metric}: its name; {loss}: that to which time and steps are compared
    *(
        "arm",
        "setting",
        "tried",
        "trials",
        "n",
        "{metric}",
        "sd",
        "change of {metric}",
        "95 % interval",
        "p",
        "verdict",
    ),
    *(
        "steps to {loss}",
        "time to {loss}, s",
        "change of time, %",
        "95 % interval of time, %",
        "p of time",
        "verdict on time",
    ),
)
NUM_OF_LOSS = 11  # columns before those on time
SKIPPED_FRAC = 1 / 3  # of a curve that the figure omits: the fall from the start would hide how arms differ
Runs = Mapping[str, Sequence[tuple[Path, Row]]]  # {arm: (folder, row) of its complete runs in the race}


def write(folder: Path | str) -> Document:
    """Writes the files of a study whose race has ended, and returns its document."""
    page, folder = document(folder), Path(folder)
    rows = _filled(page.data["heads"], page.data["table"])
    tabulars = [_tabular(part, num_left) for part, num_left in _halves(rows)]
    files = {"study.csv": escape.csv_text(rows), "study.tex": "\n".join(tabulars)}
    for name, content in (files | {"study.md": page.markdown() + "\n", NAME: page.html()}).items():
        atomic.write_text(folder / name, content, durable=False)
    return page


def _filled(heads: list[str], rows: Sequence[Sequence[str | None]]) -> list[list[str]]:
    return [heads, *([cell or "" for cell in row] for row in rows)]


def _tabular(rows: Sequence[Sequence[str]], num_left: int) -> str:
    """Returns LaTeX of a table whose first row is its head.  num_left: columns of text."""
    first, *others = [" & ".join(map(escape.latex, row)) + r" \\" for row in rows]
    begin = rf"\begin{{tabular}}{{{'l' * num_left}{'r' * (len(rows[0]) - num_left)}}}"
    return "\n".join([begin, r"\hline", first, r"\hline", *others, r"\hline", r"\end{tabular}", ""])


def _halves(rows: Sequence[Sequence[str]]) -> tuple[tuple[list[list[str]], int], ...]:
    """Divides rows of HEADS into those on loss and those on time, which a page of paper has room for, each with its
    number of columns of text."""
    return ([[*row[:NUM_OF_LOSS]] for row in rows], 3), ([[row[0], *row[NUM_OF_LOSS:]] for row in rows], 1)


def block(folder: Path | str) -> str:
    """Returns the study in Markdown, for a paper or a pull request."""
    return document(folder).markdown() + "\n"


def document(folder: Path | str, at: Path | str | None = None) -> Document:
    """Returns the document of a study.  Raises ValueError if its race has not begun or ended, or is damaged.

    at: the folder of the page, None for the study's.
    """
    folder = Path(folder).absolute()
    study = sweep.read_study(folder)
    if study["race_id"] is None:
        raise ValueError(f"{folder.name}: the race of this study has not begun: repeat the command that began it")
    race_path = race_folder.of(folder.parent.parent, study["race_id"])
    race, trials = race_folder.vouched(race_path), sweep.trials(folder, study)
    against = race_folder.verdicts_of(race)
    arms: Runs = {name: _runs(race_path, facts["runs"] or ()) for name, facts in race["arms"].items()}
    same = _same_loss(arms, race, against, study)
    baseline, *others = arms
    metric = sweep.metric_of(study)
    verdict, *rest = race_page.document_of(race).verdicts
    if edges := [name for name, tried in trials.items() if not min(tried) < sweep.best_of(tried, metric) < max(tried)]:
        doubt = f"The best {study['tune']} of {and_(edges)} is at the edge of what was tried: a larger budget= "
        doubt += "tries more.  It uses these trials again and ends with a new race."
        verdict = replace(verdict, notes=[*verdict.notes, doubt])
    timed = [Verdict(_sentence(name, baseline, times, metric), times["verdict"], name) for name, times in same.items()]
    rows = _rows(study, trials, arms, against, same)
    rests = [Section(f"{name} against {baseline}", basis(facts)) for name, facts in against.items()]
    tuned = chart_of_arms(
        "study-tuned",
        f"{metric.name} by {study['tune']}",
        "a point is a trial; the best one is partly lucky",
        study["tune"],
        metric.label,
        [{"name": name, "runs": [_points(tried)]} for name, tried in trials.items()],
        "none",
    )
    race_charts = curves.arm_charts({name: [path for path, _ in runs] for name, runs in arms.items()})[:2]
    heads = _heads(metric, same)
    tables: list[Block] = [
        Table(part[0], part[1:], [False] * num_left + [True] * (len(part[0]) - num_left), style="tight")
        for part, num_left in _halves(_filled(heads, rows))
    ]
    blocks: list[Block] = [
        Section("Result", tables),
        Section("What the verdict on the loss rests on", rests),
        verdicts.excluded(against),
        Section("Figure", [Columns([Chart(tuned | {"log_x": True}), *map(Chart, map(_ends, race_charts))])]),
        Section("Method", [Lines(_method(study, race, against))]),
    ]
    title = f"Study: {and_(others)} against {baseline}, {study['tune']} tuned"
    relative = private.way(race_path / race_page.NAME, at or folder)
    way = link(race["race_id"], relative and quote(relative))
    data = {"study": study, "trials": trials, "same_loss": same, "heads": heads, "table": rows, "race": race}
    trained = run_facts.training(runs[0][0] for runs in arms.values() if runs)
    about = [fact for fact in (trained, f"track {race['track']}", folder.name, way) if fact]
    return Document(title, [verdict, *rest, *timed], blocks, data, about=about)


def _heads(metric: Metric, same: Mapping[str, SameLoss]) -> list[str]:
    loss = next((f"{times['val_loss']:.4f}" for times in same.values()), f"the same {metric.name}")
    return [head.format(metric=metric.name, loss=loss) for head in HEADS]


def _ends(chart: Spec) -> Spec:
    """Returns a chart of arms without the first third of its curves."""
    last = max(run["x"][-1] for arm in chart["arms"] for run in arm["runs"])
    arms = []
    for arm in chart["arms"]:
        pairs = [[*zip(run["x"], run["y"], strict=True)] for run in arm["runs"]]
        ends = [[pair for pair in points if pair[0] >= last * SKIPPED_FRAC] or points[-1:] for points in pairs]
        arms.append(arm | {"runs": [{"x": [x for x, _ in end], "y": [y for _, y in end]} for end in ends]})
    caption = "; ".join(filter(None, [chart["caption"], "without the first third"]))
    return chart | {"arms": arms, "caption": caption}


def _runs(race: Path, names: Sequence[str]) -> list[tuple[Path, Row]]:
    paths = [path for path in (race_folder.run_folder_of(race, name) for name in names) if path]
    rows = [(path, row_of(run_folder.read(path))) for path in paths]
    return [(path, row) for path, row in rows if row["status"] == "complete" and row["score"] is not None]


def _same_loss(arms: Runs, race: Any, against: Mapping[str, Any], study: sweep.Study) -> dict[str, SameLoss]:
    """Returns {candidate: comparison of times to the same loss}; {} if a run lacks the times of its validations."""
    metric = sweep.metric_of(study)
    read = {row["run_id"]: curves.validations(path, metric) for runs in arms.values() for path, row in runs}
    baseline, *others = arms
    has_times = all(curve and None not in [at_s for _, at_s, _ in curve] for curve in read.values())
    if not has_times or not all(arms.values()) or not against:
        return {}
    if any(metric.reaches(curve[0][2], same_loss.of(read, metric)) for curve in read.values()):
        return {}  # before a step of training, as where losses rise: no time to it can be compared
    alpha = study["alpha"] / 2 / len(others)
    return {
        name: same_loss.compared(
            [[row for _, row in arms[arm]] for arm in (baseline, name)],
            read,
            alpha * against[name].get("earlier_weight", 1.0),
            against[name],
            race["plan"],
        )
        for name in others
    }


def _sentence(name: str, baseline: str, times: SameLoss, metric: Metric) -> str:
    (a_s, b_s), (a_steps, b_steps) = times["mean_s"], times["mean_steps"]
    sentence = f"{name} reaches {metric.name} {times['val_loss']:.4f}, which every run reaches, in {b_steps:.0f} steps"
    sentence += f" ({baseline}: {a_steps:.0f})"
    if a_s is not None and b_s is not None and times["change_pct"] is not None:
        sentence += f" and {b_s:.2f} s ({a_s:.2f} s): {times['change_pct']:+.2f} %"
    if times["ci95_pct"] and times["p"] is not None:
        (low, high), p, alpha = times["ci95_pct"], times["p"], times["alpha"]
        shown_p = f"p = {wording.apart(p, alpha)}{wording.below(p, alpha)}"
        sentence += f" (95 % interval {low:+.2f} to {high:+.2f} %, {shown_p})"
        if times["verdict"] == "inconclusive" and alpha <= p < stats.ALPHA:
            sentence += f"; p is not below the alpha of {wording.apart(alpha, p)} (the loss has the other half)"
    if times["more_outside"] and (times["change_pct"] or 0.0) < 0:
        sentence += f"; it spends more time outside its own clock than {baseline}, so this is not counted"
    return sentence


def _points(tried: Mapping[float, float]) -> dict[str, list[float]]:
    finite = {value: loss for value, loss in tried.items() if math.isfinite(loss)}
    return {"x": list(finite), "y": list(finite.values())}


def _rows(
    study: sweep.Study, trials: Any, arms: Runs, against: Mapping[str, Any], same: Mapping[str, SameLoss]
) -> list[list[str | None]]:
    """Returns a row per arm with the columns HEADS."""
    rows, metric = [], sweep.metric_of(study)
    for index, (name, tried) in enumerate(trials.items()):
        losses = [row["score"] for _, row in arms[name] if row["score"] is not None]
        loss, times = (against.get(name) or {}).get("val_loss") or {}, same.get(name) or next(iter(same.values()), None)
        low, high = loss.get("ci95") or (None, None)
        steps, seconds = (times["mean_steps"][index > 0], times["mean_s"][index > 0]) if times else (None, None)
        of_time: Mapping[str, Any] = same.get(name) or {}
        low_pct, high_pct = of_time.get("ci95_pct") or (None, None)

        def shown(form: str, value: float | None) -> str | None:
            return None if value is None else format(value, form)

        def verdict_on(compared: Mapping[str, Any] | None) -> str | None:
            return str(compared["verdict"]).replace("_", " ") if compared else None

        rows.append(
            [
                *(
                    f"{name}{' (baseline)' * (not index)}",
                    f"{study['tune']}={sweep.best_of(tried, metric):g}",
                    f"{min(tried):g} to {max(tried):g}",
                ),
                *(str(len(tried)), str(len(losses)), shown(".4f", stats.mean(losses) if losses else None)),
                *(shown(".4f", stats.sd(losses)), shown("+.4f", loss.get("change"))),
                None if low is None else f"{low:+.4f} to {high:+.4f}",
                shown(".2g", loss.get("p") if loss.get("p_holm") is None else loss["p_holm"]),
                verdict_on(against.get(name)),  # at half of alpha, beside a 95 % interval
                *(shown(".0f", steps), shown(".2f", seconds), shown("+.2f", of_time.get("change_pct"))),
                None if low_pct is None else f"{low_pct:+.2f} to {high_pct:+.2f}",
                shown(".2g", of_time.get("p")),
                verdict_on(of_time),
            ]
        )
    return rows


def _method(study: sweep.Study, race: Any, against: Mapping[str, Any]) -> list[str]:
    metric = sweep.metric_of(study)
    weights = {name: facts.get("earlier_weight", 1.0) for name, facts in against.items()}
    left = [f"earlier races of {name} left {100 * weight:.0f} %" for name, weight in weights.items() if weight < 1]
    seeds = sorted({entry["seed"] for entry in race["plan"]["order"]})
    starts = ", ".join(f"{start:g} ({name})" for name, start in study["starts"].items())
    return [
        f"Each arm: {counted(study['num_trials'] or 0, 'trial')}{sweep.tokens_text(study)}, with seed "
        f"{study['seed']}, {study['tune']} starting at {starts}; a run that diverges counts as the worst.",
        f"Race: {study['n']} runs of each arm, interleaved, seeds {seeds[0]} to {seeds[-1]}, which no run of these "
        "configs had before.",
        f"Alpha {study['alpha']:g}, half of it for each question{f' ({and_(left)})' * bool(left)}: a 95 % interval "
        "that excludes 0 is not enough.",
        f"Steps and time are to the same {metric.name}, the worst final one of the race's runs, interpolated between "
        "validations (goal.val_every_steps).",
        f"Change, interval and p are of {metric.label} (Welch's t).  Those of time are of its logarithm, compared "
        "within blocks of two rounds (by Welch's t, if fewer than four rounds are complete).",
    ]
