"""Renders what a verdict rests on, and in what its arms differ, as blocks of a Document.

The argument comparison is a bench.compare.verdict.Comparison, as in race.json, which may be of an older version.
"""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from bench.base import text_table
from bench.compare import questions, wording
from bench.web import document
from bench.web.document import Block, Bullets, Hint, Lines, Section, Table, code

MAX_DIFFERENCES = 40  # most differences shown in a text
MAX_FILES = 12
MAX_CHARS = 44  # longest differing value shown in full in a text
MAX_IN_BRIEF = 3  # settings and files of a candidate among others
WORD = re.compile(r"\w+")
HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
SIGNS = {"added": "+", "removed": "-"}  # lines of a file


def basis(comparison: Mapping[str, Any]) -> list[Block]:
    """Returns what a verdict rests on: comparability, what is compared, the noise floor, the flags."""
    flags = _flags(comparison)
    listed = Table(("flag", "meaning"), [*flags.items()])
    folded = [Section(f"Flags: {', '.join(flags)}", [listed], is_folded=True)] if flags else []
    return [Lines(_facts(comparison), is_soft=True), Bullets(comparison.get("reasons") or ()), *folded]


def _facts(comparison: Mapping[str, Any]) -> list[str]:
    lines = [f"comparable: {'yes' if comparison['comparable'] else 'NO'}"] if "comparable" in comparison else []
    if comparison.get("on"):  # missing from an older race.json, as is kind_words
        lines.append(f"question: {questions.QUESTIONS[comparison['on']]}")
    is_about_times = comparison.get("on") != "loss"
    if comparison.get("kind_words") and is_about_times:
        lines.append(f"compared: {comparison['kind_words']}")
    if is_about_times and (floor_pct := (comparison.get("time") or {}).get("floor_pct")) is not None:
        kept = comparison.get("calibration")
        source = f"calibrated, {kept['file']}" if kept else "not calibrated"
        lines.append(f"noise floor: {text_table.two_digits(floor_pct)} % ({source})")
    return lines + wording.design_sentences(comparison)


def _flags(comparison: Mapping[str, Any]) -> dict[str, str]:
    """Returns {flag: its meaning}."""
    again = comparison.get("run_again") or ()
    return {flag: wording.FLAGS.get(flag, "").format(*again) for flag in comparison.get("flags") or ()}


def in_brief(
    baseline: str, against: Mapping[str, Mapping[str, Any]], sentences: Mapping[str, list[str]]
) -> list[Block]:
    """Returns what the verdicts on several candidates rest on, once for all of which it holds, and what each changes.

    against: {candidate: its comparison}; sentences: {candidate: what else is to be said of it}.
    """
    facts = {name: _facts(comparison) + sentences[name] for name, comparison in against.items()}
    reasons = {name: [*(comparison.get("reasons") or ())] for name, comparison in against.items()}
    meanings = {name: _flags(comparison) for name, comparison in against.items()}
    flags = {name: [f"{flag}: {meaning}" for flag, meaning in own.items()] for name, own in meanings.items()}
    changes = [(name, *_in_brief(comparison)) for name, comparison in against.items()]
    listed = [Section("Flags", [Bullets(once(flags))])] if any(flags.values()) else []
    return [
        Lines(once(facts)),
        Bullets(once(reasons)),
        *listed,
        Table(("arm", f"other settings than {baseline}", "source"), changes),
    ]


def once(sentences: Mapping[str, Sequence[str]]) -> list[str]:
    """Returns the sentences of {name: sentences} without repetitions, each after its names unless it holds for all of
    them or contains them."""
    names = {
        text: [name for name, texts in sentences.items() if text in texts]
        for texts in sentences.values()
        for text in texts
    }
    is_said = {text: len(whose) == len(sentences) or {*whose} <= {*WORD.findall(text)} for text, whose in names.items()}
    return [text if is_said[text] else f"{', '.join(whose)}: {text}" for text, whose in names.items()]


