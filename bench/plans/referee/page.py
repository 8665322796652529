"""The page of a search: the staircase of what was kept, what looked good and was luck, and the cost per per cent."""

import contextlib
import html
import math
from typing import Any

from bench.base import atomic, private, text_table
from bench.base.paths import REPO, brief
from bench.plans.referee import deciding, submission
from bench.plans.referee.deciding import CONFIRMATION
from bench.plans.referee.search import Search, Submission
from bench.web import stairs
from bench.web.document import Block, Document, Lines, Picture, Section, Shown, Table, Verbatim, Verdict, coloured
from bench.web.page import Safe

NAME = "search.html"
COLOURS = {"keep": "good", "drop": "bad", "undecided": "doubt", "refused": "soft", "open": "soft"}
RIGHT = [False, False, True, True]
HEADS = ("decision", "submission, and the reason for the decision", "gain, 95 % interval", "device time, s")
NO_BREAK = "\N{NO-BREAK SPACE}"
MAX_CHARS = 24  # length of a label in the staircase


def write(search: Search) -> None:
    """Writes the page beside the journal, unless the disk is full or the folder is another user's."""
    with contextlib.suppress(OSError):
        atomic.write_text(search.folder / NAME, document(search).html(), durable=False)


def document(search: Search) -> Document:
    """Returns the document of the whole search, with its submissions in the order of their arrival."""
    tries, kept = list(search.submissions.values()), search.kept
    lucky = [entry for entry in tries if _was_luck(entry)]
    sentence = f"{len(kept)} of {len(tries)} submissions were kept" if tries else "nothing has been submitted yet"
    total = math.fsum(_gain(entry) for entry in kept)
    sentence += f": {search.shown(total)} together" if kept else ""
    sentence += f", {len(search.open)} open" * bool(search.open)
    notes = [f"{len(lucky)} more looked good in the race but not in the confirmation: luck."] * bool(lucky)
    cost, dollars = f"{search.cost(search.spent_s)} in all", search.dollars(search.spent_s)
    if dollars is not None and total > 0 and search.settings["on"] != "loss":
        cost += f", ${dollars / (100 * -math.expm1(-total)):.2f} for each per cent"
    blocks: list[Block] = [Lines([f"{cost}; this includes the calibration and what was dropped."])]
    if kept:
        blocks.append(Section("The champion", [Picture(_staircase(search))]))
    rows = [_row(search, entry) for entry in tries]
    blocks.append(Section("Submissions", [Table(HEADS, rows, RIGHT, style="facts")]))
    before = search.settings["champion"]
    for entry in kept:
        title = f"Submission {entry.number} against the champion before it"
        blocks.append(
            Section(title, [Verbatim(private.redact(submission.diff(before, entry.arm), REPO), "diff")], is_folded=True)
        )
        before = entry.arm
    blocks.append(Section("Method", [Lines(_method(search))]))
    data = {"search": search.name, "submissions": [deciding.answer(search, entry) for entry in tries]}
    return Document(f"Search {search.name}", [Verdict(f"{sentence}.", "", notes=notes)], blocks, data)


def _gain(submission: Submission) -> float:
    return (submission.decided.get("gain") if submission.decided else None) or 0.0


def _was_luck(submission: Submission) -> bool:
    decided = submission.decided
    return decided is not None and (decided.get("stage"), decided["decision"]) == (CONFIRMATION, "drop")


def _staircase(search: Search) -> Safe:
    """Plots the time that is left after each keep, or the total gain of the metric."""
    is_loss, total = search.settings["on"] == "loss", 0.0
    rows = [stairs.Row("start", "", 0.0 if is_loss else 100.0)]
    for entry in search.kept:
        total += _gain(entry)
        value = total if is_loss else 100 * math.exp(-total)
        label = private.redact(entry.note or entry.about, REPO)
        rows.append(stairs.Row(str(entry.number), text_table.middle(label, MAX_CHARS), value))
    unit = f"{search.unit} better than at the start".strip() if is_loss else "% of the time at the start"
    return stairs.plot([stairs.Panel("After each keep", unit, rows)])


def _row(search: Search, entry: Submission) -> list[object]:
    decided: Any = entry.decided or {"decision": "open", "why": "", "spent_s": 0.0}
    decision = decided["decision"]
    about = without_folders(private.redact(entry.about, REPO))
    note = private.redact(f": {entry.note}" * bool(entry.note) + f", by {entry.author}" * bool(entry.author), REPO)
    reasons = [private.redact(reason, REPO) for reason in deciding.reasons(search, entry)]
    lines = [f"<b>{html.escape(about)}</b>{html.escape(note)}", *map(html.escape, reasons)]
    submitted = Shown(f"{about}{note}: {'; '.join(reasons)}", Safe("<br>".join(lines)))
    return [
        coloured(f"{entry.number} {decision}{', luck' * _was_luck(entry)}", f"badge {COLOURS[decision]}"),
        submitted,
        _numbers(search, decided.get("gain"), decided.get("ci95")),
        f"{search.device_s(decided['spent_s']):.0f}",
    ]


def without_folders(settings: str) -> str:
    """Shortens the paths among settings to the file and the folder it is in."""
    return " ".join("=".join(map(brief, setting.split("=", 1))) for setting in settings.split(" "))


def _numbers(search: Search, gain: float | None, interval: list[float] | None) -> str:
    """Formats a gain as +2.1 % (+1.0 to +3.2 %); above 0 is better."""
    if gain is None:
        return ""
    if search.settings["on"] == "loss":
        unit, digits = search.unit, 4
    else:
        unit, digits, gain = " %", 1, 100 * -math.expm1(-gain)
    between = f"({interval[0]:+,.{digits}f} to {interval[1]:+,.{digits}f}{unit})" if interval else ""
    return " ".join(part.replace(" ", NO_BREAK) for part in (f"{gain:+,.{digits}f}{unit}", between) if part)


def _method(search: Search) -> list[str]:
    settings, calibration = search.settings, search.calibration
    overrides = private.redact_all(settings["champion"]["overrides"], REPO)
    lines = [f"The first champion: {without_folders(' '.join(overrides))}."]
    if calibration is not None:
        stop = search.stop(None)
        noise = f"{stop['sd']:.4g}{search.unit}" if settings["on"] == "loss" else f"{100 * stop['sd']:.2f} %"
        champion = "The champion {} on random and held-out tokens, {}."
        audits = ("passed the audits", "and so must every keep")
        unaudited = ("could not be audited", "so keeps are not audited either")
        lines.append(f"Runs differ by {noise} (sd); the search looks for {search.shown(stop['effect'])}.")
        lines.append(champion.format(*(audits if calibration["is_audited"] else unaudited)))
    confirmations = text_table.counted(len(search.confirmations), "confirmation")
    budget = f"alpha {settings['alpha']:g} over {confirmations} so far (LORD++)"
    return [*lines, f"Error budget: {budget}; ./run.sh referee replay {search.name} derives every decision again."]
