"""How a judge checks a certificate: nothing in it is believed, its outcome is computed again.

Believed are replays that this machine made: runs of results/replays that its ledger has from start to end, unchanged
since, which pass `verify`, ran the record's code, settings and data, and have step times of their own.  The word is
then that of replaying.judged(), from both steps.csv.  A certificate that came with a record is its bearer's claim.
"""

from pathlib import Path

from bench.plans.replay import rebuilding, replaying
from bench.plans.replay.certificate import Certificate
from bench.plans.replay.rebuilding import Recorded
from bench.record import certificates, ledger, step_files, verification


def of_record(folder: Path) -> Certificate:
    """The certificate that this machine's replays of a run give today.  ValueError says why there is none."""
    recorded = rebuilding.read(folder)
    made_here = certificates.entries(recorded.name, certificates.losses_sha256(recorded.run))
    if not made_here:
        raise ValueError(f"{_claim_of(folder)}: ./run.sh replay {folder.name}")
    root = certificates.replays_root()
    book = ledger.read(root)
    if book.faults:
        raise ValueError(f"the ledger of this machine's replays is not intact: {book.faults[0]}")
    names = made_here[-1].get("replays") or []
    replayed = [_read(book, name) for name in names]
    if not replayed:
        raise ValueError(f"its last replay here names no run: ./run.sh replay {folder.name}")
    for one in replayed:
        replaying.agree(recorded, one)
        _is_no_copy(recorded, one)
    _has_the_right_seeds(recorded, replayed)
    return replaying.judged(recorded, replayed)


def _claim_of(folder):
    """What the file beside the record says, in words that do not believe it."""
    try:
        found = certificates.read(folder)
    except ValueError as error:
        return f"its certificate was not written by ./run.sh replay ({error}), and no replay was made here"
    if found is None:
        return "has no certificate, and no replay of it was made here"
    return f"its certificate claims '{found['outcome']}', which was not checked: no replay of it was made here"


def _read(book, name) -> Recorded:
    """A replay of this machine.  ValueError: it is not there as the ledger has it."""
    entry, folder = book.runs.get(name), book.results / name
    if entry is None or entry["end"] is None:
        raise ValueError(f"its replay {name} is not in the ledger of this machine's replays, from start to end")
    if not (folder / "run.json").is_file():
        raise ValueError(f"its replay {name} no longer exists: replay it again")
    if ledger.sha256_of(folder / "run.json") != entry["end"]["run_json_sha256"]:
        raise ValueError(f"its replay {name} was changed after it ran")
    failed = [rule for rule in verification.report(folder)["rules"] if not rule["passed"]]
    if failed:
        raise ValueError(f"its replay {name} fails ./run.sh verify, {failed[0]['rule']}: {failed[0]['evidence']}")
    return rebuilding.read(folder)


def _is_no_copy(recorded, replayed):
    """Two runs never take the same time at each step, to the last digit."""
    steps_ms = [step_files.read_columns(one.folder, ["step_ms"])["step_ms"] for one in (recorded, replayed)]
    is_timed = any(value is not None for value in steps_ms[0])
    if is_timed and steps_ms[0] == steps_ms[1] or recorded.name == replayed.name:
        raise ValueError(f"its replay {replayed.name} is a copy: every step time is the record's")


def _has_the_right_seeds(recorded, replayed):
    """The record's own, or the fresh ones that nobody chooses."""
    seeds, own = [one.run["seed"] for one in replayed], recorded.run["seed"]
    if seeds not in ([own] * len(seeds), replaying.fresh_seeds(recorded, len(seeds))):
        raise ValueError(f"its replays have seeds {', '.join(map(str, seeds))}, which ./run.sh replay does not choose")
