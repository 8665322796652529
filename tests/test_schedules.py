"""Learning rate schedules against numbers worked out by hand."""

import math

import pytest

from models import schedules
from models.schedules import constant, cosine, stepped, trapezoid


def whole(schedule, num_steps, **settings):
    config = schedule.Config(name=schedule.__name__, **settings)
    return [config.lr_frac(step, num_steps) for step in range(num_steps)]


HIGH, LOW = 0.5 + math.sqrt(2) / 4, 0.5 - math.sqrt(2) / 4  # (1 + cos 45 degrees) / 2, (1 + cos 135 degrees) / 2


@pytest.mark.parametrize(
    ("schedule", "warmup_frac", "settings", "fracs"),
    [
        (trapezoid, 0.2, {"cooldown_frac": 0.5, "final_lr_frac": 0.0}, [0.5, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2]),
        # each of 4 steps from 1 to 0.2 takes 0.8 / 4
        (trapezoid, 0.0, {"cooldown_frac": 0.5, "final_lr_frac": 0.2}, [1, 1, 1, 1, 1, 0.8, 0.6, 0.4]),
        (trapezoid, 0.0, {"cooldown_frac": 0.0, "final_lr_frac": 0.0}, [1, 1, 1]),
        # round(3.5) = 4 steps each of 7: step 3 is the last of the warm-up (1) and the first of the cooldown (1)
        (trapezoid, 0.5, {"cooldown_frac": 0.5, "final_lr_frac": 0.0}, [0.25, 0.5, 0.75, 1, 0.75, 0.5, 0.25]),
        (trapezoid, 0.0, {"cooldown_frac": 1.0, "final_lr_frac": 0.0}, [1, 0.75, 0.5, 0.25]),
        # 4 steps from 1 to 0.2, and 2 that stay there
        (
            trapezoid,
            0.0,
            {"cooldown_frac": 0.5, "final_lr_frac": 0.2, "tail_frac": 0.25},
            [1, 1, 1, 0.8, 0.6, 0.4, 0.2, 0.2],
        ),
        # doubled from step 2, fourfold from step 6: half way down 4 * 0.5 + 0.2 * 0.5, then 4 * 0.25 + 0.2 * 0.75
        (
            stepped,
            0.0,
            {"cooldown_frac": 0.5, "final_lr_frac": 0.2, "at_fracs": [0.25, 0.75], "lr_fracs": [2.0, 4.0]},
            [1, 1, 2, 2, 2, 1.55, 2.1, 1.15],
        ),
        (cosine, 1 / 3, {"final_lr_frac": 0.0}, [0.5, 1, 1, HIGH, 0.5, LOW]),
        (cosine, 0.0, {"final_lr_frac": 0.1}, [1, 0.1 + 0.9 * HIGH, 0.55, 0.1 + 0.9 * LOW]),
        (constant, 0.6, {}, [1 / 3, 2 / 3, 1, 1, 1]),
    ],
)
def test_a_schedule_climbs_stays_and_falls_to_its_end(schedule, warmup_frac, settings, fracs):
    assert whole(schedule, len(fracs), warmup_frac=warmup_frac, **settings) == pytest.approx(fracs)


def test_fractions_that_do_not_fit_into_a_run_are_refused():
    with pytest.raises(ValueError, match="cooldown_frac=0.5 and tail_frac=0.6 it is more than the whole run"):
        trapezoid.Config(name="trapezoid", cooldown_frac=0.5, final_lr_frac=0.0, tail_frac=0.6)
    with pytest.raises(ValueError, match="give as many, and at_fracs in order"):
        stepped.Config(name="stepped", cooldown_frac=0.5, final_lr_frac=0.0, at_fracs=[0.5])


COOLED = {"final_lr_frac": 0.0, "cooldown_frac": 0.3}
FINAL = {constant: {}, cosine: {"final_lr_frac": 0.0}, trapezoid: COOLED, stepped: COOLED}
EVERY = pytest.mark.parametrize("schedule", FINAL, ids=lambda schedule: schedule.__name__)


@EVERY
def test_no_step_is_wasted_and_none_is_above_the_peak(schedule):
    for num_steps in (1, 2, 3, 7, 50):
        for warmup_frac, cooldown_frac in ((0.0, 1.0), (0.5, 0.5), (0.02, 0.3), (1.0, 0.0)):
            cooldown = {"cooldown_frac": cooldown_frac} if schedule in (trapezoid, stepped) else {}
            fracs = whole(schedule, num_steps, **FINAL[schedule] | {"warmup_frac": warmup_frac} | cooldown)
            assert all(0 < frac <= 1 for frac in fracs), (num_steps, warmup_frac, fracs)


@EVERY
@pytest.mark.parametrize("step", [-1, 4])
def test_a_step_outside_the_run_is_our_mistake(schedule, step):
    with pytest.raises(AssertionError):
        schedule.Config(name="one", warmup_frac=0.5, **FINAL[schedule]).lr_frac(step, 4)


def test_every_schedule_is_tested_here_and_has_a_yaml(repo):
    files = {path.stem for path in (repo / "models" / "schedules").glob("*.py")} - {"__init__"}
    yamls = {path.stem for path in (repo / "conf" / "optim" / "schedule").glob("*.yaml")}
    assert files == yamls == {schedule.__name__.rpartition(".")[2] for schedule in FINAL}
    assert all(issubclass(schedule.Config, schedules.Config) for schedule in FINAL)
