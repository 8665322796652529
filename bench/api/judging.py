"""Judges whether a claim holds by the rules of its track: speedrun.judge()."""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from bench.api.answers import Answer
from bench.api.tables import Named, names_for, names_of
from bench.base.text_table import counted
from bench.claims import claim as claims
from bench.claims import claim_folder
from bench.claims.rules import rulebook
from bench.plans.race import state
from bench.record import certificates, ledger, named, run_folder
from bench.web import document
from bench.web.document import Document

T = TypeVar("T")
MARKS = {True: ("pass", "good"), None: ("-", "soft"), False: ("FAIL", "bad")}


class Judgement(Answer):
    """Whether a claim holds.  rules: a dict each; accepted: True, False, or None for logs that do not contradict it."""

    def __init__(self, facts: Mapping[str, Any]) -> None:
        self.accepted: bool | None = facts["accepted"]
        self.rules: list[dict[str, Any]] = facts["rules"]  # rule, passed (None: does not apply), evidence
        states = {True: ("accepted", "good"), False: ("refused", "bad"), None: ("not refused", "doubt")}
        state, colour = states[self.accepted]
        about = f"{facts['claim']} on track {facts['track']}, {counted(facts['n'], 'run')}"
        rows = [
            [document.coloured(*MARKS[rule["passed"]]), rule["rule"], rule["evidence"]]
            for rule in sorted(self.rules, key=lambda rule: rule["passed"] is not False)
        ]
        verdict = document.Verdict(about, "", badges=[document.coloured(state, f"badge {colour}")])
        table = document.Table(("", "rule", "evidence"), rows)
        super().__init__(Document(f"Claim: {about}", [verdict], [table], dict(facts)))


def judge(*runs: Named, track: str | None = None, against: Named | None = None, replayed: bool = False) -> Judgement:
    """Judge whether these runs together make a claim that holds: ./run.sh judge.

    runs: run folders, a race of two arms, RACE:ARM, a claim's folder, or with track also logs.  against: the runs of
    the record that stands, for the rule on two results; None: no such rule.  replayed: require replays of each run.
    Raises ValueError if nothing can be claimed, or a race has several candidates.
    """
    with tempfile.TemporaryDirectory() as folder:
        names = names_for("judge", runs)
        others = names_of(against) if against is not None else []
        _, facts = only(judgements(names, track, others, replayed, Path(folder)), names[0])
    return Judgement(facts)


def only(judged: Sequence[T], name: str) -> T:
    """Returns the only claim of a name.  Raises ValueError for a race of several candidates."""
    if len(judged) > 1:
        raise ValueError(f"{name}: a race of {len(judged)} candidates: name one of them, RACE:ARM")
    return judged[0]


def judgements(
    names: Sequence[str], track: str | None, against: Sequence[str], replayed: bool, folder: Path
) -> list[tuple[claims.Claim, dict[str, Any]]]:
    """Returns [(claim, {"claim", "track", "n", "accepted", "rules"})], one for each candidate of a race, else one.

    folder: an empty folder in which logs become records; it must exist as long as the claims are used.
    """
    judged = []
    for name, claim in claims_of(names, track, folder / "runs"):
        if track not in (None, claim.track):
            raise ValueError(f"--track {track}: {name} is on track {claim.track}, and was made to its rules")
        if against:
            _, claim.against = only(claims_of(against, claim.track, folder / "against"), f"--against {against[0]}")
        rules = rulebook.check(claim, replayed)
        accepted = None if claim.is_of_logs else True
        if any(rule["passed"] is False for rule in rules):
            accepted = False
        about = {"claim": name, "track": claim.track, "n": len(claim.runs)}
        judged.append((claim, about | {"accepted": accepted, "rules": rules}))
    return judged


def claims_of(
    names: Sequence[str], track: str | None = None, folder: Path | None = None
) -> list[tuple[str, claims.Claim]]:
    """Returns [(name, Claim)] for what the user named.  folder: where logs become records; None: logs are refused."""
    if len(names) == 1 and len(matches := named.find(names)) == 1:
        chosen = matches[0]
        if chosen.race:  # a claim of the named arm, or of every arm that was raced against the baseline
            book = ledger.read(chosen.race.parent.parent)
            race, race_id = state.read(chosen.race, book=book), chosen.race.name
            chosen.check_arm(race.plan["arms"])
            arms = [chosen.arm] if chosen.arm else [arm for arm in race.plan["arms"] if arm != race.plan["baseline"]]
            return [(f"{race_id}:{arm}", claims.from_race(race, arm, book)) for arm in arms]
        if chosen.claim:
            return [(names[0], claim_folder.read(chosen.claim))]
        if claim_folder.lacks_claim(chosen.paths[0]):
            raise ValueError(f"{chosen.paths[0]}: its README.md has a claim's table, claim.yaml is missing: restore it")
    return [(" ".join(names), claims.from_folders(_folders(names, folder, track), track=track))]


def _folders(names: Sequence[str], folder: Path | None, track: str | None) -> list[Path]:
    """Returns the run folders that names mean, or without records those of the logs that they mean.

    Replays in a results folder are excluded, as they repeat its runs.
    """
    try:
        paths = named.runs(names)
        return [path for path in paths if path.parent.parent.name != certificates.REPLAYS] or paths
    except ValueError:
        paths = [path for match in named.find(names) for path in match.holders]
        has_records = any(True for path in paths if path.is_dir() for _ in run_folder.find_runs([path]))
        if has_records or folder is None or not (folders := _of_logs(paths, folder, track)):
            raise
        return folders


def _of_logs(paths: Sequence[Path], folder: Path, track: str | None) -> list[Path]:
    """Writes the runs of logs as records below a folder.  Returns their folders."""
    from bench.record.importers import dialects, records  # imports numpy, which is not needed to judge records

    form = (claims.track_rules(track).rules.logs if track else None) or "modded-nanogpt"
    for path, part_of in dialects.files_of(paths):
        for run, rows in dialects.read_file(path, form, part_of)[0]:
            records.write(run, rows, folder)
    return list(run_folder.find_runs([folder] if folder.is_dir() else []))
