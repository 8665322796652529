"""Simulated races: does the verdict cry wolf, does it see what it should, can it be gamed?

Seeds are fixed: these tests never flicker.
"""

import itertools
import math

import numpy
import pytest
import verdicts
from cases import slow
from comparing import COMPLETE

from bench.base import stats
from bench.base.paths import REPO
from bench.compare.verdict import compare_rows
from bench.record import run_folder
from bench.record.rows import row_of


def p_of(a_s, b_s):
    return stats.welch(numpy.log(a_s).tolist(), numpy.log(b_s).tolist()).p


BASE = row_of(run_folder.read(COMPLETE))


def rows(arm, times_s):
    """Rows of runs with these times, interleaved with those of the other arm."""
    return [
        BASE
        | {
            "run_id": f"{arm}{number}",
            "config_id": arm,
            "seed": number,
            "train_s": float(train_s),
            "num_disturbed_steps": 0,
            "val_loss": None,
            "peak_mem_gib": None,
            "started_at": f"2026-11-21T{number:02d}:{(number % 2) ^ (arm == 'B')}0:00.000Z",
        }
        for number, train_s in enumerate(times_s)
    ]


@pytest.fixture
def deciding_alone(monkeypatch):
    """What is shown beside a verdict and decides nothing is not computed: it takes nine tenths of the time."""
    verdicts.decide_alone(monkeypatch.setattr)


def test_intervals_and_the_smallest_difference_decide_nothing(monkeypatch):
    times_s = numpy.exp(0.0016 * numpy.random.default_rng(8).standard_normal((40, 2, 3)))
    times_s[:, 1] *= numpy.linspace(0.98, 1.02, 40)[:, None]
    races = [[rows(arm, times) for arm, times in zip("AB", race, strict=True)] for race in times_s]
    whole = [compare_rows(*arms, floor_pct=0.1)["verdict"] for arms in races]
    verdicts.decide_alone(monkeypatch.setattr)
    assert [compare_rows(*arms, floor_pct=0.1)["verdict"] for arms in races] == whole
    assert set(whole) == {"faster", "slower", "equivalent", "inconclusive"}


@pytest.mark.parametrize(("n", "promised"), [(5, 0.80), (3, 0.70)])
def test_a_change_as_small_as_the_detectable_one_is_found_in_80_of_100(n, promised):
    """With 3 a side it is found in 70: Welch's degrees of freedom are then a guess, as base/stats.py says."""
    values = numpy.random.default_rng(10 + n).standard_normal((1500, 2, n))
    values[:, 1] += stats.smallest_difference((1.0, 1.0), (n, n))
    power = numpy.mean([stats.welch(a.tolist(), b.tolist()).p < 0.05 for a, b in values])
    assert power == pytest.approx(promised, abs=0.035)  # 3 standard errors of 1,500 simulations


# ---- noise, floor and margin


def test_no_kind_of_verdict_is_wrong_more_often_than_its_level_whatever_the_noise_and_the_floor(deciding_alone):
    """Pooled over three plans: at most 5 % and three standard errors.  Never equivalent where the floor is coarser."""
    plans = ((2,), (5,), (3, 5))
    simulated = verdicts.simulated(60, (0.05, 0.2, 1.0, 20.0), plans=plans)
    pooled = {}
    for (sd_pct, effect_pct, _, floor_pct), answers in simulated.items():
        pooled.setdefault((sd_pct, effect_pct, floor_pct), []).extend(answers)
    for (sd_pct, effect_pct, floor_pct), answers in pooled.items():
        assert len(answers) == 180
        num_wrong = sum(verdicts.is_wrong(answer, effect_pct) for answer in answers)
        assert num_wrong / 180 <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 180), (sd_pct, effect_pct, floor_pct)
        assert floor_pct <= verdicts.MARGIN_PCT or "equivalent" not in answers
    assert set(pooled[0.05, 0.0, 0.1]) <= {"equivalent", "inconclusive", "faster", "slower"}
    assert pooled[0.05, 0.0, 0.1].count("equivalent") > 150 and pooled[0.05, 2.0, 1.0].count("slower") > 150
    assert sum(verdicts.is_wrong(answer, effect) for (_, effect, _), some in pooled.items() for answer in some) > 0


@pytest.mark.slow
def test_the_table_of_wrong_verdicts_in_the_docs_is_what_the_simulation_says(deciding_alone):
    """Only one block of it is checked: all of them take minutes."""
    simulated = verdicts.simulated(verdicts.NUM_RACES, sds_pct := (0.2,))
    docs = {cells_of(line) for line in (REPO / "docs/reference/statistics.md").read_text().splitlines()}
    rows = verdicts.table(simulated, sds_pct).splitlines()[2:]
    assert len(rows) == 4 and {cells_of(row) for row in rows} <= docs
    slack = 3 * math.sqrt(0.05 * 0.95 / verdicts.NUM_RACES)
    assert all(max(verdicts.rates(simulated, 0.2, floor)) <= 0.05 + slack for floor in verdicts.FLOORS_PCT)


