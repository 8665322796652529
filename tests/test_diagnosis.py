"""Where the time went, by regions, stretches and telemetry; stalled steps: the rule at its borders, no false alarm."""

import math
import random

import pytest

from bench.analysis.diagnosis import between_runs, stalls


def run(steps_ms, forward=0.25, flags=(), **record):
    """A record and its steps: 2 ms of data, this share of the time forward, the rest backward.  flags: by step."""
    rows = [{"step": 0, "flags": ""} | dict.fromkeys(("step_ms", "data_ms", "forward_ms", "backward_ms", "cpu_ms"))]
    for step, ms in enumerate(steps_ms, 1):
        parts = {"data_ms": 2.0, "forward_ms": forward * ms, "backward_ms": ms - 2.0 - forward * ms, "cpu_ms": 77.0}
        rows.append({"step": step, "flags": dict(flags).get(step, ""), "step_ms": ms, **parts})
    return {"measured": {"train_s_by_rank": [1.0]}, "instrument_summaries": {}} | record, rows


def test_the_region_that_became_slower_is_named():
    """40 ms a step against 42: forward 10 against 10.5, backward 28 against 29.5; nothing outside."""
    diagnosis = between_runs.diagnose([run([40.0] * 8)] * 3, [run([42.0] * 8)] * 3)
    regions = diagnosis["regions"]
    assert diagnosis["label"] == "within-run" and "cpu_ms" not in regions  # no part of a step
    assert regions["step_ms"] == {"a_ms": 40.0, "b_ms": 42.0, "change_ms": 2.0, "change_pct": 5.0, "share_frac": 1.0}
    assert (regions["forward_ms"]["change_ms"], regions["backward_ms"]["change_ms"]) == (0.5, 1.5)
    assert regions["data_ms"]["change_ms"] == 0.0
    assert regions["backward_ms"]["share_frac"] == 0.75
    assert regions["other_ms"]["change_ms"] == pytest.approx(0.0, abs=1e-12)
    assert diagnosis["words"] == ["the largest part of the change is in backward: +1.500 ms of +2.000 ms per step"]


def test_time_outside_of_all_regions_is_named_too():
    a, b = run([40.0] * 8), run([42.0] * 8)
    for row in b[1][1:]:
        row |= {"forward_ms": 10.0, "backward_ms": 28.0}
    diagnosis = between_runs.diagnose([a], [b])
    assert diagnosis["regions"]["other_ms"]["change_ms"] == 2.0
    assert "in other: +2.000 ms" in diagnosis["words"][0]


def test_one_stalled_run_moves_no_region_and_is_reported_as_a_stall():
    """Regions are medians over the runs, step by step: here one of three runs stalls for 200 ms in one step."""
    stalled = [40.0] * 20 + [240.0] + [40.0] * 19
    diagnosis = between_runs.diagnose([run([40.0] * 40)] * 3, [run([40.0] * 40), run(stalled), run([40.0] * 40)])
    assert diagnosis["regions"]["step_ms"]["change_ms"] == 0.0
    assert diagnosis["costs"]["stall"]["count"] == [0, pytest.approx(1 / 3)]
    assert diagnosis["costs"]["stall"]["ms"] == [0.0, pytest.approx(200 / 3)]
    assert diagnosis["words"] == ["stall events per run: A 0, B 0.333 (66.7 ms)"]


def test_what_the_record_says_of_costs_is_compared():
    gc = {"costs": {"stall": {"count": 0, "ms": 0.0}, "gc": {"count": 4, "ms": 12.0}}}
    diagnosis = between_runs.diagnose([run([40.0] * 8)], [run([40.0] * 8, **gc)])
    assert diagnosis["costs"]["gc"] == {"count": [None, 4], "ms": [None, 12.0]}
    assert diagnosis["words"] == ["gc events per run: A not recorded, B 4 (12 ms)"]


def test_the_run_in_quarters_shows_where_along_it_the_change_lies():
    diagnosis = between_runs.diagnose([run([40.0] * 8)], [run([40.0] * 6 + [50.0] * 2)])
    expected = [(1, 2, 0.0), (3, 4, 0.0), (5, 6, 0.0), (7, 8, 10.0)]
    assert [(part["first_step"], part["last_step"], part["change_ms"]) for part in diagnosis["stretches"]] == expected
    assert diagnosis["stretches"][3]["change_pct"] == 25.0


def test_steps_of_no_time_which_logs_of_whole_milliseconds_have_give_no_per_cent():
    diagnosis = between_runs.diagnose([run([0.0] * 8)], [run([1.0] * 8)])
    assert [(part["change_ms"], part["change_pct"]) for part in diagnosis["stretches"]] == [(1.0, None)] * 4


def test_flagged_steps_are_left_out_and_only_common_steps_count():
    b = run([999.0, 42.0, 42.0, 42.0], flags={1: "profiler"})
    diagnosis = between_runs.diagnose([run([40.0, 40.0, 40.0])], [b])
    assert diagnosis["regions"]["step_ms"]["change_ms"] == 2.0  # steps 2 and 3
    assert diagnosis["stretches"][0]["first_step"] == 2


def test_what_only_some_runs_measured_is_compared_too():
    """A short run may have no sample of the clock; the other runs of its arm do."""
    short = run([40.0] * 8, instrument_summaries={"telemetry": {"sm_clock_mhz_mean": None}})
    long = run([40.0] * 8, instrument_summaries={"telemetry": {"sm_clock_mhz_mean": 1980.0}})
    assert between_runs.diagnose([short, long], [long])["telemetry"] == {"sm_clock_mhz_mean": [1980.0, 1980.0]}
    assert between_runs.diagnose([short], [long])["telemetry"] == {"sm_clock_mhz_mean": [None, 1980.0]}


