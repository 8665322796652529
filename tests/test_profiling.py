"""The profiler on a small model: the steps asked for, one profiler at a time, files that open, honest statuses."""

import json
import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from profiled import Spy, names, outside_of_steps, read, step_names, train_under, watch_of

from bench.config.refusals import check_ranks
from bench.config.windows import Options
from bench.training.instruments.trace import Profiling, cost
from bench.training.profiling import files, recording
from bench.training.profiling.recording import ExclusiveProfile, Ranges, Recording
from bench.training.timing.clock import StepMarks

ONE = {"first_step": 5, "warmup_steps": 2, "active_steps": 3}


def traced(folder, settings=ONE, instrument="trace", **kwargs):
    """Runs a race under one instrument and returns (its summary, its flags, Spy)."""
    spy = Spy()
    watch = watch_of(folder, {instrument: dict(settings)}, spy=spy)
    train_under(watch, **kwargs)
    summary, flags = watch.collect("summary")[instrument], watch.collect("flags")[instrument]
    watch.close()
    assert not watch.warnings
    return summary, flags, spy


def recorded_nowhere():
    return not torch.autograd._profiler_enabled()


def test_exactly_the_asked_steps_are_recorded_and_the_disturbed_ones_flagged(tmp_path):
    summary, flags, spy = traced(tmp_path)
    trace = read(tmp_path / "traces" / "trace_rank0.pt.trace.json.gz")
    assert step_names(trace) == ["ProfilerStep#5", "ProfilerStep#6", "ProfilerStep#7"]
    assert len(trace["traceEvents"]) > 50 and outside_of_steps(trace) == []
    assert flags == dict.fromkeys((3, 4, 5, 6, 7), "profiled")
    assert (summary["trace"]["status"], summary["trace"]["steps"]) == ("recorded", [5, 7])
    assert "window trace records steps 5 to 7 after warm-up from step 3" in spy.said[0]
    assert "window trace recorded steps 5 to 7: traces/trace_rank0.pt.trace.json.gz" in spy.said[1]
    expected = [("profile_start", 5), ("profile_stop", [5, 7])]
    assert [(name, facts.get("step") or facts.get("steps")) for name, facts in spy.emitted] == expected


def test_phases_are_annotations_once_a_micro_step_and_never_across_a_step(tmp_path):
    traced(tmp_path)
    trace = read(tmp_path / "traces" / "trace_rank0.pt.trace.json.gz")
    kinds = [name for name in names(trace) if "Optimizer." not in name and "ProfilerStep" not in name]
    assert {name: kinds.count(name) for name in set(kinds)} == {"data": 6, "forward": 6, "backward": 6, "optimizer": 3}
    ranges = [event for event in trace["traceEvents"] if event.get("cat") == "user_annotation"]
    steps = [event for event in ranges if event["name"].startswith("ProfilerStep#")]
    for event in ranges:
        inside = [
            step
            for step in steps
            if step["ts"] <= event["ts"] and event["ts"] + event["dur"] <= step["ts"] + step["dur"]
        ]
        assert len(inside) == 1, event["name"]


def test_a_validation_between_recorded_steps_is_recorded_as_one(tmp_path):
    traced(tmp_path, {"first_step": 4, "warmup_steps": 0, "active_steps": 2})  # a validation follows step 4
    trace = read(tmp_path / "traces" / "trace_rank0.pt.trace.json.gz")
    assert names(trace).count("validation") == 1
    (validation,) = [event for event in trace["traceEvents"] if event["name"] == "validation"]
    assert all(
        event["ts"] + event["dur"] <= validation["ts"] or event["ts"] >= validation["ts"] + validation["dur"]
        for event in trace["traceEvents"]
        if event["name"].startswith("ProfilerStep#")
    )


def test_losses_are_the_same_bit_for_bit_with_any_profiler(tmp_path):
    plain = train_under(watch_of(tmp_path, {}))
    for chosen in ({"trace": {"with_stack": True, "profile_memory": True}}, {"window": {}}, {"stages": {}}):
        watch = watch_of(tmp_path, chosen)
        assert train_under(watch) == plain
        watch.close()


def test_a_window_that_is_not_reached_is_a_status_and_no_file(tmp_path):
    summary, flags, spy = traced(tmp_path, {"first_step": 50})
    assert summary["trace"]["status"] == "not reached" and summary["trace"]["steps"] is None
    assert not (tmp_path / "traces").exists() and flags == {}
    assert "but the run has 12 steps" in spy.said[0]
    assert "window trace not reached: the run ended after step 12" in spy.said[-1]


