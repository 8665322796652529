"""Windows in seconds: rank 0's clock says when one begins, and all ranks record the same steps.

Rank 0 decides at the start of a step and writes the steps into a page of memory that the ranks share; each reads it at
the start of its own.  A rank may be ahead of rank 0 there: on a CPU by no step, as each step ends with an exchange for
which it waits, on a GPU by what its host has launched ahead.  So the window begins LEAD_STEPS later.
"""

import collections
import mmap
import os
import statistics
import struct
import time
from dataclasses import replace
from pathlib import Path

from bench.config.windows import ProfilerWindow

LEAD_STEPS = {"cpu": 1, "cuda": 16}  # assumed of CUDA, not measured; a rank that is further ahead records nothing
PAGE = struct.Struct("<qqq")  # cycles decided, first step, steps
NUM_TIMES = 9  # starts of steps whose median distance is what a step takes


class ByTheClock:
    """due() at the start of every step gives each cycle of the window once, on every rank.

    folder: of the run, in which the page is a file.  Seconds count from when this is made, validations included.
    """

    def __init__(self, window: ProfilerWindow, folder: Path, rank: int, world_size: int, device_type: str):
        assert window.first_s is not None
        self._window, self._rank, self._next_s = window, rank, window.first_s
        self._lead_steps = LEAD_STEPS[device_type] if world_size > 1 else 0
        self._starts_s: collections.deque[float] = collections.deque(maxlen=NUM_TIMES)
        self._path = folder / f".{window.name}.clock.tmp"
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        os.ftruncate(fd, PAGE.size)  # zeros at first
        self._page = mmap.mmap(fd, PAGE.size)
        os.close(fd)
        if rank == 0:  # the barrier at the start of the clock comes after this, and every due() after the barrier
            PAGE.pack_into(self._page, 0, 0, 0, 0)
        self._num_seen = self._last_step = 0
        self._started_s = time.perf_counter()

    def due(self, row: int) -> ProfilerWindow | None:
        """The window whose steps have been decided since the last call; its warm-up begins with this step or later."""
        if self._rank == 0:
            self._decide(row, time.perf_counter() - self._started_s)
        num_decided, first_step, num_steps = PAGE.unpack_from(self._page, 0)
        if num_decided == self._num_seen:
            return None
        self._num_seen = num_decided
        cycle = f"_cycle{num_decided}" if self._window.every_s is not None and self._window.repeat != 1 else ""
        name = f"{self._window.name}{cycle}"
        return replace(self._window, name=name, first_step=first_step, active_steps=num_steps, first_s=None)

    def _decide(self, row: int, now_s: float) -> None:
        self._starts_s.append(now_s)
        window, active_steps = self._window, self._window.active_steps
        if now_s < self._next_s or row <= self._last_step or (self._num_seen == window.repeat != 0):
            return
        if window.active_s is not None:
            times_s = list(self._starts_s)
            if len(times_s) < 2:
                return  # nobody knows yet what a step takes
            step_s = statistics.median(later - earlier for earlier, later in zip(times_s, times_s[1:]))
            active_steps = max(1, round(window.active_s / step_s))
        first_step = row + self._lead_steps + window.warmup_steps
        self._last_step = first_step + active_steps - 1
        while window.every_s is not None and self._next_s <= now_s:
            self._next_s += window.every_s
        if window.every_s is None:
            self._next_s = float("inf")
        PAGE.pack_into(self._page, 0, self._num_seen, first_step, active_steps)
        PAGE.pack_into(self._page, 0, self._num_seen + 1, first_step, active_steps)  # the number last: it is the signal

    def close(self) -> None:
        self._page.close()
        self._path.unlink(missing_ok=True)
