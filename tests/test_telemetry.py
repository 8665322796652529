"""Telemetry: the real nvidia-ml-py on a compiled stand-in for the driver's library, the join by hand, a run."""

import json
import os
import signal
import subprocess
import sys
import time
import types
from itertools import pairwise
from pathlib import Path

import pytest
import real_runs
import stand_in

from bench.launch.console import Bars
from bench.launch.progress import Progress
from bench.machine import gpus, peak_rates, processes
from bench.machine.telemetry import nvml, sampling
from bench.machine.telemetry import sampler as telemetry_sampler
from bench.machine.telemetry import samples as join
from bench.machine.telemetry.sampler import FIELDS, line, num_foreign
from bench.record import metrics
from bench.report import run_charts
from bench.training.instruments import registry
from bench.training.instruments.base import Context, InstrumentSet
from bench.training.timing.clock import HostMarks

S = 10**9


@pytest.fixture(scope="session")
def library():
    return stand_in.compiled("nvml.c").parent


@pytest.fixture(scope="session")
def old_library():
    """The library of a driver that lacks the functions' newest versions and names."""
    return stand_in.compiled("nvml.c", "-DOLD_DRIVER").parent


PROBED = {"num_processes": 1, "links": 0, "others_mib": 2048}


class Sampling:
    """A sampler of those GPUs; the order of uuids is CUDA's, that of the scenario NVML's."""

    def __init__(self, folder, library, gpus, uuids=None, interval_ms=20, **env):
        self.path, self.scenario = folder / "telemetry.csv", folder / "gpus.txt"
        self.gpus = {uuid: PROBED | changed for uuid, changed in gpus.items()}
        self.write()
        uuids = list(gpus) if uuids is None else uuids
        paces = {"interval_ms": interval_ms, "host_interval_ms": interval_ms}
        job = {"path": str(self.path), **paces, "uuids": uuids, "num_devices": len(uuids), "root_pid": os.getpid()}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "bench.machine.telemetry.sampler", json.dumps(job)],
            cwd=real_runs.REPO,
            text=True,
            bufsize=1,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"LD_LIBRARY_PATH": str(library), "STAND_IN_GPUS": str(self.scenario)} | env,
        )
        assert self.answer() == {"ready": True}

    def write(self):
        stand_in.write(self.scenario, self.gpus)

    def answer(self):
        return json.loads(self.process.stdout.readline())

    def ask(self, word):
        self.process.stdin.write(word + "\n")
        return self.answer()

    def wait_for_rows(self, num):
        deadline_s = time.monotonic() + 20
        while len(join.read(self.path)) < num:
            assert time.monotonic() < deadline_s and self.process.poll() is None
            time.sleep(0.02)

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.process.stdin.close()  # at which it ends
        try:
            self.process.wait(10)
        finally:
            self.process.kill()
            self.process.stdout.close()


def sampled(tmp_path, library, gpus, num_rows=20, **options):
    """Samples so many rows and returns (rows, what the record would say)."""
    with Sampling(tmp_path, library, gpus, **options) as sampling:
        started = sampling.ask("start")
        sampling.wait_for_rows(num_rows)
        stopped = sampling.ask("stop")
        assert sampling.process.wait(10) == 0
    rows = join.read(sampling.path)
    summary = join.summary(rows, [(started["t_ns"], stopped["t_ns"])], started, stopped)
    return rows, summary | stopped["report"]


def test_what_the_library_says_is_in_the_rows_in_their_units(tmp_path, library):
    rows, summary = sampled(tmp_path, library, {"GPU-a": {"reasons": 0x24}}, num_rows=25)
    row = rows[3]
    assert (row["device"], row["power_w"], row["sm_clock_mhz"], row["mem_clock_mhz"]) == ("gpu0", 500, 1755, 2619)
    assert (row["temp_c"], row["util_pct"], row["mem_gib"], row["power_limit_w"]) == (61, 97, 2, 700)
    assert row["throttle_reasons"] == "sw_power_cap|sw_thermal"
    assert (row["ecc_corrected"], row["ecc_uncorrected"], row["remapped_rows"]) == (3, 0, 2)
    assert row["cpu_util_pct"] is None and row["num_processes"] == 1
    assert summary["source"] == "nvml"
    assert summary["unsupported"] == {}
    assert summary["energy_from"] == "counter" and summary["energy_agrees"] is True
    assert summary["mean_power_w"] == pytest.approx(500, rel=0.1)  # a busy machine reads the counter late


