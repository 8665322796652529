"""One damaged record spoils nothing else: no traceback, no hang, no endless memory, in any verb that reads records."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

NUM_PARTS = 16  # of the cases, drawn with a fixed seed; the first runs always, the rest with the slow tests
TESTS = Path(__file__).resolve().parent


PARTS = [0, *(pytest.param(number, marks=pytest.mark.slow) for number in range(1, NUM_PARTS))]


@pytest.mark.parametrize("part", PARTS)
def test_a_damaged_record_is_excluded_in_a_sentence_and_its_neighbours_are_shown(tmp_path, part):
    found = fuzzed("fuzzing.py", tmp_path, part)
    assert found["calls"] > 200
    assert found["faults"] == []


@pytest.mark.parametrize("part", PARTS)
def test_a_damaged_race_or_claim_is_refused_in_a_sentence(tmp_path, part):
    found = fuzzed("fuzzing_races.py", tmp_path, part)
    assert found["calls"] > 50
    assert found["faults"] == []


def fuzzed(program, folder, part):
    results = folder / "results"
    results.mkdir()
    env = os.environ | {"SPEEDRUN_RESULTS": str(results), "SPEEDRUN_CWD": str(results)}
    env["PYTHONPATH"] = os.pathsep.join([str(TESTS.parent), str(TESTS)])
    words = [sys.executable, str(TESTS / program), str(results), str(part), str(NUM_PARTS)]
    done = subprocess.run(words, cwd=TESTS.parent, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])
