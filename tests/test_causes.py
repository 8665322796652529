"""Causes of a stalled step: events, columns, ranks and telemetry are joined to it, and one of them is named."""

import pytest

from bench.analysis.diagnosis import stalls

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
