"""The README's GPU commands as their user types them, on eight GPUs that are not there, and what breaks GPUs.

Real commands on the code paths of hardware.device=cuda; tests/stand_in/__init__.py says what differs from a GPU.  No
evidence about a GPU: that is what tests marked gpu are for.
"""

import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest
import real_runs
import stand_in
from stand_in import ON_GPUS, Gpus

from bench.launch import after_race
from bench.machine import environment

EAGER = "hardware.compile=false"
PROBE = """
import torch
x = torch.ones(4, 3, device="cuda:5", requires_grad=True)
y = torch.nn.functional.linear(x, torch.ones(2, 3, device="cuda:5"))
y.sum().backward()
print(torch.cuda.device_count(), y.device, x.grad.sum().item(), torch.cuda.memory_allocated(5) > 0)
view = x.detach().view(-1)[3:]
view += 1
print(x.sum().item(), view.untyped_storage().data_ptr() == x.untyped_storage().data_ptr())
grown = torch.zeros(2, device="cuda:5").resize_(5)
print(grown.shape[0], torch.cuda.memory_allocated(0))
for wrong in (lambda: x + torch.ones(4, 3), lambda: x + torch.ones(4, 3, device="cuda:1")):
    try:
        wrong()
    except RuntimeError as error:
        print("refused" if "same device" in str(error) else error)
try:
    torch.empty(200 * 2**30, device="cuda:1")
except torch.OutOfMemoryError as error:
    print(str(error)[:67], torch.cuda.memory_stats(1)["num_ooms"])
"""


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    """Eight GPUs, on which tests leave their results."""
    return Gpus(tmp_path_factory.mktemp("gpus"))


def left_behind(folder):
    """Processes that still have this folder in their command."""
    commands = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if str(folder).encode() in path.read_bytes() and int(path.parent.name) != os.getpid():
                commands.append(path.read_bytes())
        except OSError:
            continue
    return commands


def on_cuda(folder, num):
    run = real_runs.run_json(folder)
    assert run["status"] == "complete", run["failure"]
    assert run["hardware"]["device"] == "cuda" and run["world_size"] == num
    assert run["environment"]["nccl"] == "2.29.0"
    assert run["instrument_summaries"]["telemetry"]["source"] == "nvml"
    assert run["metrics"]["peak_mem_gib"] > 0
    return run


# ---- the device


@pytest.mark.slow
def test_the_device_computes_accounts_and_refuses_as_a_gpu_does(machine):
    done = machine.command(sys.executable, "-u", "-c", PROBE)
    if done.returncode == -signal.SIGABRT:  # seen once, in the first process after the compilation, and not explained
        done = machine.command(sys.executable, "-u", "-c", PROBE)
    assert done.stdout.splitlines() == [
        "8 cuda:5 24.0 True",
        "21.0 True",
        "5 0",
        "refused",
        "refused",
        "CUDA out of memory. Tried to allocate 800.00 GiB. GPU 1 has a total 1",
    ], done.stdout + done.stderr


# ---- the README's commands


@pytest.mark.slow
def test_speedrun_on_eight_gpus(machine):
    few = ["goal.num_steps=4", "goal.val_every_steps=2", "goal.val_tokens=8192", "track.repeats=1"]
    done = machine.command("./speedrun.sh", "track=cpu_nano", *stand_in.SMALL[:-1], *few)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "8 x NVIDIA H100 80GB HBM3 at 700 W" in done.stdout and "largest possible gain" not in done.stdout
    assert f"warning: look: {after_race.NO_KERNELS}" in done.stdout  # which the stand-in has not, as WSL
    (folder,) = (machine.results / "cpu_nano").iterdir()
    run = on_cuda(folder, 8)
    assert run["hardware"]["compile"] and run["hardware"]["dtype"] == "bfloat16"
    gpus = run["instrument_summaries"]["telemetry"]["by_device"]
    assert list(gpus) == [f"gpu{number}" for number in range(8)]
    looked = {path.name for path in folder.rglob("look_rank*")}
    assert {f"look_rank7.{end}" for end in ("pt.trace.json.gz", "txt", "pickle", "html")} <= looked
    assert "model" in (folder / "memory" / "look_rank7.html").read_text()  # who allocated it: a stack in models/
    assert real_runs.bench(machine.results, "verify", str(folder)).returncode == 0


