"""Telemetry: the real nvidia-ml-py on a compiled stand-in for the driver's library, the join by hand-worked numbers, a race."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import racing

from bench import hardware, metrics
from bench.telemetry import join
from bench.telemetry.sampler import num_foreign

S = 10**9
USUAL = {
    "power_mw": 500_000, "energy_mj": 9_000_000_123, "clock_mhz": 1755, "temp_c": 61, "reasons": 0, "limit_mw": 700_000,
    "lost": 0, "denied": 0, "slow_ms": 0, "unsupported": 0, "num_processes": 1,
}  # fmt: skip


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    """Folder of the stand-in for libnvidia-ml.so.1."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("a stand-in for NVIDIA's library needs Linux and a C compiler")
    folder = tmp_path_factory.mktemp("nvml")
    source = Path(__file__).parent / "fake_nvml.c"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", folder / "libnvidia-ml.so.1", source], check=True)
    return folder


class Sampling:
    """A sampler of those GPUs; the order of uuids is CUDA's, that of the scenario NVML's."""

    def __init__(self, folder, library, gpus, uuids=None, interval_ms=20, **env):
        self.path, self.scenario = folder / "telemetry.csv", folder / "gpus.txt"
        self.gpus = {uuid: USUAL | changed for uuid, changed in gpus.items()}
        self.write()
        uuids = list(gpus) if uuids is None else uuids
        job = {"path": str(self.path), "interval_ms": interval_ms, "uuids": uuids, "num_devices": len(uuids), "root_pid": os.getpid()}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "bench.telemetry.sampler", json.dumps(job)], cwd=racing.REPO, text=True, bufsize=1,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env=os.environ | {"LD_LIBRARY_PATH": str(library), "FAKE_NVML": str(self.scenario)} | env,
        )  # fmt: skip
        assert self.answer() == {"ready": True}

    def write(self):
        text = "".join(f"{uuid} {' '.join(map(str, gpu.values()))}\n" for uuid, gpu in self.gpus.items())
        new = self.scenario.with_suffix(".new")
        new.write_text(text)
        new.replace(self.scenario)

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
        self.process.stdin.close()
        try:
            self.process.wait(10)
        finally:
            self.process.kill()
            self.process.stdout.close()


def sampled(tmp_path, library, gpus, num_rows=20, **more):
    """-> (rows, what the record would say)."""
    with Sampling(tmp_path, library, gpus, **more) as sampling:
        started = sampling.ask("start")
        sampling.wait_for_rows(num_rows)
        stopped = sampling.ask("stop")
        assert sampling.process.wait(10) == 0
    rows = join.read(sampling.path)
    told = join.summary(rows, [(started["t_ns"], stopped["t_ns"])], started, stopped)
    return rows, told | stopped["report"]


def test_what_the_library_says_is_in_the_rows_in_their_units(tmp_path, library):
    rows, told = sampled(tmp_path, library, {"GPU-a": {"reasons": 0x24}}, num_rows=25)
    row = rows[3]
    assert (row["device"], row["power_w"], row["sm_clock_mhz"], row["mem_clock_mhz"]) == ("gpu0", 500, 1755, 2619)
    assert (row["temp_c"], row["util_pct"], row["mem_gib"], row["power_limit_w"]) == (61, 97, 2, 700)
    assert (row["power_instant_w"], row["throttle_reasons"], row["ecc_uncorrected"]) == (501, "sw_power_cap|sw_thermal", 0)
    assert row["pcie_tx_mib_s"] > 0 and row["cpu_util_pct"] is None
    assert told["source"] == "nvml" and told["unsupported"] == {"gpu0": ["nvlink_tx_mib_s", "nvlink_rx_mib_s"]}
    assert told["energy_from"] == "counter" and told["energy_agrees"] is True
    assert told["mean_power_w"] == pytest.approx(500, rel=0.02)


def test_what_a_gpu_does_not_support_is_empty_in_every_row_and_named_once(tmp_path, library):
    rows, told = sampled(tmp_path, library, {"GPU-a": {"unsupported": 1}}, num_rows=25)
    assert all(row["energy_j"] is None and row["power_w"] == 500 for row in rows)
    assert told["unsupported"]["gpu0"].count("energy_j") == 1
    assert told["energy_from"] == "power" and told["mean_power_w"] == pytest.approx(500)


