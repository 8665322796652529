"""Analyses the traces of one job's ranks: the --json answer of ./run.sh analyze."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bench.analysis.trace import (
    attribution,
    categories,
    critical,
    device_time,
    events,
    launches,
    load,
    operators,
    skew,
    window,
)
from bench.analysis.trace.columns import US
from bench.analysis.trace.rank import Rank
from bench.base.text_table import counted
from bench.base.units import NS_PER_S
from bench.machine import peak_rates

BUSY_BELOW_PCT = 80
EXPOSED_ABOVE_PCT = 20
SHORT_KERNEL_US, SHORT_SHARE_PCT, SHORT_MIN_COUNT = 10, 50, 100
COPY_ABOVE_PCT = 5
UNKNOWN_ABOVE_PCT = 10
SYNC_ABOVE_PCT = 5
IDLE_REMEDIES = {
    "host_wait": "most of it waits for the host: launch less (torch.compile, fused optimizers, CUDA graphs) or look at "
    "the largest gaps",
    "kernel_wait": "most of it lies between short kernels: fuse them or use CUDA graphs",
    "other": "most of it is launched and waits for something else: another stream or an event",
}
MAX_OPERATORS = 50
APART_NS = 60 * NS_PER_S  # between two recordings; clocks of a cluster agree to less
MAX_RANKS = 2**20  # a file that claims more is not believed


class Digest(NamedTuple):
    """What is kept of an analysed file; rank has the device rows that count, and no others."""

    rank: Rank
    kinds: np.ndarray  # device_time.types of its rows
    analysis: dict[str, Any]


def analyze_files(
    paths: Sequence[str | Path], rules: tuple[categories.Rule, ...] = categories.RULES, include_last_step: bool = False
) -> dict[str | None, dict[str, Any]]:
    """Returns {window: {"ranks": {"0": {...}}, "overall": {...}}}, the earliest window first.

    Each of several large files is read and analysed by one process, which returns only its device rows.  Raises NoTrace
    for a file that is not a trace.
    """
    digests = load.over_files(_digest, paths, rules, include_last_step)
    windows = load.grouped(digests, lambda digest: digest.rank)
    return {name: _analyze_job(digests) for name, digests in windows.items()}


def doubts_of_job(ranks: Sequence[Rank]) -> Iterator[str]:
    """Yields a sentence on each sign that these traces are not those of the ranks of one job in one window."""
    sizes = {str(rank.world_size) for rank in ranks if rank.world_size}
    for fact, values in (("device", set(filter(None, map(device_name, ranks)))), ("number of ranks", sizes)):
        if len(values) > 1:
            yield f"the traces differ in their {fact} ({', '.join(sorted(values))}): they may be of several jobs"
    same = "says that it is of the same rank as another file: they may be of several jobs or windows"
    yield from (f"{rank.path.name} {same}: name them one by one" for rank in ranks if rank.is_taken)
    recorded = sorted((int(rank.ts.min()), int(rank.end.max()), rank.rank) for rank in ranks if len(rank.ts))
    for (_, end_ns, before), (begin_ns, _, after) in zip(recorded, recorded[1:]):
        if begin_ns - end_ns > APART_NS:
            apart = f"rank {after} was recorded {(begin_ns - end_ns) / NS_PER_S:.0f} s after rank {before}"
            yield f"{apart}: they may be of several jobs or windows, or their clocks differ"


def _digest(path: str | Path, rules: tuple[categories.Rule, ...], include_last_step: bool) -> Digest:
    rank = load.load(path)
    rows = window.device_rows(rank, include_last_step)
    launched = window.launches(rank, rows) >= 0
    if len(rank.steps()) == 1 and launched.any():
        first_ns = rank.ts[rows[launched]].min()  # what began earlier was launched by an earlier step
        rows = rows[launched | (rank.ts[rows] >= first_ns)]
    kinds = device_time.types(rank, rows, rules)
    analysis = _analyze_rank(rank, rows, kinds, rules, include_last_step)
    return Digest(rank.only(rows), kinds, analysis)


def _analyze_job(digests: list[Digest]) -> dict[str, Any]:
    by_rank = {str(digest.rank.rank): digest.analysis for digest in digests}
    ranks = {digest.rank.rank: (digest.rank, np.arange(len(digest.rank.ts)), digest.kinds) for digest in digests}
    sizes = [size for digest in digests if 0 < (size := digest.rank.world_size or 0) <= MAX_RANKS]
    world_size = max(sizes, default=None)
    calls, num_unmatched = skew.waits(ranks)
    overall = {
        "num_ranks": len(by_rank),
        "world_size": world_size,
        "missing_ranks": sorted(set(range(world_size or 0)) - set(ranks)),
        "collectives": skew.collectives(ranks, calls, num_unmatched),
        "pictures": {"collective": skew.picture_of_collective(ranks, calls)},
        "doubts": list(doubts_of_job([digest.rank for digest in digests])),
    }
    return {"ranks": by_rank, "overall": overall}


def _analyze_rank(
    rank: Rank, rows: np.ndarray, kinds: np.ndarray, rules: tuple[categories.Rule, ...], include_last_step: bool
) -> dict[str, Any]:
    """Returns the analysis of one rank; of several devices the one with most rows leads, and "devices" has all.

    rows: of window.device_rows(); kinds: their device_time.types.
    """
    device = np.array([track[1] for track in rank.tracks] or [0])[rank.track[rows]]
    by_device = {number.item(): device == number for number in np.unique(device)}
    leads = max(by_device.values(), key=lambda mask: mask.sum(), default=slice(None))
    leading, leading_kinds = rows[leads], kinds[leads]
    steps, until_ns = window.steps(rank, include_last_step), window.until(rank, include_last_step)
    table, times = device_time.by_name(rank, rows, kinds, rules), device_time.breakdown(rank, leading, leading_kinds)
    analysis = {
        "file": rank.path.name,
        "profiler_steps": [number for number, _, _ in steps],
        "profiler_steps_excluded": [number for number, _, _ in rank.steps()][len(steps) :],
        "num_events": rank.num_events,
        "num_device_rows": len(rows),
        "num_device_rows_excluded": _not_counted(rank, len(rows)),
        "num_bad_events": rank.num_bad,
        "doubts": list(launches.doubts(rank, until_ns)),
        "cut": rank.cut,
        "device": device_name(rank),
        "temporal": {name: times[name] for name in device_time.TIMES},
        **{name: times[name] for name in ("overlap_pct", "comm_us", "exposed_comm_us")},
        "kernel_types": device_time.by_type(rank, leading, leading_kinds),
        "steps": device_time.steps(rank, leading, leading_kinds, steps),
        "critical_path": critical.path(rank, leading, leading_kinds),
        "critical_path_of_steps": critical.steps(rank, leading, leading_kinds),
        "gaps": critical.gaps(rank, leading),
        "host_copies": launches.host_copies(rank, leading),
        **_operator_facts(rank, rows, until_ns, sum(line["sum_us"] for line in table) if len(rows) else None),
        "idle": device_time.idle(rank, rows),
        "kernels": table,
        "categories": device_time.by_category(table),
        "phases": attribution.phase_times(rank, rows, until_ns),
        "annotations": device_time.annotations(rank, events.ANNOTATION, until_ns),
        "gpu_annotations": device_time.annotations(rank, events.GPU_ANNOTATION, until_ns),
        "launches": launches.statistics(rank, rows),
        "queues": launches.queues(rank, rows),
        "copies": launches.copies(rank, rows),
        "launchers": attribution.launchers(rank, rows),
        "modules": attribution.by_python(rank, rows, until_ns, attribution.is_module, "module"),
        "sources": attribution.by_python(rank, rows, until_ns, attribution.is_source, "source")[:MAX_OPERATORS],
        "synchronisations": critical.synchronisations(rank, steps),
        "items": critical.items(rank, rows),
        "devices": {
            str(device): device_time.breakdown(rank, rows[mask], kinds[mask]) for device, mask in by_device.items()
        },
    }
    return analysis | {"advice": list(_advice(analysis, _host_us(rank, steps)))}


def _host_us(rank: Rank, steps: Sequence[window.Step]) -> float:
    """Returns how long the host's counted steps took, without any how long its recording is."""
    if steps and rank.steps():
        return sum(end - start for _, start, end in steps) / US
    calls = rank.is_kind(events.RUNTIME, events.CPU_OP, events.ANNOTATION, events.PYTHON)
    return int(rank.end[calls].max() - rank.ts[calls].min()) / US if calls.any() else 0.0


