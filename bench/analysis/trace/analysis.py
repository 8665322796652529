"""Ranks of one job -> everything that is said about them: the --json answer of ./run.sh analyze."""

import pickle
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bench.analysis.trace import (
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
    queues,
    skew,
    temporal,
    timeline,
    window,
)
from bench.machine import peak_rates

DTYPES = ("bfloat16", "float16", "float32", "tf32", "float8")
MAX_OPERATORS = 50
MAX_RANKS = 2**20  # a file that says more is not believed


class Digest(NamedTuple):
    """What is kept of a file once it is analysed: rank has its device rows that count, and no others."""

    rank: load.Rank
    kinds: np.ndarray  # kernels.types of its rows
    answer: dict


def analyze(paths, rules=categories.RULES, include_last_step=False):
    """Trace files of one job -> {"ranks": {"0": {...}}, "overall": {...}}: the --json answer."""
    return of_ranks(load.load_all(paths), rules, include_last_step)


def of_ranks(
    ranks: Iterable[load.Rank], rules: tuple[categories.Rule, ...] = categories.RULES, include_last_step: bool = False
) -> dict:
    """Ranks of one job, of load.load_all() or load.by_window() -> the same."""
    return _of_job([_digest(rank, rules, include_last_step) for rank in ranks])


def of_files(
    paths: Sequence[str | Path], rules: tuple[categories.Rule, ...] = categories.RULES, include_last_step: bool = False
) -> dict[str | None, dict]:
    """Files -> {window: analysis}, the earliest first.  A file that is not a trace raises NoTrace.

    Each of several large files is read and analysed by one process, which hands on its device rows alone.  Traces of
    this project say of which window they are; the others are one, None.
    """
    windows = {}
    with tempfile.TemporaryDirectory(prefix="trace-") as folder:
        files = list(load.over_files(_digest_file, paths, rules, include_last_step, folder))
        for file in files:
            with open(file, "rb") as opened:
                digest = pickle.load(opened)
            windows.setdefault(load.window_of(digest.rank), []).append(digest)
    return {name: _of_job(digests) for name, digests in load.earliest_first(windows, lambda digest: digest.rank)}


def _digest_file(path, num_parts, rules, include_last_step, folder):
    """-> a file in folder that holds the Digest: no process has those of the others beside the file that it reads."""
    digest = _digest(load.load(path, num_parts=num_parts), rules, include_last_step)
    with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
        pickle.dump(digest, file)
    return file.name


def _digest(rank, rules, include_last_step):
    rows = window.device_rows(rank, include_last_step)
    kinds = kernels.types(rank, rows, rules)
    answer = of_rank(rank, rows, kinds, rules, include_last_step)
    return Digest(rank.only(rows), kinds, answer)


def _of_job(digests):
    load.number([digest.rank for digest in digests])
    digests = sorted(digests, key=lambda digest: digest.rank.rank)
    by_rank = {str(digest.rank.rank): digest.answer for digest in digests}
    return {"ranks": by_rank, "overall": _overall(by_rank, digests)}


def of_rank(rank, rows, kinds, rules=categories.RULES, include_last_step=False):
    """Everything about one rank; of several devices in one file, the one with most rows leads and "devices" has all.

    rows: window.device_rows; kinds: kernels.types of them.
    """
    by_device = window.devices(rank, rows)
    leads = max(by_device.values(), key=lambda mask: mask.sum(), default=slice(None))
    steps, until_ns = window.steps(rank, include_last_step), window.until(rank, include_last_step)
    table = kernels.by_name(rank, rows, kinds, rules)
    answer = _of_file(rank, rows, steps, until_ns)
    answer |= _of_device(rank, rows[leads], kinds[leads], steps)
    answer |= _of_operators(rank, rows, until_ns, sum(line["sum_us"] for line in table) if len(rows) else None)
    answer |= {
        "idle": temporal.idle(rank, rows),
        "kernels": table,
        "categories": kernels.by_category(table),
        "phases": attribution.phase_times(rank, rows, until_ns),
        "annotations": temporal.annotations(rank, events.ANNOTATION, until_ns),
        "gpu_annotations": temporal.annotations(rank, events.GPU_ANNOTATION, until_ns),
        "launches": launches.statistics(rank, rows),
        "queues": queues.queues(rank, rows),
        "copies": launches.copies(rank, rows),
        "launchers": attribution.launchers(rank, rows),
        "modules": attribution.modules(rank, rows, until_ns),
        "sources": attribution.sources(rank, rows, until_ns)[:MAX_OPERATORS],
        "synchronisations": critical.synchronisations(rank, steps),
        "items": critical.items(rank, rows),
        "devices": {
            str(device): temporal.breakdown(rank, rows[mask], kinds[mask]) for device, mask in by_device.items()
        },
    }
    answer["pictures"] = {
        "gap": timeline.of_gap(rank, rows[leads], kinds[leads], answer["gaps"]),
        "critical_path": critical.links(rank, rows[leads], kinds[leads]),
        "queues": queues.depth(rank, rows[leads]),
    }
    return answer | {"advice": advice.of(answer)}


