"""What sampling costs: the share of a core that the sampler's process takes, .

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
    """Returns (what, measured, sign, target) of each figure."""
    from bench.machine.gpus import num_visible

    rows = []
    with tempfile.TemporaryDirectory() as folder:
        compiler = shutil.which("cc") or shutil.which("gcc")
        if compiler is None:
            print("telemetry: no C compiler, so no GPUs of a stand-in", file=sys.stderr)
        else:
            fake = _stand_in(Path(folder), compiler, num_fake)
            uuids = [f"GPU-{num}" for num in range(num_fake)]
            rows.append(
                (
                    f"sampler, % of a core, {num_fake} GPUs of a stand-in, every {interval_ms} ms",
                    _cpu_pct(folder, uuids, num_fake, interval_ms, seconds, fake),
                )
            )
        num_real = num_visible()
        if num_real:
            rows.append(
                (
                    f"sampler, % of a core, {num_real} real GPU(s), every {interval_ms} ms",
                    _cpu_pct(folder, [], num_real, interval_ms, seconds),
                )
            )
        rows.append(
            (
                f"sampler, % of a core, the host, every {host_interval_ms} ms",
                _cpu_pct(folder, [], 0, host_interval_ms, seconds),
            )
        )
    return [(what, pct, "<=", TARGET_PCT) for what, pct in rows]


def _stand_in(folder, compiler, num_gpus):
    """Environment variables that put a library of so many GPUs in the driver's place."""
    source = REPO / "tests" / "stand_in" / "nvml.c"
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", folder / "libnvidia-ml.so.1", source], check=True)
    (folder / "gpus.txt").write_text("".join(f"GPU-{num} {GPU}\n" for num in range(num_gpus)))
    return {"LD_LIBRARY_PATH": str(folder), "STAND_IN_GPUS": str(folder / "gpus.txt")}


def _cpu_pct(folder, uuids, num_devices, interval_ms, seconds, env=()):
    """CPU time of the sampler's process from its first to its last sample, over the time that passed."""
    path = str(Path(folder) / "telemetry.csv")
    job = {
        "path": path,
        "interval_ms": interval_ms,
        "host_interval_ms": interval_ms,
        "uuids": uuids,
        "num_devices": num_devices,
        "root_pid": os.getpid(),
    }
    command = [sys.executable, "-m", "bench.machine.telemetry.sampler", json.dumps(job)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
    with subprocess.Popen(command, cwd=REPO, env=os.environ | dict(env), **pipes) as process:
        process.stdout.readline()
        process.stdin.write("start\n")
        started_ns = json.loads(process.stdout.readline())["t_ns"]
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
        process.stdin.write("stop\n")
        stopped = json.loads(process.stdout.readline())
    return 100 * stopped["report"]["sampler_cpu_s"] / ((stopped["t_ns"] - started_ns) / 1e9)