def _operator_facts(rank: Rank, rows: np.ndarray, until_ns: int | None, device_us: float | None) -> dict[str, Any]:
    """Returns the tables of operators and their rates.  device_us: of all kernels, None in a trace without a device."""
    table, leading = operators.table(rank, rows, until_ns), set[int]()
    for measure in ("device_us", "self_cpu_us", "allocated_bytes", "flop"):
        leading |= set(sorted(range(len(table)), key=lambda index: -(table[index][measure] or 0))[:MAX_OPERATORS])
    rates, whole = operators.achieved(table, device_us, known_device_name(rank))
    return {
        "operators": [table[index] for index in sorted(leading)],  # those that lead by any measure, in order
        "num_operators": len(table),
        "achieved": rates[:MAX_OPERATORS],
        "achieved_whole": whole,
    }


def _not_counted(rank: Rank, num_counted: int) -> dict[str, int]:
    """Returns {"last_step", "not_launched"}: how many device rows do not count, by the reason (see window)."""
    recorded = rank.device_rows()
    if len(rank.steps()) < 2 or num_counted == len(recorded):
        return {"last_step": 0, "not_launched": len(recorded) - num_counted}
    num_unknown = int((window.step_times(rank, recorded) == window.NOT_LAUNCHED).sum())
    return {"last_step": len(recorded) - num_counted - num_unknown, "not_launched": num_unknown}


