"""The certificate of a replay: certificate.json, beside the record and beside the replay.

It names the fields in which the two environments differ, those that can change losses first.  Schema 2 has "time", and
"equal within rounding" by a measured bound (rounding.json); schema 1 assumed its bounds.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from bench.base import atomic, utc
from bench.plans.replay import outcomes
from bench.plans.replay.outcomes import Outcome
from bench.plans.replay.recorded import Recorded
from bench.plans.replay.repeats import Time
from bench.record import certificates, ledger
from bench.record.certificates import Certificate

SCHEMA_VERSION: Literal[2] = 2
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


def impossible(record: Recorded, why: str) -> Certificate:
    """The certificate of a record that cannot be run again here."""
    return {
        "record": record.name,
        "outcome": outcomes.IMPOSSIBLE,
        "why": why,
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
    """The certificate of one or more replays of the same seed, or of fresh seeds, whose outcome has no losses."""
    first, cause, why = replayed[0], None, outcome.why
    fields = differences(record.environment, first.environment)
    if outcome.num_losses is not None and outcome.word != outcomes.IDENTICAL:
        unsaid = unrecorded(record.environment, first.environment)
        cause = likeliest_cause(fields, unsaid, bool(record.config["hardware"].get("deterministic")))
        why += f"; likeliest cause: {cause}" * (outcome.word == outcomes.ROUNDED)
    found: Any = {
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
    return impossible(record, why) | found


def holds(certificate: Certificate) -> bool:
    """Whether the record was reproduced."""
    return certificate["outcome"] in certificates.HOLDS


def write(certificate: Certificate, folders: list[Path]) -> None:
    """Enter a certificate into the ledger of this machine's replays and write it into each of these folders."""
    if certificate["replays"]:
        facts: dict[str, Any] = {key: certificate[key] for key in ("record", "losses_sha256", "outcome", "replays")}
        ledger.append(certificates.replays_root(), certificates.EVENT, **facts)
    for folder in folders:
        atomic.write_json(folder / certificates.FILE, certificate)


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


def decide_the_same_bits(first: Recorded, second: Recorded) -> bool:
    """Whether machine and software are known to be the same in all that decides the bits of a loss.

    In one session (one boot, one software image) what a record does not say is the same too; elsewhere every cause of
    CAUSES must be recorded in both.  A CPU by its name alone is not known: virtual machines share one.
    """
    both = first.environment, second.environment
    if first.run.get("nodes") or {field.name for field in differences(*both)} & {*CAUSES, "variables"}:
        return False
    needed = [name for name in CAUSES if name not in OF_GPUS or second.environment.get("gpus")]
    return first.is_of_session(second) or all(facts.get(name) is not None for facts in both for name in needed)


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
    """The CAUSES that are known here and that the record does not hold, as older records do not."""
    return [
        name
        for name in CAUSES
        if recorded.get(name) is None and (here.get(name) not in (None, []) or name in LATER_FIELDS)
    ]