@pytest.mark.slow
def test_losses_on_the_gpus_are_those_of_the_cpu(machine):
    cpu = ["hardware=cpu", "hardware.dtype=float32", "look=off"]
    folder, done = machine.run("hardware.num_processes=1", "hardware.dtype=float32", EAGER, "look=off", "seed=3")
    on_cuda(folder, 1)
    other, done = machine.run(*cpu, "hardware.num_processes=1", EAGER, "seed=3")
    first, second = ([float(row["train_loss"]) for row in real_runs.steps(path)[1:]] for path in (folder, other))
    assert first == pytest.approx(second, rel=1e-5), done.stdout


@pytest.mark.slow
def test_a_race_on_two_gpus(machine):
    arguments = ["race", "A=", "B=optim=muon", "n=2", "--anyway", *ON_GPUS, EAGER, "hardware.num_processes=2"]
    done = machine.command("./run.sh", *arguments)
    assert "comparable: yes" in done.stdout and "energy" in done.stdout, done.stdout + done.stderr
    races = list((machine.results / "races").iterdir())
    assert len(races) == 1


@pytest.mark.slow
def test_a_gpu_that_another_run_has_is_refused_and_the_others_are_not(tmp_path):
    gpus = Gpus(tmp_path, num=3)
    one_gpu = ["hardware.num_processes=1", EAGER, "look=off"]
    with gpus.running(*one_gpu, CUDA_VISIBLE_DEVICES="1"):
        done = gpus.command("./run.sh", "run", *ON_GPUS, *one_gpu, "hardware.num_processes=2")
        assert done.returncode == 75 and re.search(r"GPU 1: process \d+ of user \d+ has it", done.stderr), done.stderr
        done = gpus.command(
            "./run.sh", "race", "A=", "B=optim=muon", "n=2", "--anyway", *ON_GPUS, *one_gpu, "hardware.num_processes=2"
        )
        assert done.returncode == 75 and "GPU 1: process" in done.stderr
        assert not (gpus.results / "races").exists()  # it was not even planned
        before = len(real_runs.folders(gpus.results))
        assert gpus.command("./run.sh", "run", *ON_GPUS, *one_gpu).returncode == 0
        assert len(real_runs.folders(gpus.results)) == before + 1
        gpus.set(0, others_mib=70_000)
        done = gpus.command("./run.sh", "race", "A=", "B=optim=muon", "n=2", *ON_GPUS, *one_gpu)
        assert done.returncode == 75 and "GPU 0: 68 of its 80 GiB are in use" in done.stderr, done.stderr


@pytest.mark.slow
def test_a_sweep_of_eight_is_packed_over_gpus(tmp_path):
    gpus, slots = Gpus(tmp_path), min(8, environment.usable_cpus())  # no two runs share a core either
    rates = ",".join(f"{number}e-4" for number in range(1, 9))
    packed = [f"hydra.launcher.parallel={slots}", "hardware.num_processes=1"]
    done = gpus.command("./run.sh", "run", "-m", *ON_GPUS, EAGER, "look=off", *packed, f"optim.lr={rates}")
    assert "8 of 8 complete" in done.stdout, done.stdout + done.stderr
    runs = [real_runs.run_json(folder) for folder in real_runs.folders(gpus.results)]
    assert {run["beside"]["gpu"] for run in runs} == {str(slot) for slot in range(slots)} or slots == 1
    assert all(len(run["environment"]["gpus"]) == 1 for run in runs)  # each record has its own GPU alone
    assert len({run["environment"]["gpus"][0]["uuid_hash"] for run in runs}) == slots


@pytest.mark.slow
def test_doctor_and_passport(machine):
    done = machine.command("./run.sh", "doctor", "--json")
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert checks["collective"]["found"].startswith("8 ranks agree"), done.stdout + done.stderr
    assert checks["driver"]["found"] == "1.0, 8 GPUs, 8 visible"
    assert {name for name, check in checks.items() if check["status"] == "fail"} == {"gpu speed"}
    assert "and the data sheet of NVIDIA H100 80GB HBM3 says 989" in checks["gpu speed"]["found"]
    done = machine.command("./run.sh", "doctor", "--passport", CUDA_VISIBLE_DEVICES="3")
    assert done.returncode == 1 and not (machine.results / "passports").exists(), done.stdout + done.stderr
    assert "times what the data sheet of NVIDIA H100 80GB HBM3 says" in done.stderr, done.stderr


# ---- what breaks GPUs: (what happens to GPU 1 of 2 once the run has begun, settings, kind, words of its message)

