"""Is there a cliff: CPU time of table over 10,000 and over 100,000 run folders, whole processes, interleaved.

Cold: without the index; warm: with it.  The files (2.2 GB) are in the page cache.
"""

import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.record import index
from benchmarks import results

SIZES = (10_000, 100_000)
MAX_TIMES = 15.0  # ten times the records; a cliff would be a hundred


def measure(num_rounds=3):
    """[(what, measured, sign, target)]"""
    cpu_s = {(size, kind): [] for size in SIZES for kind in ("cold", "warm")}
    with tempfile.TemporaryDirectory() as base:
        homes = {size: Path(base) / str(size) for size in SIZES}
        for size, home in homes.items():
            results.make_runs(home, size)
        time.sleep(index.SETTLED_S + 1)
        env = os.environ | {"PYTHONPYCACHEPREFIX": f"{base}/.bytecode"}
        env.pop("PYTHONDONTWRITEBYTECODE", None)
        for _ in range(num_rounds):
            for size, home in homes.items():
                (home / "cpu_nano" / index.NAME).unlink(missing_ok=True)
                for kind in ("cold", "warm"):
                    cpu_s[size, kind].append(_table_cpu_s(env | {"SPEEDRUN_RESULTS": str(home)}))
        for home in homes.values():
            shutil.rmtree(home)
    best = {key: min(seconds[1:] or seconds) for key, seconds in cpu_s.items()}
    rows = [(f"table over {size:,} run folders, {kind}, CPU s", best[size, kind], None, None) for size, kind in best]
    small, large = SIZES
    times = ((kind, best[large, kind] / best[small, kind]) for kind in ("cold", "warm"))
    return rows + [(f"{large:,} against {small:,}, {kind}, times", ratio, "<=", MAX_TIMES) for kind, ratio in times]


def _table_cpu_s(env):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    words = [sys.executable, "-m", "bench", "table"]
    subprocess.run(words, cwd=results.REPO, env=env, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
