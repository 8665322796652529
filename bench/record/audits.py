"""audit.json: how the counterfactual audit of a run ended (./run.sh audit), beside its record."""

from pathlib import Path
from typing import NotRequired, TypedDict

from bench import atomic
from bench.reading import json_file
from bench.reading.damage import Damaged
from bench.record import ledger

FILE = "audit.json"
FOLDER = ".audits"  # in results/: what begins with a dot is not searched for runs
PASSED, DOUBTED, FAILED, NOT_POSSIBLE = "passed", "doubted", "failed", "not possible"  # outcomes


class OfKind(TypedDict):
    """One counterfactual."""

    kind: str
    outcome: str  # one of those above
    why: str
    run: NotRequired[str | None]  # in results/.audits/
    nats: NotRequired[float | None]
    least_nats: NotRequired[float | None]
    unnoticed_nats: NotRequired[float]  # how much less the last loss could be; of random tokens that passed


class Audit(TypedDict):
    """What was found of a contestant: its config and code, by one of its runs."""

    run: str
    config_id: str
    source_sha256: str | None
    at: str
    claimed_nats: float | None
    outcome: str
    unnoticed_nats: NotRequired[float | None]  # the least of its audits
    audits: list[OfKind]


def write(folder: Path, audit: Audit) -> None:
    """Beside the record in folder."""
    atomic.write_json(folder / FILE, audit)


def read(folder: Path | str) -> Audit | None:
    """None where it was not audited, or the file cannot be read."""
    try:
        return json_file.read(Path(folder) / FILE, Audit)
    except Damaged:
        return None


def limit(audit: Audit) -> str:
    """What could have escaped an audit that did not fail, to follow its outcome; empty where nobody knows."""
    unnoticed_nats = audit.get("unnoticed_nats")
    if unnoticed_nats is None or audit["outcome"] == FAILED:
        return ""
    return f" (a loss lowered by less than {unnoticed_nats:.4f} nats would not have been noticed)"


def passed_here(results: Path, run: dict, audit: Audit) -> bool:
    """Whether this contestant passed an audit whose runs are in this machine's own ledger of audits, unchanged.

    results: the results folder; run: the audited record; audit: what lies beside it, which anybody can write.
    """
    same = (audit["config_id"], audit["source_sha256"]) == (run["config_id"], run["code"]["source_sha256"])
    names = [one.get("run") for one in audit["audits"] if one["outcome"] == PASSED]
    entries = ledger.read(results / FOLDER).runs
    return (
        same
        and audit["outcome"] == PASSED
        and bool(names)
        and all(_is_whole(results / FOLDER, name, entries.get(name)) for name in names)
    )


def _is_whole(root, name, entry):
    if entry is None or entry["end"] is None:
        return False
    try:
        return entry["end"]["run_json_sha256"] == ledger.sha256_of(root / name / "run.json")
    except (Damaged, OSError):
        return False
