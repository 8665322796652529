"""Passports: figures of made-up devices, files, changes, peers; and the machine before and after a race."""

import json

import pytest
import torch

from bench.base.units import GIB, MIB
from bench.cli import doctor
from bench.config.schema import HardwareConfig
from bench.machine import passports
from bench.plans.passport import rank, session, works
from bench.plans.race import condition


class MadeUp:
    """A device on which a call takes call_s, whatever it does; its clock is that of its calls."""

    def __init__(self, call_s, device_type="cuda"):
        self.call_s, self.device_type, self.at_s, self.blocks = call_s, device_type, 0.0, []

    def seconds(self, work, num_calls):
        work()
        self.blocks.append(num_calls)
        self.at_s += num_calls * self.call_s
        return num_calls * self.call_s

    def now_s(self):
        return self.at_s


ENDS = ("low", "value", "high")


def figure(kind, what, value, spread=0.0, **facts):
    ends = {"low": value * (1 - spread), "value": value, "high": value * (1 + spread)}
    return {"kind": kind, "what": what, "unit": passports.UNIT[kind], **ends, "num_samples": 10, **facts}


def gemm(precision, shape, value, spread=0.0, **facts):
    return figure("gemm", f"gemm {precision} {shape}", value, spread, precision=precision, shape=list(shape), **facts)


def passport(*devices, at="2026-11-22T10:00:00.000Z", collectives=(), **fields):
    """Returns a passport.  devices: a list of figures for each GPU."""
    entries = [
        {"id": f"id-{index}", "name": "NVIDIA H100 80GB HBM3", "index": index, "figures": list(own), "under_load": {}}
        for index, own in enumerate(devices)
    ]
    facts = {"schema_version": 1, "at": at, "took_s": 60.0, "device": "cuda", "environment": {}, "omitted": []}
    return facts | {"devices": entries, "collectives": list(collectives)} | fields


# ---- measuring


def test_a_sample_is_a_mean_over_enough_calls_and_the_first_two_only_guess():
    device = MadeUp(1e-4)  # 5 ms a sample on a GPU: 50 calls
    assert works.call_seconds(lambda: None, device, device.now_s) == pytest.approx([1e-4] * works.NUM_SAMPLES)
    assert device.blocks == [1, 1] + [50] * works.NUM_SAMPLES


def test_slow_work_gets_fewer_samples_but_never_less_than_the_least():
    device = MadeUp(1.0)
    assert works.call_seconds(lambda: None, device, device.now_s) == [1.0] * works.MIN_SAMPLES


def test_a_product_is_two_flop_a_multiplication_and_a_copy_is_read_and_written():
    timer, device = MadeUp(1e-3), torch.device("cpu")
    product = works.Case("gemm", precision="float32", shape=(10, 20, 30))  # 12,000 FLOP in 1 ms: 12 MFLOP/s
    assert works.values(product, device, timer) == pytest.approx([12e6 / 1e12] * works.NUM_SAMPLES)
    moved = works.Case("copy", num_bytes=2 * MIB)  # 2/1024 GiB in 1 ms
    assert works.values(moved, device, timer) == pytest.approx([2 / 1024 * 1000] * works.NUM_SAMPLES)


def test_what_a_device_cannot_do_is_none_and_a_lost_one_an_error():
    class Fails(MadeUp):
        def seconds(self, work, num_calls):
            raise RuntimeError(self.message)

    failing, case = Fails(1.0), works.Case("copy", num_bytes=1024)
    failing.message = "not implemented for this type"
    assert works.values(case, torch.device("cpu"), failing) is None
    failing.message = "CUDA error: an illegal memory access was encountered"
    with pytest.raises(RuntimeError, match="CUDA error"):
        works.values(case, torch.device("cpu"), failing)


def test_cuda_is_timed_by_events_around_the_calls(monkeypatch):
    """Made-up events of a device whose clock the work moves on: the host's time is not in it."""
    clock_ms = [0.0]

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at_ms = clock_ms[0]

        def synchronize(self):
            pass

        def elapsed_time(self, other):
            return other.at_ms - self.at_ms

    monkeypatch.setattr(torch.cuda, "Event", Event)

    def work():
        clock_ms[0] += 2.0

    assert works.Timer("cuda").seconds(work, 3) == pytest.approx(6e-3)