def test_what_may_not_be_read_is_empty_and_a_warning(tmp_path, library):
    rows, told = sampled(tmp_path, library, {"GPU-a": {"denied": 1}})
    assert all(row["util_pct"] is None and row["temp_c"] == 61 for row in rows)
    assert told["warnings"] == ["gpu0: no permission to read util_pct"]


def test_a_gpu_lost_in_mid_run_ends_its_rows_and_not_those_of_the_other(tmp_path, library):
    with Sampling(tmp_path, library, {"GPU-a": {}, "GPU-b": {}}) as sampling:
        started = sampling.ask("start")
        sampling.wait_for_rows(10)
        sampling.gpus["GPU-a"]["lost"] = 1
        sampling.write()
        sampling.wait_for_rows(20)
        time.sleep(join.MAX_GAP_S)
        stopped = sampling.ask("stop")
    rows = join.read(sampling.path)
    assert rows[-1]["device"] == "gpu1" and {row["device"] for row in rows} == {"gpu0", "gpu1"}
    (warning,) = stopped["report"]["warnings"]
    assert warning.startswith("gpu0 was lost")
    told = join.summary(rows, [(started["t_ns"], stopped["t_ns"])], started, stopped)
    assert told["energy_j"] is None and told["mean_power_w"] is None


def test_a_slow_call_makes_fewer_samples_and_no_burst(tmp_path, library):
    rows, told = sampled(tmp_path, library, {"GPU-a": {"slow_ms": 100}}, num_rows=5)
    apart_ms = [(after["t_ns"] - before["t_ns"]) / 1e6 for before, after in zip(rows, rows[1:])]
    assert min(apart_ms) >= 95 and told["max_tick_ms"] >= 100


def test_gpus_are_found_by_uuid_and_not_by_their_number(tmp_path, library):
    gpus = {"GPU-a": {"power_mw": 100_000}, "GPU-b": {"power_mw": 200_000}, "GPU-c": {"power_mw": 300_000}}
    rows, _ = sampled(tmp_path, library, gpus, uuids=["GPU-c", "GPU-a"])
    assert {(row["device"], row["power_w"]) for row in rows} == {("gpu0", 300), ("gpu1", 100)}


def test_limits_slowdowns_and_foreign_processes_are_doubts_with_their_figures(tmp_path, library):
    gpus = {"GPU-a": {"reasons": 0x40, "num_processes": 3}, "GPU-b": {"limit_mw": 350_000}}
    _, told = sampled(tmp_path, library, gpus)
    assert join.doubts(told) == [
        "telemetry: gpu0 was slowed by hw_thermal in 100.0 % of its samples, over 1 %",
        "telemetry: 2 foreign processes on gpu0 during the run",
        "telemetry: the GPUs have unequal power limits: gpu0 700 W, gpu1 350 W",
    ]


def test_without_a_driver_the_host_is_sampled_and_the_record_is_told(tmp_path, library):
    rows, told = sampled(tmp_path, library, {"GPU-a": {}}, num_rows=3, FAKE_NVML_NO_DRIVER="1")
    assert told["source"] == "host" and told["warnings"] == ["NVML: Driver Not Loaded"]
    assert {row["device"] for row in rows} == {"cpu"} and rows[-1]["rss_gib"] > 0


def test_the_sampler_ends_when_its_pipe_closes(tmp_path, library):
    with Sampling(tmp_path, library, {"GPU-a": {}}) as sampling:
        sampling.ask("start")
        sampling.process.stdin.close()
        assert sampling.process.wait(10) == 0


def gpu_rows(watts, **more):
    """One sample a second from second 0."""
    return [{"t_ns": num * S, "device": "gpu0", "power_w": power_w, **more} for num, power_w in enumerate(watts)]


