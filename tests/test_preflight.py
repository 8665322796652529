"""Preflight: each check at its border, and what a person reads."""

from types import SimpleNamespace

import pytest

from bench.config import schema
from bench.launch import ready
from bench.launch.prepare import Job
from bench.machine import preflight

CPU = schema.HardwareConfig(device="cpu", num_processes=2, num_threads=1)
WIDE = schema.HardwareConfig(device="cpu", num_processes=2, num_threads=2)
GPU = schema.HardwareConfig(device="cuda", num_processes=2, num_threads=4)
GIB = 2**30


def gpu(visible, **facts):
    fine = {
        "name": "NVIDIA H200",
        "visible": visible,
        "power_limit_w": 700.0,
        "default_power_limit_w": 700.0,
        "max_sm_clock_mhz": 1980,
        "clocks_event_reasons": ["gpu_idle"],
        "temp_c": 31,
        "ecc": True,
        "ecc_uncorrected": 0,
        "remap_pending": False,
        "remap_failed": False,
        "pcie_width": 16,
        "pcie_max_width": 16,
        "persistence": True,
        "num_compute_processes": 0,
        "memory_gib": 140.0,
        "used_memory_gib": 0.6,
    }
    return fine | facts


def env(gpus=(), **variables):
    return {"num_cpus": 2, "cpu_quota_cores": None, "gpus": list(gpus), "env": variables}


def names(checks):
    return [check.name for check in checks]


@pytest.mark.parametrize(("free_gib", "status"), [(0.06, "fail"), (0.07, "warn"), (1.9, "warn"), (2.0, "ok")])
def test_disk_space(monkeypatch, tmp_path, free_gib, status):
    usage = preflight.shutil._ntuple_diskusage(100 * GIB, 0, int(free_gib * GIB))
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda folder: usage)
    assert preflight.disk_space(tmp_path).status == status


def test_disk_space_is_that_of_the_folder_which_will_hold_the_results(monkeypatch, tmp_path):
    folders = []
    monkeypatch.setattr(
        preflight.shutil, "disk_usage", lambda folder: folders.append(folder) or type("", (), {"free": 9 * GIB})
    )
    assert preflight.disk_space(tmp_path / "not" / "yet").found == "9.0 GiB free for results"
    assert folders == [tmp_path]


TWO_THREADS = schema.HardwareConfig(device="cpu", num_processes=1, num_threads=2)
SPINNING = {"OMP_WAIT_POLICY": "active"}


@pytest.mark.parametrize(
    ("check", "arguments", "status"),
    [
        (preflight.memory, (2, GIB, 1.1), "fail"),  # 2 * 0.6 for workers, 1 for the data
        (preflight.memory, (2, GIB, 1.3), "warn"),
        (preflight.memory, (2, GIB, 2.1), "warn"),
        (preflight.memory, (2, GIB, 2.3), "ok"),
        (preflight.memory, (2, GIB, None), "ok"),
        (preflight.cpu_load, (CPU, 0.1, 2), "ok"),
        (preflight.cpu_load, (CPU, 0.1049, 2), "ok"),  # shown as 0.10, which is not above 0.1
        (preflight.cpu_load, (CPU, 0.11, 2), "warn"),
        (preflight.cpu_load, (CPU, None, 2), "ok"),  # unknown
        (preflight.cpu_load, (GPU, 13.9, 16), "ok"),  # two cores are left for two processes
        (preflight.cpu_load, (GPU, 14.1, 16), "warn"),
        (preflight.threads, (CPU, 2, None), "ok"),  # 2 x 1 busy threads
        (preflight.threads, (CPU, 1, None), "warn"),
        (preflight.threads, (CPU, 8, 1.5), "warn"),
        (preflight.threads, (WIDE, 4, None), "ok"),  # 2 x 2
        (preflight.threads, (WIDE, 3, None), "warn"),
        (preflight.threads, (GPU, 2, None), "ok"),  # each of the 2 processes has one
        (preflight.threads, (GPU, 1, None), "warn"),
        (preflight.waiting_threads, (TWO_THREADS, SPINNING), "warn"),
        (preflight.waiting_threads, (TWO_THREADS, {"OMP_WAIT_POLICY": "passive"}), "ok"),
        (preflight.waiting_threads, (TWO_THREADS, {}), "ok"),  # the launcher sets PASSIVE
        (preflight.waiting_threads, (CPU, SPINNING), "ok"),  # no thread waits for another
        (preflight.governor, ("performance",), "ok"),
        (preflight.governor, (None,), "ok"),
        (preflight.governor, ("powersave",), "warn"),  # clocks that follow the load
        (preflight.governor, ("schedutil",), "warn"),
        (preflight.quota, (8, None), "ok"),
        (preflight.quota, (8, 8.0), "ok"),
        (preflight.quota, (8, 3.5), "warn"),  # a share of time is not a share of cores
    ],
)
def test_each_check_at_its_border(check, arguments, status):
    assert check(*arguments).status == status


