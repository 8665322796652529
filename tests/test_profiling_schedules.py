"""Windows that repeat: torch's own schedule step by step, cycles with files of their own, what cannot be."""

import itertools
import json
import random
import shutil
from types import SimpleNamespace

import pytest
import torch
from profiled import Spy, read, step_names, train_under, watch_of
from torch.profiler import ProfilerAction

from bench.cli import analyze
from bench.config import compose, overrides, window_settings
from bench.config.window_settings import steps_of_schedule
from bench.config.windows import ProfilerWindow, described
from bench.launch.prepare import requested_config
from bench.training.instruments import registry, trace

NUM_STEPS = 60
SCHEDULE = {"wait": 1, "warmup": 1, "active": 2, "repeat": 2, "skip_first": 1}  # steps 4 and 5, then 8 and 9


def composed(*overrides):
    return requested_config(["track=cpu_nano", *overrides]).instruments


def windows_of(settings):
    """Returns the windows of the instrument trace with settings that differ from its yaml."""
    chosen = {"trace": settings}
    compose._check_settings("instruments", chosen)
    registry.check(chosen)
    return window_settings.trace_windows(chosen["trace"])


def actions(window, num_steps):
    """What is done in each step, as torch calls it."""
    step_actions = [ProfilerAction.NONE] * num_steps
    for cycle in window.cycles(num_steps):
        for step in range(cycle.begin_step, min(cycle.last_step, num_steps) + 1):
            is_last = step == cycle.last_step
            step_actions[step - 1] = ProfilerAction.WARMUP if step < cycle.first_step else ProfilerAction.RECORD
            step_actions[step - 1] = ProfilerAction.RECORD_AND_SAVE if is_last else step_actions[step - 1]
    return step_actions


@pytest.mark.filterwarnings("ignore:Profiler won't be using warmup")
def test_every_step_of_any_schedule_does_what_torchs_own_does():
    draw = random.Random(28)
    seen = set()
    for _ in range(500):
        schedule = {"wait": draw.randrange(9), "warmup": draw.randrange(5), "active": draw.randrange(1, 6)}
        optional = {"repeat": draw.randrange(4), "skip_first": draw.randrange(12), "skip_first_wait": draw.randrange(2)}
        schedule |= {key: number for key, number in optional.items() if draw.random() < 0.7}
        reference = torch.profiler.schedule(**schedule)
        (window,) = windows_of(steps_of_schedule(schedule))
        expected = [reference(step) for step in range(NUM_STEPS)]
        assert actions(window, NUM_STEPS) == expected, schedule
        seen.update(expected)
    assert len(seen) == 4  # none, warm-up, record, record and save


def test_two_cycles_are_two_traces_whose_names_say_cycle_and_rank(tmp_path):
    spy = Spy()
    watch = watch_of(tmp_path, {"trace": steps_of_schedule(SCHEDULE)}, spy=spy)
    plain = train_under(watch_of(tmp_path, {}))
    assert train_under(watch) == plain  # bit for bit
    summary, flags = watch.collect("summary")["trace"], watch.collect("flags")["trace"]
    watch.close()
    names = [f"trace_cycle{cycle}_rank0.pt.trace.json.gz" for cycle in (1, 2)]
    assert sorted(path.name for path in (tmp_path / "traces").glob("*.gz")) == names
    assert [(name, window["status"], window["steps"]) for name, window in summary.items()] == [
        ("trace_cycle1", "recorded", [4, 5]),
        ("trace_cycle2", "recorded", [8, 9]),
    ]
    for name, window in summary.items():
        assert window["files"][1:] == [f"traces/ops/{name}_rank0.{suffix}" for suffix in ("txt", "json")]
    assert flags == dict.fromkeys((3, 4, 5, 7, 8, 9), "profiled")  # each warm-up and what it warms up for
    expected = "window trace records steps 4 to 5 after warm-up from step 3, and again every 4 steps, 2 times in all"
    assert expected in spy.said[0] and "trace_cycle2" not in spy.said[0]


