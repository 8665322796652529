"""Peak memory of each phase, and the memory history: what they read, what they leave alone, and what they write."""

import pickle
from pathlib import Path

import fake_cuda
import pytest
from racing import race, run_json, steps
from snapshots import FORWARD, frames

from bench import compose, memory_recording, memory_rules, snapshot
from bench.instruments import load, memory
from bench.instruments.base import Context, Instrument, Watch
from bench.memory_monitor import DeviceMemoryMonitor, MemoryMonitor
from bench.peaks import CudaPeaks, ProcessPeaks
from bench.snapshot import process
from bench.timers import HostMarks

GIB = 2**30
SETTINGS = {"name": "steps", "first_step": 2, "active_steps": 2, "ranks": None, "max_entries": 1000, "stacks": "python",
            "whole_race": False, "windows": []}  # fmt: skip


@pytest.fixture
def cuda(monkeypatch):
    return fake_cuda.install(monkeypatch)


class Events(list):
    def __call__(self, name, **facts):
        self.append({"event": name, **facts})


def context(folder, device_type="cuda", rank=0, num_steps=5, peaks=None):
    events, said = Events(), []
    return (
        Context(Path(folder), rank, 2, device_type, num_steps, HostMarks(), 0, events, said.append, peaks),
        events,
        said,
    )


def watched(instrument):
    instrument.name = "memory"
    return Watch([instrument])


# ---- peaks


def test_a_stretchs_peak_is_its_own_and_the_whole_forgets_none(cuda):
    peaks = CudaPeaks(0)
    cuda.peak(allocated=7 * GIB)
    cuda.peak(allocated=1 * GIB)
    peaks.reset()
    cuda.peak(allocated=3 * GIB, active=4 * GIB, reserved=6 * GIB)
    cuda.peak(allocated=2 * GIB, active=2 * GIB)
    assert peaks.split()["peak_bytes"] == {"allocated": 3 * GIB, "active": 4 * GIB, "reserved": 6 * GIB}
    assert peaks.split()["peak_bytes"] == {"allocated": 2 * GIB, "active": 2 * GIB, "reserved": 6 * GIB}
    assert peaks.whole_gib() == {"allocated": 3.0, "active": 4.0, "reserved": 6.0}


def proc(folder, now_kib, highest_kib):
    (folder / "status").write_text(f"Name:\tpython\nVmHWM:\t{highest_kib} kB\nVmRSS:\t{now_kib} kB\n")
    return ProcessPeaks(str(folder))


def test_where_linux_forgets_no_peak_a_stretch_shows_its_ends_or_what_grew(tmp_path):
    peaks = proc(tmp_path, 100, 300)
    (tmp_path / "clear_refs").mkdir()  # cannot be written
    assert peaks.split()["peak_bytes"] == {"rss": 300 * 1024}
    proc(tmp_path, 120, 300)
    assert peaks.split()["peak_bytes"] == {"rss": 120 * 1024}
    proc(tmp_path, 90, 400)
    assert peaks.split()["peak_bytes"] == {"rss": 400 * 1024}
    assert peaks.whole_gib() == {"rss": 400 * 1024 / GIB}


def test_where_linux_forgets_a_peak_the_highest_since_then_counts(tmp_path):
    peaks = proc(tmp_path, 100, 300)
    peaks.split()
    assert (tmp_path / "clear_refs").read_text() == "5"
    proc(tmp_path, 100, 150)
    assert peaks.split()["peak_bytes"] == {"rss": 150 * 1024}
    assert peaks.whole_gib() == {"rss": 300 * 1024 / GIB}


def test_a_real_process_is_seen_to_grow_and_its_peak_to_be_forgotten():
    peaks = ProcessPeaks()
    peaks.split()
    before = peaks.now_bytes()
    held = bytearray(64 * 2**20)
    held[::4096] = b"x" * len(held[::4096])
    del held
    grown = peaks.split()["peak_bytes"]["rss"]
    assert grown >= before + 50 * 2**20
    assert peaks.whole_gib()["rss"] * GIB >= grown


# ---- the instrument memory


