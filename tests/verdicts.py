"""Measures how often a verdict is wrong, in simulated races judged by the real rules.

.venv/bin/python tests/verdicts.py prints the tables of docs/reference/statistics.md in some minutes.  A run's time is
log-normal; the simulation knows B's true effect, the spread between runs and what the machine does meanwhile.  Wrong
verdicts are faster or slower for what is not, and equivalent for an effect of the margin or more.  It is seeded, so the
tables are reproducible.
"""

import functools
import itertools
import math
import sys
from pathlib import Path

import numpy

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.base import stats, text_table
from bench.compare import design, effects, verdict
from bench.compare.questions import FIRM
from bench.plans.race import plan

NUM_RACES = 1000  # per sd, effect, plan and floor in the tables of docs/reference/statistics.md
MARGIN_PCT = 0.5
SDS_PCT = (0.05, 0.2, 1.0, 20.0)  # standard deviations between runs of one arm
FLOORS_PCT = (0.1, 0.3, 1.0, 77.0)  # noise floors; 0.1 if not calibrated
EFFECTS_PCT = (0.0, -0.5, 0.5, 2.0)  # true effects on B's time; the margin is 0.5
PLANS = ((2,), (3,), (5,), (10,), (3, 5), (4, 7, 10))  # numbers of runs at the interim analyses; the last is n
COLUMNS = (
    "sd of runs, %",
    "floor, %",
    "wrong faster or slower",
    "wrong equivalent",
    "slower at +2 %",
    "equivalent at 0",
)


def decide_alone(put):
    """Disables what takes most of the time and decides nothing: intervals, smallest differences, sign flips.

    put: a function such as setattr().
    """
    put(design, "flips_p", lambda *_: None)
    put(design.Fit, "smallest_difference", lambda *_: None)
    put(design.Fit, "interval", lambda fitted, *_: None)


def is_wrong(answer, effect_pct):
    """Returns whether a verdict is wrong for this true effect; inconclusive never is."""
    if answer in ("faster", "slower"):
        return effect_pct * (1 if answer == "slower" else -1) <= 0
    return answer == "equivalent" and abs(effect_pct) >= MARGIN_PCT


@functools.cache
def slots_of(n, seed):
    """Returns the slots of A's and of B's runs in a plan of n rounds, without warm-ups."""
    order = [slot["arm"] for slot in plan.order(["A", "B"], n, 0, seed) if not slot["discarded"]]
    return tuple([slot for slot, arm in enumerate(order) if arm == name] for name in "AB")


def rows_of(times_s, num_rounds):
    """Returns rows of the first rounds for effects.time(), from the times of both arms, one per round."""
    return [
        [
            {"run_id": f"{arm}{number}", "log_id": None, "train_s": float(time_s)}
            for number, time_s in enumerate(arm_times_s[:num_rounds])
        ]
        for arm, arm_times_s in zip("AB", times_s, strict=True)
    ]


