"""The page of a comparison of any runs or logs: who A and B are, the verdict with its picture, their curves and runs.

A race has a page of its own (race_page.py), with the order of its runs and its plan, of the same parts: against,
everywhere, is {name of the candidate: bench.compare.verdict.Comparison}, as race.json has it.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from bench.analysis.diagnosis import text as diagnosis_text
from bench.base.text_table import counted
from bench.compare import text as compare_text
from bench.compare import wording
from bench.compare.selection import Arm
from bench.compare.verdict import Comparison
from bench.report import curves, run_page
from bench.web import forest
from bench.web.page import REPORT_STYLES, Safe, details, figure, join, page, section, soft, table, tag

COLOUR = {"faster": "good", "slower": "bad", "equivalent": "soft", "inconclusive": "doubt", "not_comparable": "bad"}
WITHIN_RUN = "within-run: for diagnosis, not for the verdict"
PANELS = (  # key of the comparison, title, of its change below and above zero
    ("time", "Train time", ("faster", "slower")),
    ("val_loss", "val_loss", ("better", "worse")),
    ("memory", "Peak memory", ("less", "more")),
    ("energy", "Energy", ("less", "more")),
)


def html(arms: Sequence[Arm], results: Sequence[Comparison], at: Path | str) -> str:
    """Arms, the baseline first, and the comparison of each other one with it -> the page.

    at: the folder that the page will lie in.
    """
    first = results[0]
    names = [first["arms"][0], *(one["arms"][1] for one in results)]
    about = [first["about"][0], *(one["about"][1] for one in results)]
    against = dict(zip(names[1:], results, strict=True))
    named = [replace(arm, name=name) for arm, name in zip(arms, names, strict=True)]
    charts = curves.charts_of_arms(named)
    lines = [
        arm(num, name, [_shortly(words), counted(len(of_arm.rows), "run")])
        for num, (name, words, of_arm) in enumerate(zip(names, about, arms))
    ]
    folded = [differences(names[0], name, one) for name, one in against.items()]
    title = f"{names[0]} against {and_(names[1:])}"
    who = section("Arms", tag("dl", *lines, class_="arms"), *folded)
    body = [
        tag("h1", title),
        tag("div", who, section("Verdict", *verdicts(against)), class_="columns"),
        forest.plot(panels(against, names)),
        numbers(names[0], against),
        section("Curves", tag("div", *map(figure, charts), class_="columns")) if charts else "",
        excluded(against),
        section("Runs", *(_runs(arm, at) for arm in named)),
        diagnosis(against),
    ]
    return page(f"Comparison: {title}", *body, data={"charts": charts}, styles=REPORT_STYLES)


def _shortly(words):
    """Paths by their last two parts: the page is made to be sent."""
    return ", ".join("/".join(Path(one).parts[-2:]) if one.startswith("/") else one for one in words.split(", "))


def _runs(arm, at):
    lines = []
    for row, folder in zip(arm.rows, arm.folders, strict=True):
        target = run_page.link(folder, at)
        name = tag("a", row["run_id"], href=target) if target else row["run_id"]
        numbers = [None if row[key] is None else round(row[key], 4) for key in ("train_s", "val_loss", "step_avg_ms")]
        lines.append([name, row["seed"], *numbers, row["status"], row["device"]])
    head = ("run", "seed", "train time, s", "val_loss", "step_avg, ms", "status", "device")
    return details(f"{arm.name}: {counted(len(arm.rows), 'run')}", table(head, lines, class_="tight"))


def and_(words: Iterable[str]) -> str:
    """A, B and C."""
    *most, last = [*words] or ["nothing"]
    return f"{', '.join(most)} and {last}" if most else last


def arm(number: int, name: str, facts: Iterable[object]) -> Safe:
    """A line of a list of arms, in the colour of its series; the last fact is of less importance."""
    *most, last = facts
    words = [*(tag("dd", fact) for fact in most), tag("dd", last, class_="soft")]
    return tag("div", tag("dt", name), *words, style=f"--own: var(--series-{number % 8})")


def verdicts(against: Mapping[str, dict]) -> list[Safe]:
    """The sentence of each candidate, with its flags and what each means."""
    return [_verdict(name, one) for name, one in against.items()]


def _verdict(name, one):
    badge = tag("span", _plain(one.get("verdict")), class_=f"badge {COLOUR.get(one.get('verdict'), 'soft')}")
    flags = [(flag, compare_text.FLAGS.get(flag, "")) for flag in one.get("flags") or ()]
    noted = details(f"Flags: {', '.join(name for name, _ in flags)}", table((), flags)) if flags else ""
    words = str(one.get("words")).removeprefix(f"{_plain(one.get('verdict'))}: ")  # the badge says it
    before = "" if words.startswith(f"{name} ") else tag("b", f"{name}: ")
    kind = soft(f"Compared: {one['kind_words']}.") if one.get("kind_words") else ""  # an older race.json has none
    return tag("div", tag("p", before, badge, words, class_="verdict"), kind, noted)


def _plain(word):
    return str(word).replace("_", " ")


# ---- the picture


def panels(against: Mapping[str, dict], names: Sequence[str]) -> list[forest.Panel]:
    """A panel a measure that has a change, a row a candidate.  names: all arms, in the order of the charts' series."""
    result = [_panel(key, title, ways, against, names) for key, title, ways in PANELS]
    return [panel for panel in result if panel.rows]