def run_phases(instrument, cuda, train_gib, val_gib, num_rounds=2):
    watch = watched(instrument)
    watch.on_build_start()
    cuda.peak(allocated=1 * GIB, reserved=2 * GIB)
    watch.on_build_end()
    watch.on_warmup_start()
    cuda.peak(allocated=9 * GIB)
    cuda.peak(allocated=1 * GIB)
    watch.on_warmup_end()
    instrument.context.peaks.reset()
    watch.on_run_start()
    for number in range(num_rounds):
        watch.on_phase("validation")
        cuda.peak(allocated=val_gib * GIB)
        cuda.peak(allocated=1 * GIB)
        watch.on_validation(number, 4.0, 1.0)
        watch.on_step_start(number)
        watch.on_phase("forward")
        cuda.peak(allocated=(train_gib + number) * GIB)
        cuda.peak(allocated=1 * GIB)
        watch.on_step_end(number)
    watch.on_run_end()
    return watch


def test_each_phase_has_its_own_peak_and_the_races_peak_stays_known(cuda, tmp_path):
    where, events, _ = context(tmp_path, peaks=CudaPeaks(0))
    instrument = memory.INSTRUMENT(where)
    run_phases(instrument, cuda, train_gib=3, val_gib=5)
    found = instrument.summary()
    assert found["what"] == "CUDA allocator" and found["total_gib"] == 80.0
    peaks = {phase: found[f"{phase}_peak_allocated_gib"] for phase in ("build", "warmup", "train", "validation")}
    assert peaks == {"build": 1.0, "warmup": 9.0, "train": 4.0, "validation": 5.0}
    assert found["train_num_alloc_retries"] == 0 and events == []
    assert where.peaks.whole_gib()["allocated"] == 5.0  # of the race: what worker.py records, warm-up left out


def test_a_retry_is_told_with_its_step_and_what_that_step_took_longer(cuda, tmp_path, monkeypatch):
    now_ns = 0
    monkeypatch.setattr(memory.time, "perf_counter_ns", lambda: now_ns)
    where, events, _ = context(tmp_path, num_steps=20, peaks=CudaPeaks(0))
    instrument = memory.INSTRUMENT(where)
    cuda.stats["num_alloc_retries"] = 7  # of the warm-up: not told again
    instrument.on_run_start()
    reads = cuda.num_reads
    for step in range(20):
        instrument.on_step_start(step)
        now_ns += 50_000_000 if step == 12 else 10_000_000
        cuda.stats["num_alloc_retries"] += 2 if step == 12 else 0
        instrument.on_step_end(step)
    assert cuda.num_reads - reads == 3 + 1  # the first three steps and the slow one: the others cost no look
    assert events == [{"event": "allocator_retry", "step": 13, "count": 2, "ms": pytest.approx(40.0)}]
    instrument.on_run_end()
    assert instrument.summary()["train_num_alloc_retries"] == 2 and len(events) == 1


def test_a_retry_in_a_step_that_was_not_slow_is_told_without_a_step(cuda, tmp_path):
    where, events, _ = context(tmp_path, peaks=CudaPeaks(0))
    instrument = memory.INSTRUMENT(where)
    instrument.on_run_start()
    cuda.stats["num_alloc_retries"] = 1
    instrument.on_phase("validation")
    assert events == [{"event": "allocator_retry", "step": None, "count": 1, "ms": None}]


def test_over_ranks_the_largest_and_the_smallest_peak_are_told_and_counts_added_up(cuda, tmp_path):
    instrument = memory.INSTRUMENT(context(tmp_path)[0])
    of_rank = {"what": "CUDA allocator", "total_gib": 80.0, "train_num_ooms": 1}
    ranks = [{**of_rank, "train_peak_allocated_gib": gib} for gib in (3.0, 5.0, 4.0)]
    assert instrument.merge([*ranks, {}]) == {
        "what": "CUDA allocator", "total_gib": 80.0, "train_num_ooms": 3, "train_peak_allocated_gib": 5.0, "train_peak_allocated_gib_min": 3.0,
        "fullest_rank": 1,
    }  # fmt: skip
    assert instrument.merge([{}, {}]) == {}


def test_when_the_race_fails_what_each_phase_needed_is_an_event(cuda, tmp_path):
    where, events, _ = context(tmp_path, peaks=CudaPeaks(0))
    instrument = memory.INSTRUMENT(where)
    instrument.on_run_start()
    cuda.peak(allocated=79 * GIB)
    instrument.on_failure(RuntimeError("out of memory"))
    assert events[0]["event"] == "memory_at_failure" and events[0]["train_peak_allocated_gib"] == 79.0


