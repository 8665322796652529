"""certificate.json and audit.json: the outcomes of a record's replay and of its audit, in files beside the record.

./run.sh replay writes the first, ./run.sh audit the second.  Either file may have come with the record, so it is only
a claim.  A certificate is shown without "claimed" if this machine's own replays (results/replays) have the same
outcome in their ledger; lines collected from other machines do not count.  ./run.sh judge --replayed trusts neither:
it compares the losses again (bench/plans/replay/replaying.py).
"""

import functools
import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict, cast

from bench.base.paths import published_root, results_root
from bench.base.reading import json_file
from bench.base.reading.damage import Damaged
from bench.record import ledger, run_folder
from bench.record.shape import Facts

FILE = "certificate.json"
EVENT = "certificate"  # a line in the ledger of replays, with record, losses_sha256, outcome, replays
HOLDS = ("identical", "equal within rounding", "statistically reproduced")  # outcomes that confirm a record
CLAIMED = "claimed: "
MALFORMED = "malformed"
AUDIT_FILE = "audit.json"
REPLAYS = "replays"  # in results/
AUDITS_FOLDER = ".audits"  # in results/; folders that begin with a dot are not searched for runs
WEIGHTS = "weights"  # the audit that needs no run
PASSED, DOUBTED, FAILED, NOT_POSSIBLE = "passed", "doubted", "failed", "not possible"  # outcomes

Word = Literal[
    "identical", "equal within rounding", "statistically reproduced", "not reproduced", "undecided", "impossible here"
]


class Certificate(TypedDict):
    """certificate.json (bench/plans/replay/certificate.py); fields that were added later are not required."""

    schema_version: Literal[1, 2]
    record: str  # TRACK/RUN_ID, as in replays
    outcome: Word
    why: str
    replays: list[str]  # the replays that the outcome is based on; [] if none was possible
    machine: str | None  # None if nothing ran
    cause: str | None  # why losses differ, as far as the environments show it
    num_equal_losses: int | None  # before the first that differs; None for replays with fresh seeds
    num_losses: int | None  # in the record; None for replays with fresh seeds
    differences: list[dict[str, Any]]  # between the environments
    source_sha256: str  # of the record
    losses_sha256: str  # of the record's steps.csv, which reveals a certificate of another record
    facts: dict[str, Any]  # the numbers behind the outcome
    made_at: str
    time: NotRequired[dict[str, Any] | None]  # whether the run's time was reproduced; None if nothing ran
    sandbox: NotRequired[str | None]  # of the replays (bench/machine/sandbox.py); None: they ran as the user


def replays_root() -> Path:
    """Returns the results folder of replays.  Its ledger is separate, as a replay is not another repeat of a config."""
    return results_root() / REPLAYS


def read(folder: Path | str) -> Certificate | None:
    """Returns the certificate in the folder of a record or of a replay; None without one, or if it is of another run.

    Raises ValueError if the file does not have the format that ./run.sh replay writes.
    """
    if not (Path(folder) / FILE).is_file():
        return None
    certificate = cast(Certificate, json_file.read(Path(folder) / FILE, Certificate))
    run = run_folder.read_raw(folder)
    matches = name_of(run) in certificate["replays"]
    matches |= certificate["record"] == name_of(run) and certificate["losses_sha256"] == losses_sha256(run)
    return certificate if matches else None


def name_of(run: Facts) -> str:
    """Returns TRACK/RUN_ID of a run."""
    return f"{run['track']}/{run['run_id']}"


def losses_sha256(run: Facts) -> str:
    """Returns the SHA-256 of steps.csv from the record's list of artifacts; "" if it is not in the list."""
    return next((file["sha256"] for file in run["artifacts"] if file["path"] == "steps.csv"), "")


def entries(record: str, losses_sha256: str) -> list[ledger.Line]:
    """Returns the lines about a record in the ledger of this machine's replays, oldest first."""
    path = replays_root() / ledger.NAME
    if not path.is_file():
        return []
    stat = path.stat()
    lines = _entries(path.parent, stat.st_size, stat.st_mtime_ns)
    return [line for line in lines if line["record"] == record and line["losses_sha256"] == losses_sha256]


