"""Signals that end a program are never lost, where Python drops what a handler raises; processes that have ended."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from bench.machine import processes
from bench.machine.signals import Interrupted, held, raise_interrupted
from bench.record import failures


def me(number=signal.SIGTERM):
    os.kill(os.getpid(), number)


def test_one_that_comes_is_raised_with_its_name_and_the_next_are_ignored():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Interrupted, match="SIGTERM"), raise_interrupted():
        try:
            me(signal.SIGTERM)
        finally:
            me(signal.SIGINT)
            me(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_one_within_a_fork_is_raised_by_the_next_check():
    sent = []

    def send_once():
        if sent == [None]:
            sent.append(signal.SIGTERM)
            me()

    os.register_at_fork(before=send_once)  # there for ever: it acts once
    hidden, sys.unraisablehook = sys.unraisablehook, lambda unraisable: None
    try:
        with pytest.raises(Interrupted, match="SIGTERM"), raise_interrupted() as signals:
            sent.append(None)
            process = subprocess.Popen(["true"], preexec_fn=lambda: None)  # what it raises there, Python drops
            process.wait()
            assert sent == [None, signal.SIGTERM]
            signals.check()
            pytest.fail("it was lost")
    finally:
        sys.unraisablehook = hidden


def test_one_that_nobody_asked_for_is_raised_at_the_end_of_the_block():
    class Dropped:
        def __del__(self):
            me()

    hidden, sys.unraisablehook = sys.unraisablehook, lambda unraisable: None
    try:
        with pytest.raises(Interrupted, match="SIGTERM"), raise_interrupted():
            Dropped()
    finally:
        sys.unraisablehook = hidden


def test_it_is_no_exception_that_others_catch():
    with pytest.raises(Interrupted), raise_interrupted():
        try:
            me()
        except Exception:
            pytest.fail("it was taken for an error")


def test_while_held_nothing_is_raised_and_afterwards_it_is():
    done = []
    with pytest.raises(Interrupted, match="SIGTERM"), raise_interrupted():
        with held():
            me()
            done.append(True)
        done.append(False)
    assert done == [True]


def test_once_ignored_none_is_raised():
    with raise_interrupted() as signals:
        signals()
        me()
        signals.check()
    assert signals.missed() == "SIGTERM"  # so that no further run is made
    assert failures.interrupted_by({"failure": None, failures.MISSED: signals.missed()}) == "SIGTERM"
    with raise_interrupted() as signals:
        signals()
    assert signals.missed() is None


def test_what_the_process_was_started_to_ignore_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with raise_interrupted() as signals:
            me(signal.SIGHUP)
            signals.check()
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_program_started_after_one_does_not_ignore_it():
    with pytest.raises(Interrupted), raise_interrupted():
        try:
            me()
        finally:
            text = subprocess.run(["cat", "/proc/self/status"], capture_output=True, text=True).stdout
            ignored = int(next(line for line in text.splitlines() if line.startswith("SigIgn")).split()[1], 16)
            assert not ignored & 1 << (signal.SIGTERM - 1)


def sleeper(seconds):
    return subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({seconds})"])


def test_a_killed_process_has_ended_even_before_it_is_reaped():
    child = sleeper(60)
    assert not processes.has_ended(child.pid, within_s=0.05)
    child.kill()
    assert processes.has_ended(child.pid, within_s=10)
    child.wait()
    assert processes.has_ended(child.pid, within_s=0)


def test_the_watch_calls_once_the_process_is_gone():
    child, called = sleeper(60), threading.Event()
    processes.when_gone(child.pid, called.set, "test-watch")
    time.sleep(0.1)
    assert not called.is_set()
    child.kill()
    assert called.wait(10)
    child.wait()


def test_children_are_those_of_the_kernels_lists():
    alive, ended = sleeper(60), sleeper(0)
    assert processes.has_ended(ended.pid, within_s=10)
    assert processes.children() >= {alive.pid, ended.pid}  # a zombie too
    assert processes.children() == processes._children_among_all(os.getpid())
    assert processes.waited_ns([alive.pid]) is None or processes.waited_ns([alive.pid]) >= 0
    alive.kill()
    alive.wait(), ended.wait()
    assert not processes.children() & {alive.pid, ended.pid}


def test_a_pool_that_is_ended_prints_nothing_of_its_workers():
    """As ./run.sh report of a site: the workers inherited the handler of the command line, and printed what it raised.

    The first pool's workers are ended at work, the other pools' perhaps before they have begun.
    """
    program = """
import signal, time
from bench.cli import main
from bench.machine import processes
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, main._end)
for number in range(20):
    with processes.started(time.sleep, [60, 60, 60], True):
        time.sleep(0.5 * (number == 0))
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=20)
    assert (ended.returncode, ended.stderr) == (0, "")