def test_a_window_every_n_steps_is_recorded_until_the_run_ends(tmp_path):
    """No profile is kept in memory once its trace is written, which has what the tables need."""
    spy = Spy()
    settings = {"first_step": 2, "warmup_steps": 0, "active_steps": 1, "every_steps": 2}
    watch = watch_of(tmp_path, {"trace": settings}, spy=spy)
    train_under(watch, stop_after=9)
    (trace,) = watch.instruments
    assert [shot.recording for shot in trace.shots] == [None] * 6
    summary = watch.collect("summary")["trace"]
    watch.close()
    steps = [window["steps"] for window in summary.values()]
    assert steps == [[2, 2], [4, 4], [6, 6], [8, 8], None, None]
    assert all((tmp_path / file).exists() for window in summary.values() for file in window.get("files", ()))
    table = json.loads((tmp_path / "traces/ops/trace_cycle4_rank0.json").read_text())
    assert (table["window"], table["steps"]) == ("trace_cycle4", [8, 8]) and table["ranks"]["0"]["operators"]
    assert "window trace_cycle5 and 1 more not reached: the run ended after step 9" in "\n".join(spy.said)


def test_cycles_without_a_gap_are_each_whole(tmp_path):
    """torch's schedule with wait=0, warmup=0: a cycle begins in the step after the one that ended."""
    watch = watch_of(tmp_path, {"trace": steps_of_schedule({"wait": 0, "warmup": 0, "active": 3, "repeat": 2})})
    train_under(watch, num_steps=8)
    watch.close()
    files = sorted((tmp_path / "traces").glob("*.gz"))
    steps = [[f"ProfilerStep#{row}" for row in rows] for rows in ((1, 2, 3), (4, 5, 6))]
    assert [step_names(read(file)) for file in files] == steps and not watch.warnings


def test_analyze_keeps_a_summary_of_each_cycle(tmp_path):
    watch = watch_of(tmp_path, {"trace": steps_of_schedule(SCHEDULE)})
    train_under(watch)
    watch.close()
    (tmp_path / "run.json").write_text("{}")
    assert analyze.main([str(tmp_path)]) == 0
    for cycle, steps in ((1, [4]), (2, [8])):
        folder = tmp_path / "windows" / f"trace_cycle{cycle}"
        analysis = json.loads((folder / "analysis.json").read_text())
        assert analysis["ranks"]["0"]["profiler_steps"] == steps
        assert f"window trace_cycle{cycle}" in (folder / "summary.md").read_text().splitlines()[0]
    assert json.loads((tmp_path / "analysis.json").read_text())["ranks"]["0"]["profiler_steps"] == [4]
    shutil.rmtree(tmp_path / "windows")
    (tmp_path / "traces" / "trace_cycle2_rank0.pt.trace.json.gz").unlink()
    assert analyze.main([str(tmp_path)]) == 0 and not (tmp_path / "windows").exists()  # one window is the run's own


def test_the_word_for_a_schedule_sets_the_settings_of_the_window():
    expected = {"first_step": 11, "warmup_steps": 5, "active_steps": 4, "every_steps": 14, "repeat": 0}
    assert composed("profile.schedule={wait:5,warmup:5,active:4}")["trace"].items() >= expected.items()
    once = composed("profile=modded", "profile.schedule={wait:5,warmup:5,active:4,repeat:1}")
    assert once == composed("profile=modded")  # what the recipe says by itself
    late = composed("profile=modded", "profile.every=500")["trace"]
    assert (late["name"], late["first_step"], late["every_steps"], late["repeat"]) == ("modded", 11, 500, 0)
    assert overrides.with_schedule(["seed=3"]) == ["seed=3"]


def test_a_schedule_may_stop_the_run_after_its_last_cycle():
    assert registry.last_step(composed("profile.schedule={wait:5,warmup:5,active:4,repeat:3}")) == 42


