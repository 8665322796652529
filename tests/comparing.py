"""Records and rows for tests of comparisons: copies of a kept record with other times, losses and starts."""

import copy
import json
from pathlib import Path

import pytest

from bench.compare import comparison
from bench.compare.selection import Arm
from bench.record import ledger, run_folder
from bench.record.rows import row_of

RECORDS = Path(__file__).parent / "records"
COMPLETE = RECORDS / "20261121T031500Z-gpt2-adamw-48623a63-s0"
FAILED = RECORDS / "20261121T031501Z-gpt2-adamw-48623a63-s1"
# times of two arms: the means of their logs are ln 10 and ln 10.5 within 1e-6, the CV is 0.158 %
FAST, SLOW = [10.00, 10.01, 9.99, 10.02, 9.98], [10.50, 10.51, 10.49, 10.52, 10.48]
CONFIG_IDS = {"A": "aaaaaaaa", "B": "bbbbbbbb", "C": "cccccccc"}


def a_run(arm, train_s, minute, seed=None, val_loss=4.25, base=COMPLETE, **changes):
    """Returns a complete record of an arm that started at this minute of 21 November 2026; default seed: the minute."""
    run = copy.deepcopy(run_folder.read(base))
    seed = minute if seed is None else seed
    hour = 3 + minute // 60
    run |= {
        "run_id": f"20261121T{hour:02d}{minute % 60:02d}00Z-x-{CONFIG_IDS[arm]}-s{seed}",
        "started_at": f"2026-11-21T{hour:02d}:{minute % 60:02d}:00.000Z",
        "config_id": CONFIG_IDS[arm],
        "seed": seed,
    }
    if base is COMPLETE:
        run["metrics"] |= {"train_s": train_s, "val_loss": val_loss, "num_flagged_steps": 0, "num_steps": 4}
    for name, value in changes.items():
        if isinstance(value, dict) and isinstance(run.get(name), dict):
            run[name] |= value
        else:
            run[name] = value
    return run


def raced(a_times_s, b_times_s, a_losses=None, b_losses=None, **changes):
    """Returns (A's records, B's records) with these times, started in the order A B B A, a minute apart."""
    arms = {"A": [], "B": []}
    times = {"A": list(a_times_s), "B": list(b_times_s)}
    losses = {"A": list(a_losses or []), "B": list(b_losses or [])}
    minute = 0
    while times["A"] or times["B"]:
        arm = "ABBA"[minute % 4]
        arm = arm if times[arm] else "B" if arm == "A" else "A"
        val_loss = losses[arm].pop(0) if losses[arm] else 4.25 + 0.001 * (minute % 7)
        arms[arm].append(a_run(arm, times[arm].pop(0), minute, val_loss=val_loss, **changes))
        minute += 1
    return arms["A"], arms["B"]


def write(results, run, steps_csv=None):
    """Writes a record as a run folder and returns that.  Its training losses depend on its seed."""
    folder = Path(results) / run["track"] / run["run_id"]
    folder.mkdir(parents=True)
    for name in ("config.yaml", "environment.json"):
        (folder / name).write_text((COMPLETE / name).read_text())
    steps = (_steps_of(run["seed"]) if steps_csv is None else steps_csv).encode()
    (folder / "steps.csv").write_bytes(steps)
    of_steps = {"num_bytes": len(steps), "sha256": ledger.sha256_of_bytes(steps)}
    artifacts = [item | (of_steps if item["path"] == "steps.csv" else {}) for item in run["artifacts"]]
    (folder / "run.json").write_text(json.dumps(run | {"artifacts": artifacts}))
    return folder


def _steps_of(seed):
    head, *lines = (COMPLETE / "steps.csv").read_text().splitlines()
    column = head.split(",").index("train_loss")
    rows = [line.split(",") for line in lines]
    for row in rows:
        row[column] = row[column] and repr(float(row[column]) + 1e-9 * (seed or 0))
    return "".join(",".join(row) + "\n" for row in [head.split(","), *rows])


def compare(a_runs, b_runs, **options):
    """Returns the Comparison that ./run.sh compare makes of the records of all started runs of A and B."""
    return compare_arms({"A": a_runs, "B": b_runs}, **options)["B"]


def compare_arms(arms, **options):
    """Returns {candidate: Comparison} from {name: records}, the baseline first."""
    tabled = [
        Arm(name, [row_of(run) for run in runs], [None] * len(runs), {run["run_id"]: run for run in runs})
        for name, runs in arms.items()
    ]
    return dict(comparison.compare_arms(tabled, diagnose=False, **options))


@pytest.fixture
def six_runs(results):
    """A results folder with three seeds at each of two learning rates, losses 4.25 + seed / 100, and a failed run."""
    for number in range(6):
        folder = write(results, a_run("AB"[number % 2], 10.0 + number, number, val_loss=4.25 + number / 100))
        text = (folder / "config.yaml").read_text()
        (folder / "config.yaml").write_text(text.replace("lr: 0.003", f"lr: {0.003 * (1 + number % 2)}"))
    write(results, a_run("C", 1.0, 10, base=FAILED))
    return results