def _of_file(rank, rows, steps, until_ns):
    """What was read and what of it counts."""
    num_calls, num_lost = launches.without_kernel(rank, until_ns)
    return {
        "file": rank.path.name,
        "profiler_steps": [number for number, _, _ in steps],
        "profiler_steps_excluded": [number for number, _, _ in rank.steps()][len(steps) :],
        "num_events": rank.num_events,
        "num_device_rows": len(rows),
        "num_device_rows_excluded": _not_counted(rank, len(rows)),
        "num_bad_events": rank.num_bad,
        "num_launch_calls": num_calls,
        "num_launches_without_kernel": num_lost,
        "cut": rank.cut,
        "device": device_name(rank),
    }


def _of_device(rank, rows, kinds, steps):
    """Of one device."""
    times = temporal.breakdown(rank, rows, kinds)
    return {
        "temporal": {name: times[name] for name in temporal.TIMES},
        **{name: times[name] for name in ("overlap_pct", "comm_us", "exposed_comm_us")},
        "kernel_types": kernels.by_type(rank, rows, kinds),
        "steps": temporal.steps(rank, rows, kinds, steps),
        "critical_path": critical.path(rank, rows, kinds),
        "critical_path_of_steps": critical.steps(rank, rows, kinds),
        "gaps": critical.gaps(rank, rows),
        "host_copies": launches.host_copies(rank, rows),
    }


def _of_operators(rank, rows, until_ns, device_us):
    table = operators.table(rank, rows, until_ns)
    rates, whole = flops.achieved(table, device_us, *_peaks(device_name(rank)))
    return {
        "operators": _leading(table),
        "num_operators": len(table),
        "achieved": rates[:MAX_OPERATORS],
        "achieved_whole": whole,
        "flop_known_frac": whole["known_frac"],
    }


def _not_counted(rank, num_counted):
    """{"last_step", "not_launched"}: device rows that do not count: of the last step, of no known step (see window)."""
    recorded = rank.device_rows()
    if num_counted == len(recorded):
        return {"last_step": 0, "not_launched": 0}
    num_unknown = int((window.step_times(rank, recorded) == window.NOT_LAUNCHED).sum())
    return {"last_step": len(recorded) - num_counted - num_unknown, "not_launched": num_unknown}


def _leading(table):
    """Those that lead by device time, own CPU time, memory or FLOPs, in their order."""
    leading = set()
    for measure in ("device_us", "self_cpu_us", "allocated_bytes", "flop"):
        leading |= set(sorted(range(len(table)), key=lambda index: -(table[index][measure] or 0))[:MAX_OPERATORS])
    return [table[index] for index in sorted(leading)]


def device_name(rank: load.Rank) -> str | None:
    """The name of the first GPU that the trace names, or None."""
    properties = rank.meta.get("deviceProperties")
    devices = [device for device in properties if isinstance(device, dict)] if isinstance(properties, list) else []
    return next((name for device in devices if isinstance(name := device.get("name"), str)), None)


def _peaks(device_name):
    """(precision -> FLOP/s or None, bytes/s or None)"""

    def peak_of(precision):
        return peak_rates.peak_flops(device_name, precision) if precision in DTYPES else None

    return peak_of, peak_rates.mem_bytes_per_s(device_name)


def _overall(by_rank, digests):
    ranks = {one.rank.rank: (one.rank, np.arange(len(one.rank.ts)), one.kinds) for one in digests}
    times = {number: one["temporal"] for number, one in by_rank.items() if one["temporal"]["span_us"]}
    sizes = [one.rank.world_size for one in digests if 0 < (one.rank.world_size or 0) <= MAX_RANKS]
    overall = {"num_ranks": len(by_rank), "world_size": max(sizes, default=None)}
    overall["missing_ranks"] = sorted(set(range(overall["world_size"] or 0)) - set(ranks))
    for name in ("idle", "compute", "non_compute"):
        shares = [time[f"{name}_pct"] for time in times.values()]
        overall[f"{name}_pct_mean"] = sum(shares) / len(shares) if shares else None
    overall["slowest_rank"] = max(times, key=lambda number: times[number]["span_us"], default=None)
    overall["step_skew"] = skew.steps({number: by_rank[str(number)]["steps"] for number in ranks})
    calls, num_unmatched = skew.waits(ranks)
    overall["collectives"] = skew.collectives(ranks, calls, num_unmatched)
    overall["pictures"] = {"collective": timeline.of_collective(ranks, calls)}
    return overall
