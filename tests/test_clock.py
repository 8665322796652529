"""The clock holds what DESIGN calls train_s: the sum of running segments without pauses, edges synced."""

from hand import Hand

from bench.training.timing.clock import Clock


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
