"""One damaged record spoils nothing else: no traceback, no hang, no endless memory, in any verb that reads records."""

import json
import os
import subprocess
import sys
from pathlib import Path

import fuzzing
import kept_records
import pytest

TESTS = Path(__file__).resolve().parent


@pytest.mark.slow
def test_a_damaged_record_is_excluded_in_a_sentence_and_its_neighbours_are_shown(tmp_path):
    summary = fuzzed("records", tmp_path)
    assert summary["calls"] > 300 * fuzzing.NUM_PARTS
    assert summary["faults"] == []


@pytest.mark.slow
def test_a_damaged_race_or_claim_is_refused_in_a_sentence(tmp_path):
    summary = fuzzed("races", tmp_path)
    assert summary["calls"] > 180 * fuzzing.NUM_PARTS
    assert summary["faults"] == []


def fuzzed(what, folder):
    """Tries all cases, which are drawn with a fixed seed -> what fuzzing.py prints."""
    results = folder / "results"
    results.mkdir()
    env = os.environ | {"SPEEDRUN_RESULTS": str(results), "SPEEDRUN_CWD": str(results)}
    env["PYTHONPATH"] = os.pathsep.join([str(TESTS.parent), str(TESTS)])
    command = [sys.executable, str(TESTS / "fuzzing.py"), what, str(results), "0", str(fuzzing.NUM_PARTS)]
    done = subprocess.run(command, cwd=TESTS.parent, env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


# ---- what a longer hunt found


def called(monkeypatch, capsys, results, *arguments):
    """Calls a verb in this process -> (exit code, all that was printed)."""
    from bench.cli.main import main

    monkeypatch.setenv("SPEEDRUN_RESULTS", str(results))
    code = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def test_an_error_prints_no_control_character(tmp_path, monkeypatch, capsys):
    good, bad = kept_records.add(tmp_path, 1), kept_records.add(tmp_path, 9)
    run = json.loads((bad / "run.json").read_text())
    (bad / "run.json").write_text(json.dumps(run | {"track": "\x1b]0;owned\x07"}))
    code, output = called(monkeypatch, capsys, tmp_path, "judge", good, bad)
    assert code == 2 and r"records of \x1b]0;owned\x07, records of cpu_nano cannot" in output


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("environment.json", '{"packages": 7}'),
        ("config.yaml", "instruments: -1\n"),
        ("steps.csv", "step,val_loss\n,1\n,2\n"),
    ],
)
def test_of_two_runs_one_with_a_wrong_kind_the_difference_is_shown_without_it(
    tmp_path, monkeypatch, capsys, file, content
):
    good, bad = kept_records.add(tmp_path, 1), kept_records.add(tmp_path, 9)
    (bad / file).write_text(content)
    code, output = called(monkeypatch, capsys, tmp_path, "compare", good, bad, "--why")
    assert code in (0, 2) and "comparable" in output
    called(monkeypatch, capsys, tmp_path, "report", good, bad, "--out", tmp_path / "curves.html")


@pytest.mark.parametrize("arms", [{}, {"A": {}}])
def test_a_race_without_arms_is_refused(tmp_path, monkeypatch, capsys, arms):
    folder = tmp_path / "races" / "20261122T000000Z-race-00000000"
    folder.mkdir(parents=True)
    (folder / "race.json").write_text(json.dumps({"race_id": folder.name, "arms": arms}))
    code, output = called(monkeypatch, capsys, tmp_path, "compare", folder)
    assert code == 2 and "Traceback" not in output and "race.json" in output
