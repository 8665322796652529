"""KempnerForge's timers and memory monitor without their faults, on made-up marks and a made-up allocator."""

import importlib.util

import fake_cuda
import pytest
from hand import Hand
from snapshots import FORWARD

from bench.analysis.memory import pickles
from bench.cli import wheel
from bench.training.compat import CUDATimer, CUDATimerCollection, DeviceMemoryMonitor
from bench.training.timing.clock import HostMarks

GIB = 2**30


@pytest.fixture
def hand():
    return Hand()


def test_micro_steps_add_up_and_reset_forgets_them(hand):
    timers = CUDATimerCollection(["forward", "backward"], marks=HostMarks(hand))
    for ms in (10, 20, 30, 40):  # the original gives 40: its last pair wins
        timers.start("forward")
        hand.sleep_ms(ms)
        timers.stop("forward")
    assert timers.elapsed_ms("forward") == 100.0
    assert timers.elapsed_all() == {"forward": 100.0, "backward": 0.0}
    timers.reset()
    assert timers.elapsed_all() == {"forward": 0.0, "backward": 0.0}


def test_disabled_timers_need_no_device_and_give_zeros():
    timers = CUDATimerCollection(["a", "b"], enabled=False)
    timers.start("a")
    timers.stop("a")
    timers.reset()
    assert timers.elapsed_all() == {"a": 0.0, "b": 0.0}


def test_a_region_that_was_not_declared_is_refused(hand):
    with pytest.raises(KeyError, match="optimizer"):
        CUDATimerCollection(["forward"], marks=HostMarks(hand)).start("optimizer")


def test_start_and_stop_must_alternate(hand):
    timer = CUDATimer(HostMarks(hand))
    with pytest.raises(RuntimeError, match="without start"):
        timer.stop()
    timer.start()
    with pytest.raises(RuntimeError, match="twice"):
        timer.start()


def test_a_timer_works_without_cuda_and_as_a_context(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    timer = CUDATimer()
    with timer:
        sum(range(1000))
    assert 0.0 < timer.elapsed_ms() < 1000.0


@pytest.mark.gpu
def test_cuda_events_time_a_kernel_and_are_used_again():
    import torch

    from bench.training.timing.clock import CudaMarks

    marks = CudaMarks()
    timer = CUDATimer(marks)
    a_MM = torch.randn(4096, 4096, device="cuda")
    for _ in range(3):
        before_ms = timer.elapsed_ms()
        with timer:
            a_MM @ a_MM
        assert timer.elapsed_ms() > before_ms
    assert len(marks._pool) == 2


def test_the_monitors_history_begins_a_step_before_its_snapshot(monkeypatch, tmp_path):
    cuda = fake_cuda.install(monkeypatch)
    monitor = DeviceMemoryMonitor(device=0, snapshot_step=3, snapshot_dir=tmp_path, rank=1)
    for step in range(1, 6):
        cuda.peak(allocated=step * GIB, active=2 * step * GIB, reserved=8 * GIB)
        address = cuda.gpu.alloc(step * 100, FORWARD)
        facts = monitor.report(step)
        cuda.gpu.free(address)
        assert [facts[f"{name}_gb"] for name in ("allocated", "peak", "reserved", "total")] == [step, step, 8, 80]
        assert facts["mem_utilization"] == step / 80 and facts["max_active_gib"] == 2 * step
        assert facts["num_alloc_retries"] == facts["num_ooms"] == 0
    (path,) = tmp_path.iterdir()
    assert path.name == "snapshot_step_3_device_0_rank_1.pickle"
    assert [entry["size"] for entry in pickles.load(path)["device_traces"][0] if entry["action"] == "alloc"] == [300]
    assert not cuda.is_recording


def test_without_a_gpu_the_monitor_reports_the_process_and_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    facts = DeviceMemoryMonitor(snapshot_step=1, snapshot_dir=tmp_path).report(1)
    assert facts["what"] == "resident set of the process"
    assert 0 < facts["allocated_gb"] <= facts["peak_gb"] < facts["total_gb"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["compat", "profiling.kempner"])
def test_a_wheel_has_them_under_the_names_of_its_page(name, monkeypatch):
    """docs/own.md: speedrun_bench.compat and speedrun_bench.profiling; the finder of a wheel is asked for its own."""
    monkeypatch.setattr(wheel, "__name__", "speedrun_bench")
    assert importlib.util.find_spec(wheel.Packages().find_spec(f"speedrun_bench.{name}").origin) is not None
