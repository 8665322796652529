"""trace analysis: one process against two, bounded memory, and HolisticTraceAnalysis beside it, interleaved.

.venv/bin/python tests/benchmarks trace      --hta-python installs HTA and prints its Python
SPEEDRUN_BENCH_MB=400 (of a rank), SPEEDRUN_BENCH_RANKS=8, SPEEDRUN_BENCH_LARGE_MB=1500 (one file; 0: none),
SPEEDRUN_BENCH_ROUNDS=2, SPEEDRUN_BENCH_HTA_ROUNDS=1

Wall times need a quiet machine.  CPU times of all processes stand beside them, and of a speed-up the longest of any,
which is what a quiet machine would take.  HTA 0.6.1 is installed (PyPI: traceinsight) into a folder of its own under
the data folder, once.  Both do what four_breakdowns.py does, on stamps in nanoseconds and in whole microseconds, on
which HTA is the faster.  At full size it needs 12 minutes, 5 GB of disk and 12 GB of memory, nearly all HTA's.
"""

import concurrent.futures
import gzip
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path
from typing import NamedTuple

import psutil

from bench.analysis.trace import load
from bench.analysis.trace.source import Source
from bench.base.units import MIB

REPO = Path(__file__).resolve().parent.parent.parent
FILES = REPO.parent / "shared" / "traces" / "files"
SHARED, WHOLE_US = FILES / "modded_8xh100", FILES / "hta_trace_diff_control"  # real traces to repeat
HTA_PINS = ("pandas==2.2.3", "numpy==2.2.6", "networkx", "plotly==5.24.1", "psutil", "pyyaml", "pydot")
NUM_HTA_RANKS = 2
HTA_FACTOR = 15  # of its memory, all processes, to the bytes of the files
TIMES_AS_FAST, SPEED_UP, MAX_PROCESS_MIB, MAX_LARGE_MIB = 40, 1.6, 150, 400
FULL = [sys.executable, "-m", "bench", "analyze", "--json"]
FOUR = [sys.executable, str(Path(__file__).parent / "four_breakdowns.py")]
THEIRS = """
import sys, logging, os, warnings
warnings.simplefilter("ignore"); logging.disable(50)
from hta.trace_analysis import TraceAnalysis
files = dict(enumerate(sys.argv[1:]))
if __name__ == "__main__":
    found = TraceAnalysis(trace_files=files, trace_dir=os.path.dirname(files[0]))
    found.get_temporal_breakdown(visualize=False)
    found.get_comm_comp_overlap(visualize=False)
    found.get_gpu_kernel_breakdown(visualize=False)
    found.get_idle_time_breakdown(ranks=list(files), visualize=False)
"""


class Cost(NamedTuple):
    """A command's wall time; the CPU time of all its processes, its first and its busiest other; resident sets."""

    wall_s: float
    cpu_s: float
    longest_cpu_s: float
    process_mib: float  # the largest process
    all_mib: float  # all of them added up, pages that they share in each


def measure():
    """Returns [(label, measured, sign, target)].  Raises ValueError without traces to repeat, without HTA, and where
    disk or memory do not suffice."""
    mb, num_ranks, large_mb, num_rounds, hta_rounds = (
        int(os.environ.get(f"SPEEDRUN_BENCH_{name}", value))
        for name, value in (("MB", 400), ("RANKS", 8), ("LARGE_MB", 1500), ("ROUNDS", 2), ("HTA_ROUNDS", 1))
    )
    python, figures = hta_python(), []
    with tempfile.TemporaryDirectory() as folder:
        _check_room(folder, mb, num_ranks, large_mb)
        paths = _repeated(SHARED, mb, max(num_ranks, NUM_HTA_RANKS), folder)
        figures += _processes(paths[:num_ranks], mb, num_rounds)
        figures += _packed(paths[0], mb, num_rounds)
        figures += _beside_hta(paths[:NUM_HTA_RANKS], mb, python, hta_rounds, "stamps in ns")
        paths = _repeated(WHOLE_US, mb, NUM_HTA_RANKS, folder)
        figures += _beside_hta(paths, mb, python, hta_rounds, "in whole us")
        if large_mb:
            (path,) = _repeated(SHARED, large_mb, 1, folder)
            _say(f"one file of {large_mb} MB")
            label = f"one file of {large_mb} MB: peak memory of all processes, MiB"
            figures.append((label, _run([*FULL, str(path)]).all_mib, "<=", MAX_LARGE_MIB))
    return figures


