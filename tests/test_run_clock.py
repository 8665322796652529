"""Durations hold whatever happens to the time of day, and the record says it: clocks that a library moves."""

import json
import shutil
import subprocess
from pathlib import Path

import fork_server
import pytest
import real_runs
from cases import slow

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    path = tmp_path_factory.mktemp("clock") / "fake_clock.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(path), str(HERE / "fake_clock.c")], check=True)
    with fork_server.preloaded(path):
        yield path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("moved", "texts"),
    [
        ("-10800 0", ["the time of day moved by -10800"]),
        slow("10800 0", ["the time of day moved by +10800"]),
        slow("0 7", ["the time of day moved by -7", "kernel's /proc/uptime"]),
    ],
)
def test_a_clock_that_is_set_in_mid_run_is_a_doubt_and_changes_no_duration(tmp_path, library, moved, texts):
    state = tmp_path / "clock"
    state.write_text("0 0")
    env = {"LD_PRELOAD": str(library), "FAKE_CLOCK": str(state)}
    with real_runs.Background(tmp_path / "results", "goal.num_steps=200", **env) as running:
        running.wait_for_step(3)
        new = tmp_path / "new"
        new.write_text(moved)
        new.replace(state)
        code, out = running.end(120)
        run = real_runs.run_json(running.folder)
    assert (code, run["status"], run["validity"]) == (0, "complete", "suspect"), out
    doubts = [doubt["doubt"] for doubt in run["doubts"] if doubt["instrument"] == "clock"]
    assert len(doubts) == len(texts) and all(text in doubt for text, doubt in zip(texts, doubts, strict=True)), doubts
    assert all(reason in run["validity_reasons"] for reason in doubts)
    measured = run["measured"]
    assert 0 < measured["launch_s"] < 60 and 0 < measured["import_s"] < 60 and 0 < measured["wall_s"] < 120
    assert 0 < run["metrics"]["goodput_frac"] < 1
    real_runs.bench(tmp_path / "results", "verify", str(running.folder), LD_PRELOAD=str(library), code=0)


@pytest.mark.slow
def test_a_clock_that_stands_still_measures_nothing_and_the_run_does_not_count(tmp_path, library):
    """Waiting for a thread with a timeout may fail at once under such a clock: then the run says that."""
    env = {"LD_PRELOAD": str(library), "FAKE_CLOCK_STOPS_IN": "bench.training.worker"}
    done = real_runs.bench(tmp_path, "run", *real_runs.SHORT, *real_runs.SLIGHT, **env)
    run = real_runs.run_json(real_runs.folders(tmp_path)[0])
    assert run["validity"] == "invalid" and "ZeroDivisionError" not in done.stdout + json.dumps(run)
    if run["status"] == "complete":
        assert run["validity_reasons"][0].startswith("its clock did not advance: 6 steps in 0 s")
    else:
        assert "did not end in 30.0 s" in run["failure"]["message"]