def test_a_window_whose_warmup_alone_is_reached_leaves_no_file_and_no_profiler(tmp_path):
    watch = watch_of(tmp_path, {"trace": {"first_step": 9, "warmup_steps": 3}})
    train_under(watch, stop_after=7)
    assert recording._holder is None  # nothing is in the way of the next
    assert watch.collect("summary")["trace"]["trace"]["status"] == "not reached"
    assert sorted(watch.collect("flags")["trace"]) == [6, 7]
    assert not (tmp_path / "traces").exists() and not watch.warnings


def test_a_run_that_reaches_its_target_in_the_midst_cuts_the_window_short(tmp_path):
    summary, _, _ = traced(tmp_path, ONE, stop_after=6)
    assert (summary["trace"]["status"], summary["trace"]["steps"]) == ("cut short", [5, 6])
    trace = read(tmp_path / "traces" / "trace_rank0.pt.trace.json.gz")
    assert step_names(trace) == ["ProfilerStep#5", "ProfilerStep#6"]
    assert (trace["speedrun"]["first_step"], trace["speedrun"]["last_step"]) == (5, 6)
    assert [path.name for path in tmp_path.rglob(".*")] == []  # no temporary file is left


def test_a_run_that_fails_keeps_what_was_recorded(tmp_path):
    watch = watch_of(tmp_path, {"trace": dict(ONE)})
    with pytest.raises(RuntimeError) as failure:
        train_under(watch, fail_at=6)
    watch.on_failure(failure.value)
    watch.close()
    expected = ["ProfilerStep#5", "ProfilerStep#6"]
    assert step_names(read(tmp_path / "traces" / "trace_rank0.pt.trace.json.gz")) == expected
    assert recorded_nowhere() and not watch.warnings


def test_a_rank_that_is_not_asked_flags_the_steps_and_records_nothing(tmp_path):
    settings = ONE | {"ranks": [1]}
    watch = watch_of(tmp_path, {"trace": dict(settings)}, rank=0, world_size=2)
    train_under(watch)
    # two ranks: the step after the window waits for the rank that writes its trace
    assert sorted(watch.collect("flags")["trace"]) == [3, 4, 5, 6, 7, 8]
    assert watch.collect("summary")["trace"]["trace"]["status"] == "recorded"
    assert not (tmp_path / "traces").exists()
    watch = watch_of(tmp_path, {"trace": dict(settings)}, rank=1, world_size=2)
    train_under(watch)
    watch.collect("summary")
    expected = {"backend": None, "rank": 1, "world_size": 2}
    assert read(tmp_path / "traces" / "trace_rank1.pt.trace.json.gz")["distributedInfo"] == expected


def test_the_cost_of_a_recorded_step_is_its_median_against_the_others(tmp_path):
    class Marks:
        now_ms = 0.0
        ready = staticmethod(lambda mark: True)
        wait = free = staticmethod(lambda *marks: None)
        mark = lambda self: self.now_ms  # noqa: E731
        ms_between = staticmethod(lambda start, end: end - start)

    marks = Marks()
    times = StepMarks(marks, ("step",))
    for row, ms in enumerate((10, 10, 90, 15, 14, 16, 500, 12, 8), 1):
        times.start()
        times.mark("step")
        marks.now_ms += ms
        times.end(row)
    times.read_all()
    # rows 4 to 6 were recorded, 3 was warm-up, 7 waited: the others are 10, 10, 12 and 8
    step_ms = times.ms["step"]
    expected = {"profiled_step_ms": 15.0, "other_step_ms": 10.0, "cost_pct": 50.0}
    assert cost(step_ms, (4, 5, 6), {3, 4, 5, 6, 7}) == expected
    assert cost(step_ms, (20,), set())["cost_pct"] is None
    summary, _, spy = traced(tmp_path)
    recorded_ms, other_ms = summary["trace"]["profiled_step_ms"], summary["trace"]["other_step_ms"]
    assert recorded_ms > 0 and other_ms > 0  # which is more, a busy machine decides
    assert summary["trace"]["cost_pct"] == pytest.approx(100 * (recorded_ms / other_ms - 1), abs=0.1)
    assert re.search(r"a recorded step of window trace took [\d.]+ ms, another [\d.]+ ms: [+-]\d+ %", spy.said[-1])


