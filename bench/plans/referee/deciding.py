"""Derives the decision on a submission from plans, ledger and run folders alone, so that it can be derived again."""

import contextlib
import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

from bench.base.text_table import counted
from bench.compare import effects, searching, wording
from bench.compare.searching import Finding
from bench.plans.audit import auditing, final_weights
from bench.plans.race import arm_process, runner, state
from bench.plans.referee.search import Decided, Search, Submission
from bench.record import certificates, ledger, race_folder, run_folder, validity
from bench.record.rows import row_of

AUDIT_TIMES, AUDIT_SDS = 2.0, 4.0  # an audit's training may take so many times, or exp(SDs), those of the confirmation
RACE, CONFIRMATION = "race", "confirmation"  # the stages of a submission


def folder_of(search: Search, name: str) -> Path | None:
    """Returns the folder of the race of this name, planned or ended; None if there is none."""
    paths = (search.results / race_folder.FOLDER).glob(f"*-{search.name}-{name}-*/plan.json")
    return next((path.parent for path in sorted(paths)), None)


@dataclass
class Raced:
    """A race of a search, as far as it has come."""

    search: Search
    folder: Path

    @functools.cached_property
    def race(self) -> state.State:
        return state.read(self.folder, self.search.results)

    @functools.cached_property
    def record(self) -> race_folder.Race | None:
        """race.json, or None if the race has not ended."""
        return race_folder.read(self.folder) if (self.folder / "race.json").exists() else None

    @functools.cached_property
    def finding(self) -> Finding:
        """The finding of the race's stopping rule."""
        return runner.searched(self.race)

    @property
    def against(self) -> dict[str, Any]:
        """The Comparison of a race that has ended; {} if it has none."""
        return cast(Any, self.record and race_folder.verdicts_of(self.record).get("B")) or {}

    @property
    def runs(self) -> tuple[list[Path], list[Path]]:
        """The run folders of the champion and of the candidate."""
        a, b = ([self.search.results / run for run in self.race.runs(arm)] for arm in self.race.plan["arms"])
        return a, b

    @property
    def gain_text(self) -> str:
        gain = self.finding["gain"]
        rounds = counted(self.finding["num_rounds"], "round")
        return f"{'no gain known' if gain is None else self.search.shown(gain)} in {rounds}"

    def numbers(self) -> dict[str, Any]:
        """Returns gain and interval in the unit of the question, and a time's cause if the looks agree with it."""
        gain = self.finding["gain"]
        if self.search.settings["on"] == "loss":
            loss: Any = self.against.get("val_loss") or {}
            edges = [-wording.metric_of(loss).sign * edge for edge in loss.get("ci95") or ()]
            return {"gain": gain, "ci95": sorted(edges) or None}
        ci95_pct = (self.against.get("time") or {}).get("ci95_pct")
        traces = (self.against.get("diagnosis") or {}).get("traces")
        agrees = traces is not None and (gain or 0.0) * traces["change_ms"] < 0
        cause = traces.get("cause") if traces and agrees else None  # None replaces the cause found by an earlier race
        return {"gain": gain, "ci95": [-ci95_pct[1], -ci95_pct[0]] if ci95_pct else None, "cause": cause}

    def rejection(self) -> dict[str, Any]:
        """Returns the decision and the reason for it, if the finding does not lead to a keep."""
        why = self.finding["why"]
        if self.finding["outcome"] == searching.DROP:
            effect = self.search.shown(self.search.stop(None)["effect"])
            return {"decision": "drop", "why": why or f"{self.gain_text}, so {effect} is unlikely"}
        abandoned = self.record["why"] if self.record and self.record["status"] == "abandoned" else None
        if abandoned is not None and " of B " in f" {abandoned} ":
            return {"decision": "drop", "why": abandoned}
        return {"decision": "undecided", "why": abandoned or why or f"{self.gain_text}: the rounds are used up"}

    def doubt(self) -> str | None:
        """Returns a reason against keeping a candidate whose numbers would suffice; None if there is none."""
        search, against = self.search, self.against
        if not against:
            return "its race was abandoned"
        if search.calibration and search.calibration["is_audited"]:
            run = self.runs[1][-1]
            audit, record = certificates.read_audit(run), cast(Any, run_folder.read(run))
            if audit is None and record["data"]["source"] == "script":
                return "it did not read the track's data, as the champion does, so its loss cannot be audited"
            if audit is None or audit["outcome"] != certificates.PASSED:
                kinds = audit["audits"] if audit else []
                failed = "; ".join(kind["why"] for kind in kinds if kind["outcome"] != certificates.PASSED)
                return f"its audit is {audit['outcome'] if audit else 'missing'}: {failed}"
            passed = {kind["kind"] for kind in audit["audits"] if kind["outcome"] == certificates.PASSED}
            if missing := [kind for kind in search.calibration.get("audits", ()) if kind not in passed]:
                return f"it did not pass the audit {missing[0]}, as the champion does"
            if not auditing.passed_here(search.results, record, sorted(passed - {final_weights.KIND})):
                return "its audit is not in the ledger of audits"
            if longer := self._longer_in_audit(audit):
                return longer
        loss = against["val_loss"]
        if search.settings["on"] == "loss":
            if effects.NOT_COUNTED in against["flags"]:
                return f"{wording.extra_sentence(against)}, so its gain is not counted"
            gain = self.held_out_gain()
            if not loss["reasons"] and gain is not None and gain <= 0:
                return f"its loss is {-gain:.4f} nats higher on tokens of the validation shards that no run is given"
            return loss["reasons"][0] if loss["reasons"] else None
        if not against["comparable"]:
            return f"its times are not comparable: {against['reasons'][0]}"
        if loss["verdict"] in ("waived", "not_worse") or (loss["below_target"] or [None, None])[1]:
            return None
        return "its loss is not shown to be no worse"

    def _longer_in_audit(self, audit: certificates.Audit) -> str | None:
        """Returns a reason to doubt a candidate that trains longer where the data are not the track's.

        It may recognize an audit, train there, and elsewhere print losses without the work for them.
        """
        rows = [row_of(run_folder.read(run)) for run in self.runs[1]]
        if self.search.settings["on"] != "time" or rows[0]["stop_at_target"]:  # which random tokens do not reach
            return None
        most_s = max(row["train_s"] or 0.0 for row in rows)
        limit_s = most_s * max(AUDIT_TIMES, math.exp(AUDIT_SDS * self.search.stop(None)["sd"]))
        for kind in audit["audits"]:
            if kind.get("run"):
                record = run_folder.read(self.search.results / certificates.AUDITS_FOLDER / str(kind["run"]))
                if (train_s := row_of(record)["train_s"] or 0.0) > limit_s:
                    both = f"{train_s:.3g} s in its audit {kind['kind']}, {most_s:.3g} s at most in its confirmation"
                    again = "; other programs were busy then: submit it again" * validity.is_busy(record)
                    return f"it trains longer on other data: {both}{again}"
        return None

    def held_out_gain(self) -> float | None:
        """Returns the mean gain of the referee's own loss on the held-out slice; None for scripts or short slices."""
        means = []
        for folders in self.runs:
            losses = [(run_folder.read(folder).get("referee") or {}).get("loss") or {} for folder in folders]
            nats = [(loss.get("held_out") or {}).get("from_logits_nats") for loss in losses]
            if not nats or None in nats:
                return None
            means.append(math.fsum(loss_nats for loss_nats in nats if loss_nats is not None) / len(nats))
        return means[0] - means[1]


