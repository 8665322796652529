"""The doctor: what the probe's answers mean, what people and programs read, and a whole visit."""

import json
import os

import pytest
import real_runs

from bench.cli import doctor
from bench.config import schema
from bench.launch import probe
from bench.machine.preflight import Check


def answer(**facts):
    fine = {"torch_facts": {"torch": "2.13.0", "cuda": "13.0", "cudnn": 92000, "nccl": "2.29.7"}}
    fine |= {"num_bytes": 64 * 2**20, "all_reduce_ms": 1.0, "matmul_tflop_per_s": 700.0}
    return fine | {"device_name": "NVIDIA H100 80GB HBM3"} | facts


def test_ranks_that_answer_report_software_and_bandwidth():
    """Four ranks reduce 64 MiB in the slowest rank's 2 ms: 2 * 3/4 * 64 MiB / 2 ms, or 0.09375 GiB / 0.002 s."""
    software, collective, speed = probe.judge("cuda", [answer(all_reduce_ms=ms) for ms in (1.0, 2.0, 1.5, 1.0)])
    assert software.found == "torch 2.13.0, CUDA 13.0, cuDNN 92000, NCCL 2.29.7"
    assert collective.found == "4 ranks agree; all-reduce of 64 MiB: 2.00 ms, 46.9 GiB/s per rank"
    assert {software.status, collective.status, speed.status} == {"ok"}
    assert [check.name for check in probe.judge("cpu", [answer(), answer()])] == ["software", "collective"]
    assert probe.judge("cuda", [answer(all_reduce_ms=None)])[1].found == "one process: nothing to communicate with"


@pytest.mark.parametrize(("rate", "status"), [(680.0, "ok"), (678.0, "warn")])
def test_a_gpu_more_than_three_percent_below_the_median_is_slow(rate, status):
    """The median of 700, 700 and this one is 700; 3 % below it is 679."""
    assert probe.gpu_speed([700.0, rate, 700.0], 3 * ["NVIDIA of tomorrow"]).status == status


def test_a_rate_that_no_data_sheet_allows_is_no_measurement():
    """Of 989 TFLOP/s dense in bfloat16, 700 are 71 %; boards may clock up to a quarter above their data sheet."""
    names = 2 * ["NVIDIA H100 80GB HBM3"]
    speed = probe.gpu_speed([690.0, 700.0], names)
    assert speed.found == "690 to 700 TFLOP/s bfloat16, at most 71 % of the data sheet's"
    assert probe.gpu_speed([1200.0, 1236.0], names).status == "ok"
    beyond = probe.gpu_speed([87487.0, 87487.0], names)
    assert beyond.status == "fail" and beyond.remedy
    assert beyond.found == "87,487 TFLOP/s bfloat16, and the data sheet of NVIDIA H100 80GB HBM3 says 989"
    assert probe.gpu_speed([87487.0, 87487.0], 2 * ["NVIDIA of tomorrow"]).found == "87487 to 87487 TFLOP/s bfloat16"


def test_ranks_that_do_not_answer_are_a_failure_with_a_remedy():
    failed = [{"rank": 1, "message": "RuntimeError: Timed out waiting 5000ms", "hint": "see", "failed_at_s": 1.0}]
    check = probe.Answers(2, [answer()], failed, 1, "").why_missing()
    assert (check.name, check.status) == ("collective", "fail")
    assert check.found == "1 of 2 ranks answered; rank 1: RuntimeError: Timed out waiting 5000ms"
    assert "a firewall" in check.remedy
    output = "starting\nncclUnhandledCudaError: call failed\n  frame 1\n"
    check = probe.Answers(2, [], [], -6, output).why_missing()
    assert "exit code -6: ncclUnhandledCudaError" in check.found
    assert "NCCL_DEBUG=INFO" in check.remedy
    frames = 'File "/x/torch/distributed/elastic/multiprocessing/errors/__init__.py", line 361 in wrapper\nTerminated\n'
    assert probe.Answers(2, [], [], None, frames).why_missing().found.endswith("did not end in time: Terminated")
    assert "did not end in time: they printed nothing" in probe.Answers(2, [], [], None, "").why_missing().found


def test_the_last_line_says_whether_the_machine_is_fit():
    ok, warn, fail = (Check(status, status, "", "" if status == "ok" else "x") for status in ("ok", "warn", "fail"))
    assert doctor.verdict([ok]) == "ready to benchmark"
    assert doctor.verdict([ok, warn]) == "ready, but times will be less reliable: warn"
    assert doctor.verdict([ok, warn, fail]) == "not ready to benchmark: fail"


def test_a_missing_driver_is_a_failure_where_gpus_are_wanted():
    assert doctor.driver({"nvml": "NVML Shared Library Not Found"}, None).status == "fail"
    env = {"nvml": None, "driver": "580.65.06", "gpus": [{"visible": 0}, {"visible": None}]}
    assert doctor.driver(env, None).found == "580.65.06, 2 GPUs, 1 visible"
    assert doctor.driver(env, ("it is too old", "update it")) == Check("driver", "fail", "it is too old", "update it")


@pytest.mark.slow
def test_a_visit_starts_ranks_lets_them_talk_and_says_fit(tmp_path):
    temp = str(real_runs.temp_in(tmp_path))
    done = real_runs.bench(tmp_path / "results", "doctor", "hardware=cpu", "--json", code=0, TMPDIR=temp)
    report = json.loads(done.stdout)
    assert report["fit"] is True
    checks = {check["name"]: check for check in report["checks"]}
    assert checks["software"]["found"].startswith("torch 2.")
    assert checks["collective"]["found"].startswith("2 ranks agree; all-reduce of 1 MiB")
    assert all(bool(check["remedy"]) == (check["status"] != "ok") for check in report["checks"])
    assert real_runs.left_in_temp(tmp_path) == []


@pytest.mark.slow
def test_ranks_that_hang_end_within_the_timeout_and_leave_nothing(tmp_path, monkeypatch):
    """One of two ranks never comes: the other's wait for it ends, and the check says so."""
    (tmp_path / "usercustomize.py").write_text("")
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys, time\n"
        "is_probe = 'bench.launch.probe' in ' '.join(sys.orig_argv)\n"
        "if is_probe and os.environ.get('RANK') == '1': time.sleep(60)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (check,) = probe.probe(schema.HardwareConfig(device="cpu", num_processes=2, num_threads=1), timeout_s=2.0)
    assert (check.name, check.status) == ("collective", "fail")
    assert check.found.startswith("0 of 2 ranks answered; rank 0: ")
    assert not _running("bench.launch.probe")


def _running(module):
    pids = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                if module.encode() in file.read().split(b"\0"):
                    pids.append(int(pid))
        except OSError:
            continue
    return pids


def test_a_quick_visit_starts_nothing(monkeypatch, printed):
    monkeypatch.setattr(probe, "probe", lambda *args: pytest.fail("a probe was started"))
    out = printed(doctor, "hardware=cpu", "--quick")
    assert "disk" in out and out.splitlines()[-1].startswith("ready")


def test_what_is_asked_wrongly_is_refused(monkeypatch):
    monkeypatch.setattr(doctor.gpus, "visible", list)
    with pytest.raises(ValueError, match="hardware.device=cuda: this machine shows no NVIDIA GPU"):
        doctor.main(["hardware=cuda", "--quick", "hardware.num_processes=1"])
    with pytest.raises(ValueError, match="is not a setting"):
        doctor.main(["fast"])