TRACE, WAIT_5 = "+instruments=trace instruments.trace.", "profile.schedule={wait:5,warmup:5,active:4}"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("profile.schedule={wait:5,active:4}", "profile.schedule.warmup=None: use a whole number of 0 or more"),
        (
            "profile.schedule={wait:5,warmup:0,active:4,repeats:2}",
            "unknown setting profile.schedule.repeats=2: profile",
        ),
        ("profile.schedule={wait:5,warmup:0,active:0}", "active=0: use a whole number of 1 or more"),
        ("profile.schedule={wait:-1,warmup:0,active:1}", "wait=-1: use a whole number of 0 or more"),
        ("profile.schedule={wait:true,warmup:0,active:1}", "wait=True: use a whole number of 0"),
        ("profile.schedule=5", "profile.schedule=5: use a group of settings, KEY: VALUE"),
        ("profile.every=4", "every_steps=4: one cycle takes 5 steps, warm-up included: use every_steps=5 or more"),
        ("profile.every=0", "every_steps=0: use a whole number of 1 or more"),
        (f"{WAIT_5} instruments.trace.first_step=3", "trace.first_step=3 is given too, which it sets: keep one"),
        (f"{TRACE}repeat=2", "repeat=2: no distance is set"),
        (
            f"{WAIT_5} profile.stop_after_window=true",
            "every 14 steps, until the run ends: .* no last step: give .*repeat=N",
        ),
        # by the clock
        (f"{TRACE}active_s=2", "active_s=2: a window by the clock has a beginning: set first_s too"),
        (f"{TRACE}first_s=2 instruments.trace.every_steps=9", "every_steps=9: first_s is set: use every_s"),
        (f"{TRACE}first_s=-1", "first_s=-1: use a number of seconds, 0 or more"),
        (
            f"{TRACE}first_s=2 +instruments=window",
            "window trace, 3 steps after 2 s .*: it overlaps with window window, .*: keep one of them",
        ),
        (f"{TRACE}first_s=2 profile.stop_after_window=true", "it has no last step: give first_step instead"),
    ],
)
def test_windows_that_cannot_be_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        composed(*settings.split())


def window(name, first_step, active_steps, every_steps=None, repeat=0):
    return ProfilerWindow(
        name=name, first_step=first_step, active_steps=active_steps, every_steps=every_steps, repeat=repeat
    )


def test_a_window_that_repeats_has_all_steps_to_the_end_of_its_last_cycle():
    repeated = window("a", 5, 3, 10, 2)  # steps 5 to 7 and 15 to 17
    assert [repeated.overlaps(window("b", step, 2)) for step in (3, 4, 10, 17, 18)] == [False, True, True, True, False]
    endless = window("a", 5, 3, 10)
    assert endless.overlaps(window("b", 1000, 1)) and not endless.overlaps(window("b", 1, 4))
    for listed, message in (
        ([{"name": "a", "first_step": 5, "every_steps": 10}, {"name": "b", "first_step": 24}], "keep one of them"),
        ([{"name": "a", "first_step": 5, "every_steps": 10}, {"name": "a_cycle1"}], "two windows have this name"),
    ):
        with pytest.raises(ValueError, match=message):
            windows_of({"windows": listed})


def test_what_is_said_of_a_window():
    assert described(window("one", 3, 1, 10)) == "step 3, and again every 10 steps, until the run ends"
    assert [cycle.first_step for cycle in itertools.islice(window("one", 3, 1, 10).cycles(), 3)] == [3, 13, 23]


# ---- by the clock


@pytest.fixture
def clock(monkeypatch):
    """Each step takes 0.5 s: clock.row is the step that begins."""
    clock = SimpleNamespace(row=1)
    monkeypatch.setattr(trace.time, "perf_counter", lambda: 100 + 0.5 * (clock.row - 1))
    return clock


def timed(**settings):
    (window,) = windows_of({"warmup_steps": 1, **settings})
    return window


def decided(window, folder, clock, num_steps, rank=0, world_size=1):
    """Returns [(the step at whose start it was known, name, first step, last step)]."""
    clock.row, windows = 1, []
    watch = trace.ByTheClock(window, folder, rank, world_size, "cpu")
    for clock.row in range(1, num_steps + 1):
        cycle = watch.due(clock.row)
        if cycle:
            windows.append((clock.row, cycle.name, cycle.first_step, cycle.last_step))
    watch.close()
    return windows


def test_a_window_by_the_clock_begins_with_the_first_step_after_its_seconds(tmp_path, clock):
    # row 7 begins at 3.0 s: it is the warm-up; 2 s are 4 steps
    expected = [(7, "trace", 8, 11)]
    assert decided(timed(first_s=3, active_s=2), tmp_path, clock, 40) == expected
    assert decided(timed(first_s=2.9, active_steps=4), tmp_path, clock, 40) == expected
    assert decided(timed(first_s=0, active_s=0.1), tmp_path, clock, 40) == [
        (2, "trace", 3, 3)
    ]  # 1 says how long one takes
    assert not list(tmp_path.glob(".*"))


