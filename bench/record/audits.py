"""audit.json: how the counterfactual audit of a run ended (./run.sh audit), beside its record."""

from pathlib import Path
from typing import NotRequired, TypedDict

from bench import atomic
from bench.reading import json_file
from bench.reading.damage import Damaged

FILE = "audit.json"
PASSED, DOUBTED, FAILED, NOT_POSSIBLE = "passed", "doubted", "failed", "not possible"  # outcomes


class OfKind(TypedDict):
    """One counterfactual."""

    kind: str
    outcome: str  # one of those above
    why: str
    run: NotRequired[str | None]  # in results/.audits/
    nats: NotRequired[float | None]
    least_nats: NotRequired[float | None]


class Audit(TypedDict):
    """What was found of a contestant: its config and code, by one of its runs."""

    run: str
    config_id: str
    source_sha256: str | None
    at: str
    claimed_nats: float | None
    outcome: str
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
