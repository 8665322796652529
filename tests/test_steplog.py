"""The race's bookkeeping: step times, the clock at each step's end, and losses that must stay numbers."""

import pytest
import torch

from bench.training.step_log import NonFiniteLoss, StepLog
from bench.training.timers import HostMarks


class Hand:
    ns = 0

    def __call__(self):
        return self.ns


def make(num_steps=4):
    hand = Hand()
    seen = []
    log = StepLog(
        HostMarks(hand),
        torch.device("cpu"),
        num_steps,
        on_row=seen.append,
        on_val=lambda *facts: seen.append(facts),
        now_ns=hand,
    )
    return hand, log, seen


def step(hand, log, number, ms, losses):
    log.on_step_start(number)
    hand.ns += ms * 1_000_000
    for loss in losses:
        log.add_loss(number, torch.tensor(loss))
    log.on_step_end(number)


def test_train_s_runs_on_over_a_validation_but_does_not_count_it():
    hand, log, seen = make()
    log.on_validation(0, 5.5, 0.0)
    step(hand, log, 0, 100, [1.0, 1.5])
    step(hand, log, 1, 200, [2.0])
    log.on_validation(2, 4.5, 0.3)
    hand.ns += 9_000_000_000  # validation takes 9 s
    step(hand, log, 2, 400, [0.5])
    log.on_validation(3, 4.0, 0.7)
    assert log.rows == [
        {"step": 1, "t_ns": 0, "step_ms": 100.0, "train_s": 0.1, "train_loss": 2.5},
        {"step": 2, "t_ns": 100_000_000, "step_ms": 200.0, "train_s": pytest.approx(0.3), "train_loss": 2.0},
        {"step": 3, "t_ns": 9_300_000_000, "step_ms": 400.0, "train_s": pytest.approx(0.7), "train_loss": 0.5},
    ]
    assert log.val_losses == {0: 5.5, 2: 4.5, 3: 4.0}
    assert [row["step"] if isinstance(row, dict) else row[:2] for row in seen] == [
        (0, 5.5),
        1,
        2,
        (2, 4.5),
        3,
        (3, 4.0),
    ]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_loss_that_is_no_number_ends_the_race_and_names_its_step(bad):
    hand, log, _ = make()
    step(hand, log, 0, 1, [2.0])
    step(hand, log, 1, 1, [bad])
    with pytest.raises(NonFiniteLoss, match="at step 2") as caught:
        step(hand, log, 2, 1, [1.0])
    assert caught.value.step == 2
    assert [row["step"] for row in log.rows] == [1, 2]


def test_a_validation_that_is_no_number_ends_the_race_too():
    _, log, _ = make()
    with pytest.raises(NonFiniteLoss, match="val_loss=nan at step 3"):
        log.on_validation(3, float("nan"), 0.1)


def test_a_step_is_read_late_so_that_nothing_waits():
    class Slow(HostMarks):
        passed = False

        def ready(self, mark):
            return self.passed

    marks = Slow(Hand())
    log = StepLog(marks, torch.device("cpu"), 9)
    for number in range(5):
        log.on_step_start(number)
        log.on_step_end(number)
    assert log.rows == []
    marks.passed = True
    log.on_step_start(5)
    log.on_step_end(5)
    assert [row["step"] for row in log.rows] == [1, 2, 3, 4, 5]
