"""The machine before and after a race: what fell behind is flagged, or refused, and what was measured is kept."""

import json

import pytest

from bench.machine.passport import kept
from bench.plans.passport import session, works
from bench.plans.race import condition

ARMS = {"A": {"overrides": ["hardware.device=cpu", "hardware.num_processes=1", "hardware.num_threads=1"]}}


def passport(at, *rates):
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
        monkeypatch.setattr(session, "measure", lambda *_: passport(at, *rates))
        condition.measure(folder, tmp_path, ARMS, mode, when)

    return folder, tmp_path, measure


def test_a_figure_below_its_history_is_flagged_with_both_numbers(race, capsys):
    folder, _, measure = race
    kept.write(passport(1, 100.0))
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
    rows = [{"when": "after", "passport": passport(2, 100.0), "faults": []}]
    (other / condition.FILE).write_text(json.dumps({"measurements": rows}))
    (results / "races" / "damaged").mkdir()
    (results / "races" / "damaged" / condition.FILE).write_text("{")
    measure("flag", "before", 80.0)
    assert "20.0 % worse" in condition.faults_of(folder)[0]


def test_a_machine_that_fell_behind_refuses_a_race_where_that_was_asked(race):
    folder, _, measure = race
    kept.write(passport(1, 100.0))
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