def test_a_launch_is_timed_by_the_host_and_waits_once_a_call_or_once_a_block(monkeypatch):
    waits = []
    monkeypatch.setattr(torch.cuda, "synchronize", waits.append)
    device = torch.device("cpu")
    assert all(us > 0 for us in works._kernels(device, waits=False))
    num_blocks = works.NUM_SAMPLES + 1
    assert len(waits) == num_blocks
    assert all(us > 0 for us in works._kernels(device, waits=True))
    assert len(waits) == num_blocks + 2 * num_blocks


def test_bus_bandwidth_is_that_of_nccl_tests():
    assert passports.bus_bytes("all_reduce", 80, 8) == 140  # 2 * 7/8
    assert passports.bus_bytes("all_gather", 80, 8) == passports.bus_bytes("reduce_scatter", 80, 8) == 70


def test_gpus_are_measured_in_every_precision_that_they_have_and_ranks_only_together():
    names = {case.precision for case in works.cases_of_device("cuda", has_float8=True) if case.kind == "gemm"}
    assert names == {"bfloat16", "tf32", "float16", "float32", "float8"}
    assert all(case.precision != "float8" for case in works.cases_of_device("cuda"))
    assert works.cases_of_ranks("cuda", 1) == []
    assert {case.world_size for case in works.cases_of_ranks("cuda", 8)} == {8}
    every = [
        *works.cases_of_device("cuda", has_float8=True),
        *works.cases_of_device("cpu", [1, 2]),
        *works.cases_of_ranks("cpu", 2),
    ]
    assert len({case.label for case in every if case.kind != "clock"}) == len(every) - 2


def test_a_thread_wakes_up_in_microseconds():
    delays_us = works.wake_ups()
    assert len(delays_us) == works.NUM_SAMPLES and all(0.1 < us < 1e6 for us in delays_us)


def test_the_clock_is_read_while_the_load_runs(tmp_path):
    (tmp_path / "cpuinfo").write_text("processor\t: 0\ncpu MHz\t\t: 2100.5\nprocessor\t: 1\ncpu MHz\t\t: 3400.0\n")
    loads = []
    samples = rank.under(lambda: loads.append(1), lambda: rank.cpu_facts(tmp_path / "cpuinfo"), 0.1, 0.01)
    assert samples and all(facts == {"clock_mhz": 3400.0} for facts in samples)
    assert loads
    assert rank.cpu_facts(tmp_path / "none") == {"clock_mhz": None}
    sampled = {"sm_clock_mhz": 1755, "temp_c": 61, "power_w": 650.0, "throttle_reasons": "sw_power_cap", "util_pct": 99}
    gpu = type("Gpu", (), {"sample": lambda self, t_ns, now_ns: sampled})()
    assert rank.gpu_facts(gpu)["clock_mhz"] == 1755 and rank.gpu_facts(gpu)["throttle_reasons"] == "sw_power_cap"
    assert rank.gpu_facts(None)["clock_mhz"] is None


# ---- ceilings