def test_a_window_every_so_many_seconds(tmp_path, clock):
    assert decided(timed(first_s=1, every_s=5, active_steps=1), tmp_path, clock, 30) == [
        (3, "trace_cycle1", 4, 4),
        (13, "trace_cycle2", 14, 14),
        (23, "trace_cycle3", 24, 24),
    ]
    twice = timed(first_s=1, every_s=1, active_steps=3, repeat=2)  # a cycle takes 2 s: the next waits for it
    assert decided(twice, tmp_path, clock, 30) == [(3, "trace_cycle1", 4, 6), (7, "trace_cycle2", 8, 10)]


def test_every_rank_records_the_steps_that_rank_0_decided(tmp_path, clock):
    window = timed(first_s=3, active_steps=2)
    (tmp_path / ".trace.clock.tmp").write_bytes(trace.PAGE.pack(1, 2, 3))  # of a run that was killed
    watches = [trace.ByTheClock(window, tmp_path, rank, 2, "cpu") for rank in (1, 0)][::-1]
    windows = {0: [], 1: []}
    for row in range(1, 15):
        for rank in (1, 0) if row % 2 else (0, 1):  # whoever comes first to the step
            clock.row = row + 5 * rank  # the clock of rank 1 is 2.5 s ahead, and nobody asks it
            cycle = watches[rank].due(row)
            windows[rank] += [(row, cycle.first_step, cycle.last_step)] if cycle else []
    # decided in row 7, which rank 1 has begun by then; the warm-up is row 8
    assert windows == {0: [(7, 9, 10)], 1: [(8, 9, 10)]}
    for watch in watches:
        watch.close()


def test_the_instrument_records_a_window_by_the_clock(tmp_path, clock, monkeypatch):
    spy = Spy()
    watch = watch_of(tmp_path, {"trace": {"first_s": 2, "every_s": 3, "warmup_steps": 1, "active_steps": 2}}, spy=spy)
    (trace,) = watch.instruments
    begin = trace.on_step_start

    def on_step_start(step):
        clock.row = step + 1
        begin(step)

    monkeypatch.setattr(watch, "on_step_start", on_step_start)
    plain = train_under(watch_of(tmp_path, {}))
    assert train_under(watch) == plain
    summary, flags = watch.collect("summary")["trace"], watch.collect("flags")["trace"]
    watch.close()
    assert {name: window["steps"] for name, window in summary.items()} == {
        "trace_cycle1": [6, 7],
        "trace_cycle2": [12, 12],
    }
    assert summary["trace_cycle2"]["status"] == "cut short"  # 12 to 13, of 12 steps
    assert sorted(flags) == [5, 6, 7, 11, 12] and not watch.warnings
    assert step_names(read(tmp_path / "traces/trace_cycle1_rank0.pt.trace.json.gz")) == [
        "ProfilerStep#6",
        "ProfilerStep#7",
    ]
    assert "records 2 steps after 2 s and 1 step of warm-up, and again every 3 s" in spy.said[0]
    assert not list(tmp_path.glob(".*"))


def test_a_run_that_ends_before_its_window_by_the_clock_says_so(tmp_path):
    spy = Spy()
    watch = watch_of(tmp_path, {"trace": {"first_s": 3600}}, spy=spy)
    train_under(watch)
    assert watch.collect("summary")["trace"] == {"trace": {"status": "not reached", "first_s_asked": 3600}}
    watch.close()
    assert "window trace not reached: the run ended before 3600 s" in spy.said[-1]


def test_a_script_has_no_window_by_the_clock():
    from bench.config import schema
    from bench.config.refusals import check_clocks

    chosen = composed("profile.every=60s")
    assert (chosen["trace"]["first_s"], chosen["trace"]["every_s"]) == (60, 60)
    config = requested_config(["track=cpu_nano", "profile.every=60s"])
    check_clocks(config)
    config.script = schema.ScriptConfig(path="train.py")
    with pytest.raises(ValueError, match="^instruments.trace.first_s=.*a script has no clock for it: use first_step"):
        check_clocks(config)
