"""certificate.json of a run folder, as ./run.sh replay writes it: whether the run came out again."""

import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NotRequired, TypedDict

from bench.reading import json_file
from bench.record import run_folder

FILE = "certificate.json"
HOLDS = ("identical", "equal within rounding", "statistically reproduced")  # of its "outcome"


class Found(TypedDict):
    """Of certificate.json (bench/replay/certificate.py) what is read here."""

    outcome: str
    replays: list[str]
    record: NotRequired[str]
    losses_sha256: NotRequired[str]
    machine: NotRequired[str | None]
    made_at: NotRequired[str | None]


def read(folder: Path | str) -> dict | None:
    """The certificate of a run folder, as its record or as its replay; None: there is none, or it is of another run."""
    try:
        result = json_file.read(Path(folder) / FILE, Found)
        run = run_folder.read_raw(folder)
        name = f"{run['track']}/{run['run_id']}"
        if name in result["replays"]:
            return result
        listed = {one["path"]: one["sha256"] for one in run["artifacts"]}
        return (
            result if result.get("record") == name and result.get("losses_sha256") == listed.get("steps.csv") else None
        )
    except ValueError:
        return None


def outcome(folder: Path | str) -> str | None:
    """In a word, what the certificate of a run folder says; None: it has none.  Quick where there is none."""
    if not os.access(f"{folder}/{FILE}", os.F_OK):  # a table asks this of thousands of runs
        return None
    result = read(folder)
    return None if result is None else result["outcome"]


def of_several(outcomes: Iterable[str | None]) -> str | None:
    """Of the repeats of one thing: 3 identical, or 2 of 3 identical; None where none has a certificate."""
    outcomes = list(outcomes)
    counts = Counter(one for one in outcomes if one is not None)
    if not counts:
        return None
    total = f" of {len(outcomes)}" if set(outcomes) - set(counts) else ""
    return ", ".join(f"{number}{total} {one}" for one, number in counts.most_common())


def words(result: dict | None) -> str | None:
    """What it says in a line: identical on the same machine, 2026-11-22; None without one."""
    if result is None:
        return None
    machine = f" ({result['machine']})" if result.get("machine") else ""
    return f"{result['outcome']}{machine}, {str(result.get('made_at'))[:10]}"
