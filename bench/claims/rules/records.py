"""Rules about single records and about the ledger that lists them."""

import functools
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from bench.base import utc
from bench.base.paths import PUBLISHED, published_root, results_root, shown
from bench.base.reading import plain_file
from bench.base.reading.damage import Damaged
from bench.base.text_table import counted, some
from bench.claims.claim import Claim, Judged, Run
from bench.config.user_code import is_import_path
from bench.machine import git
from bench.record import certificates, configs, ledger, run_folder, verification
from bench.record.shape import Record

OF_CLASSES = ("model.arch", "data.source", "optim.name", "optim.schedule.name")  # settings that name classes
MAX_BLOBS = 500  # most ledgers read from git's history of publications, the newest first
MAX_SLACK_S = 2.0  # by how much the time of day may be set back during a run
COMPLETE = verification.is_complete.__name__.replace("_", " ")  # not applied here: another arm's run may have failed


def every_record_is_internally_consistent(claim: Claim) -> Judged:
    """Each run passes ./run.sh verify: no byte of its folder was changed, and its numbers follow from its facts."""

    def fault_of(run: Run) -> str | None:
        rules = verification.report(run.folder)["rules"]
        failed = [rule for rule in rules if not rule["passed"] and rule["rule"] != COMPLETE]
        return "; ".join(f"{rule['rule']}: {rule['evidence']}" for rule in failed[:2]) or None

    return judge_each(claim.all_runs, fault_of, f"{counted(len(claim.all_runs), 'record')} verified")


def git_identified_the_code_of_every_run(claim: Claim) -> Judged:
    """Git worked for every run: without it, whether the code matches a commit is unknown."""
    good = f"no failure of git in {counted(len(claim.all_runs), 'run')}"
    return judge_each(claim.all_runs, lambda run: run.record["code"].get("git_failure"), good)


def every_run_completed(claim: Claim) -> Judged:
    """No run failed or is invalid.  A suspect one keeps its loss, and its time does not count."""

    def fault_of(run: Run) -> str | None:
        if claim.may_end_early:
            return None if run.validations else "it has no validation"
        if run.record["status"] != "complete":
            return f"{run.record['status']}, {(run.record['failure'] or {}).get('kind')}"
        return f"invalid, {'; '.join(run.record['validity_reasons'])}" if run.record["validity"] == "invalid" else None

    num_complete = sum(run.record["status"] == "complete" for run in claim.runs)
    early = f", {len(claim.runs) - num_complete} stopped within their schedules, as the z rule allows"
    return judge_each(claim.runs, fault_of, f"{num_complete} complete" + early * (num_complete < len(claim.runs)))


def every_run_was_reproduced(claim: Claim) -> Judged:
    """Replays made on this machine reproduce each claimed run; outcomes are recomputed from both steps.csv."""
    from bench.plans.replay import replaying  # imports numpy, which only --replayed needs

    judged = []

    def fault_of(run: Run) -> str | None:
        try:
            judged.append(replaying.recomputed(run.folder))
        except ValueError as error:
            return str(error)
        return None if judged[-1]["outcome"] in certificates.HOLDS else f"{judged[-1]['outcome']}: {judged[-1]['why']}"

    faults = judge_each(claim.runs, fault_of, "")
    times = [(again["outcome"], again["time"]) for again in judged]
    outcomes = certificates.summarized(f"{outcome} (time {time['word']})" for outcome, time in times if time)
    return faults if not faults[0] else (True, f"recomputed from replays made here: {outcomes}")