def test_a_merge_that_fails_is_a_warning_and_rank_0_is_told(tmp_path):
    class Odd(Instrument):
        def merge(self, summaries):
            raise RuntimeError("no")

    odd, plain = Odd(context(tmp_path)[0]), Instrument(context(tmp_path)[0])
    odd.name, plain.name = "odd", "plain"
    watch = Watch([odd, plain])
    by_rank = [{"odd": {"a": 1}, "plain": {"b": 1}}, {"odd": {"a": 2}, "plain": {"b": 2}, "only_there": {"c": 3}}]
    assert watch.merge(by_rank) == {"odd": {"a": 1}, "plain": {"b": 1}}
    assert watch.warnings == [{"instrument": "odd", "edge": "merge", "error": "RuntimeError: no"}]


# ---- a recording


def test_a_recording_is_bounded_with_python_stacks_and_begins_empty(cuda):
    recording = memory_recording.Recording("one", max_entries=77)
    recording.start()
    assert cuda.history == [None, {"enabled": "all", "context": "all", "stacks": "python", "max_entries": 77}]
    with pytest.raises(RuntimeError, match="two: one is recording the memory history"):
        memory_recording.Recording("two").start()
    memory_recording.Recording("two").stop()  # who does not record ends nothing
    assert cuda.is_recording
    recording.stop()
    assert not cuda.is_recording
    memory_recording.Recording("two").start()
    memory_recording._holder = None  # as if another program's call had begun it
    with pytest.raises(RuntimeError, match="three: somebody else is recording"):
        memory_recording.Recording("three").start()
    with pytest.raises(ValueError, match="stacks=cpp: use python or all"):
        memory_recording.Recording("three", stacks="cpp")


