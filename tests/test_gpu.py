"""Runs on a GPU: compiled, in bfloat16, timed by CUDA events.  Each test has a CPU sister in test_run.py; what their
times and energies must be, .ci/gpu compares in a run of full size."""

import pytest
import real_runs

pytestmark = pytest.mark.gpu
ON_GPU = ["track=free", "goal.num_steps=6", "goal.val_tokens=4096", "goal.val_every_steps=3"]
ON_GPU += ["hardware=cuda", "hardware.num_processes=1"]


def new_run(results, *overrides):
    before = set(real_runs.folders(results))
    real_runs.bench(results, "run", *ON_GPU, *overrides, timeout_s=600, code=0)
    (folder,) = set(real_runs.folders(results)) - before
    return folder


@pytest.mark.parametrize("model", ["gpt2", "modern"])
@pytest.mark.parametrize("optim", ["adamw", "muon"])
def test_a_compiled_run_leaves_a_complete_record(results_dir, model, optim):
    run = real_runs.run_json(new_run(results_dir, f"model={model}", f"optim={optim}"))
    assert run["status"] == "complete"
    assert run["measured"]["dtype"] == "bfloat16"
    assert run["metrics"]["compile_s"] > 0
    assert set(run["measured"]["peak_mem_gib_by_rank"]) == {"allocated", "active", "reserved"}
    assert run["environment"]["driver"] and run["environment"]["gpus"][0]["name"]
    assert 0 < run["metrics"]["step_ms_p50"] < 1e3 * run["metrics"]["train_s"]


def test_instruments_change_no_bit(results_dir):
    plain = ["hardware.compile=false", "hardware.deterministic=true", "seed=5"]
    first, second = (new_run(results_dir, *plain, *more) for more in ([], ["instruments=[]"]))
    assert real_runs.losses(first) == real_runs.losses(second)


def test_the_gpu_agrees_with_the_cpu(results_dir):
    exact = [*real_runs.SMALL, "goal.val_tokens=1024", "hardware.dtype=float32", "hardware.compile=false", "seed=5"]
    on_gpu = [float(loss) for row in real_runs.losses(new_run(results_dir, *exact)) for loss in row[1:] if loss]
    on_cpu = [float(loss) for row in real_runs.losses(real_runs.run(results_dir, "seed=5")) for loss in row[1:] if loss]
    assert on_gpu == pytest.approx(on_cpu, rel=1e-3)