def test_what_ranks_waited_for_each_other_is_not_taken_off_twice():
    """Rank 0 writes its trace in step 1 while rank 1 waits in step 2: 1.0 + 0.1 s passed on both, not 1.0 + 1.0."""
    from bench.training import gather_result

    def rank(flags, *step_ms):
        rows = [{"train_loss": 1.0, "step_ms": ms, "t_ns": 0} for ms in step_ms]
        return gather_result.RankResult(1.0, 0.0, 1, rows, {}, {"trace": flags}, {}, {}, 0.0, {}, None)

    everyone = [rank({1: "profiled", 2: "profiled"}, 1000.0, 100.0, 50.0), rank({}, 100.0, 1000.0, 60.0)]
    own_rows = [{"step": step, "step_ms": ms} for step, ms in enumerate((None, 1000.0, 100.0, 50.0))]
    rows = gather_result.rows(own_rows, everyone)
    assert [row["step_ms"] for row in rows] == [None, 1000.0, 100.0, 60.0]  # rank 0's where flagged, else the slowest


def test_the_op_table_is_text_and_json_in_a_folder_of_its_own(tmp_path):
    """HolisticTraceAnalysis takes every .json beside a trace for a trace."""
    summary, _, _ = traced(tmp_path)
    expected = ["traces/trace_rank0.pt.trace.json.gz", "traces/ops/trace_rank0.txt", "traces/ops/trace_rank0.json"]
    assert summary["trace"]["files"] == expected
    ops = json.loads((tmp_path / "traces" / "ops" / "trace_rank0.json").read_text())
    assert (ops["window"], ops["rank"], ops["steps"]) == ("trace", 0, [5, 7])
    table = ops["ranks"]["0"]["operators"]
    (forward,) = [row for row in table if row["name"] == "aten::addmm" and row["shapes"][1] == [8, 16]]
    assert forward["count"] == 6  # 3 steps of 2 micro-steps, the last step too
    assert forward["allocated_bytes"] == 6 * 8 * 32 * 4
    assert 0 < forward["self_cpu_us"] <= forward["cpu_us"] and forward["device_us"] == 0
    text = (tmp_path / "traces" / "ops" / "trace_rank0.txt").read_text()
    assert "Operators by self CPU time" in text and "Operators by memory" in text and "aten::addmm" in text


def test_a_trace_names_no_machine_and_no_private_path(tmp_path, repo):
    traced(tmp_path, ONE | {"with_stack": True, "gzip": False})
    text = (tmp_path / "traces" / "trace_rank0.pt.trace.json").read_text()
    trace = json.loads(text)
    assert trace["host_name"] == "" and trace["traceName"] == "trace_rank0.pt.trace.json"
    assert f"{repo}/" not in text and f"{os.path.expanduser('~')}/" not in text
    assert any("profiled.py(" in name for name in names(trace, "python_function"))
    assert trace["speedrun"] == {"window": "trace", "first_step": 5, "last_step": 7}


def written(content):
    """A profile that libkineto writes with this content."""
    return SimpleNamespace(export_chrome_trace=lambda path: Path(path).write_bytes(content))


def test_a_full_disk_is_reported_and_leaves_no_half_trace(tmp_path):
    """libkineto writes what fits and says nothing."""
    with pytest.raises(OSError, match="is cut: is the disk full"):
        files.save(written(b'{"traceEvents": [\n  {\n    "ph": "X", "name": "aten::'), tmp_path / "a.json.gz")
    assert list(tmp_path.iterdir()) == []


def test_a_name_that_is_no_text_is_made_one(tmp_path):
    """torch's tracer of Python calls now and then writes freed memory as a name."""
    content = b'{"host_name": "box", "traceEvents": [\n  {\n    "ph": "X", "name": "f.py(0): \xa0\x01~E"\n  }\n]}'
    saved = files.save(written(content), tmp_path / "a.json")
    assert saved.num_events == 1
    assert json.loads(saved.path.read_text())["traceEvents"][0]["name"] == "f.py(0): \ufffd ~E"


# ---- size


def event(name, category, filler=""):
    fields = {} if category is None else {"cat": category}
    return json.dumps({"ph": "X", **fields, "name": name, "args": {"x": filler}}).encode()


def test_what_is_of_least_use_is_left_out_first():
    events = [event("thread", None), event("ProfilerStep#5", "user_annotation")]
    events += [event("f.py(1): f", "python_function", "x" * 500)]
    events += [event(f"aten::{num}", "cpu_op", "y" * 100) for num in range(5)]
    events += [event("g.py(1): g", "python_function", "x" * 500)]
    size = sum(len(line) + 2 for line in events)  # with a comma and a line end
    assert files.shrunk(events, size) == (events, {})
    assert files.shrunk(events, size - 1) == (events[:-1], {"python_function": 1})
    f, operator = len(events[2]) + 2, len(events[3]) + 2
    assert files.shrunk(events, size - 2 * f) == ([*events[:2], *events[3:-1]], {"python_function": 2})
    expected = ([*events[:2], *events[3:6]], {"python_function": 2, "cpu_op": 2})
    assert files.shrunk(events, size - 2 * f - operator - 1) == expected
    assert files.shrunk(events, 1) == (events[:2], {"python_function": 2, "cpu_op": 5})  # annotations and threads stay


