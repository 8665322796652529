"""The profiler on a GPU: kernels in the traces, each counted once, and CUDA's memory history."""

import pytest
import real_runs
from profiled import names, read, step_names
from test_gpu import new_run

pytestmark = pytest.mark.gpu
PLAIN = ("goal.num_steps=12", "hardware.compile=false", "hardware.deterministic=true", "seed=5")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return tmp_path_factory.mktemp("results")


@pytest.fixture(scope="module")
def losses(results):
    return real_runs.losses(new_run(results, *PLAIN))


def test_a_window_holds_the_kernels_of_its_steps_and_changes_no_loss(results, losses):
    folder = new_run(results, *PLAIN, "profile=window")
    assert real_runs.losses(folder) == losses
    trace = read(folder / "traces" / "profiler_traces" / "window_rank0.pt.trace.json.gz")
    assert step_names(trace) == ["ProfilerStep#6", "ProfilerStep#7", "ProfilerStep#8"]
    kernels = [event for event in trace["traceEvents"] if event.get("cat") == "kernel"]
    first = min(event["ts"] for event in trace["traceEvents"] if event["name"] == "ProfilerStep#6")
    assert len(kernels) > 50 and min(kernel["ts"] for kernel in kernels) >= first
    assert set(names(trace, "gpu_user_annotation")) >= {"forward", "optimizer"}
    window = real_runs.run_json(folder)["instrument_summaries"]["window"]["window"]
    busy = ("kernel", "gpu_memcpy", "gpu_memset")
    busy_us = sum(event["dur"] for event in trace["traceEvents"] if event.get("cat") in busy)
    assert window["breakdown"]["total_cuda_time_us"] == pytest.approx(busy_us, rel=0.01)  # each kernel once
    assert window["breakdown"]["matmul_time_us"] > 0


def test_the_stages_have_cudas_memory_history(results, losses):
    folder = new_run(results, *PLAIN, "profile=stages")
    assert real_runs.losses(folder) == losses
    (stages,) = (folder / "traces").iterdir()
    assert len(list(stages.glob("stage*_mem.pickle"))) == 4
    assert all(path.stat().st_size > 1000 for path in stages.glob("stage*_mem.pickle"))
    assert "cuda" in (stages / "stage3-training_microsteps_memory_timeline.html").read_text()


def test_a_compiled_step_is_split_by_kind(results):
    folder = new_run(results, "goal.num_steps=12", "model=modern", "profile=window")
    summary = (folder / "traces" / "profiler_traces" / "summary.md").read_text()
    assert any(line.startswith("| normalisation") for line in summary.splitlines())
    assert real_runs.run_json(folder)["instrument_summaries"]["window"]["window"]["breakdown"]["other_time_us"] > 0
