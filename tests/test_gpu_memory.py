"""Memory history of a real GPU is what the reader takes it for, also when memory runs out."""

import time

import pytest
import real_runs
import snapshots
from real_runs import run_json, steps

from bench.analysis.memory import lives, page, pickles
from bench.training import memory as device_memory

pytestmark = pytest.mark.gpu
MIB = 2**20


@pytest.fixture
def recording():
    import torch

    torch.zeros(1, device="cuda")  # makes the context, which can take a second
    history = device_memory.History("test", max_entries=10_000)
    yield history
    history.stop()
    device_memory.when_out_of_memory(None)


def test_a_real_snapshot_adds_up_as_torchs_own_reader_says_and_names_the_line_that_asked(recording, tmp_path):
    import torch
    from torch.cuda import _memory_viz

    recording.start()
    recording.mark("begin")
    held = torch.empty(48 * MIB, dtype=torch.uint8, device="cuda")
    freed = torch.empty(80 * MIB, dtype=torch.uint8, device="cuda")
    del freed
    recording.dump(tmp_path / "a.pickle", rank=0)
    snapshot = pickles.load(tmp_path / "a.pickle")
    line = snapshots.held(snapshot, torch.cuda.current_device())
    assert line.unexplained_bytes == 0
    assert line.peak_bytes >= 128 * MIB and line.end_bytes >= 48 * MIB
    assert any("test_gpu_memory.py" in place for place in line.at_peak)
    full = lives.segment_totals(snapshot, torch.cuda.current_device())
    assert f"total_allocated: {_memory_viz._format_size(full['used'])}" in _memory_viz.segsum(snapshot)
    assert full["reserved"] == torch.cuda.memory_reserved() and held.numel() == 48 * MIB
    first_us = line.lives.times_us[0]
    assert abs(first_us - snapshot["speedrun"]["marks"][0][0]) < 1e6  # one clock: the marks stand where they belong
    assert abs(first_us / 1e6 - time.time()) < 600


def test_blocks_keep_their_stacks_when_the_recording_ends(recording, tmp_path):
    import torch

    recording.start()
    weights = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
    recording.stop()
    recording.start()
    torch.empty(1 * MIB, dtype=torch.uint8, device="cuda")
    recording.dump(tmp_path / "a.pickle")
    line = snapshots.held(pickles.load(tmp_path / "a.pickle"), torch.cuda.current_device())
    own_bytes = [size for place, size in line.initial.items() if "test_gpu_memory.py" in place]
    assert sum(own_bytes) >= weights.numel()


def test_out_of_memory_is_seen_before_anything_is_given_back(recording, tmp_path):
    import torch

    seen = []

    def observe(device, requested_bytes, limit_bytes, free_bytes):
        recording.dump(tmp_path / "oom.pickle", where="test")
        seen.append((requested_bytes, free_bytes))

    device_memory.when_out_of_memory(observe)
    recording.start()
    held = [torch.empty(32 * MIB, dtype=torch.uint8, device="cuda")]
    with pytest.raises(torch.OutOfMemoryError):
        held.append(torch.empty(2**46, dtype=torch.uint8, device="cuda"))
    snapshot = pickles.load(tmp_path / "oom.pickle")
    line = snapshots.held(snapshot, torch.cuda.current_device())
    assert seen[0][0] >= 2**46 and line.lives.ooms[-1]["size"] >= 2**46
    assert line.end_bytes >= 32 * MIB
    assert "Out of memory: 65536.0 GiB" in page.document_of_snapshot(snapshot, "oom").html()


def test_a_run_records_its_phases_and_leaves_a_snapshot_with_the_models_lines(results_dir):
    on_gpu = ["hardware=cuda", "hardware.num_processes=1", "hardware.compile=false"]
    folder = real_runs.run(results_dir, *on_gpu, "instruments=[memory,memory_history]")
    run = run_json(folder)
    assert run["warnings"] == []
    summary = run["instrument_summaries"]["memory"]
    assert summary["what"] == "CUDA allocator" and summary["train_num_ooms"] == 0
    build_gib, train_gib = summary["build_peak_allocated_gib"], summary["train_peak_allocated_gib"]
    assert 0 < build_gib < train_gib <= run["metrics"]["peak_mem_gib"] + 1e-9
    assert [bool(row["flags"]) for row in steps(folder)] == [False, False, False, True, True, True, False]
    line = snapshots.held(pickles.load(folder / "memory" / "steps_rank0.pickle"), 0)
    assert any(place.startswith("models/") for place in line.at_peak)
    # the weights, which are on the GPU before the window begins
    assert any(place.startswith("training/model.py") and "build_model" in place for place in line.initial)
