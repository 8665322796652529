"""Learning rate schedules against numbers worked out by hand."""

import math

import pytest

from models import SCHEDULES
from models.schedules import constant, cosine, trapezoid


def whole(schedule, num_steps, **settings):
    return [schedule(step, num_steps, **settings) for step in range(num_steps)]


def test_trapezoid_climbs_stays_and_falls():
    fracs = whole(trapezoid, 10, warmup_frac=0.2, cooldown_frac=0.5, final_lr_frac=0.0)
    assert fracs == pytest.approx([0.5, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2])


def test_trapezoid_falls_towards_the_final_fraction():
    # 4 cooldown steps from 1 to 0.2: each takes 0.8 / 4 = 0.2
    fracs = whole(trapezoid, 8, warmup_frac=0.0, cooldown_frac=0.5, final_lr_frac=0.2)
    assert fracs == pytest.approx([1, 1, 1, 1, 1, 0.8, 0.6, 0.4])


def test_trapezoid_without_warmup_and_cooldown_is_flat():
    assert whole(trapezoid, 3, warmup_frac=0.0, cooldown_frac=0.0, final_lr_frac=0.0) == [1, 1, 1]


def test_trapezoid_takes_the_smaller_where_warmup_and_cooldown_overlap():
    # round(3.5) = 4 steps each of 7: step 3 is the last of the warm-up (1) and the first of the cooldown (1)
    fracs = whole(trapezoid, 7, warmup_frac=0.5, cooldown_frac=0.5, final_lr_frac=0.0)
    assert fracs == pytest.approx([0.25, 0.5, 0.75, 1, 0.75, 0.5, 0.25])


def test_trapezoid_can_be_all_cooldown():
    assert whole(trapezoid, 4, warmup_frac=0.0, cooldown_frac=1.0, final_lr_frac=0.0) == [1, 0.75, 0.5, 0.25]


def test_cosine_falls_along_half_a_wave():
    # after 2 warm-up steps 4 are left: 1, (1 + cos 45 degrees) / 2, 1/2, (1 + cos 135 degrees) / 2
    fracs = whole(cosine, 6, warmup_frac=1 / 3, cooldown_frac=None, final_lr_frac=0.0)
    high, low = 0.5 + math.sqrt(2) / 4, 0.5 - math.sqrt(2) / 4
    assert fracs == pytest.approx([0.5, 1, 1, high, 0.5, low])


def test_cosine_ends_near_the_final_fraction():
    # half way: 0.1 + 0.9 / 2
    fracs = whole(cosine, 100, warmup_frac=0.0, cooldown_frac=None, final_lr_frac=0.1)
    assert fracs[50] == pytest.approx(0.55)
    assert fracs[99] == pytest.approx(0.1 + 0.45 * (1 - math.cos(math.pi / 100)))


def test_constant_stays_after_its_warmup():
    fracs = whole(constant, 5, warmup_frac=0.6, cooldown_frac=None, final_lr_frac=None)
    assert fracs == pytest.approx([1 / 3, 2 / 3, 1, 1, 1])


@pytest.mark.parametrize("name", ["constant", "cosine", "trapezoid"])
def test_no_step_is_wasted_and_none_is_above_the_peak(name):
    for num_steps in (1, 2, 3, 7, 50):
        for warmup_frac, cooldown_frac in ((0.0, 1.0), (0.5, 0.5), (0.02, 0.3), (1.0, 0.0)):
            fracs = whole(
                SCHEDULES[name], num_steps, warmup_frac=warmup_frac, cooldown_frac=cooldown_frac, final_lr_frac=0.0
            )
            assert all(0 < frac <= 1 for frac in fracs), (num_steps, warmup_frac, fracs)


@pytest.mark.parametrize("name", ["constant", "cosine", "trapezoid"])
@pytest.mark.parametrize("step", [-1, 4])
def test_a_step_outside_the_race_is_our_mistake(name, step):
    with pytest.raises(AssertionError):
        SCHEDULES[name](step, 4, warmup_frac=0.5, cooldown_frac=0.5, final_lr_frac=0.0)
