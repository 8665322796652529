"""Small synthetic Kineto traces for tests."""

import gzip
import json
from pathlib import Path

import pytest

from bench.analysis.trace import analysis, load, text

SHARED = Path(__file__).resolve().parent.parent.parent / "shared" / "traces"  # real traces, if beside the checkout
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="the real traces of others are not beside this checkout")


def event(cat, name, ts, dur, pid=1, tid=1, **args):
    return {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur, "args": args}


def launched(name, ts, dur, call_ts, correlation, stream=7, cat="kernel", call_dur=2, device=0, **args):
    """Returns a device event and the call that launched it."""
    call = event("cuda_runtime", "cudaLaunchKernel", call_ts, call_dur, correlation=correlation)
    args |= {"device": device, "stream": stream, "correlation": correlation}
    return [call, event(cat, name, ts, dur, pid=device, tid=stream, **args)]


def write(path, events, indent=None, **meta):
    path = Path(path)
    text = json.dumps({"schemaVersion": 1, **meta, "traceEvents": events}, indent=indent, ensure_ascii=False).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def step(number, ts, dur):
    return event("user_annotation", f"ProfilerStep#{number}", ts, dur)


def steps_of_a_kernel(kernel_us, step_us):
    """Returns the events of three steps with one kernel each, my_kernel."""
    numbers = (1, 2, 3)
    calls = [launched("my_kernel", 1000 * number + 50, kernel_us, 1000 * number + 10, number) for number in numbers]
    return [step(number, 1000 * number, step_us) for number in numbers] + sum(calls, [])


def analysed(paths, **options):
    """Returns the analysis of the files of one job and one profiling window."""
    (report,) = analysis.analyze_files(paths, **options).values()
    return report


def load_all(paths):
    """Returns the files of one job as Ranks in order of rank."""
    return next(iter(load.by_window(paths).values()))


def rank_of(folder, events, **meta):
    """Writes the events of one rank to a.json in the folder and returns the analysis of that rank."""
    (rank,) = analysed([write(folder / "a.json", events, **meta)])["ranks"].values()
    return rank


def read_as_text(answer, both=False):
    """Returns an analysis as text for a terminal; with both, also as Markdown."""
    document = text.document(answer, "x")
    return (document.terminal(), document.markdown()) if both else document.terminal()
