"""The records kept in tests/records/, and copies of the complete one with changes."""

import copy
import json
import shutil
from pathlib import Path

import pytest

RECORDS = Path(__file__).parent / "records"
COMPLETE = RECORDS / "20261121T031500Z-gpt2-adamw-48623a63-s0"
EVIL = "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"


@pytest.fixture
def results(tmp_path, monkeypatch):
    """The results folder of this test's commands, with the kept records."""
    monkeypatch.setenv("SPEEDRUN_RESULTS", str(tmp_path / "results"))
    shutil.copytree(RECORDS, tmp_path / "results" / "cpu_nano")
    return tmp_path / "results"


def changed(values, **changes):
    """Returns a copy of nested values with these changes; __ in a name stands for a step into a group."""
    values = copy.deepcopy(values)
    for name, value in changes.items():
        *path, last = name.split("__")
        place = values
        for part in path:
            place = place.setdefault(part, {})
        place[last] = value
    return values


def add(results, seed, **changes):
    """Adds a complete run with another seed and returns its folder."""
    run = json.loads((COMPLETE / "run.json").read_text())
    run |= {
        "seed": seed,
        "run_id": f"20261122T0000{seed:02d}Z-gpt2-adamw-48623a63-s{seed}",
        "started_at": f"2026-11-22T00:00:{seed:02d}.000Z",
    }
    for key, value in changes.items():
        run[key] = run[key] | value if isinstance(run.get(key), dict) else value
    folder = results / "cpu_nano" / run["run_id"]
    shutil.copytree(COMPLETE, folder)
    (folder / "run.json").write_text(json.dumps(run))
    return folder
