"""The memory history: recorded where it is asked for and nowhere else, whole on disk, also when memory runs out."""

import pickle

import fake_cuda
import pytest
from fake_cuda import context
from snapshots import FORWARD, frames

from bench.analysis.memory import pickles
from bench.base.paths import REPO
from bench.config import window_settings
from bench.launch.prepare import requested_config
from bench.training import memory as device_memory
from bench.training.instruments.base import InstrumentSet
from bench.training.instruments.registry import load

GIB = 2**30
SETTINGS = {"name": "steps", "first_step": 2, "active_steps": 2, "ranks": None, "max_entries": 1000}
SETTINGS |= {"stacks": "python", "windows": []}


@pytest.fixture
def cuda(monkeypatch):
    return fake_cuda.install(monkeypatch)


# ---- a recording


def test_a_recording_is_bounded_with_python_stacks_and_begins_empty(cuda):
    recording = device_memory.History("one", max_entries=77)
    recording.start()
    assert cuda.history == [None, {"enabled": "all", "context": "all", "stacks": "python", "max_entries": 77}]
    with pytest.raises(RuntimeError, match="two: one is recording the memory history"):
        device_memory.History("two").start()
    device_memory.History("two").stop()  # who does not record ends nothing
    assert cuda.is_recording
    recording.stop()
    assert not cuda.is_recording
    device_memory.History("two").start()
    device_memory._holder = None  # as if another program's call had begun it
    with pytest.raises(RuntimeError, match="three: another program is recording"):
        device_memory.History("three").start()