class Derived(NamedTuple):
    """The decision that the races of a submission lead to."""

    decided: Decided
    needs_confirmation: bool  # whether the confirmation has still to be run


def derive(search: Search, submission: Submission) -> Derived:
    """Returns the decision that the races of a submission lead to so far."""
    folders = [folder_of(search, f"{submission.number}-{stage}") for stage in (RACE, CONFIRMATION)]
    race, confirmation = (Raced(search, folder) if folder else None for folder in folders)
    planned = [folder for folder in folders if folder]
    decided: Decided = {
        "submission": submission.number,
        "decision": "undecided",
        "why": "the budget was spent before it could be raced",
        "races": [folder.name for folder in planned],
        "spent_s": spent_s(search.results, planned) + checked_s(search, submission.number),
    }
    if race is None:
        return Derived(decided, False)
    decided = cast(Decided, {**decided, **race.numbers(), "stage": RACE})
    if race.finding["outcome"] != searching.PROMISING:
        return Derived(cast(Decided, {**decided, **race.rejection()}), False)
    if confirmation is None or confirmation.record is None:
        why = f"promising, {race.gain_text}, but the budget was spent before it could be confirmed"
        is_to_run = confirmation is not None or search.spent_s <= search.settings["budget_s"]
        return Derived({**decided, "why": why}, is_to_run)
    decided = cast(Decided, {**decided, **confirmation.numbers(), "stage": CONFIRMATION})
    if confirmation.finding["outcome"] != searching.KEEP:
        decided = cast(Decided, {**decided, **confirmation.rejection()})
        is_luck = decided["decision"] == "drop" and confirmation.finding["gain"] is not None
        how = "was luck; its confirmation" if is_luck else "was not confirmed"
        decided["why"] = f"{search.shown(race.finding['gain'] or 0.0)} in its race {how}: {decided['why']}"
        return Derived(decided, False)
    if doubt := confirmation.doubt():
        return Derived({**decided, "why": f"{confirmation.gain_text}, but {doubt}"}, False)
    log_e = confirmation.finding["log_e"]
    assert submission.level is not None and log_e is not None
    evidence = f"e-value {math.exp(log_e):.0f}, where {1 / submission.level:.0f} is needed"
    why = f"{confirmation.gain_text} on fresh seeds, {evidence}"
    return Derived({**decided, "decision": "keep", "why": why, "arm": submission.arm}, False)