def test_power_is_integrated_by_trapezoids_and_cut_at_the_ends():
    rows = gpu_rows([100, 300, 300])
    assert join.integrated_j(rows, 0, 2 * S) == 200 + 300
    assert join.integrated_j(rows, S // 2, S) == 125  # from 200 to 300 W in half a second
    assert join.step_energies_j(rows, [(0, S), (S, 2 * S)]) == [200, 300]
    assert join.integrated_j(rows, 0, 60 * S) is None  # nobody knows what it drew in the last minute


def test_energy_in_the_steps_is_the_counters_shared_out_by_power():
    rows = gpu_rows([100] * 30 + [200] * 31)
    ends = [{"t_ns": 0, "energy_j": {"gpu0": 1000.0}}, {"t_ns": 60 * S, "energy_j": {"gpu0": 10900.0}}]
    told = join.summary(rows, [(40 * S, 60 * S)], *ends)
    assert told["energy_j"] == 9900 and told["integrated_energy_j"] == 29 * 100 + 150 + 30 * 200
    assert told["train_energy_j"] == pytest.approx(4000 * 9900 / 9050)
    assert told["energy_disagreement_pct"] == pytest.approx(100 * 850 / 9900) and told["energy_agrees"] is False


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
    assert num_foreign([10, 11], ours={10, 11, 12}) == 0
    assert num_foreign([10, 99], ours={10}) == 1
    assert num_foreign([99], ours={10}) == 0 and num_foreign([98, 99], ours={10}) == 1


def test_metrics_of_energy_and_of_the_clock_by_hand():
    told = {"energy_j": 900.0, "train_energy_j": 800.0, "mean_power_w": 400.0, "mean_sm_clock_mhz": 915.0}
    name = "NVIDIA H100 80GB HBM3"
    run = {
        "measured": {"batch_tokens": 100, "dtype": "bfloat16"}, "environment": {"gpus": [{"name": name}]}, "world_size": 1,
        "instrument_summaries": {"telemetry": told},
    }  # fmt: skip
    assert metrics.energy(run, 4) == {"energy_j": 900.0, "energy_j_per_token": 2.0, "mean_power_w": 400.0}
    peak = hardware.peak_flops(name, "bfloat16")
    assert metrics.mfu_at_clock(1e9, peak / 4e9, run, peak) == pytest.approx(0.5)  # a quarter of the peak at half the clock
    assert metrics.mfu_at_clock(1e9, 1e3, run | {"instrument_summaries": {}}, peak) is None


@pytest.mark.slow
def test_a_race_is_the_same_to_the_bit_with_telemetry_and_without(tmp_path):
    without = racing.race(tmp_path / "without", "instruments=[regions]")
    seen = racing.race(tmp_path / "with", "instruments=[regions,telemetry]", "instruments.telemetry.interval_ms=50")
    assert racing.losses(without) == racing.losses(seen)
    run = racing.run_json(seen)
    told = run["instrument_summaries"]["telemetry"]
    assert told["source"] == "host" or run["environment"]["gpus"]
    assert len(join.read(seen / "telemetry.csv")) == sum(told["num_samples"].values()) > 2
    assert 0 < told["num_timed_samples"] <= sum(told["num_samples"].values())
    assert run["metrics"]["energy_j"] is None and not any(one["instrument"] == "telemetry" for one in run.get("warnings", ()))


@pytest.mark.slow
def test_a_killed_worker_leaves_no_sampler_behind(tmp_path):
    with racing.Background(tmp_path, "instruments=[telemetry]") as race:
        race.wait_for_step(2)
        (sampler,) = race.pids("bench.telemetry.sampler")
        os.kill(race.rank_pid(0), signal.SIGKILL)
        deadline_s = time.monotonic() + 20
        while Path(f"/proc/{sampler}").exists():
            assert time.monotonic() < deadline_s
            time.sleep(0.1)
        assert join.read(race.folder / "telemetry.csv")


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
        before_s, started_s = cpu_s(sampling.process.pid), time.monotonic()
        time.sleep(4)
        used_frac = (cpu_s(sampling.process.pid) - before_s) / (time.monotonic() - started_s)
        num_rows = len(join.read(sampling.path))
        sampling.ask("stop")
    assert num_rows >= 8 * 20 and used_frac < 0.05