BREAKS = {
    "off the bus": ({"lost": 1}, [], "gpu_error", "gpu1 was lost: GPU is lost; then: AcceleratorError: CUDA error"),
    "Xid": ({"xid": 31, "cuda_error": 700}, [], "gpu_error", "gpu1 had Xid 31; then: AcceleratorError: CUDA"),
    "ECC": ({"ecc_uncorrected": 2}, [], "gpu_error", "AcceleratorError: CUDA error: uncorrectable ECC error"),
    "NCCL": ({"nccl_error": 1}, [], "nccl_error", "DistBackendError: NCCL error"),
    "hang": ({"hang": 1}, ["hardware.collective_timeout_s=6"], "collective_timeout", "rank 0 was ended by SIGABRT"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BREAKS)
def test_a_gpu_that_breaks_ends_the_run_in_an_honest_record(tmp_path, name):
    broken, settings, kind, sentence = BREAKS[name]
    gpus = Gpus(tmp_path, 2)
    with gpus.running(EAGER, "look=off", *settings) as (folder, process):
        gpus.set(1, **broken)
        text = process.communicate(timeout=120)[0]
    failure = real_runs.run_json(folder)["failure"]
    assert (process.returncode, failure["kind"]) == (1, kind), text
    assert sentence in failure["message"] and failure["hint"] in text
    assert failure["rank"] == (0 if name == "hang" else 1)
    assert real_runs.run_json(folder)["validity"] == "invalid"
    real_runs.wait_for(lambda: not left_behind(gpus.results), timeout_s=15)


@pytest.mark.slow
def test_out_of_memory_leaves_a_snapshot_and_its_page(tmp_path):
    gpus = Gpus(tmp_path, 1, others_mib=81_559 - 4)
    large = ["data.batch_tokens=8192", "hardware.micro_batch_seqs=128", "profile=memory"]
    folder, done = gpus.run(EAGER, "look=off", *large)
    failure = real_runs.run_json(folder)["failure"]
    assert failure["kind"] == "out_of_memory", done.stdout
    assert re.match(r"OutOfMemoryError: CUDA out of memory. Tried to allocate .* 79.65 GiB", failure["message"])
    assert "micro_batch_seqs" in failure["hint"]
    (snapshot,) = (folder / "memory").glob("*.pickle")
    shown = gpus.command("./run.sh", "memory", str(snapshot))
    assert shown.returncode == 0 and "out of memory" in shown.stdout.lower(), shown.stdout + shown.stderr


# ---- what spoils times: a warning before, and a doubt or a warning after

SPOILS = {
    "throttled": ({"reasons": 0x40}, "hw_thermal"),
    "another program": ({"num_processes": 1}, "other programs compute on GPU 1"),
    "another power limit": ({"limit_mw": 500_000}, "H100 80GB HBM3 at 500 W"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SPOILS)
def test_what_slows_one_gpu_is_in_the_record(tmp_path, name):
    changed, sentence = SPOILS[name]
    gpus = Gpus(tmp_path, 2)
    gpus.set(1, **changed)
    folder, done = gpus.run(EAGER, "look=off", "goal.num_steps=60", "goal.val_every_steps=30")
    run = real_runs.run_json(folder)
    assert run["status"] == "complete" and sentence in done.stdout, done.stdout
    assert any(sentence in check["found"] for check in run["preflight"])
    assert run["validity"] == "suspect", run["validity_reasons"]
    assert any("gpu1" in reason for reason in run["validity_reasons"]), run["validity_reasons"]


@pytest.mark.slow
def test_a_mig_slice(tmp_path):
    gpus = Gpus(tmp_path, 2, mig=1)
    folder, done = gpus.run(EAGER, "look=off", CUDA_VISIBLE_DEVICES=f"MIG-{gpus.uuids[1]}")
    run = on_cuda(folder, 1)
    telemetry = run["instrument_summaries"]["telemetry"]
    assert telemetry["unsupported"] == {}, done.stdout
    assert any("a MIG slice" in warning["error"] for warning in run["warnings"])


def test_a_lost_gpu_names_the_cause_of_a_later_failure(tmp_path):
    """The quick sister: what telemetry noted comes first, whatever the rank said; a bad setting stays one."""
    from bench.record import failures

    (tmp_path / "logs").mkdir()
    error = type("DistBackendError", (RuntimeError,), {})("NCCL error: remote process exited or there was an error")
    assert failures.write(tmp_path, 0, 5, error) == "nccl_error"
    (tmp_path / "logs" / failures.GPU_FAULTS).write_text("gpu1 was lost: GPU is lost\n" * 2)
    failure = failures.classify(tmp_path, 1)
    assert (failure["kind"], failure["hint"]) == ("gpu_error", failures.HINTS["gpu_error"])
    assert failure["message"].startswith("gpu1 was lost: GPU is lost; then: DistBackendError")
    failures.write(tmp_path, 0, None, ValueError("optim.lr=-1: above 0"))
    assert failures.classify(tmp_path, 1)["kind"] == "bad_setting"