def test_what_is_written_opens_everywhere_and_names_no_private_path(cuda, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/grace")
    here = str(memory_recording.REPO)
    stack = frames(
        f"{here}/models/gpt2.py:45 forward", "/home/grace/lib/x.py:1 f", "/tmp/torchinductor_grace/ab/c.py:3 call"
    )
    recording = memory_recording.Recording()
    recording.start()
    cuda.gpu.alloc(1000, stack)
    recording.mark("forward")
    path = tmp_path / "memory" / "a_rank0.pickle"
    assert recording.dump(path, rank=0, window="a") == path.stat().st_size
    content = path.read_bytes()
    assert content[:2] == b"\x80\x04" and b"grace" not in content and here.encode() not in content
    found = snapshot.load(path)
    assert [frame["filename"] for frame in found["device_traces"][0][-1]["frames"]] == [
        "models/gpt2.py",
        "~/lib/x.py",
        "/tmp/torchinductor/ab/c.py",
    ]
    assert found["speedrun"]["rank"] == 0 and found["speedrun"]["marks"][0][1] == "forward"
    assert sorted(tmp_path.rglob("*")) == [tmp_path / "memory", path]  # nothing passing is left


def test_a_snapshot_that_cannot_be_written_leaves_nothing(cuda, tmp_path, monkeypatch):
    monkeypatch.setattr(pickle, "dump", lambda *args, **more: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        memory_recording.Recording().dump(tmp_path / "a.pickle")
    assert list(tmp_path.iterdir()) == []


# ---- the instrument memory_history


def history(folder, rank=0, device_type="cuda", num_steps=5, **settings):
    where, events, said = context(folder, device_type, rank, num_steps)
    made, warnings = load({"memory_history": SETTINGS | settings}, where)
    assert warnings == []
    return made[0], Watch(made), events, said


def build_and_warm_up(watch, cuda):
    watch.on_build_start()
    cuda.gpu.alloc(3000, frames("models/gpt2.py:12 __init__"))
    watch.on_build_end()
    watch.on_warmup_start()
    watch.on_warmup_end()
    watch.on_run_start()


def run_step(watch, cuda, step, fails=False):
    watch.on_step_start(step)
    watch.on_phase("forward")
    address = cuda.gpu.alloc(1000 + step, FORWARD)
    if fails:
        cuda.observer(0, 5000, 80 * GIB, 400)
    cuda.gpu.free(address)
    watch.on_step_end(step)


def test_the_history_rests_in_the_race_but_for_its_window(cuda, tmp_path):
    instrument, watch, events, said = history(tmp_path)
    build_and_warm_up(watch, cuda)
    assert not cuda.is_recording
    recorded = []
    for step in range(5):
        watch.on_step_start(step)
        recorded.append(cuda.is_recording)
        watch.on_phase("forward")
        cuda.gpu.free(cuda.gpu.alloc(1000 + step, FORWARD))
        watch.on_step_end(step)
    watch.on_run_end()
    assert recorded == [False, True, True, False, False]
    assert instrument.flags() == dict.fromkeys((2, 3, 4), "memory_history")  # step 4 begins after the file was written
    found = snapshot.load(tmp_path / "memory" / "steps_rank0.pickle")
    assert [entry["size"] for entry in found["device_traces"][0] if entry["action"] == "alloc"] == [1001, 1002]
    assert found["segments"][0]["blocks"][0]["frames"] == frames(
        "models/gpt2.py:12 __init__"
    )  # of before the window, with its stack
    assert [name for _, name in found["speedrun"]["marks"]] == ["step 2", "forward", "step 3", "forward"]
    (window,) = instrument.summary()["windows"]
    assert (
        window["status"] == "recorded"
        and window["file"] == "memory/steps_rank0.pickle"
        and (window["first_step"], window["last_step"]) == (2, 3)
    )
    assert [event["event"] for event in events] == ["memory_snapshot"] and "./run.sh memory" in said[-1]
    assert watch.warnings == []


def test_several_windows_are_recorded_each_for_itself_and_one_out_of_reach_is_said(cuda, tmp_path):
    windows = [
        {"name": "late", "first_step": 4, "active_steps": 1},
        {"name": "early", "first_step": 1, "active_steps": 1},
        {"name": "never", "first_step": 90},
    ]
    instrument, watch, _, _ = history(tmp_path, windows=windows)
    build_and_warm_up(watch, cuda)
    for step in range(5):
        run_step(watch, cuda, step)
    watch.on_run_end()
    status = {window["window"]: window["status"] for window in instrument.summary()["windows"]}
    assert status == {"early": "recorded", "late": "recorded", "never": "not reached"}
    assert sorted(path.name for path in (tmp_path / "memory").iterdir()) == ["early_rank0.pickle", "late_rank0.pickle"]
    assert set(instrument.flags()) == {1, 2, 4, 5}


def test_a_race_that_stops_within_a_window_writes_what_there_is(cuda, tmp_path):
    instrument, watch, _, _ = history(tmp_path, active_steps=50)
    build_and_warm_up(watch, cuda)
    for step in range(3):
        run_step(watch, cuda, step)
    watch.on_run_end()
    (window,) = instrument.summary()["windows"]
    assert window["status"] == "recorded" and (tmp_path / "memory" / "steps_rank0.pickle").exists()
    assert set(instrument.flags()) == {2, 3}


def test_ranks_that_are_not_asked_record_nothing_and_windows_of_all_ranks_are_told_together(cuda, tmp_path):
    instrument, watch, _, _ = history(tmp_path, rank=1, ranks=[0])
    build_and_warm_up(watch, cuda)
    for step in range(5):
        run_step(watch, cuda, step)
    watch.on_run_end()
    assert instrument.flags() == {} and instrument.summary()["windows"] == []
    told = {
        "window": "steps",
        "status": "recorded",
        "file": "memory/steps_rank0.pickle",
        "num_bytes": 10,
        "dump_ms": 1.0,
    }
    silent = {"window": "steps", "status": "not recorded: busy"}
    ranks = [{"what": "x", "windows": [one], "num_ooms": 1} for one in (silent, told, told | {"dump_ms": 5.0})] + [{}]
    merged = instrument.merge(ranks)
    assert merged["windows"] == [told | {"num_bytes": 20, "dump_ms": 5.0, "ranks": [1, 2]}] and merged["num_ooms"] == 3


def test_out_of_memory_is_written_at_once_with_its_history_in_the_build_and_without_one_in_the_race(cuda, tmp_path):
    instrument, watch, events, said = history(tmp_path)
    watch.on_build_start()
    cuda.gpu.alloc(3000, FORWARD)
    cuda.observer(0, 5000, 80 * GIB, 400)
    cuda.observer(0, 5000, 80 * GIB, 400)  # torch may call twice for one failure
    found = snapshot.load(tmp_path / "memory" / "oom_rank0.pickle")
    assert any(entry["size"] == 3000 for entry in found["device_traces"][0])
    assert found["speedrun"]["where"] == "build" and found["speedrun"]["requested_bytes"] == 5000
    watch.on_run_start()
    for step in range(5):
        run_step(watch, cuda, step, fails=step == 4)
    assert sorted(path.name for path in (tmp_path / "memory").iterdir()) == [
        "oom2_rank0.pickle",
        "oom_rank0.pickle",
        "steps_rank0.pickle",
    ]
    assert snapshot.load(tmp_path / "memory" / "oom2_rank0.pickle")["speedrun"]["where"] == "step 5"
    assert set(instrument.flags()) == {2, 3, 4, 5}
    assert [event["step"] for event in events if event["event"] == "out_of_memory"] == [None, 5]
    assert "ran out of memory (build): 4.9 KiB asked for, 400 B free" in said[0]
    assert instrument.summary()["num_ooms"] == 2


def test_the_whole_race_can_be_recorded_and_then_no_step_is_timed(cuda, tmp_path):
    instrument, watch, _, _ = history(tmp_path, whole_race=True)
    build_and_warm_up(watch, cuda)
    for step in range(5):
        run_step(watch, cuda, step)
        assert cuda.is_recording
    cuda.observer(0, 1, 2, 3)
    watch.on_run_end()
    assert not cuda.is_recording
    assert [window["status"] for window in instrument.summary()["windows"]] == ["recorded"]
    assert set(instrument.flags()) == {1, 2, 3, 4, 5}
    assert any(
        entry["size"] == 1004 for entry in snapshot.load(tmp_path / "memory" / "oom_rank0.pickle")["device_traces"][0]
    )


def test_an_observer_that_fails_never_hides_the_races_own_error(cuda, capsys):
    def fails(*args):
        raise OSError("the disk is full")

    memory_recording.when_out_of_memory(fails)
    cuda.observer(0, 1, 2, 3)
    assert "the disk is full" in capsys.readouterr().err
    memory_recording.when_out_of_memory(None)
    cuda.observer(0, 1, 2, 3)  # there is no detaching: it is deaf
    assert capsys.readouterr().err == ""


def test_where_something_else_records_the_window_is_not_recorded_and_says_why(cuda, tmp_path):
    other = memory_recording.Recording("stages")
    other.start()
    instrument, watch, _, said = history(tmp_path)
    build_and_warm_up(watch, cuda)
    assert cuda.is_recording  # theirs goes on
    for step in range(5):
        run_step(watch, cuda, step)
    watch.on_run_end()
    watch.close()
    assert cuda.is_recording and instrument.flags() == {} and watch.warnings == []
    assert instrument.summary()["windows"][0]["status"] == (
        "not recorded: memory_history, steps: stages is recording the memory history, and there is only one"
    )
    assert "no memory history of build and warm-up" in said[0]


def test_a_failing_dump_ends_the_recording_and_becomes_a_warning(cuda, tmp_path, monkeypatch):
    instrument, watch, _, _ = history(tmp_path)
    build_and_warm_up(watch, cuda)
    (tmp_path / "memory").write_text("in the way")
    for step in range(4):
        run_step(watch, cuda, step)
    assert not cuda.is_recording
    assert [(one["edge"], one["error"].split(":")[0]) for one in watch.warnings] == [("on_step_end", "FileExistsError")]


# ---- settings


@pytest.mark.parametrize(
    "override, says",
    [
        ("first_step=0", "first_step=0: use a whole number of 1 or more"),
        ("active_steps=0", "active_steps=0"),
        ("stacks=cpp", "stacks='cpp': use python or all"),
        ("name=../x", "name='../x': it begins the names of files"),
        ("name=oom", "no oom in front"),
        ("ranks=[-1]", "ranks=\\[-1\\]: give a list of ranks"),
        ("max_entries=0", "max_entries=0"),
        (
            "windows=[{name:a,first_step:2,active_steps:5},{name:b,first_step:6}]",
            "b begins at step 6 and a ends at step 6",
        ),
        ("windows=[{first_step:2},{first_step:9}]", "two are called steps"),
        (
            "windows=[{step:2}]",
            "unknown setting instruments.memory_history.windows: step=2: a window has name, first_step",
        ),
        ("windows=[3]", "windows=\\[3\\]: give a list"),
    ],
)
def test_settings_that_cannot_be_are_refused_before_the_race(override, says):
    with pytest.raises(ValueError, match=says):
        compose.compose(["instruments=[regions,memory_history]", f"instruments.memory_history.{override}"])


def test_a_window_takes_from_the_common_settings_what_it_does_not_say():
    windows = memory_rules.windows_of(
        SETTINGS | {"windows": [{"name": "late", "first_step": 9, "ranks": [0, 2]}, {"name": "early"}]}
    )
    assert [(window.name, window.first_step, window.last_step, window.max_entries) for window in windows] == [
        ("early", 2, 3, 1000),
        ("late", 9, 10, 1000),
    ]
    assert windows[0].has(1) and not windows[1].has(1)


# ---- the monitor


def test_the_monitors_history_begins_a_step_before_its_snapshot(cuda, tmp_path):
    monitor = MemoryMonitor(device=0, snapshot_step=3, snapshot_dir=tmp_path, rank=1)
    for step in range(1, 6):
        cuda.peak(allocated=step * GIB, active=2 * step * GIB, reserved=8 * GIB)
        address = cuda.gpu.alloc(step * 100, FORWARD)
        facts = monitor.report(step)
        cuda.gpu.free(address)
        assert (facts["allocated_gb"], facts["peak_gb"], facts["reserved_gb"], facts["total_gb"]) == (
            step,
            step,
            8.0,
            80.0,
        )
        assert facts["mem_utilization"] == step / 80 and facts["max_active_pct"] == pytest.approx(100 * 2 * step / 80)
        assert facts["num_alloc_retries"] == facts["num_ooms"] == 0
    (path,) = tmp_path.iterdir()
    assert path.name == "snapshot_step_3_device_0_rank_1.pickle"
    assert [entry["size"] for entry in snapshot.load(path)["device_traces"][0] if entry["action"] == "alloc"] == [300]
    assert not cuda.is_recording
    assert DeviceMemoryMonitor is MemoryMonitor


def test_without_a_gpu_the_monitor_tells_of_the_process_and_says_so(tmp_path):
    facts = MemoryMonitor(snapshot_step=1, snapshot_dir=tmp_path).report(1)
    assert facts["what"] == "resident set of the process"
    assert 0 < facts["allocated_gb"] <= facts["peak_gb"] < facts["total_gb"]
    assert list(tmp_path.iterdir()) == []


# ---- a real race


def test_a_race_on_two_cpu_ranks_tells_both_and_is_the_same_race(results_dir):
    plain = race(results_dir, "hardware.num_processes=2", "instruments=[]")
    folder = race(results_dir, "hardware.num_processes=2", "instruments=[memory,memory_history]")
    run = run_json(folder)
    assert [row["train_loss"] for row in steps(folder)] == [row["train_loss"] for row in steps(plain)]
    found = run["instrument_summaries"]["memory"]
    assert found["what"] == "resident set of the process" and found["fullest_rank"] in (0, 1)
    for phase in ("build", "warmup", "train", "validation"):
        assert (
            0
            < found[f"{phase}_peak_rss_gib_min"]
            <= found[f"{phase}_peak_rss_gib"]
            <= run["metrics"]["peak_mem_gib"] + 1e-3
        )
    (window,) = run["instrument_summaries"]["memory_history"]["windows"]
    assert window["ranks"] == [0, 1] and window["status"] == "recorded"
    assert [row["flags"] for row in steps(folder)] == [
        "",
        "",
        "",
        "memory_history",
        "memory_history",
        "memory_history",
        "",
    ]
    for rank in (0, 1):
        samples = process.load(folder / "memory" / f"steps_rank{rank}.rss.json")
        assert [name for _, name in samples["marks"]] == [
            "step 3", "data", "forward", "backward", "optimizer", "validation", "step 4", "data", "forward", "backward", "optimizer", "end",
        ]  # fmt: skip
    assert run["warnings"] == []