def test_a_finding_counts_in_words_that_fit_the_number():
    assert preflight.threads(CPU, 2, None).found == "2 processes with 2 busy threads; usable cores: 2"
    found = preflight.memory(2, GIB, 1.3).found
    assert found == "1.3 GiB available, at least 1.2 GiB needed, and 1.0 GiB for the data"


def test_a_cpu_run_is_not_checked_for_gpus(tmp_path):
    checks = preflight.checks(CPU, 0, env([gpu(0)]), tmp_path, foreign_cpu_cores=0.0)
    assert names(checks) == ["disk", "memory", "cpu load", "threads", "governor", "cpu quota", "openmp"]


def test_a_gpu_run_is_checked_for_the_gpus_it_uses(tmp_path):
    """GPU 2 is not used by the run: that it is busy and of another model does not matter."""
    gpus = [gpu(0), gpu(1), gpu(2, name="NVIDIA L4", num_compute_processes=3), gpu(None, persistence=False)]
    checks = preflight.checks(GPU, 0, env(gpus), tmp_path, foreign_cpu_cores=0.0)
    expected = [
        "compiler",
        "gpus idle",
        "gpu memory",
        "gpus alike",
        "persistence",
        "power limit",
        "clocks",
        "ecc",
        "pcie",
    ]
    assert names(checks)[6:] == expected
    assert {check.status for check in checks[7:]} == {"ok"}


@pytest.mark.parametrize("other", [{"name": "NVIDIA H100 PCIe"}, {"power_limit_w": 500.0}])
def test_unlike_gpus_are_warned_of(other):
    assert preflight.alike([gpu(0), gpu(1)]).found == "2 x NVIDIA H200 at 700 W"
    assert preflight.alike([gpu(0), gpu(1, **other)]).status == "warn"


@pytest.mark.parametrize(
    ("check", "facts", "finding"),
    [
        (preflight.power_limit, {"power_limit_w": 500.0}, "GPU 1: 500 W instead of 700 W"),
        (
            preflight.slowed,
            {"clocks_event_reasons": ["gpu_idle", "hw_thermal"]},
            "slowed down: GPU 1: hw_thermal at 31 C",
        ),
        (preflight.ecc, {"ecc_uncorrected": 2}, "GPU 1: 2 uncorrected errors since the driver was loaded"),
        (preflight.ecc, {"remap_pending": True}, "GPU 1: a memory row waits to be replaced"),
        (preflight.ecc, {"remap_pending": True, "remap_failed": True}, "GPU 1: a memory row could not be replaced"),
        (preflight.ecc, {"ecc": False}, "on for some GPUs, off for others"),
        (preflight.pcie, {"pcie_width": 8}, "GPU 1: x8 of x16"),
        (preflight.roomy, {"used_memory_gib": 71.2}, "GPU 1: 71 of its 140 GiB are in use"),
        (preflight.idle, {"num_compute_processes": 2}, "other programs compute on GPU 1: 2"),
        (preflight.persistent, {"persistence": False}, "off on GPU 1"),
    ],
)
def test_a_gpu_that_is_ill_is_named_with_what_it_has(check, facts, finding):
    assert check([gpu(0), gpu(1)]).status == "ok"
    ill = check([gpu(0), gpu(1, **facts)])
    assert (ill.status, ill.found) == ("warn", finding)


