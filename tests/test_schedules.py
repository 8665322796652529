"""Schedules, computed by hand, and the stages of the speedrun's records: windows, batches and rates at each step."""

import math

import pytest
import test_ladder

from bench.config import compose, schema
from models import schedules
from models.schedules import constant, cosine, stepped, trapezoid
from models.stages import Timeline


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


CPU = schema.Machine(num_gpus=0, num_cpus=2)


def up_to(tokens):
    """Records 19 to 21: the next multiple of 128, from 128 on."""
    return next(multiple for multiple in range(128, 4096, 128) if multiple >= tokens)


# of each record: its window at step k of n, as its source works it out, and how many windows a run has
WINDOWS = {
    "r13": (lambda k, n: int(64 * ((k / n * (1792 - 64) + 64) // 64)), 27),
    "r14": (lambda k, n: int(64 * ((k / n * (1792 - 64) + 64) // 64)), 27),
    "r15": (lambda k, n: 64 * int((64 + (1792 - 64) * k / n) // 64), 27),
    "r16": (lambda k, n: 128 * int(((1 - k / n) * 64 + k / n * 1792 + 64) // 128), 14),
    "r17": (lambda k, n: 128 * int(((1 - k / n) * 64 + k / n * 1792 + 64) // 128), 14),
    "r18": (lambda k, n: 128 * int(((1 - k / n) * 128 + k / n * 1856) // 128), 14),
    "r19": (lambda k, n: up_to(1728 * k / n), 14),
    "r20": (lambda k, n: up_to(1728 * k / n), 14),
    "r21": (lambda k, n: up_to(1728 * k / n), 14),
    "r26": (lambda k, n: up_to(1728 * k / n), 14),
}


# of records 29 to 53: steps of the schedule, steps in all, and the blocks of the last steps and of the last validation
THIRDS = {
    "r29": (1671, 1670, 11, 11),
    "r30": (1706, 1705, 11, 11),
    "r31": (1671, 1670, 11, 13),
    "r32": (1671, 1670, 11, 13),
    "r33": (1661, 1660, 11, 20),
    "r34": (1646, 1645, 11, 20),
    "r35": (1641, 1680, 11, 20),
    "r37": (1641, 1680, 11, 20),
    "r38": (1631, 1670, 11, 20),
    "r39": (2381, 2420, 11, 20),
    "r40": (2291, 2330, 11, 20),
    "r42": (2245, 2285, 13, 20),
    "r43": (2205, 2245, 13, 20),
    "r45": (2185, 2225, 13, 20),
    "r46": (2120, 2160, 13, 20),
    "r48": (2120, 2160, 13, 20),
    "r49": (2070, 2110, 13, 20),
    "r50": (2050, 2090, 13, 20),
    "r51": (1995, 2035, 13, 20),
    "r52": (1960, 2000, 13, 20),
    "r53": (1880, 1920, 13, 20),
}
PEAKS = dict.fromkeys(("r46", "r48"), (0.33, 0.66, 1.51, 1.93))  # of a learning rate: from where on, how large
PEAKS |= dict.fromkeys(("r49", "r50", "r51", "r52"), (1 / 3, 2 / 3, 1.51, 1.93)) | {"r53": (1 / 3, 2 / 3, 1.52, 1.73)}


@pytest.mark.parametrize("rung", test_ladder.some(THIRDS))
def test_a_window_changes_in_thirds_as_in_the_record(rung):
    """The record: block number int(3 * k / n) of (3, 7, 11) at step k of n, and what comes after n."""
    num_scheduled, num_steps, tail, end = THIRDS[rung]
    config = compose.compose([f"experiment={rung}"], CPU)
    assert config.goal.num_steps == num_steps
    timeline = Timeline(config.stages, num_steps, window_block=128)
    blocks = [(3, 7, 11)[int(3 * k / num_scheduled)] if k < num_scheduled else tail for k in range(num_steps)]
    assert [timeline.at(step).window_tokens for step in range(num_steps)] == [128 * block for block in blocks]
    assert timeline.window_after(num_steps) == 128 * end


@pytest.mark.parametrize("rung", PEAKS)
def test_batch_and_learning_rate_grow_at_their_own_steps(rung):
    num_scheduled, num_steps, *_ = THIRDS[rung]
    config = compose.compose([f"experiment={rung}"], CPU)
    timeline = Timeline(config.stages, num_steps, window_block=128)
    batches = [(8, 16, 24)[int(3 * k / num_scheduled)] if k < num_scheduled else 24 for k in range(num_steps)]
    num_tokens = [timeline.at(step).stage.batch_tokens for step in range(num_steps)]
    assert num_tokens == [2048 * 8 * batch for batch in batches]
    # the record sums over a rank's tokens, with an epsilon of 1e-8: both divided by 32,768 here, all along
    in_sums = [(timeline.at(step).stage.loss_scale or 1.0) / (tokens / 8) for step, tokens in enumerate(num_tokens)]
    assert set(in_sums) == {1 / 32768}
    assert config.optim.groups["head"].eps == pytest.approx(1e-8 / 32768, rel=1e-3)
    first_at, second_at, first, second = PEAKS[rung]
    num_falling = round(0.55 * num_scheduled)  # a part of a step more in r49 to r51

    def lr(k):  # the record's, whose peak changes at two points and which falls from 0.45 of the steps on
        x = k / num_scheduled
        peak = second if x > second_at else first if x > first_at else 1.0
        remaining_frac = min(1.0, max(0.0, (num_scheduled - k) / num_falling))
        return peak * remaining_frac + 0.1 * (1 - remaining_frac)

    schedule = config.optim.schedule
    fracs = [schedule.lr_frac(k, num_steps) for k in range(num_steps)]
    assert fracs == pytest.approx([lr(k) for k in range(num_steps)], rel=1e-9)


def test_record_53s_loss_looks_ahead_and_its_embedding_parts_step_by_step_as_in_the_record():
    timeline = Timeline(compose.compose(["experiment=r53"], CPU).stages, 1920, window_block=128)
    for k in range(1920):
        x = k / 1880
        weights = [1.0, 0.5, 0.25 * (1 - 3 * x)] if x < 1 / 3 else [1.0, 0.5 * (2 - 3 * x)] if x < 2 / 3 else None
        assert timeline.ahead_weights(k) == (weights and pytest.approx(weights, abs=1e-7))
        assert bool(timeline.at(k).stage.untied) == (k >= math.ceil(2 / 3 * 1880))


@pytest.mark.parametrize("rung", ["r52", "r53"])
def test_scalars_rest_for_40_steps_where_batch_and_window_change_as_in_the_record(rung):
    num_scheduled, num_steps, *_ = THIRDS[rung]
    timeline = Timeline(compose.compose([f"experiment={rung}"], CPU).stages, num_steps, window_block=128)
    thirds = [int(3 * k / num_scheduled) for k in range(num_scheduled)] + [3] * 40
    changes = [k for k in range(1, num_steps) if thirds[k] != thirds[k - 1]]
    frozen = {k for change in changes for k in range(change, change + 40)}
    assert {k for k in range(num_steps) if timeline.is_frozen("vectors", k)} == frozen
    assert not any(timeline.is_frozen("head", k) for k in range(num_steps))


@pytest.mark.parametrize("rung", WINDOWS)
def test_a_window_grows_as_in_the_record(rung):
    """At every step of the rung's experiment; the validation after the last has grown to the end."""
    config, (window_at, num_windows) = compose.compose([f"experiment={rung}"], CPU), WINDOWS[rung]
    num_steps = config.goal.num_steps
    timeline = Timeline(config.stages, num_steps, window_block=64 if rung < "r16" else 128)
    windows = [window_at(step, num_steps) for step in range(num_steps + 1)]
    assert [timeline.at(step).window_tokens for step in range(num_steps)] == windows[:-1]
    assert [timeline.window_after(step) for step in range(num_steps + 1)] == windows
    assert len(timeline.distinct()) == len(timeline.portions) == num_windows
    assert config.goal.val_window_tokens is None  # in every one of them validation has the step's own