def cells_of(line):
    return tuple(cell.strip() for cell in line.split("|"))


@pytest.mark.parametrize("val_sd_pct", [0.05, 0.5])
def test_time_that_is_only_moved_outside_an_arms_own_clock_is_called_faster_as_rarely_as_no_change(
    deciding_alone, val_sd_pct
):
    """1 % by its own clock, none by the launcher's: its own alone would say faster in nearly all races."""
    answers = verdicts.answers_by_clock(numpy.random.default_rng(9), -1.0, 1.0, val_sd_pct, 300)
    alone, both = zip(*answers, strict=True)
    assert alone.count("faster") > 295
    assert both.count("faster") / 300 <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 300) and "slower" not in both


def test_the_launchers_clock_costs_an_honest_race_little_power(deciding_alone):
    """0.5 %, five runs a side of 0.2 %, validations that spread half as much: 5 of 100 races less at most."""
    alone, both = zip(*verdicts.answers_by_clock(numpy.random.default_rng(10), -0.5, 0.0, 0.1, 300), strict=True)
    assert alone.count("faster") / 300 > 0.8 and both.count("faster") > alone.count("faster") - 15
    alone, both = zip(*verdicts.answers_by_clock(numpy.random.default_rng(11), 0.0, 0.0, 0.2, 300), strict=True)
    assert sum(answer in ("faster", "slower") for answer in both) <= 0.05 * 300


@pytest.mark.slow
def test_the_table_of_both_clocks_in_the_docs_is_what_the_simulation_says(deciding_alone):
    docs = {cells_of(line) for line in (REPO / "docs/reference/statistics.md").read_text().splitlines()}
    assert {cells_of(row) for row in verdicts.clock_table().splitlines()[2:]} <= docs


# ---- worlds: what the machine does during a race


@pytest.mark.parametrize("name", verdicts.WORLDS)
def test_a_race_is_called_different_in_at_most_7_of_100_whatever_the_machine_does(deciding_alone, name):
    """And not for want of power: a true 0.5 % is found."""
    for n in (5, 10):
        answers = verdicts.world_answers(30, n, 0.0, 400, verdicts.WORLDS[name])
        assert verdicts.share(answers, "faster", "slower") <= 0.07
    answers = verdicts.world_answers(31, 10, 0.5, 100, verdicts.WORLDS[name])
    assert verdicts.share(answers, "slower") >= 0.65


def test_half_a_percent_under_a_drift_of_2_percent_is_found_in_85_of_100_races_of_six_rounds(deciding_alone):
    answers = verdicts.world_answers(31, 6, 0.5, 400, verdicts.drift)
    assert verdicts.share(answers, "slower") >= 0.85
    rng, slots = numpy.random.default_rng(31), verdicts.slots_of(6, 0)
    times_s = [verdicts.times_of(rng, slots, 0.5, verdicts.drift) for _ in range(100)]
    assert numpy.mean([p_of(a_s, b_s) < 0.05 for a_s, b_s in times_s]) <= 0.05  # Welch's test, on such races


@pytest.mark.parametrize(("n", "num_compilations"), [(6, 3), *(slow(*case) for case in ((9, 3), (10, 5), (10, 10)))])
def test_what_the_runs_of_a_compilation_share_makes_no_verdict(deciding_alone, n, num_compilations):
    """Half of the runs' own spread, and twice of it; with one compilation an arm it does, the more the more runs."""
    for lottery_pct in (0.1, 0.4):
        answers = verdicts.world_answers(32, n, 0.0, 400, verdicts.quiet, lottery_pct, num_compilations)
        assert verdicts.share(answers, "faster", "slower") <= 0.07
    answers = verdicts.world_answers(32, 10, 0.0, 200, verdicts.quiet, 0.4, 1)
    assert verdicts.share(answers, "faster", "slower") > 0.3


def test_one_outlying_run_in_ten_hides_nothing(deciding_alone):
    """One run of each arm of ten is 5 % slower: 1 % is found in 85 of 100, by Welch in 53, and none is no verdict."""
    rng, answers = numpy.random.default_rng(35), {0.0: [], 1.0: []}
    for number in range(200):
        slots = verdicts.slots_of(10, number)
        for effect_pct, so_far in answers.items():
            a_s, b_s = verdicts.times_of(rng, slots, effect_pct)
            a_s[rng.integers(10)] *= 1.05
            b_s[rng.integers(10)] *= 1.05
            so_far.append(verdicts.judged((a_s, b_s), slots)[0])
    assert verdicts.share(answers[1.0], "slower") >= 0.85 and verdicts.share(answers[0.0], "faster", "slower") <= 0.07


