"""The training loop and its clock: when it validates and stops, and that train_s is the sum of running segments."""

import contextlib

import pytest
from hand import Hand

from bench.config.schema import GoalConfig
from bench.training.timing.clock import Clock
from bench.training.timing.loop import FinishLine, train


class FakeClock:
    train_s = 0.0

    def __init__(self):
        self.log = []

    def start(self):
        self.log.append("start")

    def stop(self):
        self.log.append("stop")

    @contextlib.contextmanager
    def paused(self, reason):
        self.log.append(f"pause {reason}")
        yield
        self.log.append("go")


class Instruments:
    def __init__(self, log):
        self.log = log

    def __getattr__(self, edge):
        return lambda *args: self.log.append((edge, *args))


def run(losses, num_steps, val_every_steps, target=None, stop_after=None):
    clock, steps, val_losses = FakeClock(), [], iter(losses)
    goal = GoalConfig(num_steps=num_steps, val_tokens=1, val_every_steps=val_every_steps)
    line = FinishLine(goal, 1.0, 1, float, print, lambda loss: target is not None and loss <= target, stop_after)
    outcome = train(steps.append, lambda: next(val_losses), line, clock, Instruments(clock.log))
    return outcome, steps, clock.log


def test_validates_first_then_every_so_often_then_last():
    outcome, steps, log = run([5.0, 4.0, 3.0, 2.0], num_steps=5, val_every_steps=2)
    assert outcome == (5, 2.0)
    assert steps == [0, 1, 2, 3, 4]
    expected = [(0, 5.0, 0.0), (2, 4.0, 0.0), (4, 3.0, 0.0), (5, 2.0, 0.0)]
    assert [entry[1:] for entry in log if entry[0] == "on_validation"] == expected


@pytest.mark.parametrize(
    ("losses", "settings", "num_steps", "last", "num_validations"),
    [
        # inside the pause: no time passes between the last step line and the record
        pytest.param([5.0, 4.0, 2.9], (100, 10, 3.0), 20, ["stop", "go"], 3, id="at the target"),
        pytest.param([5.0, 4.0], (100, 10, None, 14), 14, [("on_step_end", 13), "stop"], 2, id="without a validation"),
        pytest.param([5.0, 4.0, 3.0], (4, 2, None, 4), 4, ["stop", "go"], 3, id="asked for after the last step"),
        pytest.param([5.0, 4.0], (4, 4), 4, ["stop", "go"], 2, id="the last step is a regular one too"),
    ],
)
def test_stops_at_the_finish_line_or_after_the_step_that_is_asked_for(
    losses, settings, num_steps, last, num_validations
):
    outcome, steps, log = run(losses, *settings)
    assert outcome == (num_steps, losses[-1]) and len(steps) == num_steps
    assert log[-2:] == last and log.count("pause validation") == num_validations


def test_instruments_see_each_step_between_its_edges():
    _, _, log = run([5.0, 4.0], num_steps=1, val_every_steps=7)
    edges = [entry for entry in log if isinstance(entry, tuple) and entry[0].startswith("on_step")]
    assert edges == [("on_step_start", 0), ("on_step_end", 0)]


def made(sync_ms=0):
    """-> (hand, the calls of sync and barrier, clock).  sync_ms: what the device needs to finish what was queued."""
    hand, calls = Hand(), []

    def sync():
        calls.append("sync")
        hand.sleep_ms(sync_ms)

    return hand, calls, Clock(sync, lambda: calls.append("barrier"), hand)


def test_a_pause_is_not_in_train_s():
    hand, _, clock = made()
    clock.start()
    hand.ns += 2_000_000_000
    with clock.paused("validation"):
        assert clock.train_s == 2.0
        hand.ns += 5_000_000_000
    hand.ns += 1_500_000_000
    clock.stop()
    assert clock.train_s == 3.5
    assert clock.paused_ns == {"validation": 5_000_000_000}
    assert clock.num_pauses == {"validation": 1}


def test_a_stop_inside_a_pause_adds_no_time():
    hand, calls, clock = made()
    clock.start()
    hand.ns += 2_000_000_000
    with clock.paused("validation"):
        hand.ns += 5_000_000_000
        clock.stop()
        hand.ns += 10_000
    assert clock.train_s == 2.0
    assert clock.paused_ns == {"validation": 5_000_010_000}
    assert calls == ["barrier", "sync", "sync", "barrier"]


def test_start_waits_for_all_ranks_and_every_edge_for_the_device():
    _, calls, clock = made()
    clock.start()
    with clock.paused("validation"):
        pass
    clock.stop()
    assert calls == ["barrier", "sync", "sync", "barrier", "sync", "sync", "barrier"]


def test_work_queued_before_a_pause_is_paid_before_it():
    _, _, clock = made(sync_ms=3000)
    clock.start()
    with clock.paused("validation"):
        assert clock.train_s == 3.0
