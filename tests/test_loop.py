"""The training loop: when it validates, when it stops, and what its instruments see."""

import contextlib

from bench.config.schema import GoalConfig
from bench.training.finish_line import FinishLine
from bench.training.loop import train


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
    answer = train(steps.append, lambda: next(val_losses), line, clock, Instruments(clock.log))
    return answer, steps, clock.log


def test_validates_first_then_every_so_often_then_last():
    answer, steps, log = run([5.0, 4.0, 3.0, 2.0], num_steps=5, val_every_steps=2)
    assert answer == (5, 2.0)
    assert steps == [0, 1, 2, 3, 4]
    expected = [(0, 5.0, 0.0), (2, 4.0, 0.0), (4, 3.0, 0.0), (5, 2.0, 0.0)]
    assert [entry[1:] for entry in log if entry[0] == "on_validation"] == expected


def test_stops_at_the_finish_line():
    answer, steps, log = run([5.0, 4.0, 2.9], num_steps=100, val_every_steps=10, target=3.0)
    assert answer == (20, 2.9)
    assert len(steps) == 20
    assert log[-2:] == ["stop", "go"]  # inside the pause: no time passes between the last step line and the record


def test_stops_after_the_step_that_is_asked_for_without_a_validation():
    answer, steps, log = run([5.0, 4.0], num_steps=100, val_every_steps=10, stop_after=14)
    assert answer == (14, 4.0)
    assert len(steps) == 14
    assert log[-2:] == [("on_step_end", 13), "stop"]


def test_a_stop_after_the_last_step_leaves_the_run_as_it_is():
    answer, _, log = run([5.0, 4.0, 3.0], num_steps=4, val_every_steps=2, stop_after=4)
    assert answer == (4, 3.0)
    assert log.count("pause validation") == 3


def test_the_last_step_is_validated_once_when_it_is_also_a_regular_one():
    answer, _, log = run([5.0, 4.0], num_steps=4, val_every_steps=4)
    assert answer == (4, 4.0)
    assert log.count("pause validation") == 2


def test_instruments_see_each_step_between_its_edges():
    _, _, log = run([5.0, 4.0], num_steps=1, val_every_steps=7)
    edges = [entry for entry in log if isinstance(entry, tuple) and entry[0].startswith("on_step")]
    assert edges == [("on_step_start", 0), ("on_step_end", 0)]
