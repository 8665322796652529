"""Runs on a GPU: compiled, in bfloat16, timed by CUDA events.  Each test has a CPU sister in test_run.py."""

import json

import pytest
import real_runs

pytestmark = pytest.mark.gpu
ON_GPU = ["track=free", "goal.num_steps=6", "goal.val_tokens=4096", "goal.val_every_steps=3"]
ON_GPU += ["hardware=cuda", "hardware.num_processes=1"]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return tmp_path_factory.mktemp("results")


def new_run(results, *overrides):
    before = set(real_runs.folders(results))
    done = real_runs.bench(results, "run", *ON_GPU, *overrides, timeout_s=600)
    assert done.returncode == 0, done.stdout + done.stderr + real_runs.logs(results)
    (folder,) = set(real_runs.folders(results)) - before
    return folder


@pytest.mark.parametrize("model", ["gpt2", "modern"])
@pytest.mark.parametrize("optim", ["adamw", "muon"])
def test_a_compiled_run_leaves_a_complete_record(results, model, optim):
    run = real_runs.run_json(new_run(results, f"model={model}", f"optim={optim}"))
    assert run["status"] == "complete"
    assert run["measured"]["dtype"] == "bfloat16"
    assert run["metrics"]["compile_s"] > 0
    assert set(run["measured"]["peak_mem_gib_by_rank"]) == {"allocated", "active", "reserved"}
    assert run["environment"]["driver"] and run["environment"]["gpus"][0]["name"]
    assert 0 < run["metrics"]["step_ms_p50"] < 1e3 * run["metrics"]["train_s"]


def test_regions_by_cuda_events_fill_the_step(results):
    for row in real_runs.steps(new_run(results))[2:]:
        parts = sum(float(row[name]) for name in ("data_ms", "forward_ms", "backward_ms", "optimizer_ms"))
        assert 0.8 * float(row["step_ms"]) < parts <= 1.01 * float(row["step_ms"])


def test_instruments_change_no_bit(results):
    plain = ["hardware.compile=false", "hardware.deterministic=true", "seed=5"]
    assert real_runs.losses(new_run(results, *plain)) == real_runs.losses(new_run(results, *plain, "instruments=[]"))


def test_the_doctor_finds_this_machine_fit(results):
    done = real_runs.bench(results, "doctor", "--json", timeout_s=300)
    report = json.loads(done.stdout)
    assert (done.returncode, report["fit"]) == (0, True), done.stdout + done.stderr
    checks = {check["name"]: check["found"] for check in report["checks"]}
    assert "NCCL" in checks["software"] and "None" not in checks["software"]
    assert {"driver", "gpus alike", "persistence", "power limit", "clocks", "ecc", "pcie", "gpu speed"} <= set(checks)


def test_nothing_is_compiled_in_the_timed_region(results):
    run = real_runs.run_json(new_run(results))
    assert run["costs"]["recompile"] == {"count": 0, "ms": 0.0}
    assert run["instrument_summaries"]["recompiles"]["num_graph_breaks_before"] == 0
    assert run["measured"]["compile_cache"] in ("cold", "warm")


def test_the_gpu_agrees_with_the_cpu(results):
    exact = [*real_runs.SMALL, "goal.val_tokens=1024", "hardware.dtype=float32", "hardware.compile=false", "seed=5"]
    on_gpu = [float(loss) for row in real_runs.losses(new_run(results, *exact)) for loss in row[1:] if loss]
    on_cpu = [float(loss) for row in real_runs.losses(real_runs.run(results, "seed=5")) for loss in row[1:] if loss]
    assert on_gpu == pytest.approx(on_cpu, rel=1e-3)


def test_energy_and_clocks_are_the_gpus_own(results):
    # long enough: power is sampled ten times a second
    folder = new_run(results, "goal.num_steps=2000", "goal.val_every_steps=1000")
    run = real_runs.run_json(folder)
    summary = run["instrument_summaries"]["telemetry"]
    assert summary["source"] == "nvml" and set(summary["by_device"]) == {"gpu0"}
    assert summary["mean_sm_clock_mhz"] <= run["environment"]["gpus"][0]["max_sm_clock_mhz"]
    assert summary["foreign_processes"] == {}
    if run["metrics"]["energy_j"] is not None:
        in_steps = sum(float(row["energy_j"]) for row in real_runs.steps(folder)[1:])
        assert in_steps == pytest.approx(run["metrics"]["energy_j"]) and run["metrics"]["mean_power_w"] > 10
