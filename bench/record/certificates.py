"""certificate.json of a run folder, as ./run.sh replay writes it: whether the run came out again."""

from pathlib import Path
from typing import NotRequired, TypedDict

from bench import reading
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
        found = reading.json_object(Path(folder) / FILE, Found)
        run = run_folder.read_raw(folder)
        name = f"{run['track']}/{run['run_id']}"
        if name in found["replays"]:
            return found
        listed = {one["path"]: one["sha256"] for one in run["artifacts"]}
        return found if found.get("record") == name and found.get("losses_sha256") == listed.get("steps.csv") else None
    except ValueError:
        return None


def words(found: dict | None) -> str | None:
    """What it says in a line: identical on the same machine, 2026-11-22; None without one."""
    if found is None:
        return None
    machine = f" ({found['machine']})" if found.get("machine") else ""
    return f"{found['outcome']}{machine}, {str(found.get('made_at'))[:10]}"