def _panel(key, title, ways, against, names):
    is_loss = key == "val_loss"
    end, rows = ("nats" if is_loss else "pct"), []
    for name, one in against.items():
        numbers = one.get(key) or {}
        if (change := numbers.get(f"change_{end}")) is not None:
            rows.append(forest.Row(name, change, *(numbers.get(f"ci95_{end}") or (None, None)), names.index(name)))
    first = next(iter(against.values()), {}).get(key) or {}
    margin = first.get("margin_nats" if is_loss else "margin_pct")
    margin = None if margin is None else (0.0 if is_loss else -margin, margin)
    decimals, unit = (4, "nats per token") if is_loss else (2, "%")
    return forest.Panel(title, unit, rows, margin, first.get("floor_pct"), ways, decimals)


# ---- the numbers


def numbers(baseline: str, against: Mapping[str, dict]) -> Safe:
    """One table: a line a candidate and measure; then what is known of the losses, in words."""
    known = {name: wording.known(one) for name, one in against.items()}
    lines = [
        [wording.MEASURES[key][0], name, *(cell or None for cell in wording.cells(one, key))]
        for key in wording.MEASURES
        for name, one in against.items()
        if key in known[name]
    ]
    losses = [wording.loss_sentences(one.get("val_loss") or {}, (baseline, name)) for name, one in against.items()]
    p = "p, of times after Holm" if len(against) > 1 else "p"
    head = ["", "arm", f"mean of {baseline}", "of the arm", *(p if word == "p" else word for word in wording.HEAD)]
    words = [tag("p", sentence) for sentences in losses for sentence in sentences]
    shown = [table(head, lines, class_="tight")] * bool(lines) + words
    return section("Numbers", *shown) if shown else Safe("")


# ---- what differs, what is excluded, where the time went


def differences(baseline: str, name: str, one: dict) -> Safe:
    """Settings, code, data and environment of a candidate that are not the baseline's."""
    result = one.get("differences") or []
    if not result:
        return soft(f"{name} against {baseline}: nothing in the records differs.")
    counts = Counter(one["kind"] for one in result)
    kinds = ", ".join(f"{count} of {kind}" for kind, count in counts.items())
    lines = [[d["kind"], tag("code", d["what"]), _values(d["a"]), _values(d["b"])] for d in result]
    head = ("", "what", baseline, name)
    title = f"{name} against {baseline}: what differs ({kinds})"
    return details(title, table(head, lines), source(one.get("code_change")))


def _values(values):
    return " | ".join(
        "–" if value is None else value if isinstance(value, str) else json.dumps(value) for value in values
    )


def source(change: dict | None) -> Safe:
    """The change of the source, in full as far as the record has it."""
    if not change:
        return Safe("")
    if change["unknown"]:
        return soft(f"What changed in the source is unknown: {change['unknown']}")
    lines = [[one["path"], one["added"], one["removed"]] for one in change["files"]]
    end = soft("The change is longer than what is recorded.") if change["is_cut"] else ""
    return join([table(("source file", "lines added", "removed"), lines), tag("pre", change["patch"]), end])


def excluded(against: Mapping[str, dict]) -> Safe:
    """Runs that are in no mean, and the rule that excluded each; of the baseline once."""
    lines = {}
    for one in against.values():
        for run in one.get("excluded") or ():
            reasons = "; ".join(run.get("reasons") or [])
            lines[run.get("run_id")] = [run.get("arm"), tag("code", run.get("run_id")), reasons]
    return section("Excluded runs", table(("arm", "run", "by which rule"), lines.values())) if lines else Safe("")


def diagnosis(against: Mapping[str, dict]) -> Safe:
    """Where the time went."""
    result = [(name, diagnosis_text.text(one.get("diagnosis") or {})) for name, one in against.items()]
    parts = [details(f"{name}: where the time went ({WITHIN_RUN})", tag("pre", text)) for name, text in result if text]
    return section("Diagnosis", *parts) if parts else Safe("")