def test_a_window_keeps_to_its_size(tmp_path):
    summary, _, spy = traced(tmp_path, ONE | {"with_stack": True, "max_mib": 0.1, "gzip": False})
    assert (tmp_path / "traces" / "trace_rank0.pt.trace.json").stat().st_size <= 0.1 * 2**20
    assert summary["trace"]["dropped"]["python_function"] > 0
    assert "events dropped to keep max_mib" in spy.said[1]
    assert len(step_names(read(tmp_path / "traces" / "trace_rank0.pt.trace.json"))) == 3


# ---- one at a time


def test_two_profilers_at_once_are_refused_instead_of_crashing():
    first = Recording("first", Options(), "cpu", 0, 1)
    first.start()
    second = Recording("second", Options(), "cpu", 0, 1)
    try:
        with pytest.raises(RuntimeError, match="window second cannot begin: window first is recording"):
            second.start()
        second.cancel()  # nothing of its own runs, so nothing is ended
        assert not recorded_nowhere()
    finally:
        first.cancel()
    assert recorded_nowhere()
    second = Recording("second", Options(), "cpu", 0, 1)
    second.warm()
    with pytest.raises(RuntimeError, match="window first cannot begin"):
        Recording("first", Options(), "cpu", 0, 1).warm()
    second.cancel()


def test_a_profiler_of_somebody_else_is_seen():
    sentence = "a profiler of another program is recording, and two torch profilers at once crash"
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu), pytest.raises(RuntimeError, match=sentence):
        Recording("mine", Options(), "cpu", 0, 1).start()


def test_an_instrument_that_meets_another_profiler_is_dropped_with_a_warning(tmp_path):
    other = ExclusiveProfile(activities=[torch.profiler.ProfilerActivity.CPU])
    watch = watch_of(tmp_path, {"trace": dict(ONE)})
    other.start()
    try:
        train_under(watch)
    finally:
        other.stop()
    assert [warning["edge"] for warning in watch.warnings] == ["on_step_start"]
    assert "two torch profilers at once crash" in watch.warnings[0]["error"]
    assert watch.collect("flags")["trace"] == {3: "profiled"}


def test_ranges_close_from_the_inside_out():
    ranges = Ranges()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for name in ("outer", "inner", "innermost"):
            ranges.open(name)
        ranges.close(down_to=1)
        ranges.open("second")
        ranges.close()
    times = {event.name: event.time_range for event in profile.events()}
    assert (
        times["innermost"].end
        <= times["inner"].end
        <= times["second"].start
        <= times["second"].end
        <= times["outer"].end
    )


def test_what_cannot_be_recorded_here_is_said():
    if torch.cuda.is_available():
        pytest.skip("here it can be")
    with pytest.raises(ValueError, match=r"activities=\['cuda'\]: this torch can record none of them here"):
        Recording("gpu", Options(activities=("cuda",)), "cpu", 0, 1)


def test_what_ranks_recorded_of_a_window_is_reported_together():
    def recorded(rank, **changes):
        return {
            "status": "recorded",
            "steps": [3, 4],
            "files": [f"traces/a_rank{rank}.json"],
            "num_events": 10,
            "num_bytes": 5,
            "dropped": {"cpu_op": rank},
            "flush_ms": float(rank),
        } | changes

    merged = lambda summaries: Profiling.merge(None, summaries)  # noqa: E731
    bare = {"status": "recorded", "steps": [3, 4]}
    merged_windows = merged([{"a": recorded(0), "b": bare}, {"a": recorded(1), "b": recorded(1)}, {}])
    assert merged_windows["a"]["files"] == ["traces/a_rank0.json", "traces/a_rank1.json"]
    assert (merged_windows["a"]["num_events"], merged_windows["a"]["num_bytes"]) == (20, 10)
    assert (merged_windows["a"]["flush_ms"], merged_windows["a"]["dropped"]) == (1.0, {"cpu_op": 1})
    assert merged_windows["b"] == recorded(1)
    assert merged([{"a": bare}, {"a": bare}]) == {"a": bare}


@pytest.mark.parametrize(
    "instruments",
    [
        {"trace": {"ranks": [0, 5]}},
        {"stages": {"ranks": [5]}},
        {"memory_history": {"windows": [{"name": "a", "ranks": [5]}]}},
    ],
)
def test_ranks_that_the_run_does_not_have_are_refused(instruments):
    with pytest.raises(ValueError, match=": the run has 2 processes, ranks from 0: remove 5$"):
        check_ranks(instruments, 2)
    check_ranks(instruments, 6)
