"""A sleep, a garbage collection and a recompile planted in a run: each found, named and costed."""

import pytest
import real_runs

from bench.record import step_files

TINY = ["model.num_layers=1", "model.width=32", "model.num_heads=2", "data.batch_tokens=256", "goal.num_steps=30"]
SLEEP, COLLECTION, RECOMPILE = 9, 15, 21  # rows of steps.csv: one more than the step
OWN_START, OWN_END = 5, 27


@pytest.fixture(scope="module")
def planted_run(tmp_path_factory):
    planted = str(real_runs.REPO / "tests" / "planted")
    folder = real_runs.run(tmp_path_factory.mktemp("results"), *TINY, "goal.val_every_steps=12", PYTHONPATH=planted)
    return real_runs.run_json(folder), step_files.read_events(folder), step_files.read(folder)


def named(events, name):
    return [event for event in events if event["event"] == name]


def test_the_sleep_is_a_stall_in_which_the_process_waited_in_its_optimizer(planted_run):
    run, events, rows = planted_run
    (stall,) = [event for event in named(events, "stall") if event["step"] == SLEEP]
    assert stall["what"] == "waiting"
    assert 150 < stall["ms"] < 400
    assert stall["where"]["optimizer_ms"] == pytest.approx(200, abs=100)
    assert stall["t_ns"] == rows[SLEEP]["t_ns"]
    assert run["costs"]["stall"]["count"] == len(named(events, "stall")) >= 1
    assert run["costs"]["stall"]["ms"] == pytest.approx(sum(event["ms"] for event in named(events, "stall")))


def test_the_garbage_collection_is_named_with_its_step_and_generation(planted_run):
    run, events, rows = planted_run
    (full,) = [event for event in named(events, "gc") if event["step"] == COLLECTION and event["generation"] == 2]
    assert 3 < full["ms"] < rows[COLLECTION]["step_ms"]
    assert 0 <= full["t_ns"] - rows[COLLECTION]["t_ns"] < rows[COLLECTION]["step_ms"] * 1e6
    assert [event["what"] for event in named(events, "stall") if event["step"] == COLLECTION] in ([], ["gc"])
    assert run["costs"]["gc"]["count"] >= 1
    assert run["costs"]["gc"]["ms"] >= full["ms"]


def test_the_recompile_is_named_with_its_function_and_reason_and_makes_the_run_suspect(planted_run):
    run, events, rows = planted_run
    (recompile,) = named(events, "recompile")
    assert recompile["step"] == RECOMPILE
    assert recompile["function"].startswith("doubled (sitecustomize.py:")
    assert "size mismatch at index 0. expected 3, actual 4" in recompile["reason"]
    assert run["costs"]["recompile"] == {"count": 1, "ms": recompile["ms"]}
    assert 0 < recompile["ms"] < rows[RECOMPILE]["step_ms"]
    assert run["validity"] == "suspect"
    assert any("torch.compile worked 1 time(s)" in reason for reason in run["validity_reasons"])


def test_what_stalls_a_step_is_distinguished_from_what_was_planted_elsewhere(planted_run):
    _, events, _ = planted_run
    for event in named(events, "stall"):
        whats = {cause["what"] for cause in event["causes"]}
        assert ("gc" in whats) <= (event["step"] != SLEEP)
        assert ("recompile" in whats) == (event["step"] == RECOMPILE)


@pytest.mark.parametrize("row", [OWN_START, OWN_END])
def test_what_an_instrument_itself_costs_in_a_step_is_in_its_time(planted_run, row):
    """Asleep 100 ms as one step starts and as another ends: the run's marks enclose the instruments' calls."""
    _, _, rows = planted_run
    assert rows[row]["step_ms"] >= 100


def test_the_warning_of_an_instrument_that_failed_names_no_private_path(planted_run):
    run, _, _ = planted_run
    (warning,) = [warning for warning in run["warnings"] if warning["instrument"] == "planted"]
    assert "FileNotFoundError" in warning["error"] and "./tests/planted/nothing" in warning["error"]
    assert str(real_runs.REPO) not in str(run)
