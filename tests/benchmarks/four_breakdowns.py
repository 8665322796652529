"""The analyses on which HolisticTraceAnalysis is raced: times, kernels, idle, overlap.  four_breakdowns.py TRACE...

Of several large files each has its own process.
"""

import sys

from bench.analysis.trace import device_time, load, window


def breakdown(path):
    """Returns {"idle_pct", "overlap_pct", "num_kernels", "num_types", "num_streams"} of a trace."""
    rank = load.load(path)
    rows = window.device_rows(rank)
    kinds = device_time.types(rank, rows)
    times = device_time.breakdown(rank, rows, kinds)
    counts = {
        "num_kernels": len(device_time.by_name(rank, rows, kinds)),
        "num_types": len(device_time.by_type(rank, rows, kinds)),
    }
    counts["num_streams"] = len(device_time.idle(rank, rows))
    return {name: times[name] for name in ("idle_pct", "overlap_pct")} | counts


if __name__ == "__main__":
    for answer in load.over_files(breakdown, sys.argv[1:]):
        print(answer)