def test_what_a_gpu_does_not_support_is_empty_in_every_row_and_named_once(tmp_path, library):
    unsupported = ",TotalEnergyConsumption,MemoryInfo,"
    rows, summary = sampled(tmp_path, library, {"GPU-a": {}}, num_rows=25, STAND_IN_UNSUPPORTED=unsupported)
    for column in ("energy_j", "mem_gib"):
        assert all(row[column] is None and row["power_w"] == 500 for row in rows)
        assert summary["unsupported"]["gpu0"].count(column) == 1
    assert summary["energy_from"] == "power"
    assert summary["mean_power_w"] == pytest.approx(500, rel=0.1)  # a busy machine reads the counter late


@pytest.mark.parametrize("lacking", [",186,", ",FieldValues,"])
def test_a_board_without_instant_power_gives_its_usage(tmp_path, library, lacking):
    rows, summary = sampled(tmp_path, library, {"GPU-a": {}}, num_rows=3, STAND_IN_UNSUPPORTED=lacking)
    assert {row["power_w"] for row in rows} == {500} and summary["unsupported"] == {}
    rows, summary = sampled(tmp_path, library, {"GPU-a": {}}, num_rows=3, STAND_IN_UNSUPPORTED=f"{lacking}PowerUsage,")
    assert {row["power_w"] for row in rows} == {None} and summary["unsupported"] == {"gpu0": ["power_w"]}
    # the counter is there, and nothing to share it out by
    assert summary["energy_j"] is None and summary["run_energy_j"] > 0


def test_a_reading_of_power_that_fails_once_is_empty_and_the_next_is_instant_again(monkeypatch):
    import pynvml

    returns = iter((0, pynvml.NVML_ERROR_TIMEOUT, 0, pynvml.NVML_ERROR_GPU_IS_LOST))

    def values(handle, ids):
        return [types.SimpleNamespace(nvmlReturn=next(returns), value=types.SimpleNamespace(uiVal=300_000))]

    monkeypatch.setattr(pynvml, "nvmlDeviceGetFieldValues", values)
    gpu = nvml.Gpu(pynvml, None, "gpu0")
    assert [gpu._power_w() for _ in range(4)] == [300, None, 300, None]
    assert gpu.num_failed_calls == 1 and gpu.lost