# ---- what differs


def differences(
    baseline: str, name: str, comparison: Mapping[str, Any], patch: bool = True, command: str = ""
) -> list[Block]:
    """Returns a table of the facts in which a candidate differs from the baseline, and the change of its source.

    The others as in source().
    """
    differing = comparison.get("differences") or []
    if not differing:
        return [Lines([f"{name} against {baseline}: nothing in the records differs"], is_soft=True)]
    kinds = Counter(difference["kind"] for difference in differing)
    title = f"{name} against {baseline}: what differs ({', '.join(f'{kind}: {num}' for kind, num in kinds.items())})"
    rows = [[fact["kind"], code(fact["what"]), *_values(fact["a"], fact["b"])] for fact in differing]
    suffix = " differences: --json has all"
    listed = Table(("", "what", baseline, name), rows, [False] * 4, "", MAX_DIFFERENCES, suffix)
    return [Section(title, [listed, *source(comparison.get("code_change"), patch, command)], is_folded=True)]


def _values(*sides: Sequence[Any]) -> list[document.Shown]:
    """Returns the values of each arm, shortened in text unless the arms would then look the same."""
    shown = [" | ".join(text_table.middle(_value(value), MAX_CHARS) for value in values) for values in sides]
    if len(set(shown)) < len(sides):
        shown = [" | ".join(map(_value, values)) for values in sides]
    whole = [" | ".join(map(_whole, values)) for values in sides]
    return [document.Shown(text, short=short) for text, short in zip(whole, shown, strict=True)]


def _whole(value: object) -> str:
    return "-" if value is None else value if isinstance(value, str) else json.dumps(value)


def _value(value: object) -> str:
    """Returns a value as text, with hashes shortened to 12 digits."""
    if isinstance(value, list):
        return ", ".join(map(_value, value))
    return value[:12] if isinstance(value, str) and HASH.fullmatch(value) else _whole(value)


def source(change: Mapping[str, Any] | None, patch: bool = True, command: str = "") -> list[Block]:
    """Returns the files of the source that differ.

    patch: also return the diff, as far as it was recorded.  command: that of which --diff is an option, with a space
    at its end; "": the one just typed.
    """
    if not change:
        return []
    if change["unknown"]:
        return [Lines([f"source: what changed is unknown: {change['unknown']}"], is_soft=True)]
    files = sorted(change["files"], key=lambda file: -(file["added"] or 0) - (file["removed"] or 0))
    rows = [
        [file["path"], *("binary" if file[key] is None else f"{sign}{file[key]}" for key, sign in SIGNS.items())]
        for file in files
    ]
    listed = Table(("source", "added", "removed"), rows, [False, True, True], "", MAX_FILES, " files")
    if not patch:
        return [listed, Hint(f"{command}--diff shows the lines")]
    cut = [Lines(["The change is longer than what is recorded."], is_soft=True)] if change["is_cut"] else []
    return [listed, document.Verbatim(change["patch"], "diff"), *cut]


def _in_brief(comparison: Mapping[str, Any]) -> tuple[str, str]:
    """Returns the settings in which a candidate differs from the baseline, and the files of its source."""
    differing = [fact for fact in comparison.get("differences") or () if fact["kind"] == "config"]
    settings = [f"{fact['what']}={' | '.join(map(_value, fact['b']))}" for fact in differing]
    change = comparison.get("code_change") or {}
    files = [
        " ".join([file["path"], *(f"{sign}{file[key]}" for key, sign in SIGNS.items() if file[key] is not None)])
        for file in change.get("files") or ()
    ]
    return _first(settings), f"unknown: {change['unknown']}" if change.get("unknown") else _first(files)


def _first(texts: Sequence[str]) -> str:
    more = [f"and {len(texts) - MAX_IN_BRIEF} more"] * (len(texts) > MAX_IN_BRIEF)
    return ", ".join([text_table.middle(text, MAX_CHARS) for text in texts[:MAX_IN_BRIEF]] + more)
