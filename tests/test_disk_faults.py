"""What SQLite does to itself: operations of a whole command fail one by one, processes are killed, and nothing is lost.

A sample; SPEEDRUN_FAULTS_SEED=WORD draws another, and .venv/bin/python tests/benchmarks faults tries all of it.
"""

import disk_faults
import pytest
from disk_faults_scenarios import IMPORT, RUN, SCENARIOS

NUM_PLACES = {"import": 2, "publish": 3, "run": 3}
NUM_KILLS = 2


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    if disk_faults.compiler() is None:
        pytest.skip("no C compiler, which makes the library that fails operations")
    with disk_faults.Workshop(tmp_path_factory.mktemp("shop")) as workshop:
        yield workshop


@pytest.mark.slow
@pytest.mark.parametrize("name", NUM_PLACES)
def test_a_file_operation_that_fails_loses_no_record_and_falsifies_none(shop, name):
    scenario, chance = SCENARIOS[name], disk_faults.sample()
    operations = shop.count(scenario)
    for number, kind in disk_faults.places(operations, chance, NUM_PLACES[name]):
        outcome = shop.fault(scenario, number, kind)
        assert outcome.wrong == [], outcome.place


def test_a_killed_process_loses_no_record_and_falsifies_none(shop):
    chance = disk_faults.sample()
    for _ in range(NUM_KILLS):
        outcome = shop.kill(RUN, chance)
        assert outcome.wrong == [], outcome.place


@pytest.mark.slow
def test_a_file_operation_that_fails_loses_nothing_of_several_runs(shop):
    scenario, chance = SCENARIOS["sweep"], disk_faults.sample()
    ((number, kind),) = disk_faults.places(shop.count(scenario), chance, 1)
    outcome = shop.fault(scenario, number, kind)
    assert outcome.wrong == [], outcome.place


def test_the_harness_sees_a_write_that_is_lost(shop):
    operations = shop.count(IMPORT)
    (number,) = [number for number, _, call, path in operations if call == "write" and ".run.json." in path]
    outcome = shop.fault(IMPORT, number, "lost")
    assert any("unreadable" in sentence for sentence in outcome.wrong), outcome
