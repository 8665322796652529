"""Derived numbers, computed by hand; units and times of day as a person reads them."""

import json
from pathlib import Path

import pytest

from bench.base import units, utc
from bench.base.paths import REPO
from bench.record.metrics import metrics, target_reached
from bench.record.step_files import read

EXAMPLE = Path(__file__).parent / "records" / "20261121T031500Z-gpt2-adamw-48623a63-s0"


@pytest.fixture
def run():
    return json.loads((EXAMPLE / "run.json").read_text())


@pytest.fixture
def steps():
    return read(EXAMPLE)


def on_gpus(run, *names, dtype="bfloat16"):
    run["environment"]["gpus"] = [{"name": name, "memory_gib": 80.0, "power_limit_w": 700.0} for name in names]
    run["world_size"] = len(names)
    run["measured"]["dtype"] = dtype
    return run


def test_the_numbers_of_a_run_on_two_ranks(run, steps):
    """4 steps of 1,024 tokens; the ranks' clocks say 0.218 and 0.22 s; steps took 50, 52, 60 (flagged) and 56 ms."""
    numbers = metrics(run, steps)
    assert numbers["num_steps"] == 4
    assert numbers["train_s"] == 0.22  # the slowest rank
    assert numbers["num_flagged_steps"] == 1
    assert numbers["step_avg_ms"] == pytest.approx(160 / 3)  # (220 - 60) / 3: no timing statistic has a disturbed step
    assert numbers["step_ms_p50"] == 52.0  # of 50, 52, 56
    assert numbers["step_ms_p95"] == pytest.approx(55.6)  # 52 + 0.9 * 4
    assert numbers["tokens_per_s"] == pytest.approx(3072 / 0.16)
    assert numbers["val_loss"] == 4.25
    assert (numbers["peak_mem_gib"], numbers["peak_mem_gib_min"]) == (0.5, 0.375)
    assert numbers["goodput_frac"] == pytest.approx(0.05)  # 0.22 of 4.4 s
    assert numbers["target_reached"] is True  # 4.25 <= 4.5
    assert numbers["gap_nats"] is None  # no known floor
    assert (numbers["mfu"], numbers["mfu_causal"], numbers["tokens_per_s_per_gpu"]) == (None, None, None)  # of a CPU


def test_mfu_is_against_all_gpus_together(run, steps):
    """900,000 FLOP a token * 19,200 tokens/s = 1.728e10 FLOP/s, of 2 * 989e12."""
    numbers = metrics(on_gpus(run, "NVIDIA H100 80GB HBM3", "NVIDIA H100 80GB HBM3"), steps)
    assert numbers["mfu"] == pytest.approx(900_000 * 3072 / 0.16 / (2 * 989e12), rel=1e-12)
    assert numbers["mfu_causal"] == pytest.approx(numbers["mfu"] * 8 / 9, rel=1e-12)
    assert numbers["tokens_per_s_per_gpu"] == pytest.approx(1536 / 0.16)


def test_mfu_is_against_the_dtype_that_ran_and_there_is_none_of_an_unknown_gpu(run, steps):
    bf16 = metrics(on_gpus(run, "NVIDIA H200"), steps)["mfu"]
    fp32 = metrics(on_gpus(run, "NVIDIA H200", dtype="float32"), steps)["mfu"]
    assert fp32 / bf16 == pytest.approx(989 / 67)
    assert metrics(on_gpus(run, "NVIDIA H200", "Some GPU of 2031"), steps)["mfu"] is None


def test_gpu_memory_is_what_was_allocated(run, steps):
    run["measured"]["peak_mem_gib_by_rank"] = {
        "allocated": [30.0, 31.0],
        "active": [32.0, 33.0],
        "reserved": [40.0, 41.0],
    }
    numbers = metrics(run, steps)
    assert (numbers["peak_mem_gib"], numbers["peak_mem_gib_min"]) == (31.0, 30.0)


