"""Events of a run: what each costs and on which rank, and which of them is named as the cause of a stalled step."""

import pytest

from bench.analysis.diagnosis import stalls
from bench.record import step_files

MS = 1_000_000  # ns


def row(step, step_ms=100.0, **columns):
    return {"step": step, "t_ns": step * 1000 * MS, "step_ms": step_ms, **columns}


def rows_of(odd_ms, **odd):
    """Steps 1 to 20 of 100 ms with their columns, but step 10 takes odd_ms and has the columns that are given."""
    usual = {"data_ms": 1.0, "forward_ms": 39.0, "backward_ms": 50.0, "optimizer_ms": 10.0, "cpu_ms": 90.0}
    usual |= {"runqueue_ms": 0.0}
    rows = [row(step, **usual) for step in range(1, 21)]
    rows[9] = row(10, odd_ms, **(usual | odd))
    return rows


def explained(rows, *events, by_rank=None):
    (stall,) = stalls.with_causes(stalls.find(rows), rows, events, by_rank)
    return stall


def event(name, ms, step=10, **facts):
    return {"event": name, "t_ns": 0, "ms": ms, "step": step, **facts}


def test_a_collection_in_the_step_is_named_with_its_milliseconds():
    stall = explained(rows_of(200.0, cpu_ms=188.0, forward_ms=139.0), event("gc", 98.0), event("gc", 70.0, step=11))
    assert (stall["what"], stall["ms"], stall["rank"]) == ("gc", 100.0, None)
    assert stall["causes"] == [{"what": "gc", "ms": 98.0}]
    assert stall["where"] == {"forward_ms": 100.0}


def test_events_of_several_ranks_count_once_by_the_rank_that_lost_most():
    events = [event("gc", 30.0, rank=0), event("gc", 20.0, rank=1), event("gc", 25.0, rank=1)]
    assert explained(rows_of(200.0, cpu_ms=190.0), *events)["causes"][1] == {"what": "gc", "ms": 45.0}


def test_an_event_without_a_step_is_joined_by_time():
    for at_ms, cause in ((10_150, "recompile"), (10_201, "waiting")):  # in the step, after it
        seen = {"event": "recompile", "t_ns": at_ms * MS, "ms": 60.0}
        assert explained(rows_of(200.0), seen)["what"] == cause


@pytest.mark.parametrize(
    ("odd", "cause", "ms"),
    [
        ({"data_ms": 101.0}, "loader_wait", 100.0),
        ({"runqueue_ms": 95.0}, "foreign_load", 95.0),
        ({"runqueue_ms": 180.0}, "foreign_load", 100.0),  # of two threads at once
        ({"cpu_ms": 185.0}, "computing", 95.0),
        ({}, "waiting", 100.0),  # not on a CPU: asleep, or for I/O, a lock, a device
    ],
)
def test_columns_say_what_the_process_did(odd, cause, ms):
    stall = explained(rows_of(200.0, **odd))
    assert stall["causes"] == [{"what": cause, "ms": ms}]
    assert stall["what"] == cause


def test_the_longest_cause_leads_and_small_ones_are_not_named():
    stall = explained(
        rows_of(200.0, data_ms=31.0, cpu_ms=150.0, runqueue_ms=6.0), event("gc", 50.0), event("recompile", 9.0)
    )
    assert [cause["what"] for cause in stall["causes"]] == ["gc", "loader_wait"]


def test_without_columns_events_or_ranks_nothing_is_known():
    rows = [row(step, 300.0 if step == 10 else 100.0) for step in range(1, 21)]
    assert explained(rows)["what"] == "unknown"
    assert explained(rows)["causes"] == []


def test_what_only_coincides_is_named_last_and_without_milliseconds():
    rows = [row(step, 300.0 if step == 10 else 100.0) for step in range(1, 21)]
    rows[8]["val_loss"] = 3.0  # after 9 steps
    rows[9]["slowed_frac"], rows[3]["slowed_frac"] = 0.2, 0.0
    stall = explained(rows)
    assert stall["causes"] == [{"what": "throttling", "ms": None}, {"what": "after_validation", "ms": None}]
    assert stall["what"] == "throttling"
    assert explained(rows, event("gc", 190.0))["causes"][0] == {"what": "gc", "ms": 190.0}


def test_the_first_step_is_said_to_be_the_first():
    rows = [row(step, 300.0 if step == 1 else 100.0) for step in range(1, 21)]
    assert explained([{"step": 0, "val_loss": 5.5}, *rows])["what"] == "first_step"


def test_a_late_rank_is_named_where_its_own_work_took_longer():
    """Both ranks' steps take 180 ms, since they wait for each other; only rank 1's forward took 80 ms longer."""
    own = [dict.fromkeys(range(1, 21), 40.0), {step: 120.0 if step == 10 else 40.0 for step in range(1, 21)}]
    stall = explained(rows_of(180.0, cpu_ms=90.0), by_rank={"step_ms": [{}, {}], "own_ms": own})
    assert (stall["what"], stall["rank"]) == ("late_rank", 1)
    assert stall["causes"] == [{"what": "late_rank", "ms": 80.0}]


def test_the_skew_of_a_run_says_who_was_late_how_often():
    """Late by 7, 1, 0 and 30 ms on 12, 10, 10 and 10 ms; the first and the last exceed both 1 ms and a tenth."""
    ranks_ms = ((10.0, 10.0, 10.0, 10.0), (12.0, 11.0, 10.0, 40.0), (19.0, 10.0, 10.0, 10.0))
    own = [dict(enumerate(rank_ms, 1)) for rank_ms in ranks_ms]
    summary = stalls.skew_summary({"own_ms": own})["own_ms"]
    assert (summary["late_ms_p50"], summary["late_ms_max"], summary["late_ms_sum"]) == (4.0, 30.0, 38.0)
    assert (summary["num_late_steps"], summary["late_steps_by_rank"]) == (2, [0, 1, 1])
    assert stalls.skew_summary({"own_ms": own[:1]}) is None
    assert stalls.skew_summary({}) is None


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