def test_a_candidate_that_is_slow_in_one_run_of_ten_is_not_called_faster(deciding_alone):
    """1 % faster in nine runs and 20 % slower in one: slower on average, which a clipped residual alone would hide."""
    rng, answers = numpy.random.default_rng(39), []
    for number in range(200):
        slots = verdicts.slots_of(10, number)
        a_s, b_s = verdicts.times_of(rng, slots, -1.0)
        b_s[rng.integers(10)] *= 1.2
        answers.append(verdicts.judged((a_s, b_s), slots)[0])
    assert verdicts.share(answers, "faster") <= 0.05


def with_excluded(times_s, excluded):
    """Returns the verdict where the machine disturbed the runs with these numbers in each arm."""
    runs = [rows(name, arm_times_s) for name, arm_times_s in zip("AB", times_s, strict=True)]
    for arm_rows, numbers in zip(runs, excluded, strict=True):
        for number in numbers:
            arm_rows[int(number)] |= {"validity": "suspect", "machine_doubts": ["the launcher was stopped"]}
    return compare_rows(*runs, floor_pct=0.1)["verdict"]


def test_an_arm_that_has_its_slowest_runs_excluded_wins_no_more_often_and_an_honest_one_keeps_its_verdicts(
    deciding_alone,
):
    """The two slowest of six: 10 of 100 would be called faster.  One in ten that the machine slows by up to 10 %."""
    rng = numpy.random.default_rng(40)
    times_s = numpy.exp(0.01 * rng.standard_normal((200, 2, 6)))
    cheats = [with_excluded(race, ((), numpy.argsort(race[1])[-2:])) for race in times_s]
    assert verdicts.share(cheats, "faster") <= 0.05
    is_disturbed = rng.random((200, 2, 6)) < 0.1
    times_s = numpy.exp(0.002 * rng.standard_normal((200, 2, 6)) + 0.1 * is_disturbed * rng.random((200, 2, 6)))
    times_s[:, 1] *= 0.98
    honest = [with_excluded(race, map(numpy.flatnonzero, of)) for race, of in zip(times_s, is_disturbed, strict=True)]
    assert verdicts.share(honest, "faster") >= 0.9


def test_arms_one_after_the_other_get_no_firm_verdict():
    """Under a drift, as under none: numbers, and an interval that a drift does not leave so easily."""
    for number in range(40):
        rng = numpy.random.default_rng(number)
        pct = verdicts.WORLD_SD_PCT * rng.standard_normal(10) + verdicts.drift(rng, numpy.arange(10))
        arms = [10 * numpy.exp(arm_pct / 100) for arm_pct in (pct[:5], pct[5:])]
        runs = [rows(name, times_s) for name, times_s in zip("AB", arms, strict=True)]
        for hour, row in enumerate(itertools.chain(*runs)):
            row["started_at"] = f"2026-11-21T{hour:02d}:00:00.000Z"
        comparison = compare_rows(*runs, floor_pct=0.1)
        assert (comparison["verdict"], comparison["time"]["drift_pct"]) == ("not_interleaved", 0.2)
        low_pct, high_pct = comparison["time"]["ci95_pct"]
        welch = stats.interval(stats.welch(*(numpy.log(times_s).tolist() for times_s in arms)))
        assert [low_pct + 0.2, high_pct - 0.2] == pytest.approx([100 * math.expm1(edge) for edge in welch])


# ---- optional stopping


@pytest.mark.parametrize("name", [slow("nothing"), "a drift of 2 % over the race", slow("a random walk")])
def test_a_plan_that_looks_after_every_round_is_wrong_in_at_most_5_of_100(deciding_alone, name):
    rng = numpy.random.default_rng(36)
    races = [verdicts.sequential(rng, 0.0, number, verdicts.WORLDS[name]) for number in range(300)]
    assert verdicts.share([answer for answer, *_ in races], "faster", "slower") <= 0.05
    races = [verdicts.sequential(rng, 0.5, number, verdicts.WORLDS[name]) for number in range(300)]
    assert verdicts.share([answer for answer, *_ in races], "faster", "equivalent") <= 0.05
    assert verdicts.share([answer for answer, *_ in races], "slower") >= 0.9


def test_a_change_of_1_percent_ends_a_plan_of_3_to_20_rounds_before_five(deciding_alone):
    rng = numpy.random.default_rng(37)
    answers, rounds, _ = zip(*(verdicts.sequential(rng, 1.0, number) for number in range(200)), strict=True)
    assert set(answers) == {"slower"} and numpy.mean(rounds) < 5


@pytest.mark.slow
@pytest.mark.parametrize("n", [3, 5, None])
def test_a_null_race_repeated_up_to_five_times_is_won_in_at_most_5_of_100(deciding_alone, n):
    """n=None: n=auto:3-20.  Without the weight of earlier races it was 13 of 100."""
    rng = numpy.random.default_rng(38)
    assert numpy.mean([verdicts.repeated(rng, n, 5, number) for number in range(300)]) <= 0.05
