"""Is there a cliff: CPU time and memory of table and of the site over 10,000 and over 100,000 run folders.

Whole processes, interleaved.  Cold: without the store; warm: with it.  The files (2.2 GB) are in the page cache.  The
site is of runs without steps and made once a size.  where: a condition that few runs meet, sorted, by the owner of the
results folder and by another user whose first call it is (root, to whom the folder does not belong).
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.base.units import KIB, MIB
from bench.record import row_reader, store
from benchmarks import results

SIZES = (10_000, 100_000)
KINDS = ("where, cold", "where, warm", "where, another user", "table, warm", "site")
NUM_RATES = 1000  # configs, each with its repeats
WHERE = ("table", "--where", "optim.lr<0.1", "val_loss<4.22", "--sort", "train_s")
OTHER_USER = 12345
WHERE_TARGET_S, COLD_TARGET_S = 0.3, 60.0  # seconds of a quiet machine, of the larger
MAX_TIMES = 15.0  # ten times the records; a cliff would be a hundred
MAX_PEAK_MIB = 4096.0  # of the larger, and never more than it by far: rows are held, records are not


def measure(num_rounds=3, with_site=True):
    """Returns [(what, measured, sign, target)]."""
    costs = {(size, kind): [] for kind in KINDS for size in SIZES}
    with tempfile.TemporaryDirectory() as base:
        homes = {size: Path(base) / str(size) for size in SIZES}
        for size, home in homes.items():
            results.make_runs(home, size, NUM_RATES)
        time.sleep(row_reader.SETTLED_S + 1)
        env = os.environ | {"PYTHONPYCACHEPREFIX": f"{base}/.bytecode"}
        env.pop("PYTHONDONTWRITEBYTECODE", None)
        for _ in range(num_rounds):
            for size, home in homes.items():
                size_env = env | {"SPEEDRUN_RESULTS": str(home)}
                (home / store.NAME).unlink(missing_ok=True)
                costs[size, "where, cold"].append(_cost(size_env, *WHERE))
                costs[size, "where, warm"].append(_cost(size_env, *WHERE))
                costs[size, "table, warm"].append(_cost(size_env, "table"))
                if os.geteuid() == 0:  # who reads is then neither the folder's owner nor the file's
                    for path in (home, home / store.NAME):
                        os.chown(path, OTHER_USER, -1)
                    another = size_env | {"XDG_CACHE_HOME": tempfile.mkdtemp(dir=base)}
                    costs[size, "where, another user"].append(_cost(another, *WHERE))
        for size, home in homes.items() if with_site else ():
            costs[size, "site"].append(_cost(env | {"SPEEDRUN_RESULTS": str(home)}, "report", str(home)))
    rows, best = [], {key: min(seconds[1:] or seconds) for key, seconds in costs.items() if seconds}
    targets = {"where, cold": COLD_TARGET_S, "where, warm": WHERE_TARGET_S, "where, another user": WHERE_TARGET_S}
    for (size, kind), (cpu_s, peak_mib) in best.items():
        rows.append((f"{kind}, {size:,} runs, CPU s", cpu_s, "<=" if kind in targets else None, targets.get(kind)))
        rows.append((f"{kind}, {size:,} runs, largest process, MiB", peak_mib, "<=", MAX_PEAK_MIB))
    small, large = SIZES
    times = {kind: best[large, kind][0] / best[small, kind][0] for size, kind in best if size == small}
    return rows + [(f"{kind}, {large:,} against {small:,}, times", times[kind], "<=", MAX_TIMES) for kind in times]


def _cost(env, *arguments):
    """Runs a command and returns (CPU s of it and its children, MiB of the largest of them)."""
    command = [sys.executable, "-m", "bench", *arguments]
    process = subprocess.Popen(command, cwd=results.REPO, env=env, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, arguments
    return used.ru_utime + used.ru_stime, used.ru_maxrss * KIB / MIB