def test_plain_numbers_of_the_telemetry_are_compared():
    def clocked(mhz):
        facts = {"sm_clock_mhz_mean": mhz, "throttled": {"heat": 0.1}, "note": "x", "ok": True}
        return run([40.0] * 8, instrument_summaries={"telemetry": facts})

    diagnosis = between_runs.diagnose([clocked(1980.0), clocked(1970.0)], [clocked(1755.0)])
    assert diagnosis["telemetry"] == {"sm_clock_mhz_mean": [1975.0, 1755.0]}


def test_without_steps_there_is_nothing_to_say():
    diagnosis = between_runs.diagnose([run([])], [run([])])
    assert diagnosis["regions"] == {}
    assert diagnosis["stretches"] == []
    assert diagnosis["words"] == []
    assert between_runs.diagnose([], [run([40.0])])["words"] == []


def test_changes_that_cancel_have_no_shares():
    """40 ms a step against 39: forward 10 against 30.42, backward 28 against 6.58."""
    diagnosis = between_runs.diagnose([run([40.0] * 8)] * 3, [run([39.0] * 8, forward=0.78)] * 3)
    assert {pair["share_frac"] for pair in diagnosis["regions"].values()} == {None}
    sentence = "the changes of the regions cancel; the largest is in backward: -21.420 ms of -1.000 ms per step"
    assert diagnosis["words"] == [sentence]


def rows(values, flags=()):
    return [{"step": 0, "step_ms": None}] + [
        {"step": num, "step_ms": ms, "flags": "profiled" if num in flags else ""} for num, ms in enumerate(values, 1)
    ]


def test_a_step_far_above_its_neighbours_is_found_with_what_it_cost():
    values = [100.0] * 40
    values[6] = 300.0
    values[25] = 160.0
    assert stalls.find(rows(values)) == [
        {"step": 7, "ms": 200.0, "step_ms": 300.0, "usual_ms": 100.0},
        {"step": 26, "ms": 60.0, "step_ms": 160.0, "usual_ms": 100.0},
    ]


# Of 31 around step 19, 11 take 100 ms, 10 take 90, 10 take 110 or more: median 100, median difference 10 ms, still so
# with one of them odd.  A robust standard deviation is 14.826 ms, six of them 88.956: the border is at 188.956 ms.
UNEVEN = [90.0, 100.0, 110.0] * 13


@pytest.mark.parametrize(
    ("values", "odd_ms", "is_stall"),
    [
        ([100.0] * 41, 120.0, False),  # less than a fifth, however steady the others are
        ([100.0] * 41, 120.5, True),
        ([0.5] * 41, 1.4, False),  # less than a millisecond, however short the steps are
        ([0.5] * 41, 1.6, True),
        (UNEVEN, 188.0, False),  # less than six robust standard deviations
        (UNEVEN, 190.0, True),
    ],
)
def test_a_stall_is_above_all_three_borders(values, odd_ms, is_stall):
    assert bool(stalls.outliers([*values[:19], odd_ms, *values[20:]])) is is_stall


def test_too_few_steps_show_no_usual_time():
    assert stalls.outliers([100.0, 100.0, 100.0, 900.0]) == []
    assert stalls.outliers([100.0, 100.0, 100.0, 900.0, 100.0]) == [(3, 800.0)]


def test_the_first_and_the_last_step_are_judged_too():
    assert stalls.outliers([300.0] + [100.0] * 10 + [200.0]) == [(0, 200.0), (11, 100.0)]


def test_flagged_steps_are_neither_judged_nor_usual():
    values = [100.0] * 12
    values[3] = values[4] = 5000.0
    assert stalls.find(rows(values, flags=(4, 5))) == []
    assert stalls.find(rows(values, flags=(4,)))[0]["step"] == 5


def test_a_running_median_follows_a_step_in_the_level_at_once():
    values = [31.0] * 40 + [57.0] * 40
    assert stalls.running_median(values) == values


def gauss(rng, frac):
    return 1 + frac * rng.gauss(0, 1)


QUIET = {
    "steady with 1 % noise": lambda num, rng: 50 * gauss(rng, 0.01),
    "steady with 10 % noise": lambda num, rng: 50 * gauss(rng, 0.10),
    "1 % slower each step": lambda num, rng: 50 * 1.01**num * gauss(rng, 0.01),
    "faster step by step": lambda num, rng: 50 * (1 + math.exp(-num / 5)) * gauss(rng, 0.01),
    "three stages of a schedule": lambda num, rng: (31, 57, 83)[num // 400] * gauss(rng, 0.005),
    "an optimizer that updates every other step": lambda num, rng: (27, 35)[num % 2] * gauss(rng, 0.005),
    "waves": lambda num, rng: 50 * (1 + 0.3 * math.sin(num / 30)) * gauss(rng, 0.01),
}


@pytest.mark.parametrize("kind", QUIET)
def test_no_false_alarm_in_1200_steps_that_only(kind):
    """Ten seeds each; with a real stall of half a step planted in the same series, just that one is found."""
    for seed in range(10):
        rng = random.Random(seed)
        values = [QUIET[kind](num, rng) for num in range(1200)]
        assert stalls.outliers(values) == []
        values[700] *= 2.5
        assert [num for num, _ in stalls.outliers(values)] == [700]


def test_excess_is_above_the_running_median_and_knows_only_rows_that_have_the_column():
    rows = [{"step": num, "data_ms": 1.0} for num in range(1, 9)] + [{"step": 9, "data_ms": 51.0}, {"step": 10}]
    assert stalls.excess(rows, "data_ms") == {**dict.fromkeys(range(1, 9), 0.0), 9: 50.0}
    assert stalls.excess(rows, "cpu_ms") == {}
