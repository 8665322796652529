"""Preflight: each check at its border, and what a person reads."""

import pytest

from bench import config as schema
from bench import preflight

CPU = schema.HardwareConfig(device="cpu", num_processes=2, num_threads=1)
WIDE = schema.HardwareConfig(device="cpu", num_processes=2, num_threads=2)
GPU = schema.HardwareConfig(device="cuda", num_processes=2, num_threads=4)
GIB = 2**30


def gpu(visible, **facts):
    fine = {
        "name": "NVIDIA H200",
        "visible": visible,
        "power_limit_w": 700.0,
        "persistence": True,
        "num_compute_processes": 0,
    }
    return fine | facts


def config(hardware):
    return schema.Config(hardware=hardware)


def env(gpus=(), **variables):
    return {"num_cpus": 2, "cpu_quota_cores": None, "gpus": list(gpus), "env": variables}


def names(found):
    return [check.name for check in found]


@pytest.mark.parametrize(("free_gib", "status"), [(0.06, "fail"), (0.07, "warn"), (1.9, "warn"), (2.0, "ok")])
def test_disk_space(monkeypatch, tmp_path, free_gib, status):
    usage = preflight.shutil._ntuple_diskusage(100 * GIB, 0, int(free_gib * GIB))
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda folder: usage)
    assert preflight.disk_space(tmp_path).status == status


def test_disk_space_is_that_of_the_folder_which_will_hold_the_results(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(
        preflight.shutil, "disk_usage", lambda folder: asked.append(folder) or type("", (), {"free": 9 * GIB})
    )
    assert preflight.disk_space(tmp_path / "not" / "yet").found == "9.0 GiB free for results"
    assert asked == [tmp_path]


@pytest.mark.parametrize(
    ("available_gib", "status"),
    [(1.1, "fail"), (1.3, "warn"), (2.1, "warn"), (2.3, "ok"), (None, "ok")],  # 2 * 0.6 for workers, 1 for the data
)
def test_memory_for_two_workers_and_a_gib_of_data(available_gib, status):
    assert preflight.memory(2, GIB, available_gib).status == status


@pytest.mark.parametrize(
    ("hardware", "foreign_cores", "num_cpus", "status"),
    [
        (CPU, 0.1, 2, "ok"),
        (CPU, 0.11, 2, "warn"),
        (CPU, None, 2, "ok"),  # unknown
        (GPU, 13.9, 16, "ok"),  # two cores are left for two processes
        (GPU, 14.1, 16, "warn"),
    ],
)
def test_load_of_other_programs(hardware, foreign_cores, num_cpus, status):
    assert preflight.cpu_load(hardware, foreign_cores, num_cpus).status == status


@pytest.mark.parametrize(
    ("hardware", "num_cpus", "quota", "status"),
    [
        (CPU, 2, None, "ok"),
        (CPU, 1, None, "warn"),
        (CPU, 8, 1.5, "warn"),
        (WIDE, 4, None, "ok"),
        (WIDE, 3, None, "warn"),
        (GPU, 2, None, "ok"),
        (GPU, 1, None, "warn"),
    ],
)
def test_busy_threads_against_cores(hardware, num_cpus, quota, status):
    """The CPU race has 2 x 1 busy threads, the wide one 2 x 2; on GPUs each of the 2 processes has one."""
    assert preflight.threads(hardware, num_cpus, quota).status == status


def test_spinning_threads_are_warned_of_only_where_there_are_threads_that_could():
    two = schema.HardwareConfig(device="cpu", num_processes=1, num_threads=2)
    assert preflight.waiting_threads(two, {"OMP_WAIT_POLICY": "active"}).status == "warn"
    assert preflight.waiting_threads(two, {"OMP_WAIT_POLICY": "passive"}).status == "ok"
    assert preflight.waiting_threads(two, {}).status == "ok"  # the launcher sets PASSIVE
    assert preflight.waiting_threads(CPU, {"OMP_WAIT_POLICY": "active"}).status == "ok"


def test_a_cpu_race_is_not_asked_about_gpus(tmp_path):
    found = preflight.checks(config(CPU), 0, env([gpu(0)]), tmp_path, foreign_cpu_cores=0.0)
    assert names(found) == ["disk", "memory", "cpu load", "threads", "openmp"]


def test_a_gpu_race_is_asked_about_the_gpus_it_uses(tmp_path):
    """GPU 2 is not raced on: that it is busy and of another model is no matter."""
    gpus = [gpu(0), gpu(1), gpu(2, name="NVIDIA L4", num_compute_processes=3), gpu(None, persistence=False)]
    found = preflight.checks(config(GPU), 0, env(gpus), tmp_path, foreign_cpu_cores=0.0)
    assert names(found)[4:] == ["gpus idle", "gpus alike", "persistence"]
    assert {check.status for check in found[4:]} == {"ok"}


def test_busy_gpus_are_named():
    check = preflight.gpus_idle([gpu(0), gpu(1, num_compute_processes=2)])
    assert (check.status, check.found) == ("warn", "other programs compute on GPU 1: 2")
    assert "unknown" in preflight.gpus_idle([gpu(0, num_compute_processes=None)]).found


@pytest.mark.parametrize("other", [{"name": "NVIDIA H100 PCIe"}, {"power_limit_w": 500.0}])
def test_unlike_gpus_are_warned_of(other):
    assert preflight.gpus_alike([gpu(0), gpu(1)]).found == "2 x NVIDIA H200 at 700 W"
    assert preflight.gpus_alike([gpu(0), gpu(1, **other)]).status == "warn"


def test_persistence_mode_off_is_warned_of_and_unknown_is_not():
    assert preflight.gpus_persistent([gpu(0), gpu(1, persistence=False)]).found == "off on GPU 1"
    assert preflight.gpus_persistent([gpu(0, persistence=None)]).status == "ok"


def test_without_a_given_load_it_is_sampled(monkeypatch, tmp_path):
    monkeypatch.setattr(preflight, "_sample", lambda: 1.5)
    found = preflight.checks(config(CPU), 0, env(), tmp_path)
    assert (
        next(check for check in found if check.name == "cpu load").found
        == "other programs use 1.50 of 2 cores (limit 0.1)"
    )


def test_every_warning_carries_a_remedy_and_nothing_else_does(tmp_path):
    crowded = schema.HardwareConfig(device="cpu", num_processes=4, num_threads=4)
    for hardware in (CPU, GPU, crowded):
        gpus = [gpu(0, num_compute_processes=1), gpu(1, name="x", persistence=False)]
        for check in preflight.checks(config(hardware), 10**15, env(gpus, OMP_WAIT_POLICY="ACTIVE"), tmp_path, 9.0):
            assert bool(check.remedy) == (check.status != "ok"), check


def test_the_report_has_a_line_for_each_check_and_one_for_each_remedy():
    found = [preflight.Check("disk", "ok", "9.0 GiB free"), preflight.Check("cpu load", "warn", "busy", "end them")]
    assert preflight.report(found).splitlines() == [
        "      ok  disk      9.0 GiB free",
        "    warn  cpu load  busy",
        "                    try: end them",
    ]
