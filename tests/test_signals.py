"""A signal that ends a program is never lost: real signals, at the places where Python drops what a handler raises."""

import os
import signal
import subprocess
import sys

import pytest

from bench.machine.signals import Interrupted, held, raise_interrupted


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
