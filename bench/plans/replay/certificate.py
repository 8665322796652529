"""What a replay showed, as a file beside the record and beside the replay: certificate.json.

It names the fields in which the two environments differ, those that can change losses first.  Schema 2 has "time", and
"equal within rounding" by a measured bound (rounding.json); schema 1 assumed its bounds.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.base import atomic, utc
from bench.plans.replay import outcomes
from bench.plans.replay.outcomes import Outcome
from bench.plans.replay.recorded import Recorded
from bench.plans.replay.repeats import Time
from bench.record import certificates, ledger

SCHEMA_VERSION = 2
# What can change a loss, the likeliest cause first, and what to call it.  Fields of run.json["environment"].
CAUSES = {
    "torch": "another torch",
    "gpus": "other GPUs",
    "cpu_model": "another CPU",
    "cpu_details": "another CPU",
    "cpu_capability": "another instruction set of the CPU",
    "num_threads": "another number of threads, which adds in another order",
    "cuda": "another CUDA",
    "cudnn": "another cuDNN",
    "nccl": "another NCCL",
    "driver": "another driver",
    "libraries": "other numerical libraries",
    "python": "another Python",
}
LATER_FIELDS = ("cpu_details", "cpu_capability", "libraries")  # not in the first records
OF_GPUS = ("cuda", "cudnn", "nccl", "driver")  # unknown, and no cause, where no GPU computes
UNSAID = "nothing that the two environments say"


@dataclass(frozen=True)
class Field:
    """One fact of an environment that is not the same in the two."""

    name: str
    recorded: Any
    here: Any


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """One record's replay.  The paths are TRACK/RUN_ID."""

    record: str
    outcome: str  # a word of outcomes.py
    why: str
    replays: list[str] = field(default_factory=list)  # the runs that it was judged by; [] where none could be made
    machine: str | None = None  # machine_kind(); None where nothing ran
    cause: str | None = None  # of losses that differ, as far as the environments name one
    num_equal_losses: int | None = None  # before the first that differs; None of several runs
    num_losses: int | None = None  # recorded
    differences: list[Field] = field(default_factory=list)  # of the environments
    source_sha256: str  # the record's
    losses_sha256: str  # of the record's steps.csv, so that a certificate of another record shows
    facts: dict[str, Any] = field(default_factory=dict)  # the numbers behind the word
    time: Time | None = None  # whether the run's time came again; None where nothing ran
    made_at: str = ""
    schema_version: int = SCHEMA_VERSION

    @property
    def holds(self) -> bool:
        """Whether the record was reproduced."""
        return self.outcome in certificates.HOLDS


def impossible(recorded: Recorded, why: str) -> Certificate:
    """Of a record that cannot be run again here."""
    return Certificate(**_of_record(recorded), outcome=outcomes.IMPOSSIBLE, why=why)


def of(recorded: Recorded, replayed: Sequence[Recorded], outcome: Outcome, time: Time) -> Certificate:
    """Of the same seed again, by one replay or by more; or of fresh seeds, whose outcome has no number of losses."""
    first = replayed[0]
    fields, cause = differences(recorded.environment, first.environment), None
    if outcome.num_losses is not None and outcome.word != outcomes.IDENTICAL:
        unsaid = unrecorded(recorded.environment, first.environment)
        cause = likeliest_cause(fields, unsaid, bool(recorded.config["hardware"].get("deterministic")))
    return Certificate(
        **_of_record(recorded),
        outcome=outcome.word,
        why=outcome.why + (f"; likeliest cause: {cause}" if cause and outcome.word == outcomes.ROUNDED else ""),
        replays=[replay.name for replay in replayed],
        machine=machine_kind(recorded.environment, first.environment, recorded.is_of_session(first)),
        cause=cause,
        num_equal_losses=outcome.num_equal_losses,
        num_losses=outcome.num_losses,
        differences=fields,
        facts=outcome.facts if outcome.share is None else {"share_of_rounding": outcome.share},
        time=time,
    )


def _of_record(recorded: Recorded) -> dict[str, Any]:
    return {
        "record": recorded.name,
        "source_sha256": recorded.run["code"]["source_sha256"],
        "losses_sha256": certificates.losses_sha256(recorded.run),
        "made_at": utc.now(),
    }


def write(certificate: Certificate, folders: list[Path]) -> None:
    """Into the ledger of this machine's replays, and into each of these folders in place of an earlier one."""
    facts = {key: getattr(certificate, key) for key in ("record", "losses_sha256", "outcome", "replays")}
    if certificate.replays:
        ledger.append(certificates.replays_root(), certificates.EVENT, **facts)
    for folder in folders:
        atomic.write_json(folder / certificates.FILE, dataclasses.asdict(certificate))


def differences(recorded: Mapping[str, Any], here: Mapping[str, Any]) -> list[Field]:
    """Two run.json["environment"], each with "variables": fields that differ, what can change losses first.

    A field that one of them does not know is not a difference: older records say less.
    """
    names = [*CAUSES, *sorted((recorded.keys() | here.keys()) - set(CAUSES) - {"memory_gib"})]
    fields = [Field(name, _plain(name, recorded.get(name)), _plain(name, here.get(name))) for name in names]
    return [field for field in fields if None not in (field.recorded, field.here) and field.recorded != field.here]


def _plain(name: str, value: Any) -> Any:
    """GPUs by name: a serial number and a power limit change no loss."""
    return [gpu["name"] for gpu in value] if name == "gpus" and value is not None else value


def machine_kind(recorded: Mapping[str, Any], here: Mapping[str, Any], is_same_session: bool) -> str:
    """Which machine the replay ran on: "same session", "same kind of machine", "other torch", "other machine"."""
    names = {field.name for field in differences(recorded, here)}
    if is_same_session:
        return "same session"
    if names & {"gpus", "cpu_model", "cpu_details", "cpu_capability", "num_cpus", "driver"}:
        return "other machine"
    return "other torch" if "torch" in names else "same kind of machine"


def decide_the_same_bits(one: Recorded, other: Recorded) -> bool:
    """Whether machine and software are known to be the same in all that decides the bits of a loss.

    In one session (one boot, one software image) what a record does not say is the same too; elsewhere every cause of
    CAUSES must be recorded in both.  A CPU by its name alone is not known: virtual machines share one.
    """
    both = one.environment, other.environment
    if one.run.get("nodes") or {field.name for field in differences(*both)} & {*CAUSES, "variables"}:
        return False
    needed = [name for name in CAUSES if name not in OF_GPUS or other.environment.get("gpus")]
    return one.is_of_session(other) or all(facts.get(name) is not None for facts in both for name in needed)


def likeliest_cause(fields: list[Field], unsaid: list[str], is_deterministic: bool) -> str:
    """The likeliest class of cause of a difference in losses that these environments name.

    unsaid: of CAUSES, what the record does not say.
    """
    named = [CAUSES[field.name] for field in fields if field.name in CAUSES]
    named += ["other settings of the numerical libraries"] * any(field.name == "variables" for field in fields)
    if named:
        return named[0]
    if unsaid:
        return f"{' or '.join(CAUSES[name] for name in unsaid)}: the record does not say"
    return UNSAID if is_deterministic else f"{UNSAID}; hardware.deterministic is off"


def unrecorded(recorded: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """Of CAUSES, what the record does not say: what is known here, and what older records have not."""
    return [
        name
        for name in CAUSES
        if recorded.get(name) is None and (here.get(name) not in (None, []) or name in LATER_FIELDS)
    ]
