"""Timers: KempnerForge's API without its faults, on host marks that the test moves."""

import pytest

from bench.training.timers import CUDATimer, CUDATimerCollection, HostMarks


class Hand:
    ns = 0

    def __call__(self):
        return self.ns

    def sleep_ms(self, ms):
        self.ns += int(ms * 1e6)


@pytest.fixture
def hand():
    return Hand()


def test_micro_steps_add_up(hand):
    timers = CUDATimerCollection(["forward", "backward"], marks=HostMarks(hand))
    for ms in (10, 20, 30, 40):  # the original gives 40: its last pair wins
        timers.start("forward")
        hand.sleep_ms(ms)
        timers.stop("forward")
    assert timers.elapsed_ms("forward") == 100.0
    assert timers.elapsed_all() == {"forward": 100.0, "backward": 0.0}


def test_a_region_that_is_skipped_after_reset_is_zero_not_stale(hand):
    timers = CUDATimerCollection(["a"], marks=HostMarks(hand))
    timers.start("a")
    hand.sleep_ms(7)
    timers.stop("a")
    timers.reset()
    assert timers.elapsed_all() == {"a": 0.0}


def test_disabled_timers_need_no_device_and_give_zeros():
    timers = CUDATimerCollection(["a", "b"], enabled=False)
    timers.start("a")
    timers.stop("a")
    assert timers.elapsed_all() == {"a": 0.0, "b": 0.0}
    assert timers.enabled is False


def test_an_undeclared_region_is_named_in_the_error(hand):
    timers = CUDATimerCollection(["forward"], marks=HostMarks(hand))
    with pytest.raises(KeyError, match="'optimizer' is no declared region: forward"):
        timers.start("optimizer")


def test_a_timer_works_without_cuda_and_as_a_context():
    timer = CUDATimer()
    with timer:
        pass
    assert 0.0 <= timer.elapsed_ms() < 1000.0
    assert timer.count == 1


def test_start_and_stop_must_alternate(hand):
    timer = CUDATimer(HostMarks(hand))
    with pytest.raises(RuntimeError, match="without start"):
        timer.stop()
    timer.start()
    with pytest.raises(RuntimeError, match="twice"):
        timer.start()


@pytest.mark.gpu
def test_cuda_events_time_a_kernel_and_are_used_again():
    import torch

    from bench.training.timers import CudaMarks

    marks = CudaMarks()
    timer = CUDATimer(marks)
    a_MM = torch.randn(4096, 4096, device="cuda")
    for _ in range(3):
        with timer:
            a_MM @ a_MM
        assert timer.elapsed_ms() > 0.0
    assert len(marks._pool) == 2
