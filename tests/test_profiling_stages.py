"""nanochat's stages: four profiles, each with its files, flushed when it is left; and the page of their memory."""

import json
import re

import fake_cuda
import pytest
import torch
from browser import Browser, needs_browser
from profiled import Spy, names, read, train_under, watch_of
from snapshots import frames

from bench.base.paths import REPO
from bench.training.profiling import allocations
from bench.training.profiling.allocations import Timeline

STAGES = ("stage1-model_init", "stage2-eval_bpb", "stage3-training_microsteps", "stage4-optimizer_step")
MIB = 2**20


@pytest.fixture(scope="module")
def staged(tmp_path_factory):
    """Trains under the instrument and returns (folder of the stages, summary, flags, Spy)."""
    folder = tmp_path_factory.mktemp("run") / "20261121T042547Z-gpt2-adamw-b95d24bb-s0"
    folder.mkdir()
    spy = Spy()
    watch = watch_of(folder, {"stages": {"step": 2}}, spy=spy)
    train_under(watch)
    summary, flags = watch.collect("summary")["stages"], watch.collect("flags")["stages"]
    watch.close()
    assert not watch.warnings
    return folder / "traces" / "20261121_042547", summary, flags, spy


def test_each_stage_has_its_files_under_nanochats_names(staged):
    folder, summary, _, _ = staged
    for stage in STAGES:
        assert json.loads((folder / f"{stage}_trace.json").read_text())["traceEvents"]
        assert (folder / f"{stage}_memory_timeline.html").read_text().startswith("<!DOCTYPE html>")
        assert (folder / "ops" / f"{stage}.json").exists()
        entry = summary[stage.split("-")[1]]
        assert entry["status"] == "recorded"
        assert f"traces/20261121_042547/{stage}_trace.json" in entry["files"]
        assert entry["mem_pickle"].startswith("not available: torch keeps a memory history of CUDA only")
    assert not list(folder.glob("*.pickle"))


def test_each_stage_holds_what_it_is_called(staged):
    folder = staged[0]
    init, evaluation, micro_steps, optimizer = (read(folder / f"{stage}_trace.json") for stage in STAGES)
    assert "aten::uniform_" in names(init, "cpu_op")  # nn.Linear's weights are drawn
    assert names(evaluation).count("validation") == 1 and "aten::gelu" in names(evaluation, "cpu_op")
    ranges = names(micro_steps)
    expected = {"ProfilerStep#2": 1, "data": 2, "forward": 2, "backward": 2}
    assert {name: ranges.count(name) for name in ("ProfilerStep#2", "data", "forward", "backward")} == expected
    assert "optimizer" not in ranges and not any("AdamW" in name for name in ranges)
    ranges = names(optimizer)
    assert "optimizer" in ranges and "forward" not in ranges
    assert any("AdamW.step" in name for name in ranges) and any("zero_grad" in name for name in ranges)
    for trace in (init, evaluation, micro_steps, optimizer):
        assert any(event.get("cat") == "python_function" for event in trace["traceEvents"])  # with_stack, as there
        assert trace["record_shapes"] == trace["profile_memory"] == trace["with_stack"] == 1


def test_only_the_profiled_step_is_flagged(staged):
    assert staged[2] == {2: "profiled"}


def test_a_stage_is_written_before_the_next_begins_and_says_so_without_escapes(staged):
    lines = [re.fullmatch(r"\[PROFILER:(\w+)\] (.*)", line).groups() for line in staged[3].said]
    phases = [phase for phase, text in lines if text == "recording"]
    assert phases == ["model_init", "eval_bpb", "training_microsteps", "optimizer_step"]
    for phase in phases:
        mine = [text for of, text in lines if of == phase]
        assert mine[1].startswith("Exporting Chrome trace to traces/20261121_042547/stage")
        assert mine[2].startswith("Exporting memory timeline to") and mine[3].startswith("Trace export complete")
    assert [of for of, _ in lines] == sorted((of for of, _ in lines), key=phases.index)


def test_a_stage_that_is_not_reached_says_so(tmp_path):
    spy = Spy()
    watch = watch_of(tmp_path, {"stages": {"step": 50, "gzip": True, "with_stack": False}}, spy=spy)
    train_under(watch)
    summary = watch.collect("summary")["stages"]
    assert {phase: entry["status"] for phase, entry in summary.items()} == {
        "model_init": "recorded",
        "eval_bpb": "recorded",
        "training_microsteps": "not reached",
        "optimizer_step": "not reached",
    }
    assert "training_microsteps] was not reached: the run has no step 50" in spy.said[-2]
    expected = ["stage1-model_init_trace.json.gz", "stage2-eval_bpb_trace.json.gz"]
    assert sorted(path.name for path in (tmp_path / "traces").rglob("*.gz")) == expected


def test_a_rank_above_0_records_only_if_asked_and_has_its_number_in_the_names(tmp_path):
    watch = watch_of(tmp_path, {"stages": {}}, rank=1, world_size=2)
    train_under(watch)
    assert {entry["status"] for entry in watch.collect("summary")["stages"].values()} == {"not this rank: ranks=[0]"}
    assert sorted(watch.collect("flags")["stages"]) == [1, 2]  # in step 2 it waits for rank 0's files
    watch = watch_of(tmp_path, {"stages": {"ranks": None}}, rank=1, world_size=2)
    train_under(watch)
    assert len(list((tmp_path / "traces").rglob("stage*_rank1_trace.json"))) == 4


