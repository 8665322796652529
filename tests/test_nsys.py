"""Nsight Systems and NVTX, without a GPU and without nsys: the command of a rank, and the order of the calls.

No GPU has run this: what nsys makes of the command, and of a run, is not shown here.
"""

import os
import shutil
import time

import pytest
import real_runs
import torch

from bench.config import compose
from bench.launch import ranks
from bench.launch.prepare import prepare, requested_config
from bench.machine import processes
from bench.training.instruments import registry
from bench.training.instruments.base import Context, InstrumentSet
from bench.training.timing.clock import HostMarks

FAKE = """#!/bin/sh
printf '%s\\n' "$@" > "$NSYS_SAID"
while [ "${1#-}" != "$1" ] || [ "$1" = profile ]; do shift; done
exec "$@"
"""


@pytest.fixture
def nsys(tmp_path, monkeypatch):
    """A program of that name on PATH: it notes its words in a file, and runs the command behind its options."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nsys").write_text(FAKE)
    (tmp_path / "bin" / "nsys").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("NSYS_SAID", str(tmp_path / "said"))
    return tmp_path / "said"


def settings(*overrides):
    return requested_config(["track=cpu_nano", "profile=nsys", *overrides]).instruments


def test_each_rank_runs_within_nsys_with_a_report_of_its_own(nsys, tmp_path):
    chosen = settings("instruments.nsys.trace=[cuda,nvtx,osrt]", "instruments.nsys.name=late")
    assert registry.program(chosen, tmp_path, "cuda") == [
        "nsys",
        "profile",
        "--trace=cuda,nvtx,osrt",
        "--sample=none",
        "--cpuctxsw=none",
        "--capture-range=cudaProfilerApi",
        "--capture-range-end=stop",
        "--force-overwrite=true",
        f"--output={tmp_path}/traces/late_rank%q{{RANK}}",
    ]
    assert registry.program(requested_config(["track=cpu_nano"]).instruments, tmp_path, "cuda") == []


def test_without_nsys_or_a_gpu_it_is_refused_with_a_remedy(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="there is no program nsys here: install .* put nsys on PATH; profile=modded"):
        registry.program(settings(), tmp_path, "cuda")
    with pytest.raises(ValueError, match="profile=nsys on hardware.device=cpu: its range is CUDA's: use profile="):
        prepare(["track=cpu_nano", "hardware=cpu", "profile=nsys"], say=lambda text: None)


@pytest.mark.parametrize(
    ("overrides", "remedy"),
    [
        (["instruments.nsys.first_step=0"], "instruments.nsys.first_step=0: use a whole number of 1 or more"),
        (["instruments.nsys.name=a/b"], "instruments.nsys.name=a/b: use letters, .* part of a file's name"),
        (["instruments.nsys.trace=[]"], r"instruments.nsys.trace=\[\]: use a list of what nsys"),
        (["+instruments=trace"], "two torch profilers at once crash"),
    ],
)
def test_settings_that_cannot_be_are_refused(overrides, remedy):
    with pytest.raises(ValueError, match=remedy):
        settings(*overrides)


# ---- the calls, on a CUDA that is none


@pytest.fixture
def calls(monkeypatch):
    """Every call of torch's NVTX and profiler range, in order."""
    recorded = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda name: recorded.append(name))
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: recorded.append("pop"))
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: recorded.append("START"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: recorded.append("STOP"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: recorded.append("sync"))
    return recorded


def loaded(tmp_path, chosen, device_type="cuda", rank=0, num_steps=3):
    compose._check_settings("instruments", chosen)
    context = Context(tmp_path, rank, 2, device_type, num_steps, HostMarks(time.perf_counter_ns))
    instruments, warnings = registry.load(chosen, context)
    return InstrumentSet(instruments, warnings=warnings)


def train(watch, num_steps=3):
    watch.on_build_start()
    watch.on_build_end()
    watch.on_warmup_start()
    watch.on_warmup_end()
    watch.on_run_start()
    watch.on_phase("validation")
    watch.on_validation(0, 5.0, 0.0)
    for step in range(num_steps):
        watch.on_step_start(step)
        for phase in ("data", "forward", "backward", "optimizer"):
            watch.on_phase(phase)
        watch.on_step_end(step)
    watch.on_run_end()
    watch.close()


STEP = ["data", "pop", "forward", "pop", "backward", "pop", "optimizer", "pop", "pop"]


def test_nvtx_names_steps_and_phases(tmp_path, calls):
    train(loaded(tmp_path, {"nvtx": {}}), num_steps=2)
    before = ["build", "pop", "warmup", "pop", "validation", "pop"]
    assert calls == [*before, "step 1", *STEP, "step 2", *STEP]


def test_nvtx_on_a_cpu_is_a_warning_and_no_range(tmp_path, calls):
    watch = loaded(tmp_path, {"nvtx": {}}, device_type="cpu")
    train(watch)
    assert "trains on the CPU" in watch.warnings[0]["error"] and calls == []


def test_the_range_is_open_for_the_window_alone_after_the_device_has_caught_up(tmp_path, calls):
    watch = loaded(tmp_path, {"nsys": {"first_step": 2, "active_steps": 1}})
    train(watch)
    assert calls[6:] == ["step 1", *STEP, "sync", "START", "step 2", *STEP, "sync", "STOP", "step 3", *STEP]
    assert watch.collect("flags") == {"nsys": {2: "profiled", 3: "profiled"}}
    summary = {"status": "captured", "steps_asked": [2, 2], "steps": [2, 2], "file": "traces/nsys_rank0.nsys-rep"}
    assert watch.collect("summary") == {"nsys": summary}


def test_a_range_that_the_run_ends_in_is_closed_and_another_rank_opens_none(tmp_path, calls):
    watch = loaded(tmp_path, {"nsys": {"first_step": 3, "active_steps": 4, "ranks": [0]}})
    train(watch)
    assert calls[-2:] == ["sync", "STOP"] and calls.count("STOP") == 1
    assert watch.collect("summary")["nsys"]["status"] == "cut short"
    calls.clear()
    other = loaded(tmp_path, {"nsys": {"first_step": 3, "active_steps": 4, "ranks": [0]}}, rank=1)
    train(other)
    assert "START" not in calls and other.collect("summary")["nsys"]["status"] == "not this rank"


# ---- a run within


def test_a_run_within_nsys_trains_the_same(finished_run, tmp_path, nsys):
    """nsys is the fake one; the guard starts it as the rank, and it starts the worker."""
    folder = tmp_path / "copy"
    shutil.copytree(finished_run, folder)
    around = registry.program(settings(), folder, "cuda")
    env = os.environ | {processes.WITHIN: "nsys", "TMPDIR": str(tmp_path)}
    with ranks.Guard(folder) as guard, ranks.started(guard, 1, folder, env, (*around, *ranks.WORKER)) as group:
        assert group.has_ended(240)
    assert group.exit_code() == 0, (folder / "logs" / "agent.log").read_text()
    assert real_runs.losses(folder) == real_runs.losses(finished_run)
    assert nsys.read_text().splitlines() == [*around[1:], *ranks.WORKER, str(folder)]
