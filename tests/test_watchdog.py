"""A process is known to have ended when it has, reaped or not."""

import os
import subprocess
import sys
import threading
import time

from bench.machine import processes


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
    assert processes.waited_ns(os.getpid()) is None or processes.waited_ns(os.getpid()) >= 0
    alive.kill()
    alive.wait(), ended.wait()
    assert not processes.children() & {alive.pid, ended.pid}
