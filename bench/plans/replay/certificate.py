"""What a replay showed, as a file beside the record and beside the replay: certificate.json.

Schema 2 has "time", and "equal within rounding" by a measured bound (rounding.json); schema 1 assumed its bounds.
"""

import dataclasses
from pathlib import Path

from bench.base import atomic, utc
from bench.base.reading import json_file
from bench.plans.replay import environments, outcomes
from bench.plans.replay.environments import Field
from bench.plans.replay.outcomes import Outcome
from bench.plans.replay.rebuilding import Recorded
from bench.plans.replay.times import Time
from bench.record import certificates, ledger

SCHEMA_VERSION = 2


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
    facts: dict  # the numbers behind the word
    time: Time | None = None  # whether the run's time came again; None where nothing ran
    made_at: str = ""
    schema_version: int = SCHEMA_VERSION

    @property
    def holds(self) -> bool:
        """Whether the record was reproduced."""
        return self.outcome in certificates.HOLDS


def impossible(recorded: Recorded, why: str) -> Certificate:
    """Of a record that cannot be run again here."""
    return _of(recorded, outcomes.IMPOSSIBLE, why)


def of_one(recorded: Recorded, replayed: list[Recorded], outcome: Outcome, time: Time) -> Certificate:
    """Of the same seed again, by one replay or by more."""
    theirs, ours = environment_of(recorded), environment_of(replayed[0])
    fields = environments.differences(theirs, ours)
    unsaid, is_deterministic = environments.unsaid(theirs, ours), recorded.config["hardware"].get("deterministic")
    is_same = outcome.word == outcomes.IDENTICAL
    cause = None if is_same else environments.cause(fields, unsaid, bool(is_deterministic))
    return _of(
        recorded,
        outcome.word,
        outcome.why + (f"; likeliest cause: {cause}" if cause and outcome.word == outcomes.ROUNDED else ""),
        replays=[one.name for one in replayed],
        machine=environments.kind(theirs, ours, session_ids(recorded, replayed[0])),
        cause=cause,
        num_equal_losses=outcome.num_equal_losses,
        num_losses=outcome.num_losses,
        differences=fields,
        facts={} if outcome.share is None else {"share_of_rounding": outcome.share},
        time=time,
    )


def of_several(
    recorded: Recorded, replayed: list[Recorded], word: str, why: str, facts: dict, time: Time
) -> Certificate:
    """Of fresh seeds."""
    theirs, ours = environment_of(recorded), environment_of(replayed[0])
    return _of(
        recorded,
        word,
        why,
        replays=[one.name for one in replayed],
        machine=environments.kind(theirs, ours, session_ids(recorded, replayed[0])),
        differences=environments.differences(theirs, ours),
        facts=facts,
        time=time,
    )


def _of(recorded, outcome, why, **more):
    rest = {"replays": [], "machine": None, "cause": None, "num_equal_losses": None, "num_losses": None}
    rest |= {"differences": [], "facts": {}}
    return Certificate(
        recorded.name,
        outcome,
        why,
        **(rest | more),
        source_sha256=recorded.run["code"]["source_sha256"],
        losses_sha256=certificates.losses_sha256(recorded.run),
        made_at=utc.now(),
    )


def session_ids(recorded: Recorded, replayed: Recorded) -> tuple[str | None, str | None]:
    """Of both."""
    return recorded.run.get("session_id"), replayed.run.get("session_id")


def machine_of(one: Recorded) -> dict:
    """environment.json; {} where it is missing."""
    path = one.folder / "environment.json"
    return json_file.read(path) if path.is_file() else {}


def environment_of(one: Recorded) -> dict:
    """run.json's environment, with "variables", those that reach arithmetic."""
    return one.run["environment"] | {"variables": environments.variables(machine_of(one))}


def write(certificate: Certificate, folders: list[Path]) -> None:
    """Into the ledger of this machine's replays, and into each of these folders in place of an earlier one."""
    facts = {key: getattr(certificate, key) for key in ("record", "losses_sha256", "outcome", "replays")}
    if certificate.replays:
        ledger.append(certificates.replays_root(), certificates.EVENT, **facts)
    for folder in folders:
        atomic.write_json(folder / certificates.FILE, dataclasses.asdict(certificate))