def _check_room(folder, mb, num_ranks, large_mb):
    disk_mb, memory_mb = shutil.disk_usage(folder).free / 1e6, psutil.virtual_memory().available / 1e6
    for name, free_mb, needed_mb in (
        ("disk in " + folder, disk_mb, max(mb * (num_ranks + 1), large_mb) * 1.1),
        ("memory, for HTA", memory_mb, HTA_FACTOR * NUM_HTA_RANKS * mb),
    ):
        if free_mb < needed_mb:
            raise ValueError(f"{name}: {free_mb:.0f} MB are free, {needed_mb:.0f} needed: set SPEEDRUN_BENCH_MB=100")


def _repeated(real, mb, number, folder):
    """So many ranks of mb MB in place of those there, from the traces in a folder; by all cores."""
    real = load.find(real)
    _say(f"writing {number} of {mb} MB from {real[0].parent.name}")
    paths = [Path(folder) / f"rank{index}.json" for index in range(number)]
    for path in Path(folder).glob("*.json"):
        path.unlink()
    with concurrent.futures.ProcessPoolExecutor(load.usable_cpus()) as pool:
        list(pool.map(repeat, (real[index % len(real)] for index in range(number)), paths, [mb] * number))
    return paths


def _say(message):
    print(f"  {time.strftime('%H:%M:%S')} {message} ...", file=sys.stderr, flush=True)


def _processes(paths, mb, num_rounds):
    """The whole analysis by one process and by two."""
    solo, pair = [], []
    for number in range(num_rounds):
        _say(f"{len(paths)} ranks, by one process and by two, round {number + 1} of {num_rounds}")
        solo.append(_run([*FULL, *map(str, paths)], num_cores=1))
        pair.append(_run([*FULL, *map(str, paths)], num_cores=2))
    solo, pair = map(_median, (solo, pair))
    label = f"{len(paths)} ranks of {mb} MB"
    took = f"{solo.longest_cpu_s:.1f} s, {pair.longest_cpu_s:.1f} s; wall {solo.wall_s:.1f} s, {pair.wall_s:.1f} s"
    yield f"{label}: speed-up from 1 to 2 processes ({took})", solo.longest_cpu_s / pair.longest_cpu_s, ">=", SPEED_UP
    yield f"{label}: the same of wall time", solo.wall_s / pair.wall_s, None, None
    largest_mib = max(solo.process_mib, pair.process_mib)
    yield f"{label}: peak memory of the largest process, MiB", largest_mib, "<=", MAX_PROCESS_MIB


def _beside_hta(paths, mb, python, num_rounds, stamps):
    ours, theirs, arguments = [], [], [str(path) for path in paths]
    for number in range(num_rounds):
        _say(f"HTA on {len(paths)} ranks, {stamps}, round {number + 1} of {num_rounds}: minutes")
        ours.append(_run([*FOUR, *arguments]))
        theirs.append(_run([python, "-c", THEIRS, *arguments]))
        ours.append(_run([*FOUR, *arguments]))
    ours, theirs = map(_median, (ours, theirs))
    label = f"{len(paths)} ranks of {mb} MB, {stamps}: HTA's"
    took = f"({theirs.wall_s:.1f} s, {ours.wall_s:.2f} s)"
    yield f"{label} time / ours {took}", theirs.wall_s / ours.wall_s, ">=", TIMES_AS_FAST
    took = f"({theirs.cpu_s:.1f} s, {ours.cpu_s:.2f} s)"
    yield f"{label} CPU time of all processes / ours {took}", theirs.cpu_s / ours.cpu_s, None, None
    memory = f"({theirs.all_mib:.0f} MiB, {ours.all_mib:.0f} MiB)"
    yield f"{label} peak memory / ours {memory}", theirs.all_mib / ours.all_mib, ">=", 10