@functools.lru_cache(maxsize=4)
def _entries(results: Path, size: int, mtime_ns: int) -> list[ledger.Line]:
    lines = ledger.read(results).own_lines
    return [line for line in lines if line["event"] == EVENT and "record" in line and "losses_sha256" in line]


def is_claim(folder: Path | str, certificate: Certificate) -> bool:
    """Whether a certificate says that its record holds, but no replay of this machine confirms it.

    The certificate of a published record is always a claim, so that its table reads the same on every machine.
    """
    if certificate["outcome"] not in HOLDS:
        return False
    if Path(folder).absolute().is_relative_to(published_root().absolute()):
        return True
    claimed = certificate["outcome"], certificate["replays"]
    made_here = entries(certificate["record"], certificate["losses_sha256"])
    return not any((line.get("outcome"), line.get("replays")) == claimed for line in made_here)


def outcome(folder: Path | str) -> str | None:
    """Returns the outcome of a run folder's certificate, with "claimed: " if it is only a claim; None without one."""
    if not os.access(f"{folder}/{FILE}", os.F_OK):  # the fast way out, as a table calls this for thousands of runs
        return None
    try:
        certificate = read(folder)
    except ValueError:
        return MALFORMED
    return None if certificate is None else CLAIMED * is_claim(folder, certificate) + certificate["outcome"]


def summarized(outcomes: Iterable[str | None]) -> str | None:
    """Summarizes the outcomes of repeats: "3 identical" or "2 of 3 identical"; None if none has a certificate."""
    outcomes = list(outcomes)
    counts = Counter(outcome for outcome in outcomes if outcome is not None)
    if not counts:
        return None
    total = f" of {len(outcomes)}" if set(outcomes) - set(counts) else ""
    return ", ".join(f"{number}{total} {outcome}" for outcome, number in counts.most_common())


def sentence(folder: Path | str) -> str | None:
    """Describes a run's certificate: "identical (same session), time reproduced, 2026-11-22"; None without one."""
    verdict = outcome(folder)
    certificate = None if verdict in (None, MALFORMED) else read(folder)
    if certificate is None:
        return verdict
    machine = f" ({certificate['machine']})" if certificate["machine"] else ""
    time = f", time {time_facts['word']}" if (time_facts := certificate.get("time")) else ""
    return f"{verdict}{machine}{time}, {certificate['made_at'][:10]}"


# ---- audit.json


class OfKind(TypedDict):
    """The outcome of one counterfactual, such as random tokens."""

    kind: str
    outcome: str  # PASSED, DOUBTED, FAILED or NOT_POSSIBLE
    why: str
    run: NotRequired[str | None]  # in results/.audits/
    nats: NotRequired[float | None]
    least_nats: NotRequired[float | None]
    unnoticed_nats: NotRequired[float]  # a cheat that lowers the last loss by less passes; if random tokens passed


class Audit(TypedDict):
    """The audit of a contestant (a config and its code), made from one of its runs."""

    run: str
    config_id: str
    source_sha256: str | None
    at: str
    claimed_nats: float | None
    outcome: str
    unnoticed_nats: NotRequired[float | None]  # the smallest of its audits
    audits: list[OfKind]


def read_audit(folder: Path | str) -> Audit | None:
    """Returns the audit in a run folder, or None if there is none or it cannot be read."""
    try:
        return cast(Audit, json_file.read(Path(folder) / AUDIT_FILE, Audit))
    except Damaged:
        return None


def audit_limit(audit: Audit) -> str:
    """Returns text to append to the outcome: what an audit that did not fail could have missed; "" if unknown."""
    unnoticed_nats = audit.get("unnoticed_nats")
    if unnoticed_nats is None or audit["outcome"] == FAILED:
        return ""
    return f" (a loss lowered by less than {unnoticed_nats:.4f} nats would not have been noticed)"
