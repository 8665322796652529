"""What happens on one rank as lines of events.jsonl: rank 0 writes them at once, others keep them."""

import contextlib
import time

from bench.base import utc
from bench.record import step_files


class RankEvents:
    """events("gc", ms=3.2) from anywhere on this rank.  .kept: those not yet written, oldest first."""

    def __init__(self, rank):
        self._rank, self._sink = rank, None
        self.kept = []

    def __call__(self, name, **facts):
        now_ns = time.perf_counter_ns()
        t_ns = facts.pop("t_ns", now_ns)  # given where the event happened earlier
        event = {"t_ns": t_ns, "utc": utc.now((now_ns - t_ns) / 1e9), "event": name, "rank": self._rank, **facts}
        self._sink(event) if self._sink else self.kept.append(event)

    @contextlib.contextmanager
    def handed_to(self, sink):
        """In this block to sink(event), what was kept first."""
        while self.kept:
            sink(self.kept.pop(0))
        self._sink = sink
        try:
            yield
        finally:
            self._sink = None

    def write(self, folder):
        """What was kept, where there will be no result: the run has failed."""
        while self.kept:
            with contextlib.suppress(OSError):
                step_files.append_event(folder, self.kept.pop(0))
