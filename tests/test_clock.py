"""The clock holds what DESIGN calls train_s: the sum of running segments without pauses, edges synced."""

from bench.training.clock import Clock


class Hand:
    """A clock hand that the test moves."""

    def __init__(self):
        self.ns = 0
        self.calls = []

    def now_ns(self):
        return self.ns

    def sync(self):
        self.calls.append("sync")

    def barrier(self):
        self.calls.append("barrier")


def make():
    hand = Hand()
    return hand, Clock(hand.sync, hand.barrier, hand.now_ns)


def test_a_pause_is_not_in_train_s():
    hand, clock = make()
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
    hand, clock = make()
    clock.start()
    hand.ns += 2_000_000_000
    with clock.paused("validation"):
        hand.ns += 5_000_000_000
        clock.stop()
        hand.ns += 10_000
    assert clock.train_s == 2.0
    assert clock.paused_ns == {"validation": 5_000_010_000}
    assert hand.calls == ["barrier", "sync", "sync", "barrier"]


def test_start_waits_for_all_ranks_and_every_edge_for_the_device():
    hand, clock = make()
    clock.start()
    with clock.paused("validation"):
        pass
    clock.stop()
    assert hand.calls == ["barrier", "sync", "sync", "barrier", "sync", "sync", "barrier"]


def test_work_queued_before_a_pause_is_paid_before_it():
    hand = Hand()

    def slow_sync():  # the device needs 3 s to finish what was queued
        hand.ns += 3_000_000_000

    clock = Clock(slow_sync, hand.barrier, hand.now_ns)
    clock.start()
    with clock.paused("validation"):
        assert clock.train_s == 3.0
