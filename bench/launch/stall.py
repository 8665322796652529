"""Does a run still get on?  A run that stands still and computes nothing is ended, in place of waiting for ever."""

from collections.abc import Callable, Hashable

NUM_LOOKS = 10  # within the timeout
IDLE_CORES = 0.05  # of all the run's processes together; a sampler and an agent that wait take 0.02 (assumed limit)


class Stall:
    """timeout_s: how long a run may stand still; None: for ever.  cpu_s(): {pid: CPU seconds} of its processes.

    A long validation, a compilation and a GPU that is waited for print nothing, but use a core: only where no sign of
    progress comes and the run's processes compute nothing either, it stands still.  A loop without an end computes.
    """

    def __init__(self, timeout_s: float | None, cpu_s: Callable[[], dict[int, float]], now_s: float):
        self._timeout_s, self._cpu_s = timeout_s, cpu_s
        self._sign = self._cpu_before_s = None
        self._alive_s = self._looked_s = now_s

    def stands_still(self, sign: Hashable, now_s: float) -> bool:
        """sign: changes whenever the run gets on."""
        if self._timeout_s is None:
            return False
        if sign != self._sign:
            self._sign, self._cpu_before_s = sign, None
            self._alive_s = self._looked_s = now_s
            return False
        if now_s - self._looked_s < self._timeout_s / NUM_LOOKS:
            return False
        before_s, self._cpu_before_s = self._cpu_before_s, self._cpu_s()
        if before_s is None:  # the first look: silence before it counts only if it goes on
            self._looked_s = now_s
            return False
        used_s = sum(spent_s - before_s.get(pid, 0.0) for pid, spent_s in self._cpu_before_s.items())
        if used_s > IDLE_CORES * (now_s - self._looked_s):
            self._alive_s = now_s
        self._looked_s = now_s
        return now_s - self._alive_s >= self._timeout_s
