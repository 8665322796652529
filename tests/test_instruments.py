"""The contract of instruments: they only watch, are dropped when they fail, and cost nothing where they do nothing."""

import sys
from pathlib import Path

import pytest
from hand import Hand

from bench.config import compose
from bench.training.instruments import regions, registry
from bench.training.instruments.base import Context, Instrument, InstrumentSet
from bench.training.timing.clock import HostMarks


@pytest.fixture
def hand():
    return Hand()


@pytest.fixture
def context(tmp_path, hand):
    return Context(Path(tmp_path), rank=0, world_size=1, device_type="cpu", num_steps=4, marks=HostMarks(hand))


class Seeing(Instrument):
    name = "seeing"

    def __init__(self, context):
        super().__init__(context)
        self.seen = []

    def on_step_start(self, step):
        self.seen.append(step)


class Failing(Instrument):
    name = "failing"

    def on_step_start(self, step):
        raise OSError("the sensor is gone")


def test_a_failing_instrument_becomes_a_warning_and_the_others_go_on(context):
    seeing = Seeing(context)
    watch = InstrumentSet([Failing(context), seeing])
    watch.on_step_start(0)
    watch.on_step_start(1)
    assert seeing.seen == [0, 1]
    failure = {"instrument": "failing", "edge": "on_step_start", "error": "OSError: the sensor is gone"}
    assert watch.warnings == [failure]
    assert watch.collect("summary") == {"seeing": {}}


def test_what_is_essential_may_end_the_run(context):
    watch = InstrumentSet([], essential=Failing(context))
    with pytest.raises(OSError, match="the sensor is gone"):
        watch.on_step_start(0)


def test_regions_add_up_the_micro_steps_of_a_step(context, hand):
    (regions,), _ = registry.load({"regions": {}}, context)
    watch = InstrumentSet([regions])
    first, second = (("data", 1), ("forward", 2), ("backward", 4)), (("data", 1), ("forward", 3), ("backward", 5))
    for step in range(2):
        watch.on_step_start(step)
        for phase, ms in (*first, *second, ("optimizer", 7)):
            watch.on_phase(phase)
            hand.ns += ms * 1_000_000 * (step + 1)
        watch.on_step_end(step)
        watch.on_phase("validation")
        hand.ns += 50_000_000
    watch.on_run_end()
    assert regions.columns() == {
        "data_ms": {1: 2.0, 2: 4.0},
        "forward_ms": {1: 5.0, 2: 10.0},
        "backward_ms": {1: 9.0, 2: 18.0},
        "optimizer_ms": {1: 7.0, 2: 14.0},
    }
    assert regions.summary() == {"data_ms": 3.0, "forward_ms": 7.5, "backward_ms": 13.5, "optimizer_ms": 10.5}


def test_an_instrument_that_is_not_chosen_is_not_imported(context):
    sys.modules.pop("bench.training.instruments.regions", None)
    registry.load({}, context)
    assert "bench.training.instruments.regions" not in sys.modules


def test_an_instrument_that_cannot_start_is_a_warning(context, monkeypatch):
    import importlib

    regions = importlib.import_module("bench.training.instruments.regions")

    def no_sensor(context):
        raise OSError("no sensor")

    monkeypatch.setattr(regions, "INSTRUMENT", no_sensor)
    instruments, warnings = registry.load({"regions": {}}, context)
    assert instruments == []
    assert warnings == [{"instrument": "regions", "edge": "start", "error": "OSError: no sensor"}]


class Odd(Seeing):
    """Gives answers that a record cannot hold, and flags what it disturbed."""

    name = "odd"
    closed = 0

    def columns(self):
        return {"step_ms": {1: 0.0}}

    def summary(self):
        return {"watts": object()}

    def flags(self):
        return {1: "profiled"}

    def on_step_end(self, step):
        raise RuntimeError("gone")

    def close(self):
        self.closed += 1


def test_answers_that_the_record_cannot_hold_are_left_out_with_a_warning(context):
    watch = InstrumentSet([Odd(context)])
    assert watch.collect("columns") == {} and watch.collect("summary") == {}
    assert "columns ['step_ms'] are written by the run or by another instrument" in watch.warnings[0]["error"]
    assert "not JSON serializable" in watch.warnings[1]["error"]


@pytest.mark.parametrize(
    ("name", "cell"),
    [
        ("a,b", "a_b"),
        ('a"b', "a_b"),
        ("gc\n", "gc_"),
        ("=1+1", "_1+1"),
        ("-x", "_x"),
        ("x;y", "x_y"),
        *((usual, usual) for usual in ("loss (ema)", "util_%", "lr[0]", "attn->mlp", "p50*", "gc.gen2", "oom/retry")),
    ],
)
def test_the_name_of_a_column_and_a_flag_are_cells_of_a_csv(context, name, cell):
    seeing = Seeing(context)
    seeing.columns, seeing.flags = lambda: {name: {1: 0.0}}, lambda: {1: name}
    watch = InstrumentSet([seeing])
    assert watch.collect("columns") == {"seeing": {cell: {1: 0.0}}}
    assert watch.collect("flags") == {"seeing": {1: cell}} and watch.warnings == []


