"""The step log: step times, the clock at each step's end, and losses that must stay numbers."""

import pytest
import torch
from hand import Hand

from bench.training.instruments.base import Instrument, InstrumentSet
from bench.training.timing.clock import HostMarks
from bench.training.timing.step_log import NonFiniteLoss, StepLog


def make(num_steps=4):
    hand = Hand()
    seen = []
    log = StepLog(HostMarks(hand), torch.device("cpu"), num_steps, on_row=seen.append, now_ns=hand)
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
    times = [(row["step"], row["t_ns"], row["step_ms"], row["train_s"]) for row in seen]
    assert times == [
        (0, None, None, 0.0),
        (1, 0, 100.0, 0.1),
        (2, 100_000_000, 200.0, 0.3),  # with a validation: the clock's own train_s
        (3, 9_300_000_000, 400.0, 0.7),
    ]
    assert [row["train_loss"] for row in seen] == [None, 2.5, 2.0, 0.5]
    assert [row["val_loss"] for row in seen] == [5.5, None, 4.5, 4.0]
    assert log.rows == seen[1:]


def test_the_end_of_a_run_without_a_validation_reads_what_is_unread():
    hand, log, seen = make()
    log.on_validation(0, 5.5, 0.0)
    for number in (0, 1):
        step(hand, log, number, 100, [1.0])
    log.on_run_end()
    assert [(row["step"], row["step_ms"], row["val_loss"]) for row in seen[1:]] == [(1, 100.0, None), (2, 100.0, None)]


def test_between_validations_train_s_is_the_clock_of_the_last_one_and_the_marks_since():
    hand, log, seen = make()
    log.on_validation(0, 5.5, 0.0)
    step(hand, log, 0, 100, [1.0])
    log.on_validation(1, 4.5, 0.15)  # the clock says more than the marks
    for number in (1, 2, 3):
        step(hand, log, number, 200, [1.0])
    assert [row["train_s"] for row in seen[2:]] == [pytest.approx(0.35), pytest.approx(0.55)]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_loss_that_is_no_number_ends_the_run_and_names_its_step(bad):
    hand, log, _ = make()
    step(hand, log, 0, 1, [2.0])
    step(hand, log, 1, 1, [bad])
    with pytest.raises(NonFiniteLoss, match="at step 2") as caught:
        step(hand, log, 2, 1, [1.0])
    assert caught.value.step == 2
    assert [row["step"] for row in log.rows] == [1, 2]


def test_a_validation_that_is_no_number_ends_the_run_too():
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


def test_what_an_instrument_does_in_a_step_is_in_its_time():
    """At each edge that the clock runs at: else a costly instrument would make a run look faster than it is."""
    hand, log, seen = make()

    class Costly(Instrument):
        def on_step_start(self, step):
            hand.ns += 1_000_000

        def on_phase(self, name):
            hand.ns += 20_000_000

        def on_step_end(self, step):
            hand.ns += 300_000_000

    watch = InstrumentSet([Costly(context=None)], essential=log)
    watch.on_step_start(0)
    watch.on_phase("forward")
    log.add_loss(0, torch.tensor(1.0))
    watch.on_step_end(0)
    watch.on_validation(1, 4.5, 0.321)
    assert seen[-1]["step_ms"] == 321.0