def spent_s(results: Path, folders: Sequence[Path]) -> float:
    """Returns the wall time of all runs that were started for these races."""
    slots = [slot for folder in folders for slot in state.read(folder, results).slots]
    return _wall_s(results, [run for slot in slots for run, _ in slot.attempts])


def checks_of(search: Search, name: object) -> Path:
    """Returns the results folder of the short runs of a submission, or of the champion."""
    return search.folder / "checks" / str(name)


def checked_s(search: Search, number: int) -> float:
    """Returns the wall time of the short runs of a submission, including those that were killed."""
    results = checks_of(search, number)
    return _wall_s(results, [f"{path.parent.name}/{path.name}" for path in sorted(results.glob("[!.]*/*"))])


def _wall_s(results: Path, runs: Sequence[str]) -> float:
    """Returns the wall time of those runs whose record can be read."""
    records = [arm_process.record_of(results, run) for run in runs]
    return math.fsum(row_of(record)["wall_s"] or 0.0 for record in records if record)


def sentence(search: Search, submission: Submission) -> str:
    """Returns the decision on a submission with its reasons and its cost, in one line."""
    decided = submission.decided
    if decided is None:
        return f"{submission.number} open: {submission.about}"
    why = "; ".join(reasons(search, submission))
    return f"{submission.number} {decided['decision']}: {why} ({search.cost(decided['spent_s'])})"


def reasons(search: Search, submission: Submission) -> list[str]:
    """Returns why it was decided so, what changed in a step if its races have looks, and who replayed a keep's runs."""
    if submission.decided is None:
        return []
    decided = submission.decided
    return [reason for reason in (decided["why"], decided.get("cause"), replayed(search, submission)) if reason]