def _packed(path, mb, num_rounds):
    """The same file compressed."""
    _say("gzip beside plain")
    gz = path.with_suffix(".json.gz")
    with open(path, "rb") as source, gzip.open(gz, "wb", compresslevel=3) as target:
        while block := source.read(1 << 22):
            target.write(block)
    costs = [(_run([*FOUR, str(gz)], 1).cpu_s, _run([*FOUR, str(path)], 1).cpu_s) for _ in range(num_rounds)]
    gz.unlink()
    packed_s, plain_s = map(statistics.median, zip(*costs))
    yield f"trace of {mb} MB: gzip's CPU time / plain", packed_s / plain_s, "<=", 1.3


def _median(costs):
    return Cost(*map(statistics.median, zip(*costs)))


def _run(command, num_cores=None):
    """Cost of a command that must succeed, on so many cores; None: all."""
    cores = sorted(os.sched_getaffinity(0))[:num_cores]
    peak, cpu, largest_bytes, started = {}, {}, 0, time.perf_counter()
    with tempfile.TemporaryFile("w+") as errors:
        process = psutil.Popen(
            [*command],
            cwd=REPO,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env=os.environ | {"PYTHONPATH": str(REPO)},
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
        )
        while process.poll() is None:
            largest_bytes = max(largest_bytes, _sample(process, peak, cpu))
            time.sleep(0.05)
        wall_s = time.perf_counter() - started
        errors.seek(0)
        if process.returncode:
            raise ValueError(f"{command[0]}: failed: {errors.read()[-500:]}")
    return Cost(wall_s, sum(cpu.values()), max(cpu.values()), max(peak.values()) / MIB, largest_bytes / MIB)


def _sample(process, peak, cpu):
    """Updates each process's largest resident set and CPU seconds so far.  Returns all sets together, in bytes."""
    total = 0
    try:
        for member in [process, *process.children(recursive=True)]:
            resident, times = member.memory_info().rss, member.cpu_times()
            peak[member.pid], cpu[member.pid] = max(peak.get(member.pid, 0), resident), times.user + times.system
            total += resident
    except psutil.Error:  # it just ended
        pass
    return total


def repeat(real, path, mb):
    """Write a trace of about mb MB: the real one's events again and again, each time later, with new ids and steps."""
    opened = gzip.open if Source(real).is_gzip else open
    with opened(real, "rb") as file:
        raw = file.read()
    start = raw.index(b"[", raw.index(b'"traceEvents"')) + 1
    source = Source(real)
    body = b",\n  ".join(source.chunks()).strip().rstrip(b",")
    stamps = [int(digits) for digits in re.findall(rb'"ts":\s*(\d+)', body)]
    spans = sorted(stamps)[len(stamps) // 100 :]  # without the metadata's stamps of 0
    span = spans[-1] - spans[0] + 1_000_000
    steps = [int(digits) for digits in re.findall(rb"ProfilerStep#(\d+)", body)]
    num_steps = max(steps) - min(steps) + 1 if steps else 0
    with open(path, "wb") as file:
        file.write(raw[:start])
        for number in range(max(1, round(mb * 1e6 / len(body)))):
            file.write(b",\n  " if number else b"")
            file.write(_shifted(body, number, span, num_steps) if number else body)
        file.write(b"]" + source.tail)


def _shifted(body, number, span, num_steps):
    def by(offset):
        return lambda match: match[1] + str(int(match[2]) + offset).encode()

    body = re.sub(rb'("ts":\s*)(\d+)', by(number * span), body)
    body = re.sub(rb'("(?:correlation|External id|id)":\s*)(\d+)', by(number * 10_000_000), body)
    return re.sub(rb"(ProfilerStep#)(\d+)", by(number * num_steps), body)


def hta_python():
    """The Python of an environment that has HTA 0.6.1; made once."""
    folder = Path(os.environ.get("SPEEDRUN_DATA") or REPO / ".data") / "hta-0.6.1"
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        print(
            "benchmarks trace: installing HolisticTraceAnalysis 0.6.1 into an environment of its own, once",
            file=sys.stderr,
        )
        venv.create(folder, with_pip=True, clear=True)
        for packages in (["--no-deps", "traceinsight==0.6.1"], list(HTA_PINS)):
            done = subprocess.run([python, "-m", "pip", "install", "-q", *packages], capture_output=True, text=True)
            if done.returncode:
                raise ValueError(
                    f"benchmarks trace: HTA could not be installed: {done.stderr.strip().splitlines()[-1][:200]}"
                )
        (folder / "complete").touch()
    return str(python)