def test_a_summary_is_no_trace(context):
    seeing = Seeing(context)
    seeing.summary = lambda: {"text": "x" * 2**20}
    watch = InstrumentSet([seeing])
    assert watch.collect("summary") == {} and "1,048,588 characters" in watch.warnings[0]["error"]


@pytest.mark.parametrize(
    "method, value, sentence",
    [
        ("columns", {"odd_ms": [1.0]}, "Expected `object`, got `array`"),
        ("columns", {"odd_ms": {1: "late"}}, "Expected `int | float | null`, got `str`"),
        ("columns", {"odd_ms": {1: float("nan")}}, "not JSON compliant"),
        ("columns", {"odd_ms": {"one": 2.0}}, "Expected `int`, got `str`"),
        ("flags", {1: 5}, "Expected `str`, got `int`"),
        ("flags", [1], "Expected `object`, got `array`"),
        ("doubts", [5], "Expected `str`, got `int`"),
    ],
)
def test_an_answer_of_another_shape_is_left_out_with_a_warning(context, method, value, sentence):
    odd = Odd(context)
    setattr(odd, method, lambda: value)
    watch = InstrumentSet([odd])
    assert watch.collect(method) == {} and sentence in watch.warnings[0]["error"]


def test_a_column_of_another_instrument_is_not_overwritten(context):
    first, second = Odd(context), Odd(context)
    first.columns, second.columns, second.name = lambda: {"watts": {1: 5.0}}, lambda: {"watts": {1: 7.0}}, "second"
    watch = InstrumentSet([first, second])
    assert watch.collect("columns") == {"odd": {"watts": {1: 5.0}}} and watch.warnings[0]["instrument"] == "second"


def test_means_leave_out_the_steps_that_another_instrument_disturbed(context, hand):
    odd, seen = Odd(context), registry.load({"regions": {}, "host": {}}, context)[0]
    odd.on_step_end, odd.flags = lambda step: None, lambda: {2: "profiled"}
    watch = InstrumentSet([odd, *seen])
    for step, ms in enumerate((10, 500, 20)):
        watch.on_step_start(step)
        watch.on_phase("forward")
        hand.ns += ms * 1_000_000
        watch.on_step_end(step)
    watch.on_run_end()
    watch.collect("flags")
    summary = watch.collect("summary")
    undisturbed_ms = [ms for row, ms in seen[1].columns()["cpu_ms"].items() if row != 2]
    assert summary["regions"]["forward_ms"] == 15.0 and summary["host"]["cpu_ms"] == pytest.approx(sum(undisturbed_ms))


def test_a_dropped_instrument_is_closed_once_and_what_it_flagged_stays_flagged(context):
    odd = Odd(context)
    watch = InstrumentSet([odd])
    watch.on_step_end(0)
    watch.close()
    assert odd.closed == 1
    assert watch.collect("flags") == {"odd": {1: "profiled"}}
    assert watch.collect("summary") == {}


def test_an_unknown_instrument_is_refused_by_name(context):
    with pytest.raises(ValueError, match="instruments=wattmetre: there is no"):
        registry.load({"wattmetre": {}}, context)


def test_every_instrument_has_a_yaml_and_every_yaml_an_instrument(repo):
    files = {path.stem for path in (repo / "bench" / "training" / "instruments").glob("*.py")}
    rooms = files - {"__init__", "base", "registry"}
    assert rooms == {path.stem for path in (repo / "conf" / "instruments").glob("*.yaml")}


@pytest.mark.parametrize("name", compose.choices("instruments"))
def test_an_instrument_that_works_while_the_clock_runs_says_at_what(name, repo):
    """docs/race.md tells the reader the same."""
    kind = registry.kind(name)
    assert kind.is_in_timed_region() == bool(kind.in_timed_region)
    assert f"| `{name}` | {kind.in_timed_region} |" in (repo / "docs/race.md").read_text()


def test_only_what_works_while_the_clock_runs_is_part_of_the_timing_protocol(monkeypatch):
    class Later(Instrument):
        def on_run_end(self):
            """Does nothing before it."""

    monkeypatch.setattr(registry, "kind", lambda name, settings: Later if name == "later" else regions.Regions)
    assert registry.in_timed_region({"regions": {}, "later": {}}) == ["regions"]
