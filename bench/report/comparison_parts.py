"""The parts of a page that shows comparisons with one baseline: verdict, forest plot, numbers, what differs, why.

against, everywhere: {name of the candidate: bench.compare.verdict.Comparison}, as race.json has it.
"""

import json
from collections.abc import Iterable, Mapping, Sequence

from bench import text_table
from bench.compare import text as compare_text
from bench.diagnosis import text as diagnosis_text
from bench.web import forest
from bench.web.page import Safe, details, join, section, soft, table, tag

COLOUR = {"faster": "good", "slower": "bad", "equivalent": "soft", "inconclusive": "doubt", "not_comparable": "bad"}
WITHIN_RUN = "within-run: for diagnosis, not for the verdict"
MEASURES = (  # key of the comparison, title, of its change below and above zero
    ("time", "Train time", ("faster", "slower")),
    ("val_loss", "val_loss", ("better", "worse")),
    ("memory", "Peak memory", ("less", "more")),
    ("energy", "Energy", ("less", "more")),
    ("compile", "Compile time", ("less", "more")),
)
MEANS = {"time": ("mean_s", "s", 2), "memory": ("mean_gib", "GiB", 3), "energy": ("mean_j", "J", 0)}
MEANS |= {"val_loss": ("mean", "nats per token", 4), "compile": ("mean_s", "s", 2)}
LOSS_WORDS = {
    "waived": "the losses are those of {a}, bit for bit: there is nothing to test",
    "not_worse": "not worse than {a}'s: a rise of {margin:g} nats is excluded",
    "worse": "worse than {a}'s, and a rise of {margin:g} nats is not excluded",
    "inconclusive": "not shown to be no worse than {a}'s: a rise of {margin:g} nats is not excluded",
}


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
    found = [_panel(key, title, ways, against, names) for key, title, ways in MEASURES if key != "compile"]
    return [panel for panel in found if panel.rows]


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
    by_holm = any((one.get("time") or {}).get("p_holm") is not None for one in against.values())
    found = [_line(key, title, name, one, by_holm) for key, title, _ in MEASURES for name, one in against.items()]
    p = "p after Holm" if by_holm else "p"
    head = (
        "",
        "arm",
        f"mean of {baseline}",
        "of the arm",
        "change",
        "95 % interval",
        p,
        "n",
        "CV, %",
        "MDE (80 % power)",
    )
    lines = [line for line in found if line]
    losses = [tag("p", words) for name, one in against.items() if (words := _loss_words(baseline, name, one))]
    return join([table(head, lines, class_="tight") if lines else "", *losses])


def _line(key, title, name, one, by_holm):
    found = one.get(key) or {}
    end = "nats" if key == "val_loss" else "pct"
    change, interval = found.get(f"change_{end}"), found.get(f"ci95_{end}")
    if change is None and key != "time":
        return None
    p = found.get("p_holm" if by_holm and key != "val_loss" else "p")
    decimals, unit = (4, "") if key == "val_loss" else (2, " %")
    mean_key, mean_unit, mean_decimals = MEANS[key]
    means = [None if mean is None else f"{mean:,.{mean_decimals}f}" for mean in found.get(mean_key) or (None, None)]
    return [
        f"{title}, {mean_unit}",
        name,
        *means,
        None if change is None else f"{change:+.{decimals}f}{unit}",
        None if not interval else f"{interval[0]:+.{decimals}f} to {interval[1]:+.{decimals}f}{unit}",
        None if p is None else f"{p:.2g}",
        _pair(found.get("n")),
        _pair(found.get("cv_pct") or _cv_pct(found)),
        None if found.get("mde_pct") is None else f"{text_table.two_digits(found['mde_pct'])} %",
    ]


def _cv_pct(loss):
    spreads = zip(loss.get("sd") or (), loss.get("mean") or ())
    return [None if sd is None or not mean else 100 * sd / mean for sd, mean in spreads]


def _pair(values):
    return None if not values else ", ".join("–" if value is None else f"{value:.3g}" for value in values)


def _loss_words(baseline, name, one):
    loss = one.get("val_loss") or {}
    if loss.get("reasons"):
        return f"{name}: val_loss is not compared: {' and '.join(loss['reasons'])}."
    words = LOSS_WORDS.get(loss.get("verdict"))
    return words and f"{name}: val_loss is {words.format(a=baseline, margin=loss.get('margin_nats') or 0.0)}."


# ---- what differs, what is excluded, where the time went


def differences(baseline: str, name: str, one: dict) -> Safe:
    """Settings, code, data and environment of a candidate that are not the baseline's."""
    found = one.get("differences") or []
    if not found:
        return soft(f"{name} against {baseline}: nothing in the records differs.")
    kinds = ", ".join(
        f"{sum(d['kind'] == kind for d in found)} of {kind}" for kind in dict.fromkeys(d["kind"] for d in found)
    )
    lines = [[d["kind"], tag("code", d["what"]), _values(d["a"]), _values(d["b"])] for d in found]
    head = ("", "what", baseline, name)
    return details(
        f"{name} against {baseline}: what differs ({kinds})", table(head, lines), source(one.get("code_change"))
    )


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
        for run in one.get("left_out") or ():
            lines[run.get("run_id")] = [
                run.get("arm"),
                tag("code", run.get("run_id")),
                "; ".join(run.get("reasons") or []),
            ]
    return section("Excluded runs", table(("arm", "run", "by which rule"), lines.values())) if lines else Safe("")


def diagnosis(against: Mapping[str, dict]) -> Safe:
    """Where the time went."""
    found = [(name, diagnosis_text.text(one.get("diagnosis") or {})) for name, one in against.items()]
    parts = [
        details(f"{name}: where the time went ({WITHIN_RUN})", tag("pre", words)) for name, words in found if words
    ]
    return section("Diagnosis", *parts) if parts else Safe("")