def test_what_a_driver_does_not_say_is_unknown_and_no_warning_nor_are_idling_and_a_little_memory():
    silent = {key: None for key in gpu(0) if key not in ("name", "visible")}
    for check in preflight.gpu_checks([gpu(0, **silent), gpu(1, **silent)]):
        assert check.status == "ok", check
        assert "unknown" in check.found or check.name == "gpus alike", check
    fine = {"clocks_event_reasons": ["sw_power_cap", "gpu_idle"], "used_memory_gib": 14.0}  # a tenth
    assert {check.status for check in preflight.gpu_checks([gpu(0, **fine), gpu(1, **fine)])} == {"ok"}


def test_without_a_given_load_it_is_sampled(monkeypatch, tmp_path):
    monkeypatch.setattr(preflight, "sample_foreign_cores", lambda: 1.5)
    checks = preflight.checks(CPU, 0, env(), tmp_path)
    expected = "other programs use 1.50 of 2 cores (limit 0.1)"
    assert next(check for check in checks if check.name == "cpu load").found == expected


def test_every_warning_carries_a_remedy_and_nothing_else_does(tmp_path):
    crowded = schema.HardwareConfig(device="cpu", num_processes=4, num_threads=4)
    for hardware in (CPU, GPU, crowded):
        ill = {
            "ecc_uncorrected": 3,
            "clocks_event_reasons": ["hw_slowdown"],
            "default_power_limit_w": 500.0,
            "pcie_width": 8,
        }
        gpus = [gpu(0, num_compute_processes=1, **ill), gpu(1, name="x", persistence=False)]
        for check in preflight.checks(hardware, 10**15, env(gpus, OMP_WAIT_POLICY="ACTIVE"), tmp_path, 9.0):
            assert bool(check.remedy) == (check.status != "ok"), check


def test_the_report_has_a_line_for_each_check_and_one_for_each_remedy():
    checks = [preflight.Check("disk", "ok", "9.0 GiB free"), preflight.Check("cpu load", "warn", "busy", "end them")]
    expected = ["      ok  disk      9.0 GiB free", "    warn  cpu load  busy", "                    try: end them"]
    assert preflight.report(checks).splitlines() == expected


def test_a_gpu_run_that_compiles_needs_a_c_compiler(monkeypatch, tmp_path):
    monkeypatch.setattr(preflight.shutil, "which", lambda name: None)
    monkeypatch.setattr(preflight.sysconfig, "get_path", lambda name: str(tmp_path))
    check = preflight.compiler()
    assert (check.status, check.found) == ("warn", "no C compiler and no Python.h, which torch.compile needs on a GPU")
    eager = schema.HardwareConfig(device="cuda", num_processes=1, num_threads=4, compile=False)
    names = [
        [check.name for check in preflight.checks(hardware, 0, env([gpu(0)]), tmp_path, 0.0)]
        for hardware in (GPU, eager)
    ]
    assert ["compiler" in listed for listed in names] == [True, False]


def test_shards_that_are_seen_again_are_a_warning_with_how_many_would_do():
    def epochs_check(num_steps, num_train_shards=3):
        data = SimpleNamespace(batch_tokens=1000, num_train_shards=num_train_shards, seq_len=10)
        hardware = SimpleNamespace(micro_batch_seqs=1)
        config = SimpleNamespace(goal=SimpleNamespace(num_steps=num_steps), data=data, hardware=hardware, stages=None)
        dataset = SimpleNamespace(train=[SimpleNamespace(num_tokens=100_000)] * 3)
        return ready.epochs(Job(config, dataset, [], []))

    assert epochs_check(300) == preflight.Check("epochs", "ok", "1.00 epochs of 3 training shards")
    assert epochs_check(700) == preflight.Check(
        "epochs",
        "warn",
        "2.33 epochs of 3 training shards: tokens are seen again",
        "fewer steps, or data.num_train_shards=7",
    )
    assert epochs_check(700, None).remedy == "fewer steps"
