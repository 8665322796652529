"""What sampling costs: the share of a core that the sampler's process takes.

Eight GPUs of a stand-in for the driver's library (tests/stand_in/nvml.c; its calls cost nothing, a real driver's
come on top), this machine's own GPUs where it has some, and its host.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent.parent
GPU = "power_mw=500000 energy_mj=9000000000 clock_mhz=1755 temp_c=61 reasons=4 limit_mw=700000 num_processes=1"
TARGET_PCT = 3


def measure(num_fake=8, interval_ms=100, host_interval_ms=1000, seconds=8.0):
    """Yields (what, measured, sign, target) of each figure."""
    from bench.machine.gpus import visible

    measured = [("the host", [], 0, host_interval_ms, {})]
    with tempfile.TemporaryDirectory() as folder:
        if compiler := shutil.which("cc") or shutil.which("gcc"):
            uuids, stand_in = [f"GPU-{num}" for num in range(num_fake)], _stand_in(Path(folder), compiler, num_fake)
            measured.append((f"{num_fake} GPUs of a stand-in", uuids, num_fake, interval_ms, stand_in))
        else:
            print("telemetry: no C compiler, so no GPUs of a stand-in", file=sys.stderr)
        if num_real := len(visible()):
            measured.append((f"{num_real} real GPU(s)", [], num_real, interval_ms, {}))
        for what, uuids, num_devices, every_ms, env in measured:
            pct = _cpu_pct(folder, uuids, num_devices, every_ms, seconds, env)
            yield f"sampler, % of a core, {what}, every {every_ms} ms", pct, "<=", TARGET_PCT


def _stand_in(folder, compiler, num_gpus):
    """Environment variables that put a library of so many GPUs in the driver's place."""
    source = REPO / "tests" / "stand_in" / "nvml.c"
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", folder / "libnvidia-ml.so.1", source], check=True)
    (folder / "gpus.txt").write_text("".join(f"GPU-{num} {GPU}\n" for num in range(num_gpus)))
    return {"LD_LIBRARY_PATH": str(folder), "STAND_IN_GPUS": str(folder / "gpus.txt")}


def _cpu_pct(folder, uuids, num_devices, interval_ms, seconds, env):
    """CPU time of the sampler's process from its first to its last sample, over the time that passed."""
    job = {"path": str(Path(folder) / "telemetry.csv"), "interval_ms": interval_ms, "host_interval_ms": interval_ms}
    job |= {"uuids": uuids, "num_devices": num_devices, "root_pid": os.getpid()}
    command = [sys.executable, "-m", "bench.machine.telemetry.sampler", json.dumps(job)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
    with subprocess.Popen(command, cwd=REPO, env=os.environ | env, **pipes) as process:
        process.stdout.readline()
        process.stdin.write("start\n")
        started_ns = json.loads(process.stdout.readline())["t_ns"]
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
        process.stdin.write("stop\n")
        stopped = json.loads(process.stdout.readline())
    return 100 * stopped["report"]["sampler_cpu_s"] / ((stopped["t_ns"] - started_ns) / 1e9)
