"""How long a run lasts, by the monotonic clock, which cannot be set; and whether the machine's other clocks agree.

time.monotonic() and the time of day are slewed together (clock_gettime(2)), so that they part only where the time is
set, or the machine sleeps.  /proc/uptime is the kernel's own, which a preloaded library does not change.
"""

import contextlib
import time

MAX_DIFFERENCE_S = 1.0


class RunClock:
    """From now on."""

    def __init__(self):
        self.started_s = time.monotonic()
        self._wall_s, self._uptime_s = time.time(), _uptime_s()

    def lasted_s(self) -> float:
        """Seconds so far."""
        return time.monotonic() - self.started_s

    def doubts(self) -> list[str]:
        """Sentences: where another clock says that it was more than a second longer or shorter."""
        result, lasted_s, uptime_s = [], self.lasted_s(), _uptime_s()
        if abs(jump_s := time.time() - self._wall_s - lasted_s) > MAX_DIFFERENCE_S:
            why = "it was set, or the machine slept; durations are by the monotonic clock, dates may be wrong"
            result.append(f"the time of day moved by {jump_s:+.1f} s against the monotonic clock during the run: {why}")
        if None not in (uptime_s, self._uptime_s):
            passed_s = uptime_s - self._uptime_s
            if abs(passed_s - lasted_s) > MAX_DIFFERENCE_S:
                both = f"{lasted_s:.1f} s of the run, the kernel's /proc/uptime {passed_s:.1f} s"
                why = "the machine slept, or this program sees a wrong time"
                result.append(f"the monotonic clock counted {both}: {why}")
        return result


def _uptime_s():
    """Seconds since boot, sleep included, to the hundredth; None where the system is not Linux."""
    with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/uptime") as file:
        return float(file.read().split()[0])
    return None
