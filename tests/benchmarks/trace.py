"""trace analysis against HolisticTraceAnalysis, time and peak memory, interleaved, fresh processes.

.venv/bin/python tests/benchmarks trace      --hta-python installs HTA and prints its Python
SPEEDRUN_BENCH_MB=400,1500 (the default: 400), SPEEDRUN_BENCH_TRACE=a real trace to repeat

HTA 0.6.1 is installed (PyPI: traceinsight) into a folder of its own under the data folder, once.  Both parse the file
and do the temporal, kernel, idle and overlap breakdowns; ours reads device and runtime rows: these four need no other.
"""

import gzip
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

import psutil

from bench.trace.source import Source
from bench.units import MIB

REPO = Path(__file__).resolve().parent.parent.parent
HTA_PINS = ("pandas==2.2.3", "numpy==2.2.6", "networkx", "plotly==5.24.1", "psutil", "pyyaml", "pydot")
TARGETS = {400: (25, 10), 1500: (40, None)}  # MB: (times as fast, times less memory)
MAX_MIB_AT_1500 = 400
OURS = """
import sys
if __name__ == "__main__":
    from bench.trace import events as e, kernels, load, temporal, window
    rank = load.load(sys.argv[1], (e.KERNEL, e.MEMCPY, e.MEMSET, e.RUNTIME, e.ANNOTATION))
    rows = window.device_rows(rank)
    kinds = kernels.types(rank, rows)
    print(temporal.breakdown(rank, rows, kinds)["idle_pct"], len(kernels.by_name(rank, rows, kinds)))
    print(len(kernels.by_type(rank, rows, kinds)), len(temporal.idle(rank, rows)))
"""
THEIRS = """
import sys, logging, warnings
warnings.simplefilter("ignore"); logging.disable(50)
from hta.trace_analysis import TraceAnalysis
import os
found = TraceAnalysis(trace_files={0: sys.argv[1]}, trace_dir=os.path.dirname(sys.argv[1]))
print(float(found.get_temporal_breakdown(visualize=False)["idle_time_pctg"].iloc[0]))
found.get_comm_comp_overlap(visualize=False); found.get_gpu_kernel_breakdown(visualize=False)
found.get_idle_time_breakdown(ranks=[0], visualize=False)
"""


def measure(num_rounds=3):
    """[(what, measured, sign, target)].  Raises ValueError without a trace to repeat, or without HTA."""
    real = Path(
        os.environ.get("SPEEDRUN_BENCH_TRACE")
        or REPO.parent / "shared" / "traces" / "files" / "hta_trace_diff_control" / "control.json.gz"
    )
    if not real.is_file():
        raise ValueError(f"SPEEDRUN_BENCH_TRACE={real}: there is no such trace; name a Kineto trace of a GPU to repeat")
    python, found = hta_python(), []
    with tempfile.TemporaryDirectory() as folder:
        for mb in [int(word) for word in os.environ.get("SPEEDRUN_BENCH_MB", "400").split(",")]:
            path = Path(folder) / f"{mb}.json"
            repeat(real, path, mb)
            found += _one_size(path, mb, python, num_rounds if mb <= 400 else 1)
            path.unlink()
    return found


def _one_size(path, mb, python, num_rounds):
    ours, theirs, packed = [], [], []
    gz = path.with_suffix(".json.gz")
    with open(path, "rb") as source, gzip.open(gz, "wb", compresslevel=3) as target:
        while block := source.read(1 << 22):
            target.write(block)
    for _ in range(num_rounds):
        ours.append(_run([sys.executable, "-c", OURS, str(path)]))
        theirs.append(_run([python, "-c", THEIRS, str(path)]))
        ours.append(_run([sys.executable, "-c", OURS, str(path)]))
        packed.append(_run([sys.executable, "-c", OURS, str(gz)]))
    gz.unlink()
    (our_s, our_mib), (their_s, their_mib), (gz_s, _) = (
        tuple(map(statistics.median, zip(*runs))) for runs in (ours, theirs, packed)
    )
    times, less = TARGETS.get(mb, (25, 10))
    yield f"trace of {mb} MB: HTA's time / ours ({their_s:.1f} s, {our_s:.2f} s)", their_s / our_s, ">=", times
    if less:
        yield (
            f"trace of {mb} MB: HTA's peak memory / ours ({their_mib:.0f} MiB, {our_mib:.0f} MiB)",
            their_mib / our_mib,
            ">=",
            less,
        )
    else:
        yield f"trace of {mb} MB: peak memory, MiB (HTA {their_mib:.0f})", our_mib, "<=", MAX_MIB_AT_1500
    yield f"trace of {mb} MB: gzip's time / plain", gz_s / our_s, "<=", 1.3


def _run(command):
    """(seconds, peak MiB: the resident sets of the process and its children added up) of a command that must succeed.

    Pages that processes share count in each: the sum is at least what the machine must have.
    """
    peak_bytes, started = 0, time.perf_counter()
    with tempfile.TemporaryFile("w+") as errors:
        process = psutil.Popen(
            [*command], cwd=REPO, stdout=subprocess.DEVNULL, stderr=errors, env=os.environ | {"PYTHONPATH": str(REPO)}
        )
        while process.poll() is None:
            peak_bytes = max(peak_bytes, _resident_bytes(process))
            time.sleep(0.05)
        seconds = time.perf_counter() - started
        errors.seek(0)
        if process.returncode:
            raise ValueError(f"{command[0]}: failed: {errors.read()[-500:]}")
    return seconds, peak_bytes / MIB


def _resident_bytes(process):
    total = 0
    try:
        for one in [process, *process.children(recursive=True)]:
            total += one.memory_info().rss
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
    stamps = [int(found) for found in re.findall(rb'"ts":\s*(\d+)', body)]
    spans = sorted(stamps)[len(stamps) // 100 :]  # without the metadata's stamps of 0
    span = spans[-1] - spans[0] + 1_000_000
    steps = [int(found) for found in re.findall(rb"ProfilerStep#(\d+)", body)]
    num_steps = max(steps) - min(steps) + 1 if steps else 0
    with open(path, "wb") as file:
        file.write(raw[:start])
        for number in range(max(1, round(mb * 1e6 / len(body)))):
            file.write(b",\n  " if number else b"")
            file.write(_shifted(body, number, span, num_steps) if number else body)
        file.write(b"]" + source.tail)


def _shifted(body, number, span, num_steps):
    def by(offset):
        return lambda found: found[1] + str(int(found[2]) + offset).encode()

    body = re.sub(rb'("ts":\s*)(\d+)', by(number * span), body)
    body = re.sub(rb'("(?:correlation|External id|id)":\s*)(\d+)', by(number * 10_000_000), body)
    return re.sub(rb"(ProfilerStep#)(\d+)", by(number * num_steps), body)


def hta_python():
    """The Python of an environment that has HTA 0.6.1; made once."""
    folder = Path(os.environ.get("SPEEDRUN_DATA") or REPO / ".data") / "hta-0.6.1"
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        print(
            "bench-self trace: installing HolisticTraceAnalysis 0.6.1 into an environment of its own, once",
            file=sys.stderr,
        )
        venv.create(folder, with_pip=True, clear=True)
        for words in (["--no-deps", "traceinsight==0.6.1"], list(HTA_PINS)):
            done = subprocess.run([python, "-m", "pip", "install", "-q", *words], capture_output=True, text=True)
            if done.returncode:
                raise ValueError(
                    f"bench-self trace: HTA could not be installed: {done.stderr.strip().splitlines()[-1][:200]}"
                )
        (folder / "complete").touch()
    return str(python)