def test_a_run_that_fails_keeps_the_stage_it_was_in(tmp_path):
    watch = watch_of(tmp_path, {"stages": {"step": 2}})
    with pytest.raises(RuntimeError) as failure:
        train_under(watch, fail_at=2)
    watch.on_failure(failure.value)
    watch.close()
    assert len(list((tmp_path / "traces").rglob("stage3-training_microsteps_trace.json"))) == 1
    assert not torch.autograd._profiler_enabled() and not watch.warnings


# ---- memory


def test_what_is_alive_is_followed_and_the_peak_is_taken_apart(tmp_path):
    """Hand-worked: 8 MiB and 4 MiB are alive at the peak, the 2 MiB between them are gone by then."""

    def allocate(mib):
        return torch.empty(mib * MIB, dtype=torch.uint8)

    options = {"activities": [torch.profiler.ProfilerActivity.CPU], "profile_memory": True}
    with torch.profiler.profile(**options):
        before = allocate(3)  # torch knows the size, on a CPU, of what it has seen being allocated
    with torch.profiler.profile(**options) as profile:
        with torch.profiler.record_function("forward"):
            kept = allocate(8)
            passing = allocate(2)
            del passing
        with torch.profiler.record_function("backward"):
            later = allocate(4)
        del kept, later, before
    profile.export_chrome_trace(str(tmp_path / "trace.json"))
    timelines, phases = allocations.read((tmp_path / "trace.json").read_bytes())
    timeline = timelines["cpu"]
    assert [name for name, _, _ in phases] == ["forward", "backward"]
    # 3 MiB from before are seen when they are released: alive are 3, 11, 13, 11, 15, then 7, 3, 0
    assert [alive / MIB for _, alive in timeline.points] == [11, 13, 11, 15, 7, 3, 0]
    assert (timeline.peak_bytes / MIB, timeline.start_bytes / MIB) == (15, 3)
    expected = [("forward", 8, 1), ("backward", 4, 1)]
    assert [(phase, num_bytes / MIB, count) for phase, _, _, num_bytes, count in timeline.at_peak] == expected


def test_the_page_names_what_was_alive_and_runs_no_script_of_the_snapshot():
    """Alive: 1 MiB from 0 on, 3 in the forward phase from 0.5 ms on, 0 from 1 ms on, where the phase ends."""
    hostile = "</title><script>alert(1)</script>"
    points, group = [(0, MIB), (500_000, 3 * MIB), (1_000_000, 0)], ("forward", hostile, "a.py(1): f", 3 * MIB, 7)
    timeline = Timeline("cpu", points, 500_000, 3 * MIB, 0, [group])
    text = allocations.page_of("stage: memory", hostile, {"cpu": timeline}, [("forward", 0, 1_000_000)])
    assert "<script>alert" not in text and "&lt;script&gt;" in text
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", text)
    assert "at most 3.0 MiB" in text and "<td>a.py(1): f</td>" in text
    assert '<td class="number">7</td><td class="number">3.0</td>' in text
    (drawn,) = json.loads(re.search(r'id="charts">(.*?)</script>', text)[1])
    alive = {series["name"]: series["y"] for series in drawn["series"]}
    assert drawn["x"][-1] == 1.0 and max(value for value in alive["forward"] if value is not None) == 3.0
    assert alive["forward"][-1] is None and alive[allocations.NO_PHASE][-1] == 0.0
    assert "Nothing was allocated" in allocations.page_of("empty", "", {}, [])


@needs_browser
@pytest.mark.slow
def test_the_page_opens_in_a_browser_offline(staged):
    with Browser() as browser:
        page = browser.open(staged[0] / "stage3-training_microsteps_memory_timeline.html")
        assert page.js("document.title") == "stage3-training_microsteps: memory"
        page.until("document.querySelectorAll('.chart canvas').length === 1")
        assert page.js("document.querySelectorAll('tbody tr').length") > 3
        assert page.errors == []


def test_on_a_gpu_the_memory_history_is_on_in_a_stage_off_after_it_and_its_snapshot_names_no_private_path(
    tmp_path, monkeypatch
):
    """CUDA played by fake_cuda.py; the sister in test_profiling_gpu.py has the real one."""
    import dataclasses
    import warnings

    from bench.analysis.memory import pickles
    from bench.training import memory as device_memory

    cuda = fake_cuda.install(monkeypatch)
    watch = watch_of(tmp_path, {"stages": {"max_entries": 1000}})
    (stages,) = watch.instruments
    stages.context = dataclasses.replace(stages.context, device_type="cuda")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "CUDA is not available")
        watch.on_build_start()
        cuda.gpu.alloc(MIB, frames(f"{REPO}/models/gpt2.py:12 __init__"))
        watch.on_build_end()
        expected = [None, {"enabled": "all", "context": "all", "stacks": "python", "max_entries": 1000}, None]
        assert cuda.history == expected
        other = device_memory.History("memory_history")
        other.start()  # the history of another program stays on, and is what the stage writes
        watch.on_phase("validation")
        watch.on_validation(0, 1.0, 0.0)
    assert other.is_running and cuda.is_recording
    assert stages.flags() == {} and not watch.warnings
    first, second = sorted(tmp_path.rglob("*_mem.pickle"))
    assert (first.name, second.name) == ("stage1-model_init_mem.pickle", "stage2-eval_bpb_mem.pickle")
    assert str(REPO).encode() not in first.read_bytes()
    snapshot = pickles.load(first)
    assert snapshot["speedrun"]["what"] == "CUDA memory while model_init was recorded"
    assert [entry["size"] for entry in snapshot["device_traces"][0] if entry["action"] == "alloc"] == [MIB]