def test_what_is_written_opens_everywhere_and_names_no_private_path(cuda, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/grace")
    checkout = str(REPO)
    stack = frames(
        f"{checkout}/models/gpt2.py:45 forward", "/home/grace/lib/x.py:1 f", "/tmp/torchinductor_grace/ab/c.py:3 call"
    )
    recording = device_memory.History()
    recording.start()
    cuda.gpu.alloc(1000, stack)
    recording.mark("forward")
    path = tmp_path / "memory" / "a_rank0.pickle"
    assert recording.dump(path, rank=0, window="a") == path.stat().st_size
    content = path.read_bytes()
    assert content[:2] == b"\x80\x04" and b"grace" not in content and checkout.encode() not in content
    snapshot = pickles.load(path)
    expected = ["models/gpt2.py", "~/lib/x.py", "/tmp/torchinductor/ab/c.py"]
    assert [frame["filename"] for frame in snapshot["device_traces"][0][-1]["frames"]] == expected
    assert snapshot["speedrun"]["rank"] == 0 and snapshot["speedrun"]["marks"][0][1] == "forward"
    assert sorted(tmp_path.rglob("*")) == [tmp_path / "memory", path]  # nothing passing is left


def test_a_snapshot_that_cannot_be_written_leaves_nothing(cuda, tmp_path, monkeypatch):
    monkeypatch.setattr(pickle, "dump", lambda *args, **options: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        device_memory.History().dump(tmp_path / "a.pickle")
    assert list(tmp_path.iterdir()) == []


# ---- the instrument memory_history


def history(folder, rank=0, device_type="cuda", num_steps=5, **settings):
    where, events, messages = context(folder, device_type, rank, num_steps)
    instruments, warnings = load({"memory_history": SETTINGS | settings}, where)
    assert warnings == []
    return instruments[0], InstrumentSet(instruments), events, messages


def build_and_warm_up(watch, cuda):
    watch.on_build_start()
    cuda.gpu.alloc(3000, frames("models/gpt2.py:12 __init__"))
    watch.on_build_end()
    watch.on_warmup_start()
    watch.on_warmup_end()
    watch.on_run_start()


def run_steps(watch, cuda, num_steps=5, fails_at=None):
    """Returns whether the history was recorded in each step."""
    recorded = []
    for step in range(num_steps):
        watch.on_step_start(step)
        recorded.append(cuda.is_recording)
        watch.on_phase("forward")
        address = cuda.gpu.alloc(1000 + step, FORWARD)
        if step == fails_at:
            cuda.observer(0, 5000, 80 * GIB, 400)
        cuda.gpu.free(address)
        watch.on_step_end(step)
    return recorded


def written(folder):
    return sorted(path.name for path in (folder / "memory").iterdir())


def test_the_history_is_off_in_the_run_but_for_its_window(cuda, tmp_path):
    instrument, watch, events, messages = history(tmp_path)
    build_and_warm_up(watch, cuda)
    assert not cuda.is_recording
    assert run_steps(watch, cuda) == [False, True, True, False, False]
    watch.on_run_end()
    assert instrument.flags() == dict.fromkeys((2, 3, 4), "memory_history")  # step 4 begins after the file was written
    snapshot = pickles.load(tmp_path / "memory" / "steps_rank0.pickle")
    assert [entry["size"] for entry in snapshot["device_traces"][0] if entry["action"] == "alloc"] == [1001, 1002]
    before = snapshot["segments"][0]["blocks"][0]  # of before the window, with its stack
    assert before["frames"] == frames("models/gpt2.py:12 __init__")
    assert [name for _, name in snapshot["speedrun"]["marks"]] == ["step 2", "forward", "step 3", "forward"]
    (window,) = instrument.summary()["windows"]
    assert window["status"] == "recorded" and window["file"] == "memory/steps_rank0.pickle"
    assert (window["first_step"], window["last_step"]) == (2, 3)
    assert [event["event"] for event in events] == ["memory_snapshot"] and "./run.sh memory" in messages[-1]
    assert watch.warnings == []


def test_several_windows_are_recorded_each_for_itself_and_one_out_of_reach_is_said(cuda, tmp_path):
    windows = [
        {"name": "late", "first_step": 4, "active_steps": 1},
        {"name": "early", "first_step": 1, "active_steps": 1},
        {"name": "never", "first_step": 90},
    ]
    instrument, watch, _, _ = history(tmp_path, windows=windows)
    build_and_warm_up(watch, cuda)
    run_steps(watch, cuda)
    watch.on_run_end()
    status = {window["window"]: window["status"] for window in instrument.summary()["windows"]}
    assert status == {"early": "recorded", "late": "recorded", "never": "not reached"}
    assert written(tmp_path) == ["early_rank0.pickle", "late_rank0.pickle"]
    assert set(instrument.flags()) == {1, 2, 4, 5}


def test_a_run_that_stops_within_a_window_writes_what_there_is(cuda, tmp_path):
    instrument, watch, _, _ = history(tmp_path, active_steps=50)
    build_and_warm_up(watch, cuda)
    run_steps(watch, cuda, 3)
    watch.on_run_end()
    (window,) = instrument.summary()["windows"]
    assert (window["status"], window["first_step"], window["last_step"]) == ("cut short", 2, 3)
    assert (tmp_path / "memory" / "steps_rank0.pickle").exists() and set(instrument.flags()) == {2, 3}


def test_ranks_that_are_not_asked_record_nothing_and_windows_of_all_ranks_are_reported_together(cuda, tmp_path):
    instrument, watch, _, _ = history(tmp_path, rank=1, ranks=[0])
    build_and_warm_up(watch, cuda)
    run_steps(watch, cuda)
    watch.on_run_end()
    assert instrument.flags() == {} and instrument.summary()["windows"] == []
    recorded = {"window": "steps", "status": "recorded", "file": "memory/steps_rank0.pickle", "num_bytes": 10}
    recorded |= {"dump_ms": 1.0}
    silent = {"window": "steps", "status": "not recorded: busy"}
    windows = (silent, recorded, recorded | {"dump_ms": 5.0})
    merged = instrument.merge([*({"what": "x", "windows": [window], "num_ooms": 1} for window in windows), {}])
    assert merged["windows"] == [recorded | {"num_bytes": 20, "dump_ms": 5.0, "ranks": [1, 2]}]
    assert merged["num_ooms"] == 3


def test_out_of_memory_is_written_at_once_with_its_history_in_the_build_and_without_one_in_the_run(cuda, tmp_path):
    instrument, watch, events, messages = history(tmp_path)
    watch.on_build_start()
    cuda.gpu.alloc(3000, FORWARD)
    cuda.observer(0, 5000, 80 * GIB, 400)
    cuda.observer(0, 5000, 80 * GIB, 400)  # torch may call twice for one failure
    snapshot = pickles.load(tmp_path / "memory" / "oom_rank0.pickle")
    assert any(entry["size"] == 3000 for entry in snapshot["device_traces"][0])
    assert snapshot["speedrun"]["where"] == "build" and snapshot["speedrun"]["requested_bytes"] == 5000
    watch.on_run_start()
    run_steps(watch, cuda, fails_at=4)
    assert written(tmp_path) == ["oom2_rank0.pickle", "oom_rank0.pickle", "steps_rank0.pickle"]
    assert pickles.load(tmp_path / "memory" / "oom2_rank0.pickle")["speedrun"]["where"] == "step 5"
    assert set(instrument.flags()) == {2, 3, 4, 5}
    assert [event["step"] for event in events if event["event"] == "out_of_memory"] == [None, 5]
    assert "ran out of memory (build): 4.9 KiB asked for, 400 B free" in messages[0]
    assert instrument.summary()["num_ooms"] == 2


def test_an_observer_that_fails_never_hides_the_runs_own_error(cuda, capsys):
    def fails(*args):
        raise OSError("the disk is full")

    device_memory.when_out_of_memory(fails)
    cuda.observer(0, 1, 2, 3)
    assert "the disk is full" in capsys.readouterr().err
    device_memory.when_out_of_memory(None)
    cuda.observer(0, 1, 2, 3)  # there is no detaching: it is deaf
    assert capsys.readouterr().err == ""


def test_where_something_else_records_the_window_is_not_recorded_and_says_why(cuda, tmp_path):
    other = device_memory.History("stages")
    other.start()
    instrument, watch, _, messages = history(tmp_path)
    build_and_warm_up(watch, cuda)
    assert cuda.is_recording  # theirs goes on
    run_steps(watch, cuda)
    watch.on_run_end()
    watch.close()
    assert cuda.is_recording and instrument.flags() == {} and watch.warnings == []
    assert instrument.summary()["windows"][0]["status"] == (
        "not recorded: memory_history, steps: stages is recording the memory history, and there is only one"
    )
    assert "no memory history of build and warm-up" in messages[0]


def test_a_failing_dump_ends_the_recording_and_becomes_a_warning(cuda, tmp_path):
    instrument, watch, _, _ = history(tmp_path)
    build_and_warm_up(watch, cuda)
    (tmp_path / "memory").write_text("in the way")
    run_steps(watch, cuda, 4)
    assert not cuda.is_recording
    assert [(row["edge"], row["error"].split(":")[0]) for row in watch.warnings] == [("on_step_end", "FileExistsError")]


# ---- settings


@pytest.mark.parametrize(
    "override, says",
    [
        ("first_step=0", "first_step=0: use a whole number of 1 or more"),
        ("active_steps=0", "active_steps=0"),
        ("stacks=cpp", "stacks=cpp: use python or all"),
        ("name=../x", "name=../x: use letters, .* part of a file's name"),
        ("name=oom", "name=oom: use letters, digits, '-' and '_', .*no oom in front"),
        ("ranks=[-1]", "ranks=\\[-1\\]: use a list of ranks"),
        ("max_entries=0", "max_entries=0"),
        ("windows=[{name:a,first_step:2,active_steps:5},{name:b,first_step:6}]", "b begins at step 6, but a ends at"),
        ("windows=[{first_step:2},{first_step:9}]", "name=steps: two windows have this name"),
        (
            "windows=[{step:2}]",
            r"unknown setting instruments.memory_history.windows\[0\].step=2: instruments.memory_history.windows\[0\] ",
        ),
        ("windows=[3]", "windows=\\[3\\]: use a list of windows"),
    ],
)
def test_settings_that_cannot_be_are_refused_before_the_run(override, says):
    with pytest.raises(ValueError, match=says):
        requested_config(["instruments=[regions,memory_history]", f"instruments.memory_history.{override}"])


def test_a_window_takes_from_the_common_settings_what_it_does_not_say():
    windows = window_settings.memory_windows(
        SETTINGS | {"windows": [{"name": "late", "first_step": 9, "ranks": [0, 2]}, {"name": "early"}]}
    )
    expected = [("early", 2, 3, 1000), ("late", 9, 10, 1000)]
    assert [(window.name, window.first_step, window.last_step, window.max_entries) for window in windows] == expected
    assert windows[0].has(1) and not windows[1].has(1)
