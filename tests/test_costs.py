"""Costs from a run folder: which events are counted, for which rank, and which are written as events."""

import pytest

from bench.analysis.diagnosis import stalls
from bench.record import step_files

MS = 1_000_000
START = {"t_ns": 500 * MS, "utc": "2026-11-21T03:00:00.500Z", "event": "run_start"}


@pytest.fixture
def folder(tmp_path):
    total = {"t_ns": 0, "event": "gc_total", "rank": 1, "count": 700, "ms": 31.0}
    for event in (START, gc(1, 4.0), gc(1, 5.0), gc(0, 30.0), total):
        step_files.append_event(tmp_path, event)
    return tmp_path


def gc(rank, ms):
    return {"t_ns": 0, "event": "gc", "rank": rank, "ms": ms, "step": 3}


def rows(odd_ms=150.0):
    steps_ms = {step: odd_ms if step == 7 else 100.0 for step in range(1, 12)}
    timed = [{"step": step, "t_ns": step * 1000 * MS, "step_ms": ms} for step, ms in steps_ms.items()]
    return [{"step": 0, "val_loss": 5.0}, *timed]


def run(*instruments):
    return {"instruments": dict.fromkeys(instruments, {})}


def test_a_kind_is_there_only_if_it_was_measured(folder):
    assert set(stalls.event_costs(folder, run(), rows())["costs"]) == {"stall", "non_finite_loss"}
    assert set(stalls.event_costs(folder, run("garbage"), rows())["costs"]) == {"stall", "gc", "non_finite_loss"}


def test_a_cost_is_that_of_the_rank_that_lost_most_by_its_own_total_where_it_wrote_one(folder):
    costs = stalls.event_costs(folder, run("garbage", "recompiles"), rows())["costs"]
    assert costs["gc"] == {"count": 700, "ms": 31.0}
    assert costs["recompile"] == {"count": 0, "ms": 0.0}
    assert costs["graph_break"] == {"count": 0, "ms": None}


def test_stalls_are_counted_and_written_with_their_time(folder):
    tally = stalls.event_costs(folder, run(), rows())
    assert tally["costs"]["stall"] == {"count": 1, "ms": 50.0}
    (event,) = tally["events"]
    assert (event["event"], event["step"], event["t_ns"], event["what"]) == ("stall", 7, 7000 * MS, "unknown")
    assert event["utc"] == "2026-11-21T03:00:07.000Z"  # 6.5 s after the start
    assert stalls.event_costs(folder, run(), rows(100.0))["events"] == []


def test_late_ranks_cost_what_the_others_waited(folder):
    own = [dict.fromkeys(range(1, 12), 10.0), {num: 35.0 if num == 7 else 11.0 for num in range(1, 12)}]
    step_files.write_by_rank(folder, {"step_ms": own, "own_ms": own})
    tally = stalls.event_costs(folder, run(), rows())
    assert tally["costs"]["late_rank"] == {"count": 1, "ms": 35.0}  # 10 * 1 ms that are below the threshold, and 25 ms
    assert tally["skew"]["own_ms"]["late_steps_by_rank"] == [0, 1]
    stall, late = tally["events"]
    assert (stall["rank"], stall["what"]) == (1, "late_rank")
    assert (late["event"], late["late_ms_max"], late["t_ns"]) == ("rank_skew", 25.0, 11_000 * MS)


def test_what_ranks_measured_is_read_as_it_was_written(tmp_path):
    columns = {"step_ms": [{1: 10.0, 2: 20.1234567}, {1: 11.0}], "own_ms": [{2: 5.0}, {2: 6.0}]}
    step_files.write_by_rank(tmp_path, columns)
    expected = ["step,step_ms_rank0,step_ms_rank1,own_ms_rank0,own_ms_rank1", "1,10.0,11.0,,", "2,20.123,,5.0,6.0"]
    assert (tmp_path / "steps_by_rank.csv").read_text().splitlines() == expected
    columns["step_ms"][0][2] = 20.123
    assert step_files.read_by_rank(tmp_path) == columns
    assert step_files.read_by_rank(tmp_path / "none") == {}


def test_steps_that_a_profiler_disturbed_make_no_rank_late(folder):
    own = [dict.fromkeys(range(1, 12), 10.0), {num: 900.0 if num == 7 else 11.0 for num in range(1, 12)}]
    step_files.write_by_rank(folder, {"step_ms": own, "own_ms": own})
    flagged = [row | ({"flags": "profiled"} if row["step"] == 7 else {}) for row in rows()]
    tally = stalls.event_costs(folder, run(), flagged)
    assert tally["costs"]["late_rank"] == {"count": 0, "ms": 10.0} and tally["skew"]["step_ms"]["late_ms_max"] == 1.0
