"""A run folder -> what every exporter needs: settings, series by step, and the final numbers, all plain values."""

from dataclasses import dataclass
from pathlib import Path

from bench.base import utc
from bench.base.reading import yaml_file
from bench.base.reading.damage import Damaged
from bench.config import schema
from bench.config.typed import leaves
from bench.record import run_folder, step_files

NAMES = {"train_loss": "loss/train", "val_loss": "loss/val", "lr": "optim/lr", "tokens": "progress/tokens"}
NOT_EXPORTED = ("step", "flags", "t_ns")
MAX_TEXT = 250  # characters of a setting's value: what all three take


@dataclass
class Exported:
    folder: Path
    run: dict  # the record
    settings: dict  # "optim.lr": 0.003, ...
    points: list  # [(step, seconds since 1970, {"loss/train": 4.2, ...})]
    final: dict  # "final/val_loss": 2.7, ...
    tags: dict  # words about the run


def read(folder: Path | str) -> Exported:
    """A run folder.  Raises ValueError for one that holds no record, or one of a run that has not ended."""
    folder = Path(folder)
    run = run_folder.read(folder)
    if run["status"] == "running":
        raise ValueError(f"{folder}: the run has not ended: export it afterwards")
    rows, offset_s = step_files.read(folder), _offset_s(step_files.read_events(folder), run)
    points, last_s = [], utc.seconds(run["started_at"])
    for row in rows:
        if row.get("t_ns") is not None and offset_s is not None:
            last_s = row["t_ns"] / 1e9 + offset_s
        points.append((row["step"], last_s, series_of(row)))
    final = {f"final/{name}": float(value) for name, value in run["metrics"].items() if isinstance(value, (int, float))}
    words = ("run_id", "name", "track", "status", "validity", "config_id", "comparability_id", "started_at")
    tags = {name: str(run[name]) for name in (*words, "seed")} | {"commit": str(run["code"].get("commit"))}
    return Exported(folder, run, _settings(folder), points, final, tags)


def series_of(row: dict) -> dict[str, float]:
    """A row of steps.csv -> {name: value}; the times of a step that an instrument disturbed are under "disturbed/"."""
    result = {}
    for column, value in row.items():
        if column in NOT_EXPORTED or not isinstance(value, (int, float)):
            continue
        of_time = "disturbed" if row.get("flags") else "time"
        group = of_time if column.endswith("_ms") else "steps"
        result[NAMES.get(column, f"{group}/{column}")] = float(value)
    return result


def _settings(folder):
    """config.yaml, flat; a list or None as its words."""
    try:
        result = leaves(schema.upgraded(yaml_file.read(folder / "config.yaml")))
    except Damaged:  # verify says so
        return {}
    plain = (bool, int, float)
    return {key: one if isinstance(one, plain) else str(one)[:MAX_TEXT] for key, one in result if one != {}}


def _offset_s(events, run):
    """What to add to t_ns / 1e9 for seconds since 1970: of the first event that has both clocks; None without one."""
    for event in events:
        if event.get("utc") and isinstance(event.get("t_ns"), int):
            return utc.seconds(event["utc"]) - event["t_ns"] / 1e9
    return None
