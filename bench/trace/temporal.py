"""Where the device's time went: busy and idle, computing and not, communication hidden and exposed.  Nanoseconds in, us out."""

import numpy as np

from bench.trace import events, intervals, window
from bench.trace.nest import groups

US = 1000
KERNEL_WAIT_BELOW_NS = 30_000  # HolisticTraceAnalysis' effective limit: its constant 30 is compared with microseconds
COMPUTATION, COMMUNICATION, MEMORY = range(3)


def breakdown(rank, rows, kinds):
    """{"span_us", "idle_us", "compute_us", "non_compute_us", ..._pct, "exposed_comm_us", "comm_us", "overlap_pct"}.

    One device.  span: first start to last end; compute: time in which a computation kernel runs; non_compute: the rest of
    the busy time; idle + compute + non_compute = span.  overlap_pct: share of communication hidden under computation, None
    without communication.  None for every time of a device that did nothing.
    """
    busy = intervals.union(rank.ts[rows], rank.end[rows])
    if not len(rows):
        return dict.fromkeys(
            (
                "span_us",
                "idle_us",
                "compute_us",
                "non_compute_us",
                "idle_pct",
                "compute_pct",
                "non_compute_pct",
                "comm_us",
                "exposed_comm_us",
                "overlap_pct",
            )
        )
    sets = [intervals.union(rank.ts[rows[kinds == kind]], rank.end[rows[kinds == kind]]) for kind in range(3)]
    span = int(rank.end[rows].max() - rank.ts[rows].min())
    busy_ns, compute, comm = (
        intervals.length(busy),
        intervals.length(sets[COMPUTATION]),
        intervals.length(sets[COMMUNICATION]),
    )
    hidden = intervals.intersection_length(sets[COMMUNICATION], sets[COMPUTATION])
    found = {
        "span_us": span / US,
        "idle_us": (span - busy_ns) / US,
        "compute_us": compute / US,
        "non_compute_us": (busy_ns - compute) / US,
    }
    found |= {
        f"{name}_pct": 100 * found[f"{name}_us"] / found["span_us"] if span else 0.0
        for name in ("idle", "compute", "non_compute")
    }
    return found | {
        "comm_us": comm / US,
        "exposed_comm_us": (comm - hidden) / US,
        "overlap_pct": 100 * hidden / comm if comm else None,
    }


def idle(rank, rows):
    """Why each stream waited: [{"device", "stream", "host_wait_us", "kernel_wait_us", "other_us"}].

    A gap before a row is a host wait if the host launched it only after the stream had run dry; else a kernel wait if it
    is shorter than 30 us; else other.
    """
    found = []
    launched = window.launch_times(rank, rows)
    for track, mine in groups(rank.track[rows]):
        order = mine[np.argsort(rank.ts[rows[mine]], kind="stable")]
        start, end, call = rank.ts[rows[order]], rank.end[rows[order]], launched[order]
        before = np.maximum.accumulate(end)[:-1]
        gap = np.maximum(start[1:] - before, 0)
        is_host = (call[1:] != window.NOT_LAUNCHED) & (call[1:] > before)
        is_kernel = ~is_host & (gap < KERNEL_WAIT_BELOW_NS)
        _, device, stream = rank.tracks[track]
        sums = {"host_wait_us": gap[is_host], "kernel_wait_us": gap[is_kernel], "other_us": gap[~is_host & ~is_kernel]}
        found.append(
            {"device": device, "stream": stream} | {name: int(values.sum()) / US for name, values in sums.items()}
        )
    return found


def steps(rank, rows, kinds, counted):
    """One line a ProfilerStep: {"step", "host_us", "busy_us", "compute_us", "comm_us", "exposed_comm_us", "num_kernels"}.

    counted: window.steps.  Device rows belong to the step in which the host launched them; host_us is the annotation's own
    time, None where only the GPU shows the step.
    """
    on_host, found, kind_of = bool(rank.steps()), [], np.full(len(rank.ts), -1, np.int8)
    kind_of[rows] = kinds
    for (number, start, end), mine in window.rows_of_steps(rank, rows, counted):
        sets = [
            intervals.union(rank.ts[some], rank.end[some])
            for some in (mine[kind_of[mine] == kind] for kind in range(3))
        ]
        busy = intervals.union(rank.ts[mine], rank.end[mine])
        comm = intervals.length(sets[COMMUNICATION])
        hidden = intervals.intersection_length(sets[COMMUNICATION], sets[COMPUTATION])
        found.append(
            {
                "step": number,
                "host_us": (end - start) / US if on_host else None,
                "busy_us": intervals.length(busy) / US,
                "compute_us": intervals.length(sets[COMPUTATION]) / US,
                "comm_us": comm / US,
                "exposed_comm_us": (comm - hidden) / US,
                "num_kernels": len(mine),
            }
        )
    return found


def annotations(rank, kind=events.ANNOTATION, until_ns=None):
    """[{"name", "count", "sum_us", "mean_us", "min_us", "max_us", "std_us"}] of the host's (or GPU's) named ranges, longest first.

    Those that count, see window.  std is of a sample (n - 1); 0 for one.
    """
    rows = window.annotation_rows(rank, kind, until_ns)
    found = []
    for name, mine in groups(rank.name[rows]):
        dur = rank.dur[rows[mine]]
        total = int(dur.sum())
        std = float(dur.std(ddof=1)) if len(dur) > 1 else 0.0
        found.append(
            {
                "name": rank.names[name],
                "count": len(dur),
                "sum_us": total / US,
                "mean_us": total / len(dur) / US,
                "min_us": int(dur.min()) / US,
                "max_us": int(dur.max()) / US,
                "std_us": std / US,
            }
        )
    return sorted(found, key=lambda line: -line["sum_us"])