def designed(slots, num_rounds, num_compilations=1, is_sequential=False):
    """Returns the design of the first rounds of a plan with these slots."""
    known = {
        f"{arm}{number}": slot for arm, planned in zip("AB", slots) for number, slot in enumerate(planned[:num_rounds])
    }
    groups = [number * num_compilations // len(slots[0]) for number in range(num_rounds)]
    return design.Design(known, groups if num_compilations > 1 else (), is_sequential)


def judged(times_s, slots, num_rounds=None, alpha=stats.ALPHA, floor_pct=0.1, num_compilations=1, is_sequential=False):
    """Returns the verdict on the first rounds of a race, and its effects.Time."""
    num_rounds = num_rounds or len(slots[0])
    race_design = designed(slots, num_rounds, num_compilations, is_sequential)
    time = effects.time(rows_of(times_s, num_rounds), floor_pct, MARGIN_PCT, alpha, race_design)
    return ("inconclusive" if time["p"] is None else verdict.decide(time)), time


def verdicts(rng, sd_pct, effect_pct, looks, floors_pct, num_races):
    """Returns {floor_pct: verdicts of all races}; a race ends at the first analysis that decides, or at the last."""
    sd, alpha = sd_pct / 100, stats.ALPHA / len(looks)
    logs = sd * rng.standard_normal((num_races, 2, looks[-1]))
    logs[:, 1] += math.log1p(effect_pct / 100)
    answers = {floor_pct: [] for floor_pct in floors_pct}
    for number, times_s in enumerate(10 * numpy.exp(logs)):
        open_races = set(floors_pct)
        for n in looks:
            _, time = judged(times_s, slots_of(looks[-1], number), n, alpha)
            for floor_pct in sorted(open_races):
                answer = verdict.decide(time | {"floor_pct": floor_pct})
                if answer in FIRM or n == looks[-1]:
                    answers[floor_pct].append(answer)
                    open_races.remove(floor_pct)
    return answers


def simulated(num_races, sds_pct=SDS_PCT, effects_pct=EFFECTS_PCT, plans=PLANS, floors_pct=FLOORS_PCT, seed=0):
    """Returns {(sd_pct, effect_pct, looks, floor_pct): verdicts}; those of one sd do not depend on the other sds."""
    answers = {}
    for sd_pct in sds_pct:
        rng = numpy.random.default_rng([seed, round(100 * sd_pct)])
        for effect_pct, looks in itertools.product(effects_pct, plans):
            for floor_pct, floor_answers in verdicts(rng, sd_pct, effect_pct, looks, floors_pct, num_races).items():
                answers[sd_pct, effect_pct, looks, floor_pct] = floor_answers
    return answers


def rates(answers, sd_pct, floor_pct):
    """Returns the worst rates of (wrong differences, wrong equivalences) over effects and plans."""
    worst = [0.0, 0.0]
    for (sd, effect_pct, _, floor), group in answers.items():
        if (sd, floor) == (sd_pct, floor_pct):
            wrong = [answer == "equivalent" for answer in group if is_wrong(answer, effect_pct)]
            for kind in (0, 1):
                worst[kind] = max(worst[kind], wrong.count(bool(kind)) / len(group))
    return worst


def table(answers, sds_pct=SDS_PCT):
    cells = []
    for sd_pct in sds_pct:
        for floor_pct in FLOORS_PCT:
            shares = rates(answers, sd_pct, floor_pct)
            for effect_pct, right in ((2.0, "slower"), (0.0, "equivalent")):
                group = answers[sd_pct, effect_pct, (10,), floor_pct]
                shares.append(group.count(right) / len(group))
            cells.append([f"{sd_pct:g}", f"{floor_pct:g}", *(f"{100 * share:.1f} %" for share in shares)])
    return text_table.render(COLUMNS, cells, [True] * 6, "github")


# ---- worlds: what the machine does during a race

WORLD_SD_PCT = 0.2  # standard deviation between runs
WORLD_NS = (3, 5, 6, 10)


def quiet(rng, slots):
    return 0.0 * slots


def drift(rng, slots, pct=2.0):
    return pct * slots / (len(slots) - 1)


def correlated(rng, slots):
    noise = numpy.zeros(len(slots))
    for slot in range(1, len(slots)):
        noise[slot] = 0.9 * noise[slot - 1] + WORLD_SD_PCT * rng.standard_normal()
    return noise


def walk(rng, slots):
    return numpy.cumsum(WORLD_SD_PCT * rng.standard_normal(len(slots)))


def clock_states(rng, slots):
    return 0.5 * (numpy.cumsum(rng.random(len(slots)) < 0.2) % 2)


def every_fourth(rng, slots):
    return 0.5 * numpy.isin(slots % 4, (0, 3))


def outliers(rng, slots):
    return 5.0 * (rng.random(len(slots)) < 0.05)


WORLDS = {  # {name in docs/reference/statistics.md: function that returns what is added to each slot's time, in %}
    "nothing": quiet,
    "a drift of 2 % over the race": drift,
    "correlated noise, AR(0.9)": correlated,
    "a random walk": walk,
    "two clock states, 0.5 % apart": clock_states,
    "0.5 % on two slots of every four": every_fourth,
    "5 % on one run in twenty": outliers,
}


def times_of(rng, slots, effect_pct, world=quiet, lottery_pct=0.0, num_compilations=1):
    """Returns the times in s of A's and B's runs.  lottery_pct: sd of what the runs of one compilation share."""
    n = len(slots[0])
    pct = WORLD_SD_PCT * rng.standard_normal(2 * n) + world(rng, numpy.arange(2 * n))
    groups = numpy.arange(n) * num_compilations // n
    arms = [pct[arm_slots] + lottery_pct * rng.standard_normal(num_compilations)[groups] for arm_slots in slots]
    return [10 * numpy.exp(arms[0] / 100), 10 * numpy.exp(arms[1] / 100) * (1 + effect_pct / 100)]


def world_answers(seed, n, effect_pct, num_races, world=quiet, lottery_pct=0.0, num_compilations=1):
    """Returns the verdict of each race in a world."""
    rng = numpy.random.default_rng([seed, n])
    return [
        judged(
            times_of(rng, slots_of(n, number), effect_pct, world, lottery_pct, num_compilations),
            slots_of(n, number),
            num_compilations=num_compilations,
        )[0]
        for number in range(num_races)
    ]


def share(answers, *wanted):
    return sum(answer in wanted for answer in answers) / len(answers)


def world_table(num_races=NUM_RACES):
    cells = []
    for name, world in WORLDS.items():
        null = [world_answers(30, n, 0.0, num_races, world) for n in WORLD_NS]
        true = [world_answers(31, n, 0.5, num_races, world) for n in WORLD_NS]
        wrong = ", ".join(f"{100 * share(answers, 'faster', 'slower'):.1f}" for answers in null)
        cells.append([name, wrong, ", ".join(f"{100 * share(answers, 'slower'):.1f}" for answers in true)])
    columns = ("the machine adds", "wrong at 0, % (n 3, 5, 6, 10)", "slower at +0.5 %, % (n 3, 5, 6, 10)")
    return text_table.render(columns, cells, [False, True, True], "github")


LOTTERIES = ((5, 1), (10, 1), (6, 3), (9, 3), (10, 5), (10, 10))  # (n, compilations an arm)


def lottery_table(num_races=NUM_RACES):
    cells = []
    for n, num_compilations in LOTTERIES:
        shares = []
        for lottery_pct, effect_pct in ((0.1, 0.0), (0.4, 0.0), (0.1, 0.5), (0.4, 0.5)):
            answers = world_answers(32, n, effect_pct, num_races, quiet, lottery_pct, num_compilations)
            shares.append(share(answers, *(("slower",) if effect_pct else ("faster", "slower"))))
        cells.append([str(n), str(num_compilations), *(f"{100 * frac:.1f} %" for frac in shares)])
    columns = (
        "n",
        "compilations",
        "wrong, 0.1 %",
        "wrong, 0.4 %",
        "slower at +0.5 %, 0.1 %",
        "slower at +0.5 %, 0.4 %",
    )
    return text_table.render(columns, cells, [True] * 6, "github")


# ---- sequential plans, and races that are repeated

FIRST, LAST = 3, 20


def sequential(rng, effect_pct, number, world=quiet, alpha=stats.ALPHA):
    """Returns (verdict, number of rounds, log e-value) of a race with the plan n=auto:3-20."""
    slots = slots_of(LAST, number)
    times_s = times_of(rng, slots, effect_pct, world)
    for n in range(FIRST, LAST + 1):
        answer, time = judged(times_s, slots, n, alpha, is_sequential=True)
        if answer in FIRM:
            break
    return answer, n, time["log_e"]


def repeated(rng, n, num_times, number):
    """Returns whether B is ever faster if a null race is repeated up to num_times.  n: None for n=auto:3-20."""
    weight = 1.0
    for attempt in range(num_times):
        seed = num_times * number + attempt
        if n is None:
            answer, _, log_e = sequential(rng, 0.0, seed, alpha=weight * stats.ALPHA)
        else:
            answer, time = judged(times_of(rng, slots_of(n, seed), 0.0), slots_of(n, seed), alpha=weight * stats.ALPHA)
            log_e = time["log_e"]
        if answer == "faster":
            return True
        weight *= 0.5 if log_e is None else math.exp(min(0.0, log_e))
    return False


def sequential_table(num_races=NUM_RACES):
    cells = []
    for name in ("nothing", "a drift of 2 % over the race", "a random walk", "5 % on one run in twenty"):
        for effect_pct in (0.0, 0.5, 1.0):
            rng = numpy.random.default_rng([33, round(10 * effect_pct)])
            races = [sequential(rng, effect_pct, number, WORLDS[name]) for number in range(num_races)]
            answers = [answer for answer, *_ in races]
            rounds = numpy.mean([n for _, n, _ in races])
            shares = [share(answers, "slower"), share(answers, "faster"), share(answers, "equivalent")]
            cells.append([name, f"{effect_pct:g}", f"{rounds:.1f}", *(f"{100 * frac:.1f} %" for frac in shares)])
    columns = ("the machine adds", "true effect, %", "mean rounds", "slower", "faster", "equivalent")
    return text_table.render(columns, cells, [False] + [True] * 5, "github")


# ---- both clocks

RUN_SD_PCT, NUM_RUNS = 0.2, 5
# (B's change by its own clock, the part that B only moves outside that clock, the sd of a run's total validation time),
# all in % of the training time
MOVES_PCT = (
    (0.0, 0.0, 0.1),
    (0.0, 0.0, 0.2),
    (-0.5, 0.0, 0.05),
    (-0.5, 0.0, 0.1),
    (-0.5, 0.0, 0.2),
    (-1.0, 0.0, 0.4),
    (-1.0, 1.0, 0.05),
    (-1.0, 1.0, 0.5),
    (0.0, 0.5, 0.1),
)
CLOCK_COLUMNS = (
    "by its own clock, %",
    "moved outside, %",
    "spread of validations, %",
    "own clock alone",
    "both clocks",
)


def answers_by_clock(rng, own_pct, moved_pct, val_sd_pct, num_races, n=NUM_RUNS):
    """Returns (verdict by the runs' own clocks alone, verdict by both clocks) of each race, at a floor of 0.1 %."""
    train_s = 10 * numpy.exp(RUN_SD_PCT / 100 * rng.standard_normal((num_races, 2, n)))
    train_s[:, 1] *= 1 + own_pct / 100
    val_s = 1 + val_sd_pct / 10 * rng.standard_normal((num_races, 2, n))
    val_s[:, 1] += moved_pct / 10
    answers = []
    for number, race in enumerate(numpy.stack([train_s, val_s], -1)):
        arms = rows_of(race[..., 0], n)
        for rows, arm_times_s in zip(arms, race.tolist(), strict=True):
            for row, (own_s, val_s) in zip(rows, arm_times_s, strict=True):
                row |= {"outside_s": own_s + val_s, "outside_validations_s": val_s}
        time = effects.time(arms, 0.1, MARGIN_PCT, stats.ALPHA, designed(slots_of(n, number), n))
        answers.append((verdict.decide(time | {"outside": None}), verdict.decide(time)))
    return answers


def clock_table(num_races=NUM_RACES):
    rng, cells = numpy.random.default_rng(25), []
    for pcts in MOVES_PCT:
        shares = [
            ", ".join(f"{word} {100 * calls.count(word) / num_races:.1f} %" for word in FIRM if word in calls) or "none"
            for calls in zip(*answers_by_clock(rng, *pcts, num_races), strict=True)
        ]
        cells.append([*(f"{pct:g}" for pct in pcts), *shares])
    return text_table.render(CLOCK_COLUMNS, cells, [True] * 3 + [False] * 2, "github")


if __name__ == "__main__":
    decide_alone(setattr)
    num_races = int(sys.argv[1]) if len(sys.argv) > 1 else NUM_RACES
    print(table(simulated(num_races)), end="\n\n")
    for render in (clock_table, world_table, lottery_table, sequential_table):
        print(render(num_races), end="\n\n", flush=True)
    for name, n in (("n=5", 5), ("n=auto:3-20", None)):
        rng = numpy.random.default_rng(34)
        won = [repeated(rng, n, 5, number) for number in range(num_races)]
        print(f"a null race of {name}, repeated until it is won, 5 times at most: {100 * share(won, True):.1f} %")
