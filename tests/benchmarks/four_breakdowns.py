"""The analyses on which HolisticTraceAnalysis is raced: times, kernels, idle, overlap.  four_breakdowns.py TRACE...

They need device rows and launches alone, so nothing else is decoded; of several large files each has its own process.
"""

import sys

from bench.analysis.trace import events, kernels, load, temporal, window

KINDS = (events.KERNEL, events.MEMCPY, events.MEMSET, events.RUNTIME, events.ANNOTATION)


def of_file(path, num_parts):
    """-> {"idle_pct", "overlap_pct", "num_kernels", "num_types", "num_streams"} of a trace."""
    rank = load.load(path, KINDS, num_parts)
    rows = window.device_rows(rank)
    kinds = kernels.types(rank, rows)
    times = temporal.breakdown(rank, rows, kinds)
    counts = {
        "num_kernels": len(kernels.by_name(rank, rows, kinds)),
        "num_types": len(kernels.by_type(rank, rows, kinds)),
    }
    counts["num_streams"] = len(temporal.idle(rank, rows))
    return {name: times[name] for name in ("idle_pct", "overlap_pct")} | counts


if __name__ == "__main__":
    for answer in load.over_files(of_file, sys.argv[1:]):
        print(answer)