def device_name(rank: Rank) -> str | None:
    """Returns the name of the first GPU that the trace names, or None."""
    return next((name for device in _devices(rank) if isinstance(name := device.get("name"), str)), None)


def known_device_name(rank: Rank) -> str | None:
    """Returns the device's name or, if no peaks are known by it, that of the only known device with its properties."""
    return peak_rates.known_name(device_name(rank), next(iter(_devices(rank)), {}))


def _devices(rank: Rank) -> list[dict[str, Any]]:
    properties = rank.meta.get("deviceProperties")
    return [device for device in properties if isinstance(device, dict)] if isinstance(properties, list) else []


def _advice(analysis: dict[str, Any], host_us: float) -> Iterator[str]:
    """Yields sentences on what one rank's analysis means, the most important first.

    host_us: of _host_us().  Every sentence has its figure and its threshold; there is none on what is not known.
    """
    span_us, table = analysis["temporal"]["span_us"], analysis["kernels"]
    if not span_us:
        return
    busy_pct = 100 - analysis["temporal"]["idle_pct"]
    if busy_pct < BUSY_BELOW_PCT:
        why = IDLE_REMEDIES[max(IDLE_REMEDIES, key=lambda name: sum(line[f"{name}_us"] for line in analysis["idle"]))]
        if 2 * analysis["launches"]["num_unlinked"] > analysis["num_device_rows"]:
            why = "what it waits for is not known, as the launches of most kernels are not in the trace"
        yield f"The device is busy {busy_pct:.1f} % of the time (under {BUSY_BELOW_PCT} %): {why}."
    exposed_us = analysis["exposed_comm_us"]
    if exposed_us > EXPOSED_ABOVE_PCT / 100 * span_us:
        yield (
            f"Communication that overlaps with no kernel takes {100 * exposed_us / span_us:.1f} % of the time (over "
            f"{EXPOSED_ABOVE_PCT} %): overlap it with backward, or send less; see which rank is late."
        )
    count = sum(line["count"] for line in table)
    is_short = [line["mean_us"] < SHORT_KERNEL_US and line["type"] != "MEMORY" for line in table]
    num_short = sum(line["count"] for line, yes in zip(table, is_short) if yes)
    if count >= SHORT_MIN_COUNT and 100 * num_short / count > SHORT_SHARE_PCT:
        yield (
            f"{num_short} of {count} kernels take under {SHORT_KERNEL_US} us on average (over {SHORT_SHARE_PCT} %): "
            "launching costs as much; fuse them or use CUDA graphs."
        )
    copies = analysis["host_copies"]
    if copies["exposed_us"] > COPY_ABOVE_PCT / 100 * span_us:
        is_pageable = copies["pageable_us"] > copies["sum_us"] / 2
        how = "copy the next batch earlier, on a stream of its own"
        how = "pin the host's memory and copy with non_blocking=True" if is_pageable else how
        yield (
            f"Copies to the device that overlap with nothing take {100 * copies['exposed_us'] / span_us:.1f} % of the "
            f"time (over {COPY_ABOVE_PCT} %): {how}."
        )
    if num_items := analysis["items"]["count"]:
        num_steps = len(analysis["profiler_steps"])
        often = counted(num_items, "value") + (f", {num_items / num_steps:.1f} a step," if num_steps > 1 else "")
        yield (
            f"The host read {often} from the device (.item(), float(), printing a tensor) and spent "
            f"{analysis['items']['sum_us'] / 1000:.2f} ms on it: each waits until the device has caught up; keep them "
            "out of the step (any is too many)."
        )
    waiting_us = sum(line["sum_us"] for line in analysis["synchronisations"])
    if waiting_us > SYNC_ABOVE_PCT / 100 * host_us:
        names = ", ".join(line["name"] for line in analysis["synchronisations"][:2])
        yield (
            f"The host waited {waiting_us / 1000:.2f} ms in {names} ({100 * waiting_us / host_us:.1f} % of its time, "
            f"over {SYNC_ABOVE_PCT} %): look at who calls it."
        )
    pct = next((line["pct"] for line in analysis["categories"] if line["category"] == "other"), 0.0)
    if pct > UNKNOWN_ABOVE_PCT:
        yield (
            f"{pct:.1f} % of kernel time has no known category (over {UNKNOWN_ABOVE_PCT} %): give rules of your own "
            "with --rules."
        )
