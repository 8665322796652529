"""Records for other programs: what is written is what they read."""

import csv
import io
import json
from pathlib import Path

import pytest

from bench import export, record, steps
from bench.importers import modded_nanogpt

COMPLETE = Path(__file__).parent / "records" / "20261121T031500Z-gpt2-adamw-48623a63-s0"


def test_csv_has_a_line_a_run_or_a_step(capsys):
    assert export.main([str(COMPLETE), "--to", "csv"]) == 0
    (row,) = csv.DictReader(io.StringIO(capsys.readouterr().out))
    assert (row["run_id"], float(row["val_loss"])) == (COMPLETE.name, 4.25)
    assert export.main([str(COMPLETE), "--to", "csv", "--steps"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [int(row["step"]) for row in rows] == [0, 1, 2, 3, 4] and rows[4]["val_loss"] == "4.25"


def test_mllog_lines_are_json_with_the_keys_of_mlperf():
    lines = list(export.mllog(record.read(COMPLETE), steps.read(COMPLETE)))
    events = [json.loads(line.removeprefix(":::MLLOG ")) for line in lines]
    assert all(set(event) == {"namespace", "time_ms", "event_type", "key", "value", "metadata"} for event in events)
    keys = [event["key"] for event in events]
    assert keys.index("run_start") < keys.index("eval_accuracy") < keys.index("run_stop")
    stop, start = (next(event for event in events if event["key"] == key) for key in ("run_stop", "run_start"))
    assert stop["time_ms"] - start["time_ms"] == 220 and stop["metadata"]["status"] == "success"


def test_a_modded_nanogpt_log_is_read_back_by_its_importer(tmp_path, capsys):
    assert export.main([str(COMPLETE), "--to", "modded-nanogpt", "--out", str(tmp_path / "a.txt")]) == 0
    ((run,), facts) = modded_nanogpt.read((tmp_path / "a.txt").read_bytes(), "a.txt")
    assert (run.val_loss, run.num_steps, run.complete, facts["unmatched"]) == (4.25, 4, True, [])
    assert run.train_time_ms == pytest.approx(218, abs=1) and run.facts["seed"] == 0  # 50 + 52 + 60 + 56
    assert run.step_avg_meaning == modded_nanogpt.MEANINGS[0]


def test_parquet_is_read_back(tmp_path, capsys):
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is optional")
    assert export.main([str(COMPLETE), "--to", "parquet", "--steps", "--out", str(tmp_path / "a.parquet")]) == 0
    assert parquet.read_table(tmp_path / "a.parquet").column("step").to_pylist() == [0, 1, 2, 3, 4]


def test_wrong_use_is_refused(tmp_path):
    with pytest.raises(ValueError, match="say where with --out"):
        export.main([str(COMPLETE), "--to", "parquet"])
    with pytest.raises(ValueError, match="there is no run in there"):
        export.main([str(tmp_path), "--to", "csv"])
    with pytest.raises(ValueError, match="these are 2"):
        export.main([str(COMPLETE.parent), "--to", "modded-nanogpt"])