def replayed(search: Search, submission: Submission) -> str | None:
    """Summarizes the certificates of the candidate's runs in the confirmation of a keep; None if it was not kept."""
    if submission.decided is None or submission.decided["decision"] != "keep":
        return None
    folder, summary = folder_of(search, f"{submission.number}-{CONFIRMATION}"), None
    with contextlib.suppress(ValueError):  # race.json is damaged or missing: its runs are not known
        runs = race_folder.read(folder or search.folder)["arms"]["B"]["runs"] or ()
        summary = certificates.summarized(certificates.sentence(search.results / run) for run in runs)
    return f"replayed: {summary}" if summary else "not replayed"


def answer(search: Search, submission: Submission) -> dict[str, Any]:
    """Returns the answer to its submitter, without seeds, the held-out slice or the champion's own numbers."""
    decided = submission.decided
    about = {"submission": submission.number, "submitted": submission.about, "note": submission.note}
    if decided is None:
        return about | {"decision": None}
    gain, is_loss = decided.get("gain"), search.settings["on"] == "loss"
    return about | {
        "decision": decided["decision"],
        "gain_of_metric" if is_loss else "gain_pct": gain if gain is None or is_loss else 100 * -math.expm1(-gain),
        "ci95": decided.get("ci95"),
        "device_s": search.device_s(decided["spent_s"]),
        "dollars": search.dollars(decided["spent_s"]),
        "why": decided["why"],
        "cause": decided.get("cause"),
        "replayed": replayed(search, submission),
    }


# ---- replaying the decisions


def replay(search: Search) -> Iterator[str]:
    """Yields a sentence for each place where the records do not lead to what the journal says."""
    yield from (f"journal: {fault}" for fault in search.faults)
    book = ledger.read(search.results)
    yield from (f"ledger: {fault}" for fault in book.faults)
    kept: list[bool] = []
    known_races = {search.calibration["race_id"]} if search.calibration else set()
    for submission in search.submissions.values():
        decided = submission.decided
        if submission.level is not None:
            level = searching.level(search.settings["alpha"], kept)
            if not math.isclose(level, submission.level):
                yield f"submission {submission.number}: its level is {submission.level:g}, and was to be {level:g}"
        if decided is None:
            continue
        races = decided.get("races") or []
        known_races |= set(races)
        if decided["decision"] != "refused":
            for fault in _faults(search, submission, races, book):
                yield f"submission {submission.number}: {fault}"
            derived = derive(search, submission).decided
            if any(derived.get(key) != decided.get(key) for key in ("decision", "gain", "arm")):
                both = f"{decided['decision']} in the journal, {derived['decision']} by its records"
                yield f"submission {submission.number}: {both}"
        if submission.level is not None:
            kept.append(decided["decision"] == "keep")
    planned = [line.get("race_id") or "" for line in book.lines if line["event"] == "plan"]
    for race_id in planned if not search.open else ():
        if f"-{search.name}-" in race_id and race_id not in known_races:
            yield f"{race_id}: a race of this search that the journal does not have"


def _faults(search: Search, submission: Submission, races: Sequence[str], book: ledger.Ledger) -> Iterator[str]:
    """Yields faults of the records that a decision rests on, as sentences."""
    for name in races:
        race = state.read(race_folder.of(search.results, name), search.results, book)
        path = race.folder / "race.json"
        ends = [line.get("race_json_sha256") for line in race.lines if line["event"] == "race_end"]
        if not path.is_file() or ends != [ledger.sha256_of(path)]:
            yield f"{name}/race.json is not the one that the ledger has"
        level = submission.level if f"-{CONFIRMATION}-" in name else None
        if race.plan["sequential"]["stop"] != search.stop(level):
            yield f"{name} stopped by other rules than the search's"
        for slot in race.slots:
            for run, _ in slot.attempts:
                end, folder = book.runs[run]["end"], search.results / run
                if end and (folder / "run.json").is_file() and ledger.is_changed(folder, end):
                    yield f"{run} is not the record that the ledger has"