def test_an_old_driver_without_the_newest_names_is_asked_by_the_older_ones(tmp_path, old_library):
    gpus = {"GPU-a": {"reasons": 0x4, "num_processes": 2}}
    rows, summary = sampled(tmp_path, old_library, gpus, num_rows=5)
    assert {(row["throttle_reasons"], row["num_processes"], row["power_w"]) for row in rows} == {
        ("sw_power_cap", 2, 500)
    }
    assert summary["foreign_processes"] == {"gpu0": 1}
    assert summary["unsupported"] == {} and summary["warnings"] == []
    env = os.environ | {"LD_LIBRARY_PATH": str(old_library), "STAND_IN_GPUS": str(tmp_path / "gpus.txt")}
    code = (
        "from bench.machine import gpus; gpu, = gpus.nvml_facts()['gpus'];"
        "print(gpu['num_compute_processes'], gpu['clocks_event_reasons'])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=real_runs.REPO, env=env, capture_output=True, text=True)
    assert done.stdout == "2 ['sw_power_cap']\n", done.stderr


def test_what_may_not_be_read_is_empty_and_a_warning(tmp_path, library):
    rows, summary = sampled(tmp_path, library, {"GPU-a": {"denied": 1}})
    assert all(row["util_pct"] is None and row["temp_c"] == 61 for row in rows)
    assert summary["warnings"] == ["gpu0: no permission to read util_pct"]


def test_a_gpu_lost_in_mid_run_ends_its_rows_and_not_those_of_the_other(tmp_path, library):
    with Sampling(tmp_path, library, {"GPU-a": {}, "GPU-b": {}}) as sampling:
        started = sampling.ask("start")
        sampling.wait_for_rows(10)
        sampling.gpus["GPU-a"]["lost"] = 1
        sampling.write()
        sampling.wait_for_rows(20)
        read_s = [row["read_ns"] / 1e9 for row in join.read(sampling.path) if row["device"] == "gpu0"]
        time.sleep(max(join.MAX_GAP_S, *(3 * (later - earlier) for earlier, later in pairwise(read_s))))
        stopped = sampling.ask("stop")
    rows = join.read(sampling.path)
    assert rows[-1]["device"] == "gpu1" and {row["device"] for row in rows} == {"gpu0", "gpu1"}
    (warning,) = stopped["report"]["warnings"]
    assert warning.startswith("gpu0 was lost")
    summary = join.summary(rows, [(started["t_ns"], stopped["t_ns"])], started, stopped)
    assert summary["energy_j"] is None and summary["run_energy_j"] is None and summary["mean_power_w"] is None


def test_a_slow_call_makes_fewer_samples_and_no_burst(tmp_path, library):
    rows, summary = sampled(tmp_path, library, {"GPU-a": {"slow_ms": 100}}, num_rows=5)
    apart_ms = [(after["t_ns"] - before["t_ns"]) / 1e6 for before, after in zip(rows, rows[1:])]
    assert min(apart_ms) >= 95 and summary["max_tick_ms"] >= 100


def test_gpus_are_found_by_uuid_and_not_by_their_number(tmp_path, library):
    gpus = {"GPU-a": {"power_mw": 100_000}, "GPU-b": {"power_mw": 200_000}, "GPU-c": {"power_mw": 300_000}}
    rows, _ = sampled(tmp_path, library, gpus, uuids=["GPU-c", "GPU-a"])
    assert {(row["device"], row["power_w"]) for row in rows} == {("gpu0", 300), ("gpu1", 100)}


def test_the_energy_of_some_of_a_runs_gpus_is_not_the_runs(seen, monkeypatch):
    watch, telemetry, context = seen({"GPU-a": {}, "GPU-b": {}})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")  # as srun --gpus-per-task=1 shows each rank its own
    train(watch, context)
    summary = telemetry.summary()
    assert [summary[name] for name in ("energy_j", "run_energy_j", "mean_power_w", "energy_agrees")] == [None] * 4
    assert "energy_j" not in telemetry.columns() and summary["by_device"]["gpu0"]["mean_power_w"] == 500
    (warning,) = watch.warnings
    assert "NVML shows this process 1 of the run's 2 GPUs" in warning["error"]


def test_limits_slowdowns_and_foreign_processes_are_doubts_with_their_figures(tmp_path, library):
    gpus = {"GPU-a": {"reasons": 0x40, "num_processes": 3}, "GPU-b": {"limit_mw": 350_000}}
    _, summary = sampled(tmp_path, library, gpus)
    num = summary["by_device"]["gpu0"]["num_timed_samples"]
    assert join.doubts(summary) == [
        f"gpu0 was slowed down by hw_thermal in 100.0 % of {num} samples (limit 1 %)",
        "2 other processes computed on gpu0 during the run",
        "the GPUs have unequal power limits: gpu0 700 W, gpu1 350 W",
    ]


def test_reasons_add_up_to_a_slowdown_and_a_power_cap_is_none():
    rows = gpu_rows([1] * 150, throttle_reasons="sw_power_cap")
    rows[3]["throttle_reasons"], rows[7]["throttle_reasons"] = "sw_thermal", "hw_slowdown|hw_power_brake"
    spans = [(0, 149 * S)]
    summary = join.summary(rows, spans, *ENDS) | {"foreign_processes": {}}
    assert summary["by_device"]["gpu0"]["slowed_frac"] == 2 / 150  # each alone would be below the limit
    assert join.doubts(summary) == [
        "gpu0 was slowed down by hw_power_brake, hw_slowdown, sw_thermal in 1.3 % of 150 samples (limit 1 %)"
    ]
    rows[3]["throttle_reasons"] = "none"
    assert join.doubts(join.summary(rows, spans, *ENDS) | {"foreign_processes": {}}) == []
    all_bits = pytest.importorskip("pynvml").nvmlClocksThrottleReasonAll
    assert "0x" not in str(gpus.reason_names(all_bits))  # each that the installed nvidia-ml-py names


def test_a_power_limit_changed_in_the_run_is_a_doubt_and_rounding_is_none():
    rows = gpu_rows([1] * 4, power_limit_w=700.0)
    rows[0]["power_limit_w"] = 699.5
    alone = {"foreign_processes": {}}
    assert join.doubts(join.summary(rows, [(0, 3 * S)], *ENDS) | alone) == []
    rows[3]["power_limit_w"] = 400.0
    (doubt,) = join.doubts(join.summary(rows, [(0, 3 * S)], *ENDS) | alone)
    assert doubt == "the power limit of gpu0 was changed in the run, between 400 and 700 W"


def test_without_a_driver_the_host_is_sampled_and_the_record_says_so(tmp_path, library):
    rows, summary = sampled(tmp_path, library, {"GPU-a": {}}, num_rows=3, STAND_IN_NO_DRIVER="1")
    assert summary["source"] == "host" and summary["warnings"] == ["NVML: Driver Not Loaded"]
    assert {row["device"] for row in rows} == {"cpu"} and rows[-1]["rss_gib"] > 0


def test_rows_of_a_tick_share_its_time_so_that_gpus_are_drawn_as_lines(tmp_path, library):
    rows, _ = sampled(tmp_path, library, {"GPU-a": {"slow_ms": 5}, "GPU-b": {}}, num_rows=12)
    first, second = rows[0], rows[1]
    assert first["t_ns"] == second["t_ns"] and first["late_ms"] < 5 <= second["late_ms"]
    table = {name: [row[name] for row in rows] for name in ("t_ns", "device", "power_w")}
    (chart,) = run_charts.telemetry(table, rows[0]["t_ns"], [("power_w", "power, W")])
    assert [line["name"] for line in chart["series"]] == ["gpu0", "gpu1"]
    assert all(None not in line["y"] for line in chart["series"])


def test_a_full_disk_ends_the_file_and_not_the_counters(tmp_path, library):
    (tmp_path / "telemetry.csv").symlink_to("/dev/full")
    with Sampling(tmp_path, library, {"GPU-a": {}}) as sampling:
        started = sampling.ask("start")
        time.sleep(0.1)
        stopped = sampling.ask("stop")
    assert stopped["energy_j"]["gpu0"] > started["energy_j"]["gpu0"]
    assert stopped["report"]["warnings"] == ["telemetry.csv ends early: No space left on device"]


def test_the_sampler_ends_with_its_parent_though_its_pipe_is_held_open(tmp_path, library):
    read_end, write_end = os.pipe()
    job = {"path": str(tmp_path / "telemetry.csv"), "interval_ms": 20, "host_interval_ms": 20, "uuids": []}
    job = json.dumps(job | {"num_devices": 0, "root_pid": 1})
    code = (
        "import subprocess, sys, time\n"
        f"words = [sys.executable, '-m', 'bench.machine.telemetry.sampler', '{job}']\n"
        f"child = subprocess.Popen(words, stdin={read_end}, stdout=subprocess.PIPE)\n"
        "child.stdout.readline()\nprint(child.pid, flush=True)\ntime.sleep(60)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code], cwd=real_runs.REPO, stdout=subprocess.PIPE, text=True, pass_fds=[read_end]
    )
    sampler = int(parent.stdout.readline())
    parent.kill()
    parent.communicate()
    try:
        real_runs.wait_for(lambda: processes.start_ticks(sampler) is None, 20)
    finally:
        os.close(read_end)
        os.close(write_end)


def gpu_rows(watts, **columns):
    """One sample a second from second 0."""
    return [
        {"t_ns": num * S, "read_ns": num * S, "device": "gpu0", "power_w": power_w, **columns}
        for num, power_w in enumerate(watts)
    ]


ENDS = {"t_ns": 0, "energy_j": {}}, {"t_ns": 3 * S, "energy_j": {}}


def test_power_is_integrated_by_trapezoids_and_cut_at_the_ends():
    rows = gpu_rows([100, 300, 300])
    curve = join.Curve(rows, "power_w")
    assert curve.integral(0, 2 * S) == 200 + 300
    assert curve.integral(S // 2, S) == 125  # from 200 to 300 W in half a second
    assert curve.mean(S // 2, S) == 250
    assert curve.integral(-S, 3 * S) == 100 + 500 + 300  # a little beyond its ends it is what it was there
    assert curve.integral(0, 60 * S) is None  # what it drew in the last minute is unknown


def test_an_integral_does_not_depend_on_where_the_clock_began():
    """100 to 300 W from 50 to 51 s, 300 to 200 W to 52 s: the halves of the second piece are 137.5 and 112.5 J."""
    rows = [{"read_ns": (50 + num) * S, "power_w": watts} for num, watts in enumerate([100.0, 300.0, 200.0])]
    curve = join.Curve(rows, "power_w")
    assert curve.integral(51 * S, 51 * S + S // 2) == 137.5 and curve.integral(51 * S + S // 2, 52 * S) == 112.5
    assert curve.integral(50 * S, 52 * S) == 200 + 250


def test_beyond_its_samples_a_curve_goes_on_for_a_second_or_three_of_its_longest_gaps():
    quick = join.Curve([{"read_ns": num * S // 10, "power_w": 100.0} for num in range(11)], "power_w")
    slow = join.Curve([{"read_ns": num * 2 * S, "power_w": 100.0} for num in range(3)], "power_w")
    assert quick.integral(0, 2 * S) == pytest.approx(200) and quick.integral(0, 2 * S + 1) is None
    assert slow.integral(0, 10 * S) == 1000 and slow.integral(0, 10 * S + 1) is None


def test_new_memory_errors_are_those_since_the_run_began():
    rows = gpu_rows([100] * 4)
    for row, count in zip(rows, (7.0, 7.0, 9.0, 9.0)):
        row["ecc_uncorrected"], row["remapped_rows"] = count, 3.0
    summary = join.summary(rows, [(0, 3 * S)], *ENDS)["by_device"]["gpu0"]
    assert (summary["new_ecc_uncorrected"], summary["new_remapped_rows"]) == (2, 0)


def test_means_are_over_the_samples_and_then_over_the_devices():
    rows = gpu_rows([100] * 4, sm_clock_mhz=1000.0) + [
        row | {"device": "gpu1"} for row in gpu_rows([100] * 2, sm_clock_mhz=1600.0)
    ]
    rows[1]["sm_clock_mhz"] = 1400.0
    assert join.summary(rows, [(0, 3 * S)], *ENDS)["mean_sm_clock_mhz"] == (1100 + 1600) / 2


def test_steps_lie_where_the_device_had_them_between_synchronised_edges():
    rows = [{"step": step, "step_ms": ms} for step, ms in enumerate((100, 300, 200), 1)]
    spans = [(10 * S, 10 * S + 440_000_000), (20 * S, 20 * S + 200_000_000)]
    assert join.step_spans(rows, spans, ends=[2, 3]) == {  # 400 ms of steps in 440 ms: each a tenth longer
        1: (10 * S, 10 * S + 110_000_000),
        2: (10 * S + 110_000_000, 10 * S + 440_000_000),
        3: (20 * S, 20 * S + 200_000_000),
    }
    assert join.step_spans(rows[:2], spans, ends=[2, 3]).keys() == {1, 2}  # the time of step 3 is not known


def test_energies_of_the_steps_add_up_to_that_of_the_run():
    rows = gpu_rows([100, 100, 300, 300], sm_clock_mhz=1000.0) + [
        row | {"device": "gpu1"} for row in gpu_rows([50] * 4, sm_clock_mhz=1200.0)
    ]
    columns = join.columns(rows, {1: (0, S), 2: (S, 2 * S)}, {"energy_j": 800.0})
    assert columns == {
        "energy_j": {1: 300.0, 2: 500.0},
        "sm_clock_mhz": {1: 1100.0, 2: 1100.0},
    }  # integrals of 150 and 250 J, doubled
    assert join.columns(rows, {1: (0, S)}, {"energy_j": None}).keys() == {"sm_clock_mhz"}


def test_a_step_has_the_share_of_it_in_which_the_worst_gpu_was_slowed_down():
    """gpu1 is slowed down from its second sample to its third; of the time between two samples that differ, half."""
    rows = gpu_rows([100] * 5, throttle_reasons="sw_power_cap")
    reasons = ["none", "hw_thermal", "sw_power_cap|hw_thermal", "none", "none"]
    rows += [row | {"device": "gpu1", "throttle_reasons": reason} for row, reason in zip(gpu_rows([100] * 5), reasons)]
    steps = {number: ((number - 1) * S, number * S) for number in (1, 2, 3, 4)}
    assert join.columns(rows, steps, {"energy_j": None})["slowed_frac"] == {1: 0.5, 2: 1.0, 3: 0.5, 4: 0.0}


def test_energy_in_the_steps_is_the_counters_shared_out_by_power():
    rows = gpu_rows([100] * 30 + [200] * 31)
    ends = [{"t_ns": 0, "energy_j": {"gpu0": 1000.0}}, {"t_ns": 60 * S, "energy_j": {"gpu0": 10900.0}}]
    summary = join.summary(rows, [(40 * S, 60 * S)], *ends)
    assert summary["run_energy_j"] == 9900 and summary["integrated_run_energy_j"] == 29 * 100 + 150 + 30 * 200
    assert summary["energy_j"] == pytest.approx(4000 * 9900 / 9050)
    assert summary["mean_power_w"] == pytest.approx(4000 * 9900 / 9050 / 20)
    assert summary["energy_disagreement_pct"] == pytest.approx(100 * 850 / 9900) and summary["energy_agrees"] is False


def test_shares_of_reasons_count_timed_samples_alone():
    rows = gpu_rows([1] * 4)
    for row, reasons in zip(rows, ["hw_thermal", "none", "sw_power_cap|hw_thermal", "none"]):
        row["throttle_reasons"] = reasons
    assert join.reason_shares(join.inside(rows, [(S, 3 * S)])) == {"hw_thermal": 1 / 3, "sw_power_cap": 1 / 3}


def test_a_counter_that_began_anew_or_is_missing_gives_no_energy():
    assert join.counted_j({"gpu0": 5.0, "gpu1": 7.0}, {"gpu0": 6.0, "gpu1": 9.5}) == 3.5
    assert join.counted_j({"gpu0": 5.0}, {"gpu0": 1.0}) is None
    assert join.counted_j({"gpu0": None}, {"gpu0": 1.0}) is None


def test_a_process_of_another_namespace_is_the_runs_own():
    assert num_foreign([10, 11], own_pids={10, 11, 12}) == 0
    assert num_foreign([10, 99], own_pids={10}) == 1
    assert num_foreign([99], own_pids={10}) == 0 and num_foreign([98, 99], own_pids={10}) == 1


def test_metrics_of_energy_and_of_the_clock_by_hand():
    summary = {"energy_j": 800.0, "mean_power_w": 400.0, "mean_sm_clock_mhz": 915.0}
    name = "NVIDIA H100 80GB HBM3"
    run = {
        "measured": {"batch_tokens": 100, "dtype": "bfloat16"},
        "environment": {"gpus": [{"name": name}]},
        "world_size": 1,
        "instrument_summaries": {"telemetry": summary},
    }
    expected = {"energy_j": 800.0, "energy_j_per_step": 200.0, "energy_j_per_token": 2.0, "mean_power_w": 400.0}
    assert metrics.energy(run, 4) == expected
    peak = peak_rates.peak_flops(name, "bfloat16")
    assert metrics.mfu_at_clock(1e9, peak / 4e9, run, peak) == pytest.approx(
        0.5
    )  # a quarter of the peak at half the clock
    assert metrics.mfu_at_clock(1e9, 1e3, run | {"instrument_summaries": {}}, peak) is None


def test_processes_are_looked_for_seldom(monkeypatch):
    calls, now = [], [0.0]
    alone = types.SimpleNamespace(pid=7, children=lambda recursive: [])
    monkeypatch.setattr(telemetry_sampler.psutil, "Process", lambda pid: calls.append(pid) or alone)
    family = telemetry_sampler.Family(7, now_s=lambda: now[0])
    for now[0] in (0.0, 1.0, 9.9, 10.0):
        family.pids()
    assert calls == [7, 7]
    family.pids(since_s=0.0)
    assert calls == [7, 7, 7]


def test_the_bar_shows_the_power_of_all_gpus_at_the_last_tick(tmp_path):
    rows = [
        {"t_ns": t_ns, "device": device, "power_w": watts}
        for t_ns, device, watts in ((1, "gpu0", 9.0), (2, "gpu0", 400.0), (2, "gpu1", 300.5))
    ]
    assert Progress(tmp_path, 10, Bars())._power_w() is None
    (tmp_path / "telemetry.csv").write_text(
        line({name: name for name in FIELDS}) + line({}) + "".join(map(line, rows)) + "3,gpu0,,77"
    )
    assert Progress(tmp_path, 10, Bars())._power_w() == 700.5


@pytest.fixture
def seen(tmp_path, library, monkeypatch):
    """A made-up run of two GPUs, four steps, two validations: (watch, telemetry, context) for train()."""

    def make(gpus, interval_ms=20):
        scenario = tmp_path / "gpus.txt"
        stand_in.write(scenario, {uuid: PROBED | gpu for uuid, gpu in gpus.items()})
        for name, value in (("LD_LIBRARY_PATH", library), ("STAND_IN_GPUS", scenario)):
            monkeypatch.setenv(name, str(value))
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        context = Context(tmp_path, 0, len(gpus), "cuda", 4, HostMarks())
        (telemetry,), warnings = registry.load(
            {"telemetry": {"interval_ms": interval_ms, "host_interval_ms": interval_ms}}, context
        )
        assert not warnings
        return InstrumentSet([telemetry]), telemetry, context

    return make


def train(watch, context, step_s=0.15, after_step=lambda step: None):
    watch.on_warmup_start()
    watch.on_run_start()
    for step in range(5):
        if step in (0, 2, 4):
            watch.on_phase("validation")
            watch.on_validation(step, 1.0, 0.0)
        if step < 4:
            watch.on_step_start(step)
            time.sleep(step_s)
            watch.on_step_end(step)
            context.rows.append({"step": step + 1, "step_ms": 1e3 * step_s})
            after_step(step)
    watch.on_run_end()
    watch.collect_warnings()
    watch.close()


def test_a_run_on_two_gpus_is_recorded_with_its_energy_by_step(seen):
    watch, telemetry, context = seen({"GPU-a": {}, "GPU-b": {"power_mw": 300_000, "clock_mhz": 1655}})
    train(watch, context)
    summary, table = telemetry.summary(), telemetry.columns()
    timed_s = sum(end_ns - begin_ns for begin_ns, end_ns in telemetry._spans) / 1e9
    assert timed_s >= 0.6  # four steps of 0.15 s, or longer on a loaded machine
    assert summary["energy_j"] == pytest.approx(800 * timed_s, rel=0.03)
    assert summary["mean_power_w"] == pytest.approx(800, rel=0.03)
    assert summary["mean_sm_clock_mhz"] == 1705 and summary["by_device"]["gpu1"]["mean_power_w"] == 300
    assert sum(table["energy_j"].values()) == pytest.approx(summary["energy_j"])
    assert list(table["energy_j"]) == [1, 2, 3, 4] and list(table["sm_clock_mhz"].values()) == pytest.approx([1705] * 4)
    assert summary["sampler_cpu_frac"] > 0 and watch.warnings == []
    json.dumps(summary)


def test_an_xid_is_noted_at_once_and_warned_of_once(seen, tmp_path):
    watch, telemetry, context = seen({"GPU-a": {}, "GPU-b": {}})
    (tmp_path / "logs").mkdir()

    def fail(step):
        if step == 1:
            stand_in.write(tmp_path / "gpus.txt", {"GPU-a": PROBED, "GPU-b": PROBED | {"xid": 63}})
            real_runs.wait_for(lambda: (tmp_path / "logs" / "gpus.log").exists(), timeout_s=20)

    train(watch, context, after_step=fail)
    assert (tmp_path / "logs" / "gpus.log").read_text() == "gpu1 had Xid 63\n"
    assert [warning["error"] for warning in watch.warnings] == ["gpu1 had Xid 63"]
    assert watch.instruments == [telemetry]


@pytest.mark.slow
def test_a_sampler_that_hangs_costs_its_counters_and_not_the_record(seen, monkeypatch):
    watch, telemetry, context = seen({"GPU-a": {}})
    monkeypatch.setattr(sys.modules["bench.machine.telemetry.sampling"], "ANSWER_S", 1.0)
    process = []

    def hang(step):
        if step == 3:
            process.append(telemetry._sampling._process)
            telemetry.pause()

    train(watch, context, after_step=hang)
    assert process[0].poll() is not None  # killed
    assert watch.warnings == [
        {"instrument": "telemetry", "edge": "run", "error": "the sampler of telemetry.csv gave no answer in 1 s"}
    ]
    assert telemetry.summary()["energy_from"] == "power" and telemetry.doubts() == []


def test_an_interval_that_no_driver_can_follow_is_refused():
    """Before the run, which would go without telemetry."""
    for name in ("interval_ms", "host_interval_ms"):
        settings = {"interval_ms": 100, "host_interval_ms": 1000, name: 5}
        with pytest.raises(ValueError, match=f"instruments.telemetry.{name}=5: use a whole number of 10 or more"):
            registry.check({"telemetry": settings})


@pytest.mark.parametrize(
    ("device", "cpu_frac", "cpu_s", "num"),
    [("cpu", 0.027, 0.3, 1), ("cpu", 0.027, 0.006, 0), ("cpu", 0.005, 0.3, 0), ("cuda", 0.02, 0.3, 0)],
)
def test_a_sampler_that_takes_the_cpu_from_its_run_makes_it_suspect(tmp_path, device, cpu_frac, cpu_s, num):
    """Its pace is not part of config_id, so that what it costs is bounded."""
    telemetry = registry.kind("telemetry")(Context(tmp_path, 0, 1, device, 4, HostMarks()), interval_ms=10)
    telemetry._stopped = {}
    cost = {"sampler_cpu_frac": cpu_frac, "sampler_cpu_s": cpu_s}
    telemetry.summary = lambda: {"by_device": {}, "foreign_processes": {}, **cost}
    doubts = telemetry.doubts()
    assert len(doubts) == num
    assert not doubts or doubts[0].startswith("telemetry itself took 2.7 % of a core (limit 1 %): set a longer")


@pytest.mark.slow
def test_a_run_is_the_same_to_the_bit_with_telemetry_and_without(tmp_path, library, bare_run):
    """A run on the CPU stays one where NVML shows GPUs that torch does not see."""
    scenario = tmp_path / "gpus.txt"
    stand_in.write(scenario, {f"GPU-{name}": PROBED for name in "ab"})
    env = {"LD_LIBRARY_PATH": str(library), "STAND_IN_GPUS": str(scenario)}
    seen = real_runs.run(
        tmp_path, "seed=5", "instruments=[regions,telemetry]", "instruments.telemetry.host_interval_ms=10", **env
    )
    assert real_runs.losses(bare_run) == real_runs.losses(seen)
    run = real_runs.run_json(seen)
    assert len(json.loads((seen / "environment.json").read_text())["gpus"]) == 2
    summary = run["instrument_summaries"]["telemetry"]
    assert summary["source"] == "host" and run["environment"]["gpus"] == []
    assert len(join.read(seen / "telemetry.csv")) == sum(summary["num_samples"].values()) > 2
    assert 0 < summary["num_timed_samples"] <= sum(summary["num_samples"].values())
    assert run["metrics"]["energy_j"] is None
    assert not any(warning["instrument"] == "telemetry" for warning in run.get("warnings", ()))


def test_a_sampler_without_proc_says_why_it_ends_in_one_line(tmp_path):
    code = "import psutil, runpy; psutil.cpu_percent = lambda _: open('/none/stat')\n"
    code += "runpy.run_module('bench.machine.telemetry.sampler', run_name='__main__')"
    job = {"path": str(tmp_path / "x.csv"), "interval_ms": 20, "host_interval_ms": 20, "uuids": [], "num_devices": 0}
    command = [sys.executable, "-c", code, json.dumps(job | {"root_pid": os.getpid()})]
    done = subprocess.run(command, cwd=real_runs.REPO, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode and done.stderr == "telemetry: [Errno 2] No such file or directory: '/none/stat'\n"


def test_a_killed_sampler_is_a_warning_and_closing_it_is_no_error(tmp_path):
    settings = {"interval_ms": 100, "host_interval_ms": 100}
    sampler = sampling.Sampling(tmp_path / "telemetry.csv", settings, [], 0, os.getpid())
    sampler.wait()
    sampler.start()
    sampler._process.kill()
    sampler._process.wait()
    assert sampler.stop()["report"]["warnings"]
    sampler.close()  # the word that nobody took is gone: it fails no second time


@pytest.mark.slow
def test_a_killed_worker_leaves_no_sampler_behind(tmp_path):
    with real_runs.Background(tmp_path, "instruments=[telemetry]") as running:
        running.wait_for_step(2)
        (sampler,) = running.pids("bench.machine.telemetry.sampler")
        os.kill(running.rank_pid(0), signal.SIGKILL)
        real_runs.wait_for(lambda: processes.start_ticks(sampler) is None, 20)
        assert join.read(running.folder / "telemetry.csv")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_eight_gpus_at_the_default_pace_cost_little(tmp_path, library):
    """CPU time of the sampler's own process, 2.0 to 2.3 % of a core here; the bound leaves room for a busy machine.

    The stand-in answers at once: this is our own cost and not a driver's.
    """
    gpus = {f"GPU-{number:08d}-0000-0000-0000-000000000000": {} for number in range(8)}

    def cpu_s(pid):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")  # utime, stime

    with Sampling(tmp_path, library, gpus, interval_ms=100) as sampling:
        sampling.ask("start")
        before_s, num_before = cpu_s(sampling.process.pid), len(join.read(sampling.path))
        sampling.wait_for_rows(num_before + 8 * 20)  # it takes fewer of them a second where the machine is busy
        used_s = cpu_s(sampling.process.pid) - before_s
        num_samples = (len(join.read(sampling.path)) - num_before) / 8
        sampling.ask("stop")
    assert used_s / num_samples < 0.05 * 0.1
