"""Ranks of one job -> everything that is said about them: the --json answer of ./run.sh analyze."""

from bench.machine import peak_rates
from bench.trace import (
    advice,
    attribution,
    categories,
    critical,
    events,
    flops,
    kernels,
    launches,
    load,
    operators,
    skew,
    temporal,
    window,
)

DTYPES = ("bfloat16", "float16", "float32", "tf32", "float8")
MAX_OPERATORS = 50
MAX_RANKS = 2**20  # a file that says more is not believed


def analyze(paths, rules=categories.RULES, include_last_step=False):
    """Trace files of one job -> {"ranks": {"0": {...}}, "overall": {...}}: the --json answer."""
    return of_ranks(load.load_all(paths), rules, include_last_step)


def of_ranks(ranks, rules=categories.RULES, include_last_step=False):
    """Ranks of one job -> the same."""
    chosen = {rank.rank: (rank, *_rows(rank, rules, include_last_step)) for rank in ranks}
    by_rank = {str(number): of_rank(*one, rules, include_last_step) for number, one in chosen.items()}
    return {"ranks": by_rank, "overall": _overall(by_rank, chosen)}


def _rows(rank, rules, include_last_step):
    rows = window.device_rows(rank, include_last_step)
    return rows, kernels.types(rank, rows, rules), window.until(rank, include_last_step)


def of_rank(rank, rows, kinds, until_ns, rules, include_last_step=False):
    """Everything about one rank; of several devices in one file, the one with most rows leads and "devices" has all."""
    by_device = window.devices(rank, rows)
    leads = max(by_device.values(), key=lambda mask: mask.sum(), default=slice(None))
    on_main, main_kinds = rows[leads], kinds[leads]
    time = temporal.breakdown(rank, on_main, main_kinds)
    table = kernels.by_name(rank, rows, kinds, rules)
    ops = operators.table(rank, rows, until_ns)
    peaks, mem_bytes_per_s, device_name = _peaks(rank)
    rates, achieved = flops.achieved(
        ops, sum(line["sum_us"] for line in table) if len(rows) else None, peaks, mem_bytes_per_s
    )
    steps = window.steps(rank, include_last_step)
    num_calls, num_lost = launches.without_kernel(rank, until_ns)
    found = {
        "file": rank.path.name,
        "profiler_steps": [number for number, _, _ in steps],
        "profiler_steps_left_out": [number for number, _, _ in rank.steps()][len(steps) :],
        "num_events": rank.num_events,
        "num_device_rows": len(rows),
        "num_device_rows_left_out": _left_out(rank, len(rows)),
        "num_bad_events": rank.num_bad,
        "num_launch_calls": num_calls,
        "num_launches_without_kernel": num_lost,
        "cut": rank.cut,
        "device": device_name,
        "temporal": {
            name: time[name]
            for name in (
                "idle_us",
                "compute_us",
                "non_compute_us",
                "span_us",
                "idle_pct",
                "compute_pct",
                "non_compute_pct",
            )
        },
        "overlap_pct": time["overlap_pct"],
        "comm_us": time["comm_us"],
        "exposed_comm_us": time["exposed_comm_us"],
        "idle": temporal.idle(rank, rows),
        "kernel_types": kernels.by_type(rank, on_main, main_kinds),
        "kernels": table,
        "categories": kernels.by_category(table),
        "steps": temporal.steps(rank, on_main, main_kinds, steps),
        "phases": attribution.phase_times(rank, rows, until_ns),
        "annotations": temporal.annotations(rank, events.ANNOTATION, until_ns),
        "gpu_annotations": temporal.annotations(rank, events.GPU_ANNOTATION, until_ns),
        "launches": launches.statistics(rank, rows),
        "queues": launches.queues(rank, rows),
        "copies": launches.copies(rank, rows),
        "operators": _leading(ops),
        "num_operators": len(ops),
        "achieved": rates[:MAX_OPERATORS],
        "achieved_whole": achieved,
        "flop_known_frac": achieved["known_frac"],
        "launchers": attribution.launchers(rank, rows),
        "modules": attribution.modules(rank, rows, until_ns),
        "sources": attribution.sources(rank, rows, until_ns)[:MAX_OPERATORS],
        "critical_path": critical.path(rank, on_main, main_kinds),
        "critical_path_of_steps": critical.steps(rank, on_main, main_kinds),
        "gaps": critical.gaps(rank, on_main),
        "synchronisations": critical.synchronisations(rank, steps),
        "items": critical.items(rank, rows),
        "host_copies": launches.host_copies(rank, on_main),
        "devices": {
            str(device): temporal.breakdown(rank, rows[mask], kinds[mask]) for device, mask in by_device.items()
        },
    }
    return found | {"advice": advice.of(found)}


def _left_out(rank, num_counted):
    """{"last_step", "not_launched"}: device rows that do not count, of the last step and of no known step (see window)."""
    recorded = rank.device_rows()
    if num_counted == len(recorded):
        return {"last_step": 0, "not_launched": 0}
    num_unknown = int((window.step_times(rank, recorded) == window.NOT_LAUNCHED).sum())
    return {"last_step": len(recorded) - num_counted - num_unknown, "not_launched": num_unknown}


def _leading(ops):
    """Those that lead by device time, own CPU time, memory or FLOPs, in their order."""
    leading = set()
    for measure in ("device_us", "self_cpu_us", "allocated_bytes", "flop"):
        leading |= set(sorted(range(len(ops)), key=lambda place: -(ops[place][measure] or 0))[:MAX_OPERATORS])
    return [ops[place] for place in sorted(leading)]


def _peaks(rank):
    """(precision -> FLOP/s or None, bytes/s or None, the device's name or None) by what the trace says of its GPU."""
    properties = rank.meta.get("deviceProperties")
    names = [one.get("name") for one in properties if isinstance(one, dict)] if isinstance(properties, list) else []
    name = next((one for one in names if isinstance(one, str)), None)
    if name is None:
        return (lambda precision: None), None, None
    return (
        (lambda precision: peak_rates.peak_flops(name, precision) if precision in DTYPES else None),
        peak_rates.mem_bytes_per_s(name),
        name,
    )


def _overall(by_rank, chosen):
    times = {number: found["temporal"] for number, found in by_rank.items() if found["temporal"]["span_us"]}
    sizes = [one[0].world_size for one in chosen.values() if 0 < (one[0].world_size or 0) <= MAX_RANKS]
    overall = {"num_ranks": len(by_rank), "world_size": max(sizes, default=None)}
    overall["missing_ranks"] = sorted(set(range(overall["world_size"] or 0)) - set(chosen))
    for name in ("idle", "compute", "non_compute"):
        shares = [time[f"{name}_pct"] for time in times.values()]
        overall[f"{name}_pct_mean"] = sum(shares) / len(shares) if shares else None
    overall["slowest_rank"] = max(times, key=lambda number: times[number]["span_us"], default=None)
    overall["step_skew"] = skew.steps({number: by_rank[str(number)]["steps"] for number in chosen})
    overall["collectives"] = skew.collectives({number: one[:3] for number, one in chosen.items()})
    return overall