def the_contestant_was_audited(claim: Claim) -> Judged:
    """No audit (./run.sh audit) of these runs failed; a script, or a class of the user's own, has passed one here.

    A script's logits cannot be seen, and either may have kept weights of an earlier run.  Every run of a model holds
    its own validations on random and held-out tokens, which `verify` checks.
    """
    from bench.plans.audit import auditing  # imports what starts runs, which few claims need

    results = results_root()  # a claim's own folder may come with audits that its author wrote
    audits = {run.name: certificates.read_audit(run.folder) for run in claim.runs}
    by_run = {name: audit for name, audit in audits.items() if audit is not None}
    failed = [
        f"{name}: {part['kind'].replace('_', ' ')}: {part['why']}"
        for name, audit in by_run.items()
        for part in audit["audits"]
        if part["outcome"] == certificates.FAILED
    ]
    ours = [run for run in claim.runs if run.record.get("referee")]
    contestants = {(run.record["config_id"], run.record["code"]["source_sha256"]): run for run in ours}
    if not failed and (results / certificates.AUDITS_FOLDER / ledger.NAME).is_file():
        failed = [
            f"{run.name}: {kind.replace('_', ' ')}: an audit on this machine failed: ./run.sh audit {run.name} says why"
            for run in contestants.values()
            for kind, outcomes in auditing.outcomes_here(results, run.record).items()
            if certificates.FAILED in outcomes
        ]
    if failed:
        return False, "; ".join(failed)
    limit = certificates.audit_limit
    outcomes = ", ".join(f"{name} {audit['outcome']}{limit(audit)}" for name, audit in by_run.items())
    own = [run for run in contestants.values() if _has_own_code(run)]
    if not own or not any(key.split(".")[0] == "data" for key in claim.track_rules.fixed):
        held = "each run holds its own validations on random and held-out tokens"
        if any(run.record.get("script") for run in claim.runs):
            held = (
                f"not audited, nor need be on a track that fixes no data: ./run.sh audit {claim.runs[0].name} does it"
            )
        return (True, outcomes) if by_run else (None, held)
    lacking = [run for run in own if not auditing.passed_here(results, run.record, runs=claim.ledger.results)]
    if not lacking:
        return True, outcomes or "audited on this machine"
    claimed = f"{outcomes} according to the claimant; " if outcomes else ""
    contestant = "script" if lacking[0].record.get("script") else "code of its own"
    return False, f"{claimed}the {contestant} was not audited on this machine: ./run.sh audit {lacking[0].name}"


def _has_own_code(run: Run) -> bool:
    """Returns whether a run is a script's, or its settings name a class that is not the harness's."""
    settings = configs.settings(configs.read(str(run.folder)))
    own = any(is_import_path(value) for key, value in settings.items() if key in OF_CLASSES or key.endswith(".class"))
    return bool(run.record.get("script")) or own


def the_ledger_is_whole(claim: Claim) -> Judged:
    """No line of the ledger was changed or removed, by its hash chain, times, line count and published copies.

    A line count that restarts between the claim's runs could hide removed lines and is refused; an earlier restart is
    reported.
    """
    book = claim.ledger
    if not book.lines:
        return False, "there is no ledger: copy ledger.jsonl of the results folder to these runs"
    mine: dict[int, list[int]] = {}  # {first line of a chain: lines of the claim's runs in it}
    for number, root, line in zip(book.numbers, book.roots, book.lines):
        if line.get("run") in claim.names:
            mine.setdefault(root, []).append(number)
    lost = ledger.lost_end(book)
    faults = [*book.faults, *([f"this machine has {lost}"] if lost else []), *_faults_of_published(book)]
    evidence, before = f"{len(book.lines)} lines, each names the one before it", []
    for number, root in book.recounted:
        if root not in mine or number <= mine[root][0]:
            before.append(number)
        elif number <= mine[root][-1]:
            where = f"the line count restarted at line {number}, between the claim's runs"
            faults.append(f"{where}, so lines may have been removed there: race again")
    if before:
        numbers = ", ".join(map(str, before))
        evidence += f"; the line count restarted at line {numbers}: whether lines were removed before it is unknown"
    return not faults, "; ".join(faults[:3]) or evidence


def _faults_of_published(book: ledger.Ledger) -> list[str]:
    """Returns a sentence for each published copy with lines that this ledger lacks: it was cut or rewritten since.

    Each publication copies the whole ledger, and git keeps earlier copies.  Copies of other ledgers are ignored, and so
    are later copies of this one if it is itself an older copy.
    """
    own = {line["sha256"] for line in book.lines if "sha256" in line}
    firsts = [line["sha256"] for line in book.lines if "sha256" in line and line.get("prev") is None]
    joined = {name for line in book.lines for name in line.get("firsts", ())}
    heads = {name for line in book.lines for name in line.get("heads", ())} | {book.lines[-1].get("sha256")}
    is_live = book.results.resolve() == results_root().resolve()
    sentences = []
    for where, text in _copies():
        lines = [line for line in map(ledger.parsed, text.splitlines()) if line is not None]
        missing = [line for line in lines if line["sha256"] not in own]
        if not missing or (first := lines[0]["sha256"]) not in firsts:
            continue
        if (not is_live or first in joined) and heads & {line["sha256"] for line in lines}:
            continue
        facts: Mapping[str, Any] = missing[0]
        description = " ".join(str(facts[key]) for key in ("event", "run", "race_id", "at") if facts.get(key))
        remedy = f"the first is {description}: restore them, or merge the two ledgers line by line"
        sentences.append(f"{where} has {len(missing)} lines that are missing from this ledger, {remedy}")
    return sentences


