"""The public logs beside this checkout are imported as the numbers that were read from them by hand."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import test_track3
from benchmarks import public_records

from bench.cli import import_logs
from bench.compare import verdict as verdicts
from bench.record import run_folder as record
from bench.record import verification
from bench.record.importers import modded_nanogpt

PAIR = "track_1_short/2026-02-28_TransposeCopyBackward"
SHARED = Path(__file__).resolve().parent.parent.parent / "shared" / "logs"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="the public logs are not beside this checkout")


def public():
    return list(csv.DictReader((SHARED / "expected.csv").read_text().splitlines())) if SHARED.is_dir() else []


@needs_shared
@pytest.mark.parametrize("row", public(), ids=lambda row: row["path"][-50:])
def test_a_public_log_is_read_as_expected(row):
    path = next(path for path in (SHARED / "modded-nanogpt" / row["path"], SHARED / row["path"]) if path.exists())
    runs, facts = modded_nanogpt.read(path.read_bytes())
    assert len(runs) == int(row["n_runs"]) and facts["unmatched"] == []
    if not runs:
        return
    run, count = runs[-1], lambda name: int((~np.isnan(runs[-1].columns[name])).sum())
    values = {
        "n_steps": run.num_steps,
        "declared_total": run.declared_steps,
        "final_val_step": run.val_step,
        "final_val_loss": run.val_loss,
        "final_train_time_ms": run.train_time_ms,
        "step_avg_ms": run.step_avg_ms,
        "n_val_points": count("val_loss"),
        "n_train_loss_points": count("train_loss"),
        "step_avg_recomputed_ms": run.train_time_ms and round(run.train_time_ms / run.val_step, 3),
        "peak_mib": run.facts["peak_mib"],
        "n_gpus": run.facts["num_gpus"],
        "world_size_logged": run.facts["world_size"],
    }
    for name, value in values.items():
        assert value == (float(row[name]) if row[name] else None), name
    assert (run.step_avg_meaning or "") == row["step_avg_semantics"]
    assert (run.facts["gpu_name"] or "") == row["gpu_name"] and str(run.complete) == row["complete"]
    if row["torch_version"]:  # two logs say "Running pytorch 2.4.1" between their rules, which the list does not have
        assert run.facts["torch"] == row["torch_version"]


@needs_shared
def test_importing_the_public_logs_leaves_records_that_everything_else_reads(results, printed, capsys):
    assert import_logs.main(["modded-nanogpt", str(SHARED / "modded-nanogpt"), "--json"]) == 0
    expected = {"files": 47, "runs": 63, "complete": 59, "incomplete": 4, "not_a_run": 3}
    assert json.loads(capsys.readouterr().out) == expected | {"unmatched_metric_lines": 0, "duplicates": 0}
    folders = list(record.find_runs([results]))
    assert len(folders) == 63
    assert all(verification.report(folder)["passed"] for folder in folders[::7])
    assert "0 new run folders" in printed(import_logs, "modded-nanogpt", SHARED / "modded-nanogpt")


@needs_shared
def test_what_is_kept_of_a_pair_compares_as_its_logs_do():
    facts = json.loads(public_records.FACTS.read_text())
    runs = public_records.read_runs(SHARED / "modded-nanogpt")
    logs = [[run.row for run in public_records.matching(runs, f"{PAIR}/{arm}/*")] for arm in ("baseline", "this_pr")]
    kept = [public_records.decoded(name, facts) for name in ("1/76 baseline", "1/76")]
    assert [len(arm) for arm in logs] == [6, 6]
    for from_logs, from_kept in zip(logs, kept, strict=True):
        for name in set(public_records.KEPT) - {"source_sha256"}:  # of these copies the code is left out
            assert [row[name] for row in from_logs] == [row[name] for row in from_kept]
    from_logs, from_kept = (verdicts.compare_rows(*arms) for arms in (logs, kept))
    assert {name for name in from_logs if from_logs[name] != from_kept[name]} == {"memory"}  # which is not kept


@needs_shared
def test_a_log_of_twenty_runs_is_judged_as_upstream_judged_result_12(capsys):
    log = SHARED / "modded-nanogpt/track_3_optimization/results/1bd8db7a-f3a3-4195-856d-cab7e0816443.txt"
    verdict, rules = test_track3.judged(capsys, log, code=0)
    evidence = rules["the target is reached"]["evidence"]
    assert (verdict["track"], verdict["n"]) == ("steps", 20)
    assert evidence.startswith("step 3325 is the first") and "mean val_loss 3.27905 " in evidence and "n=20" in evidence
