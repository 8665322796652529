"""The clock of a device under load: read again and again while products run on it."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

LOAD_S, EVERY_S = 1.5, 0.1
RISE_S = 0.4  # until a clock that rested is up


def under(
    work: Callable[[], object], read: Callable[[], dict], load_s: float = LOAD_S, every_s: float = EVERY_S
) -> list[dict]:
    """work: a second or less of load, called for load_s and until read(), facts now, has been called after RISE_S."""
    result, over = [], threading.Event()

    def sample():
        over.wait(min(RISE_S, load_s / 2))
        while not over.is_set():
            result.append(read())
            over.wait(every_s)

    thread = threading.Thread(target=sample)
    thread.start()
    until_s = time.perf_counter() + load_s
    try:
        while time.perf_counter() < until_s or not result and thread.is_alive():
            work()
    finally:
        over.set()
        thread.join()
    return result


def cpu_facts(cpuinfo: Path = Path("/proc/cpuinfo")) -> dict:
    """{"clock_mhz"}: of the fastest core as the kernel says it, which under a hypervisor may be what the host was sold
    as; None where it says nothing."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        lines = ()
    clocks_mhz = [float(line.partition(":")[2]) for line in lines if line.startswith("cpu MHz")]
    return {"clock_mhz": max(clocks_mhz, default=None)}


def gpu_facts(gpu) -> dict:
    """gpu: of bench.machine.telemetry.nvml, None without a driver that answers -> {"clock_mhz", "temp_c", "power_w",
    "throttle_reasons"}."""
    now_ns = time.perf_counter_ns()
    row = (gpu.sample(now_ns, now_ns) if gpu is not None else None) or {}
    names = ("temp_c", "power_w", "throttle_reasons")
    return {"clock_mhz": row.get("sm_clock_mhz")} | {name: row.get(name) for name in names}