def test_the_gap_is_above_the_known_floor(run, steps):
    run["data"]["floor_nats"] = 4.0
    run["goal"] = {"target_val_loss": None, "target_gap_nats": 0.2}
    numbers = metrics(run, steps)
    assert numbers["gap_nats"] == 0.25
    assert numbers["target_reached"] is False


def test_the_target_itself_counts_as_reached_and_without_one_there_is_no_answer():
    assert target_reached({"target_val_loss": 4.25}, 4.25, None) is True
    assert target_reached({"target_val_loss": 4.2}, 4.25, None) is False
    assert target_reached({"target_val_loss": 4.2}, None, None) is None
    assert target_reached({}, 4.25, None) is None
    assert target_reached(None, 4.25, None) is None


def test_a_run_that_did_not_finish_has_what_is_known_and_None_for_the_rest(run, steps):
    run["measured"] = {"wall_s": 3.0}
    run["model"] = {"arch": "gpt2"}
    del run["goal"]
    numbers = metrics(run, steps[:3])
    assert (numbers["num_steps"], numbers["val_loss"]) == (2, 4.75)
    rest = {name: value for name, value in numbers.items() if name not in ("num_steps", "val_loss")}
    assert set(rest.values()) == {None}


def test_a_run_without_any_step_has_no_numbers(run):
    run["measured"] = {}
    assert set(metrics(run, []).values()) == {None}


def test_a_loss_that_is_no_number_is_no_loss(run, steps):
    steps[-1]["val_loss"] = float("nan")
    assert metrics(run, steps)["val_loss"] is None


def test_the_same_names_as_in_the_schema(run, steps):
    schema = json.loads((Path(REPO) / "bench" / "record" / "run.schema.json").read_text())
    names = set(schema["properties"]["metrics"]["properties"])
    assert set(metrics(run, steps)) == names - {"score"}  # which is there where the goal is not val_loss at the end
    assert set(metrics(run | {"goal": {"metric": {"name": "val_bpb"}}}, steps)) == names


def test_bytes_seconds_milliseconds_and_nanoseconds_convert():
    assert (units.GIB, units.gib_from_bytes(3 * 2**29)) == (1_073_741_824, 1.5)
    assert (units.ms_from_s(0.0125), units.ms_from_ns(2_500_000)) == (12.5, 2.5)
    assert units.s_from_ns(1_500_000_000) == 1.5


DURATIONS = {0.5: "0.50 s", 120: "120.00 s", 11.021: "11.02 s", 754: "12 min 34 s", 3599.6: "1 h 00 min"}


@pytest.mark.parametrize(("seconds", "text"), [*DURATIONS.items(), (3725, "1 h 02 min")])
def test_a_duration_changes_its_unit_where_a_person_would(seconds, text):
    assert units.format_s(seconds) == text


def test_sizes_and_times_carry_their_unit_and_what_was_not_measured_prints_as_nothing():
    assert units.format_ms(55.123) == "55.12 ms"
    assert units.format_bytes(512) == "512 B"
    assert units.format_bytes(65536) == "64.0 KiB"
    assert units.format_bytes(2402048) == "2.3 MiB"  # 2402048 / 2**20 = 2.29
    assert units.format_gib(79.647) == "79.6 GiB"
    for function in (units.format_s, units.format_ms, units.format_bytes, units.format_gib):
        assert function(None) == ""


ZONES = {"03": ("Z", "+00:00", ""), "04": ("+01:00",)}  # by the hour that is meant


@pytest.mark.parametrize("text", [f"2026-11-21T{hour}:15:00.123{zone}" for hour in ZONES for zone in ZONES[hour]])
def test_every_way_of_writing_a_moment_is_read_as_the_same_one(text):
    assert utc.seconds(text) == 1795230900.123
    assert utc.text(utc.parse(text)) == "2026-11-21T03:15:00.123Z"


def test_now_is_a_number_of_seconds_ago_and_what_is_no_time_is_refused():
    assert utc.seconds(utc.now()) - utc.seconds(utc.now(before_s=60)) == pytest.approx(60, abs=1)
    with pytest.raises(ValueError):
        utc.parse("yesterday")