def test_ceilings_are_the_best_tenth_of_the_nearest_case():
    of = passports.Ceilings(
        [
            gemm("bfloat16", (4096, 4096, 4096), 700.0, 0.1),
            gemm("bfloat16", (512, 512, 512), 100.0),
            figure("copy", "copy small", 1000.0, num_bytes=MIB),
            figure("copy", "copy large", 2000.0, num_bytes=GIB),
            figure("collective", "all_reduce", 200.0, name="all_reduce", num_bytes=MIB, world_size=8),
        ],
        "2026-11-22T10:00:00Z",
    )
    assert of.peak_flops("bfloat16") == pytest.approx(770e12)
    assert of.peak_flops("float32") is None
    assert of.shape_flops("bfloat16", (500, 600, 500)) == pytest.approx(100e12)
    assert of.shape_flops("bfloat16", (4096, 4096, 8192)) == pytest.approx(770e12)
    assert of.shape_flops("bfloat16", (1, 4096, 4096)) is None  # twelve powers of two away
    assert of.bytes_per_s(4 * MIB) == 1000 * GIB and of.bytes_per_s(GIB // 4) == 2000 * GIB
    assert of.bus_bytes_per_s("all_reduce", 3 * MIB, 8) == 200 * GIB
    assert of.bus_bytes_per_s("all_reduce", 3 * MIB, 4) is None
    assert of.bus_bytes_per_s("all_gather", 3 * MIB, 8) is None


def run_on(uuid_hash, started_at):
    env = {"gpus": [{"name": "H100", "uuid_hash": uuid_hash}], "cpu_model": "x", "num_cpus": 2, "memory_gib": 8.0}
    return {"environment": env, "started_at": started_at}


A_CPU = {"cpu_model": "A CPU", "num_cpus": 4, "memory_gib": 15.9, "gpus": []}


def cpus_passport(figures, **fields):
    device = {"id": passports.cpu_id(A_CPU), "name": "A CPU", "index": 0, "figures": figures, "under_load": {}}
    return passport(**fields) | {"device": "cpu", "devices": [device]}


def ceilings_on_a_cpu(num_threads, started_at=None):
    return passports.ceilings_of_run({"environment": A_CPU | {"num_threads": num_threads}, "started_at": started_at})


def test_a_run_gets_the_passport_of_its_device_that_is_nearest_in_time(results):
    for day, rate in (("01", 500.0), ("20", 700.0)):
        passports.write(passport([gemm("bfloat16", (64, 64, 64), rate)], at=f"2026-11-{day}T10:00:00.000Z"))
    (results / passports.FOLDER / "damaged.json").write_text("{")
    assert passports.ceilings_of_run(run_on("id-0", "2026-11-02T00:00:00Z")).peak_flops("bfloat16") == 500e12
    newer = passports.ceilings_of_run(run_on("id-0", "2026-11-19T00:00:00Z"))
    assert newer.peak_flops("bfloat16") == 700e12
    assert newer.source == "measured, passport of 2026-11-20"
    assert passports.ceilings_of_run(run_on("another", "2026-11-19T00:00:00Z")) is None
    assert passports.ceilings_of_run(run_on("id-0", None), rank=1) is None


def test_of_a_cpu_the_figures_with_the_runs_threads_count(results):
    mine = [gemm("float32", (64, 64, 64), 0.1 * number, num_threads=number) for number in (1, 4)]
    both = [figure("collective", "all_reduce", 1.0, name="all_reduce", num_bytes=MIB, world_size=2)]
    passports.write(cpus_passport(mine, collectives=both))
    for num_threads, tflops in ((1, 0.1), (2, 0.1), (4, 0.4)):  # 2 were not measured: the most below
        assert ceilings_on_a_cpu(num_threads).peak_flops("float32") == pytest.approx(1e12 * tflops)
    assert ceilings_on_a_cpu(4).bus_bytes_per_s("all_reduce", MIB, 2) == GIB


def test_a_cpus_passport_measured_beside_other_programs_comes_last_and_says_so(results):
    for day, rate, cores in (("20", 0.05, 1.5), ("01", 0.1, 0.1)):
        mine = [gemm("float32", (64, 64, 64), rate, num_threads=1)]
        passports.write(cpus_passport(mine, at=f"2026-11-{day}T10:00:00.000Z", foreign_cpu_cores=cores))
        ceilings = ceilings_on_a_cpu(1, "2026-11-20T10:00:00Z")
        assert ceilings.peak_flops("float32") == pytest.approx(1e12 * rate)
        beside = " beside programs that took 1.5 cores" if cores > 1 else ""
        assert ceilings.source == f"measured{beside}, passport of 2026-11-{day}"


@pytest.mark.parametrize(
    "change", [{"schema_version": 2}, {"devices": "none"}, {"collectives": [figure("copy", "x", 1.0) | {"low": -1.0}]}]
)
def test_what_is_no_passport_is_refused(results, change):
    path = results / "one.json"
    path.write_text(json.dumps(passport([]) | change))
    with pytest.raises(ValueError, match="one.json"):
        passports.read(path)


# ---- judging


def test_a_change_beyond_the_spread_of_the_earlier_samples_is_flagged():
    shape = (64, 64, 64)
    earlier = [passport([gemm("bfloat16", shape, rate, 0.02)]) for rate in (700.0, 710.0)]  # 686 to 724.2
    (line,) = passports.changes(passport([gemm("bfloat16", shape, 600.0, 0.02)]), earlier)
    assert (line["before"], line["now"], line["num_earlier"]) == (705.0, 600.0, 2)
    assert line["change_pct"] == pytest.approx(-14.894, abs=1e-3)
    assert line["beyond_spread"] and line["is_worse"]
    (line,) = passports.changes(passport([gemm("bfloat16", shape, 690.0, 0.02)]), earlier)
    assert not line["beyond_spread"]
    (line,) = passports.changes(
        passport([figure("launch", "launch", 9.0)]), [passport([figure("launch", "launch", 5.0)])]
    )
    assert line["beyond_spread"] and line["is_worse"]  # of a launch less is better
    assert passports.changes(passport([figure("clock", "clock", 9.0)]), []) == []


def test_collectives_are_compared_only_with_those_of_the_same_box():
    now, old = (figure("collective", "all_reduce", value, name="all_reduce") for value in (100.0, 200.0))
    same = passports.changes(passport([], [], collectives=[now]), [passport([], [], collectives=[old])])
    assert [(line["device"], line["change_pct"]) for line in same] == [(None, -50.0)]
    assert passports.changes(passport([], [], collectives=[now]), [passport([], collectives=[old])]) == []


def test_a_gpu_slower_than_its_peers_is_named():
    rates = (700.0, 690.0, 630.0, 705.0)  # the median of the others is 700: 630 is a tenth below
    slow = passports.slower_than_peers(passport(*([gemm("bfloat16", (64, 64, 64), rate)] for rate in rates)))
    (line,) = slow
    assert (line["device"], line["id"], line["peers"]) == (2, "id-2", 700.0)
    assert line["slower_pct"] == pytest.approx(10.0)
    text = passports.as_text(passport([], [], [], []), passports.folder() / "x.json", [], slow)
    assert "GPU 2 is slower than its peers: gemm bfloat16" in text
    assert passports.slower_than_peers(passport([gemm("bfloat16", (64, 64, 64), 1.0)])) == []


# ---- a whole one, on this CPU


@pytest.mark.slow
def test_the_doctor_measures_keeps_compares_and_prints(results, monkeypatch, answer_of):
    """Stopped after five seconds, so that some figures are omitted; the second has one that is less than half."""
    hardware, progress = HardwareConfig(device="cpu", num_processes=1, num_threads=1), []
    first = session.measure(hardware, doctor.environment.environment(), progress.append, limit_s=5.0)
    assert passports.read(passports.write(first)) == first
    measured = {figure["what"]: figure for figure in first["devices"][0]["figures"]}
    assert all(0 < figure["low"] <= figure["value"] <= figure["high"] for figure in measured.values())
    copies = [name for name, figure in measured.items() if figure["kind"] == "copy"]
    assert copies and measured[copies[0]]["num_samples"] >= works.MIN_SAMPLES
    assert progress[0].startswith("1/") and progress[0].endswith("clock")
    names = {*measured, *(figure["what"] for figure in first["collectives"])}
    omitted = {line.rpartition(":")[0] for line in first["omitted"]}
    assert omitted and not names & omitted
    second = json.loads(json.dumps(first | {"at": "2100-01-01T00:00:00.000Z"}))
    slower = next(figure for figure in second["devices"][0]["figures"] if figure["what"] == copies[0])
    slower |= {name: slower[name] * measured[copies[0]]["low"] / measured[copies[0]]["high"] / 2 for name in ENDS}
    changes = passports.changes(second, [first])
    assert {line["what"] for line in changes} == names
    assert [line["what"] for line in changes if line["beyond_spread"]] == [copies[0]]
    text = passports.as_text(second, passports.folder() / "x.json", changes, [])
    assert f"compared with 1 earlier passport: 1 of {len(names)} figures beyond the spread (*), 1 of them worse" in text
    assert "not measured, no time" in text
    monkeypatch.setattr(session, "measure", lambda hardware, env, say: second)
    printed = answer_of(doctor, "hardware=cpu", "--passport")
    assert printed["passport"] == second and len(printed["changes"]) == len(changes)
    assert len(list((results / passports.FOLDER).glob("*.json"))) == 2


@pytest.mark.parametrize(
    ("beyond", "sentence"),
    [
        (gemm("bfloat16", (8192, 8192, 8192), 87487.0), "came to 88.5 times what the data sheet of NVIDIA H100 80GB"),
        (figure("copy", "copy 2 GiB", 6240.0, num_bytes=2 * GIB), "copy 2 GiB came to 2.0 times what the data sheet"),
    ],
)
def test_figures_beyond_the_data_sheet_are_no_measurement(beyond, sentence):
    """989 TFLOP/s; 3.35e12 bytes/s are 3,120 GiB/s.  What a cache holds may be faster than memory, so 2 MiB may."""
    fine = [gemm("bfloat16", (8192, 8192, 8192), 1100.0), figure("copy", "copy 2 MiB", 6240.0, num_bytes=2 * MIB)]
    (device,) = passport(fine)["devices"]
    session._refuse_beyond_sheet(device)
    with pytest.raises(session.NotMeasured, match=sentence):
        session._refuse_beyond_sheet(device | {"figures": [*fine, beyond]})
    session._refuse_beyond_sheet(device | {"figures": [*fine, beyond], "name": "NVIDIA of tomorrow"})


def test_a_measurement_that_fails_is_a_sentence_and_exit_code_1(results, monkeypatch, capsys):
    def fails(hardware, env, say):
        raise session.NotMeasured("0 of 2 ranks answered")

    monkeypatch.setattr(session, "measure", fails)
    assert doctor.main(["hardware=cpu", "--passport"]) == 1
    assert "not measured: 0 of 2 ranks answered" in capsys.readouterr().err
    assert not (results / passports.FOLDER).exists()


ARMS = {"A": {"overrides": ["hardware.device=cpu", "hardware.num_processes=1", "hardware.num_threads=1"]}}


def of_rates(at, *rates):
    """Returns a passport of devices whose copy reaches these rates, with samples 1 % around them."""
    figures = [
        {"what": "copy 2.0 GiB", "kind": "copy", "unit": "GiB/s", "num_bytes": 2**31, "num_samples": 9}
        | {"value": rate, "low": 0.99 * rate, "high": 1.01 * rate}
        for rate in rates
    ]
    devices = [{"id": f"id-{n}", "name": "GPU", "index": n, "figures": [figure]} for n, figure in enumerate(figures)]
    facts = {"schema_version": 1, "at": f"2026-11-0{at}T00:00:00.000Z", "took_s": 1.0, "device": "cuda"}
    return facts | {"environment": {}, "devices": devices, "collectives": [], "omitted": []}


@pytest.fixture
def race(tmp_path, monkeypatch):
    """Returns (folder, results, measure(mode, when, *rates))."""
    monkeypatch.setenv("SPEEDRUN_RESULTS", str(tmp_path))
    folder = tmp_path / "races" / "mine"
    folder.mkdir(parents=True)

    def measure(mode, when, *rates, at=5):
        monkeypatch.setattr(session, "measure", lambda *_: of_rates(at, *rates))
        condition.measure(folder, tmp_path, ARMS, mode, when)

    return folder, tmp_path, measure


def test_a_figure_below_its_history_is_flagged_with_both_numbers(race, capsys):
    folder, _, measure = race
    passports.write(of_rates(1, 100.0))
    measure("flag", "before", 90.0)  # its best sample, 90.9, is below the worst of the passport, 99
    sentence = "copy 2.0 GiB of device 0 (GPU) is 10.0 % worse than it was: 90 GiB/s, 100 in 1 earlier measurement"
    assert condition.faults_of(folder) == [f"before the race, {sentence}"]
    assert sentence in capsys.readouterr().out
    measure("flag", "before", 98.5, at=6)  # 2 %: within what healthy devices differ by
    assert len(condition.of(folder)) == 2 and len(condition.faults_of(folder)) == 1


def test_what_other_races_measured_is_history_too(race):
    folder, results, measure = race
    other = results / "races" / "other"
    other.mkdir()
    rows = [{"when": "after", "passport": of_rates(2, 100.0), "faults": []}]
    (other / condition.FILE).write_text(json.dumps({"measurements": rows}))
    (results / "races" / "damaged").mkdir()
    (results / "races" / "damaged" / condition.FILE).write_text("{")
    measure("flag", "before", 80.0)
    assert "20.0 % worse" in condition.faults_of(folder)[0]


def test_a_machine_that_fell_behind_refuses_a_race_where_that_was_asked(race):
    folder, _, measure = race
    passports.write(of_rates(1, 100.0))
    with pytest.raises(ValueError, match="the machine has changed: copy .* --machine=flag"):
        measure("refuse", "before", 90.0)
    measure("refuse", "after", 80.0, at=6)  # it has been run: its result is kept, with the fault beside it
    assert condition.faults_of(folder)[-1].startswith("after the race, copy")


def test_a_gpu_that_differs_from_its_peers_and_one_that_fell_in_the_race_are_named(race):
    folder, _, measure = race
    measure("flag", "before", 100.0, 100.0, 90.0)  # no history
    assert condition.faults_of(folder) == [
        "before the race, copy 2.0 GiB of device 2 is 10.0 % below its peers: 90 GiB/s, the others' median 100"
    ]
    measure("flag", "after", 100.0, 80.0, 90.0, at=6)
    assert [fault for fault in condition.faults_of(folder) if fault.startswith("after") and "worse" in fault] == [
        "after the race, copy 2.0 GiB of device 1 (GPU) is 20.0 % worse than it was: "
        "80 GiB/s, 100 in 1 earlier measurement"
    ]


@pytest.mark.parametrize("mode", ["off", "auto"])
def test_a_race_on_a_cpu_measures_nothing_unless_asked_and_composes_no_config_for_it(race, mode, monkeypatch):
    folder, _, measure = race
    monkeypatch.delattr(condition.compose, "compose")
    measure(mode, "before", 100.0)
    assert condition.of(folder) == []


def test_a_machine_that_cannot_be_measured_is_no_reason_against_a_race(race, monkeypatch, capsys):
    folder, results, _ = race

    def refuse(*_):
        raise session.NotMeasured("its processes took too long")

    monkeypatch.setattr(session, "measure", refuse)
    condition.measure(folder, results, ARMS, "refuse", "before")
    assert "was not measured: its processes took too long" in capsys.readouterr().out
    assert condition.of(folder) == []


def test_few_figures_are_those_that_the_race_uses():
    cases = works.few(works.cases_of_device("cuda", has_float8=True), ["bfloat16"])
    assert [case.label for case in cases] == [
        "clock",
        "copy 2.0 GiB",
        "launch kernel, host time",
        "gemm bfloat16 8192x8192x8192",
        "gemm bfloat16 4096x4096x4096",
    ]
    messages = works.few(works.cases_of_ranks("cuda", 8), ["bfloat16"])
    assert [(case.name, case.num_bytes) for case in messages] == [
        ("all_reduce", 2**28),
        ("all_gather", 2**28),
        ("reduce_scatter", 2**28),
    ]


@pytest.mark.slow
def test_a_real_one_takes_seconds_and_compares_with_itself(race, monkeypatch):
    folder, results, _ = race
    monkeypatch.setitem(condition.LIMIT_S, "cpu", 2.0)
    condition.measure(folder, results, ARMS, "flag", "before")
    (measured,) = condition.of(folder)
    figures = [figure["what"] for figure in measured["passport"]["devices"][0]["figures"]]
    assert figures[0] == "clock" and not any("bfloat16" in name or "2 threads" in name for name in figures)
    assert measured["passport"]["collectives"] == [] and measured["faults"] == []  # of one process
