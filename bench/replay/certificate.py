"""What a replay showed, as a file beside the record and beside the replay: certificate.json."""

import dataclasses
from pathlib import Path

from bench import atomic
from bench.machine import utc
from bench.reading import json_file
from bench.record import certificates
from bench.replay import environments, outcomes
from bench.replay.environments import Field
from bench.replay.outcomes import Outcome
from bench.replay.rebuilding import Recorded

SCHEMA_VERSION = 1


@dataclasses.dataclass(frozen=True)
class Certificate:
    """One record's replay.  The paths are TRACK/RUN_ID."""

    record: str
    outcome: str  # a word of outcomes.py
    why: str
    replays: list[str]  # the runs that it was judged by; [] where none could be made
    machine: str | None  # environments.kind(); None where nothing ran
    cause: str | None  # of losses that differ, as far as the environments name one
    num_equal_losses: int | None  # before the first that differs; None of several runs
    num_losses: int | None  # recorded
    differences: list[Field]  # of the environments
    source_sha256: str  # the record's
    losses_sha256: str  # of the record's steps.csv, so that a certificate of another record shows
    facts: dict  # of several runs: their numbers
    made_at: str = ""
    schema_version: int = SCHEMA_VERSION

    @property
    def holds(self) -> bool:
        """Whether the record was reproduced."""
        return self.outcome in certificates.HOLDS


def impossible(recorded: Recorded, why: str) -> Certificate:
    """Of a record that cannot be run again here."""
    return _of(recorded, outcomes.IMPOSSIBLE, why)


def of_one(recorded: Recorded, replayed: Recorded, outcome: Outcome) -> Certificate:
    """Of the same seed again."""
    theirs, ours = _environment(recorded), _environment(replayed)
    fields = environments.differences(theirs, ours)
    is_same = outcome.word == outcomes.IDENTICAL
    unsaid, is_deterministic = environments.unsaid(theirs, ours), recorded.config["hardware"].get("deterministic")
    cause = None if is_same else environments.cause(fields, unsaid, bool(is_deterministic))
    return _of(
        recorded,
        outcome.word,
        outcome.why + (f"; likeliest cause: {cause}" if cause and outcome.word == outcomes.ROUNDED else ""),
        replays=[replayed.name],
        machine=environments.kind(theirs, ours, (recorded.run.get("session_id"), replayed.run.get("session_id"))),
        cause=cause,
        num_equal_losses=outcome.num_equal_losses,
        num_losses=outcome.num_losses,
        differences=fields,
    )


def of_several(recorded: Recorded, replayed: list[Recorded], word: str, why: str, facts: dict) -> Certificate:
    """Of fresh seeds."""
    theirs, ours = _environment(recorded), _environment(replayed[0])
    session_ids = recorded.run.get("session_id"), replayed[0].run.get("session_id")
    return _of(
        recorded,
        word,
        why,
        replays=[one.name for one in replayed],
        machine=environments.kind(theirs, ours, session_ids),
        differences=environments.differences(theirs, ours),
        facts=facts,
    )


def _of(recorded, outcome, why, **more):
    rest = {"replays": [], "machine": None, "cause": None, "num_equal_losses": None, "num_losses": None}
    rest |= {"differences": [], "facts": {}}
    listed = {one["path"]: one["sha256"] for one in recorded.run["artifacts"]}
    return Certificate(
        recorded.name,
        outcome,
        why,
        **(rest | more),
        source_sha256=recorded.run["code"]["source_sha256"],
        losses_sha256=listed.get("steps.csv", ""),
        made_at=utc.now(),
    )


def environment_of(one: Recorded) -> dict:
    """environment.json; {} where it is missing."""
    path = one.folder / "environment.json"
    return json_file.read(path) if path.is_file() else {}


def _environment(one):
    return one.run["environment"] | {"variables": environments.variables(environment_of(one))}


def write(result: Certificate, folders: list[Path]) -> None:
    """Into each of these run folders, in place of an earlier one."""
    for folder in folders:
        atomic.write_json(folder / certificates.FILE, dataclasses.asdict(result))
