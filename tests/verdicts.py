"""How often is a verdict wrong?  Simulated races, judged by the real rules.     .venv/bin/python tests/verdicts.py

Prints the table of docs/COMPARING.md, in some minutes.  A run's time is log-normal; B's true effect on it, the spread
between runs, the number of runs, the planned looks and the floor are known here and not to the verdict.  Wrong is
faster for what is not faster, slower for what is not slower, and equivalent for an effect of the margin or more.
Seeded: the same table each time.
"""

import itertools
import math
import sys
from pathlib import Path

import numpy

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.base import stats, text_table
from bench.compare import effects, verdict
from bench.plans.race.runner import DECIDED

NUM_RACES = 1000  # of each sd, effect, plan and floor in the table of docs/COMPARING.md
MARGIN_PCT = 0.5
SDS_PCT = (0.05, 0.2, 1.0, 20.0)  # between runs of one arm
FLOORS_PCT = (0.1, 0.3, 1.0, 77.0)  # 0.1: not calibrated
EFFECTS_PCT = (0.0, -0.5, 0.5, 2.0)  # on B's time; 0.5 is the margin
PLANS = ((2,), (3,), (5,), (10,), (3, 5), (4, 7, 10))  # the looks, the last is n
COLUMNS = (
    "sd of runs, %",
    "floor, %",
    "wrong faster or slower",
    "wrong equivalent",
    "slower at +2 %",
    "equivalent at 0",
)


def decide_alone(put):
    """The smallest difference and the intervals are not computed: they decide nothing and take most of the time.

    put: as setattr().
    """
    put(effects.stats, "smallest_difference", lambda *_: None)
    put(effects.stats, "interval", lambda test, *_: None if test.t is None else (test.difference, test.difference))


def is_wrong(said, effect_pct):
    """Whether this verdict on this true effect misleads; inconclusive never does."""
    if said in ("faster", "slower"):
        return effect_pct * (1 if said == "slower" else -1) <= 0
    return said == "equivalent" and abs(effect_pct) >= MARGIN_PCT


def verdicts(rng, sd_pct, effect_pct, looks, floors_pct, num_races):
    """{floor_pct: the verdict of each race}: a race ends at the first look that decides, or at its last."""
    sd, alpha = sd_pct / 100, stats.ALPHA / len(looks)
    logs = sd * rng.standard_normal((num_races, 2, looks[-1]))
    logs[:, 1] += math.log1p(effect_pct / 100)
    found = {floor_pct: [] for floor_pct in floors_pct}
    for times_s in 10 * numpy.exp(logs):
        open_races = set(floors_pct)
        for n in looks:
            arms = [[{"train_s": float(time_s)} for time_s in arm[:n]] for arm in times_s]
            time = effects.time(arms, 0.0, MARGIN_PCT, alpha)
            for floor_pct in sorted(open_races):
                said = verdict.decide(time | {"floor_pct": floor_pct})
                if said in DECIDED or n == looks[-1]:
                    found[floor_pct].append(said)
                    open_races.remove(floor_pct)
    return found


def simulated(num_races, sds_pct=SDS_PCT, effects_pct=EFFECTS_PCT, plans=PLANS, floors_pct=FLOORS_PCT, seed=0):
    """{(sd_pct, effect_pct, looks, floor_pct): verdicts}, of each sd the same whatever the others are."""
    found = {}
    for sd_pct in sds_pct:
        rng = numpy.random.default_rng([seed, round(100 * sd_pct)])
        for effect_pct, looks in itertools.product(effects_pct, plans):
            for floor_pct, said in verdicts(rng, sd_pct, effect_pct, looks, floors_pct, num_races).items():
                found[sd_pct, effect_pct, looks, floor_pct] = said
    return found


def rates(found, sd_pct, floor_pct):
    """(worst rate of wrong differences, of wrong equivalences) over effects and plans."""
    worst = [0.0, 0.0]
    for (sd, effect_pct, _, floor), said in found.items():
        if (sd, floor) == (sd_pct, floor_pct):
            wrong = [one == "equivalent" for one in said if is_wrong(one, effect_pct)]
            for kind in (0, 1):
                worst[kind] = max(worst[kind], wrong.count(bool(kind)) / len(said))
    return worst


def table(found, sds_pct=SDS_PCT):
    cells = []
    for sd_pct in sds_pct:
        for floor_pct in FLOORS_PCT:
            shares = rates(found, sd_pct, floor_pct)
            for effect_pct, right in ((2.0, "slower"), (0.0, "equivalent")):
                said = found[sd_pct, effect_pct, (10,), floor_pct]
                shares.append(said.count(right) / len(said))
            cells.append([f"{sd_pct:g}", f"{floor_pct:g}", *(f"{100 * share:.1f} %" for share in shares)])
    return text_table.render(COLUMNS, cells, [True] * 6, "github")


# ---- both clocks

RUN_SD_PCT, NUM_RUNS = 0.2, 5
# B's change by its own clock, what of it B only moves outside that clock, and the spread of a run's validations
# together, all in % of the training time
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


def of_both_clocks(rng, own_pct, moved_pct, val_sd_pct, num_races, n=NUM_RUNS):
    """[(the verdict of the runs' own clocks alone, that of both clocks)] of each race, at a floor of 0.1 %."""
    train_s = 10 * numpy.exp(RUN_SD_PCT / 100 * rng.standard_normal((num_races, 2, n)))
    train_s[:, 1] *= 1 + own_pct / 100
    val_s = 1 + val_sd_pct / 10 * rng.standard_normal((num_races, 2, n))
    val_s[:, 1] += moved_pct / 10
    found = []
    for race in numpy.stack([train_s, val_s], -1):
        arms = [
            [{"train_s": own_s, "outside_s": own_s + val_s, "outside_validations_s": val_s} for own_s, val_s in arm]
            for arm in race.tolist()
        ]
        time = effects.time(arms, 0.1, MARGIN_PCT, stats.ALPHA)
        found.append((verdict.decide(time | {"outside": None}), verdict.decide(time)))
    return found


def clock_table(num_races=NUM_RACES):
    rng, cells = numpy.random.default_rng(25), []
    for pcts in MOVES_PCT:
        shares = [
            ", ".join(f"{word} {100 * said.count(word) / num_races:.1f} %" for word in DECIDED if word in said)
            or "none"
            for said in zip(*of_both_clocks(rng, *pcts, num_races), strict=True)
        ]
        cells.append([*(f"{pct:g}" for pct in pcts), *shares])
    return text_table.render(CLOCK_COLUMNS, cells, [True] * 3 + [False] * 2, "github")


if __name__ == "__main__":
    decide_alone(setattr)
    print(table(simulated(int(sys.argv[1]) if len(sys.argv) > 1 else NUM_RACES)))
    print(f"\n{clock_table()}")
