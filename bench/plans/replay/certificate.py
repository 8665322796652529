"""The certificate of a replay: certificate.json, beside the record and beside the replay.

It names the fields in which the two environments differ, those that can change losses first. Schema 2 has "time", and
"equal within rounding" by a measured bound (rounding.json); schema 1 assumed its bounds.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from bench.base import atomic, private, utc
from bench.base.paths import REPO
from bench.plans.replay import outcomes
from bench.plans.replay.outcomes import Outcome
from bench.plans.replay.recorded import Recorded
from bench.plans.replay.repeats import Time
from bench.record import certificates, ledger
from bench.record.certificates import Certificate

SCHEMA_VERSION: Literal[2] = 2
# {field of run.json["environment"] that can change a loss: its description}, the likeliest cause first.
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
LATER_FIELDS = ("cpu_details", "cpu_capability", "libraries")  # fields that the first records do not have
OF_GPUS = ("cuda", "cudnn", "nccl", "driver")  # unknown, and no cause, on a CPU
UNSAID = "nothing that the two environments say"


@dataclass(frozen=True)
class Field:
    """A fact in which two environments differ."""

    name: str
    recorded: Any
    here: Any


def impossible(record: Recorded, why: str) -> Certificate:
    """Returns the certificate of a record that cannot be run again here."""
    return {
        "record": record.name,
        "outcome": outcomes.IMPOSSIBLE,
        "why": private.redact(why, REPO),
        "replays": [],
        "machine": None,
        "cause": None,
        "num_equal_losses": None,
        "num_losses": None,
        "differences": [],
        "source_sha256": record.run["code"]["source_sha256"],
        "losses_sha256": certificates.losses_sha256(record.run),
        "facts": {},
        "time": None,
        "made_at": utc.now(),
        "schema_version": SCHEMA_VERSION,
    }


def from_replays(record: Recorded, replayed: Sequence[Recorded], outcome: Outcome, time: Time) -> Certificate:
    """Returns the certificate of replays of the same seed, or of fresh seeds, whose outcome has no losses."""
    first, cause, why = replayed[0], None, outcome.why
    fields = differences(record.environment, first.environment)
    if outcome.num_losses is not None and outcome.word != outcomes.IDENTICAL:
        unsaid = unrecorded(record.environment, first.environment)
        cause = likeliest_cause(fields, unsaid, bool(record.config["hardware"].get("deterministic")))
        why += f"; likeliest cause: {cause}" * (outcome.word == outcomes.ROUNDED)
    content: Any = {
        "outcome": outcome.word,
        "why": why,
        "replays": [replay.name for replay in replayed],
        "machine": machine_kind(record.environment, first.environment, record.is_of_session(first)),
        "cause": cause,
        "num_equal_losses": outcome.num_equal_losses,
        "num_losses": outcome.num_losses,
        "differences": [dataclasses.asdict(field) for field in fields],
        "facts": outcome.facts if outcome.share is None else {"share_of_rounding": outcome.share},
        "time": dataclasses.asdict(time),
    }
    return impossible(record, why) | content


def write(certificate: Certificate, folders: list[Path]) -> None:
    """Enters a certificate into the ledger of this machine's replays and writes it into each of these folders."""
    if certificate["replays"]:
        facts: dict[str, Any] = {key: certificate[key] for key in ("record", "losses_sha256", "outcome", "replays")}
        ledger.append(certificates.replays_root(), certificates.EVENT, **facts)
    for folder in folders:
        atomic.write_json(folder / certificates.FILE, certificate)


def differences(recorded: Mapping[str, Any], here: Mapping[str, Any]) -> list[Field]:
    """Returns the fields in which two environments of run.json differ, those that can change losses first.

    Each has "variables". A field that one of them lacks is not a difference, because older records have fewer.
    """
    names = [*CAUSES, *sorted((recorded.keys() | here.keys()) - set(CAUSES) - {"memory_gib"})]
    fields = [Field(name, _plain(name, recorded.get(name)), _plain(name, here.get(name))) for name in names]
    return [field for field in fields if None not in (field.recorded, field.here) and field.recorded != field.here]


def _plain(name: str, value: Any) -> Any:
    """Reduces GPUs to their names, because a serial number and a power limit change no loss."""
    return [gpu["name"] for gpu in value] if name == "gpus" and value is not None else value


def machine_kind(recorded: Mapping[str, Any], here: Mapping[str, Any], is_same_session: bool) -> str:
    """Returns where the replay ran: "same session", "same kind of machine", "other torch" or "other machine"."""
    names = {field.name for field in differences(recorded, here)}
    if is_same_session:
        return "same session"
    if names & {"gpus", "cpu_model", "cpu_details", "cpu_capability", "num_cpus", "driver"}:
        return "other machine"
    return "other torch" if "torch" in names else "same kind of machine"


def decide_the_same_bits(first: Recorded, second: Recorded) -> bool:
    """Returns whether machine and software are known to be the same in all that decides the bits of a loss.

    Within a session (one boot, one software image) unrecorded facts are the same too; elsewhere every one of CAUSES
    must be recorded in both. A CPU's name does not identify it, because different virtual machines share names.
    """
    both = first.environment, second.environment
    if first.run.get("nodes") or {field.name for field in differences(*both)} & {*CAUSES, "variables"}:
        return False
    needed = [name for name in CAUSES if name not in OF_GPUS or second.environment.get("gpus")]
    return first.is_of_session(second) or all(facts.get(name) is not None for facts in both for name in needed)


def likeliest_cause(fields: list[Field], unsaid: list[str], is_deterministic: bool) -> str:
    """Returns the likeliest class of cause of a difference in losses that these environments name.

    unsaid: those of CAUSES that the record does not have.
    """
    named = [CAUSES[field.name] for field in fields if field.name in CAUSES]
    named += ["other settings of the numerical libraries"] * any(field.name == "variables" for field in fields)
    if named:
        return named[0]
    if unsaid:
        return f"{' or '.join(CAUSES[name] for name in unsaid)}: the record does not say"
    return UNSAID if is_deterministic else f"{UNSAID}; hardware.deterministic is off"


def unrecorded(recorded: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """Returns those of CAUSES that are known here but not in the record, as in older records."""
    return [
        name
        for name in CAUSES
        if recorded.get(name) is None and (here.get(name) not in (None, []) or name in LATER_FIELDS)
    ]