def _copies() -> list[tuple[str, str]]:
    """Returns (name, text) of each published ledger, in results/published/ and in git's history, without duplicates."""
    published = {}
    for path in sorted(published_root().glob(f"*/{ledger.NAME}")):
        try:
            published[plain_file.text(path, plain_file.MAX_LINES_BYTES)] = shown(path)
        except Damaged:  # judging that publication reports it
            continue
    project = published_root().parent.parent
    before = _copies_in_history(project, git.ask(project, "for-each-ref", "--format=%(objectname)"))
    return [(name, text) for text, name in ({text: name for name, text in before} | published).items()]


@functools.cache
def _copies_in_history(project: Path, refs: str | None) -> list[tuple[str, str]]:
    """Returns (name, text) of each published ledger in the git history.  refs: key of the cache, None without git."""
    listed = git.ask(project, "rev-list", "--objects", "--all", "--", f"results/{PUBLISHED}") if refs else None
    objects = [line.partition(" ")[::2] for line in (listed or "").splitlines()]
    blobs = [(name, path) for name, path in objects if path.endswith(f"/{ledger.NAME}")][:MAX_BLOBS]
    texts = [(f"{path} in git ({name[:8]})", git.ask(project, "cat-file", "blob", name)) for name, path in blobs]
    return [(name, text) for name, text in texts if text is not None]


def every_record_matches_the_ledger(claim: Claim) -> Judged:
    """The ledger has the start and the end of each run, and its run.json is the one that was written then.

    What the run says of its own times fits between the two lines.
    """
    names = {line.get("sha256") for line in claim.ledger.lines}

    def fault_of(run: Run) -> str | None:
        entry = claim.ledger.runs.get(run.name)
        if entry is None:
            return "it is not in the ledger"
        if run.record.get("ledger_sha256") not in names:
            return "the ledger's line of its start is not the one that the run names"
        if entry["end"] is None:
            return "its end is not in the ledger"
        if ledger.is_changed(run.folder, entry["end"]):
            return "run.json was changed after the run"
        if _segments(run.record) != [
            line["checkpoint_sha256"]
            for line in claim.ledger.lines
            if line["event"] == "resume" and line.get("run") == run.name
        ]:
            return "its segments are not those of the ledger"
        return _times_fault(run.record, entry["start"].get("at"), entry["end"].get("at"))

    return judge_each(claim.all_runs, fault_of, f"start and end of {counted(len(claim.all_runs), 'run')}")


def _segments(run: Record) -> list[str]:
    """Returns the hashes of the checkpoints from which the run was resumed, in order."""
    return [str(segment.get("checkpoint_sha256")) for segment in (run.get("segments") or [])[1:]]


def _times_fault(run: Record, start: str | None, end: str | None) -> str | None:
    """Returns how the run's times contradict those of its start and end in the ledger, or None."""
    started_at, ended_at = run["started_at"], run["ended_at"]
    if start is None or end is None or started_at is None or ended_at is None:
        return None
    began, ended = utc.parse(started_at), utc.parse(ended_at)
    if (began - ended).total_seconds() > MAX_SLACK_S:
        return f"it ended at {run['ended_at']}, before it was started at {run['started_at']}"
    known_s = (utc.parse(end) - utc.parse(start)).total_seconds()
    if abs((began - utc.parse(start)).total_seconds()) > run_folder.MAX_CLOCK_SKEW_S:
        return f"it started at {run['started_at']} by its own record, but at {start} by the ledger"
    train_s = run["metrics"].get("train_s") if run["status"] == "complete" else None
    if train_s is not None and train_s > known_s + MAX_SLACK_S:
        return f"it trained for {train_s:.1f} s, but the ledger has only {known_s:.1f} s between its start and its end"
    return None


def judge_each(runs: Iterable[Run], fault_of: Callable[[Run], str | None], good: str) -> tuple[bool, str]:
    """Judges each run alone.  fault_of: returns what is wrong with a run or None.  good: evidence if none fails."""
    faults = [f"{run.name}: {fault}" for run in runs if (fault := fault_of(run))]
    return not faults, some(faults, separator="; ") or good
