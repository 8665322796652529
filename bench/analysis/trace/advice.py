"""What the numbers of one rank mean, as an engineer would say it.  Every sentence has its figure and its threshold.

Nothing is said where nothing is known.
"""

from bench.base.terminal.text_table import counted

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


def of(answer):
    """answer: one rank's analysis (bench/analysis/trace/analysis.py) -> sentences, the most important first."""
    if not answer["temporal"].get("span_us"):
        return []
    parts = (_idle, _communication, _short_kernels, _copies, _items, _synchronisations, _unknown)
    return [sentence for part in parts for sentence in part(answer, answer["temporal"]["span_us"])]


def _idle(answer, span_us):
    busy_pct = 100 - answer["temporal"]["idle_pct"]
    if busy_pct < BUSY_BELOW_PCT:
        why = max(IDLE_REMEDIES, key=lambda name: sum(line[f"{name}_us"] for line in answer["idle"]))
        yield f"The device is busy {busy_pct:.1f} % of the time (under {BUSY_BELOW_PCT} %): {IDLE_REMEDIES[why]}."


def _communication(answer, span_us):
    exposed_us = answer["exposed_comm_us"]
    if exposed_us is not None and exposed_us > EXPOSED_ABOVE_PCT / 100 * span_us:
        yield (
            f"Communication that overlaps with no kernel takes {100 * exposed_us / span_us:.1f} % of the time (over "
            f"{EXPOSED_ABOVE_PCT} %): overlap it with backward, or send less; see which rank is late."
        )


def _short_kernels(answer, span_us):
    table = answer["kernels"]
    count = sum(line["count"] for line in table)
    is_short = [line["mean_us"] < SHORT_KERNEL_US and line["type"] != "MEMORY" for line in table]
    short = sum(line["count"] for line, yes in zip(table, is_short) if yes)
    if count >= SHORT_MIN_COUNT and 100 * short / count > SHORT_SHARE_PCT:
        yield (
            f"{short} of {count} kernels take under {SHORT_KERNEL_US} us on average (over {SHORT_SHARE_PCT} %): "
            "launching costs as much; fuse them or use CUDA graphs."
        )


def _copies(answer, span_us):
    copies = answer["host_copies"]
    if copies["exposed_us"] > COPY_ABOVE_PCT / 100 * span_us:
        is_pageable = copies["pageable_us"] > copies["sum_us"] / 2
        how = "copy the next batch earlier, on a stream of its own"
        how = "pin the host's memory and copy with non_blocking=True" if is_pageable else how
        yield (
            f"Copies to the device that overlap with nothing take {100 * copies['exposed_us'] / span_us:.1f} % of the "
            f"time (over {COPY_ABOVE_PCT} %): {how}."
        )


def _items(answer, span_us):
    count, num_steps = answer["items"]["count"], len(answer["profiler_steps"])
    if count:
        often = counted(count, "value") + (f", {count / num_steps:.1f} a step," if num_steps > 1 else "")
        yield (
            f"The host read {often} from the device (.item(), float(), printing a tensor) and spent "
            f"{answer['items']['sum_us'] / 1000:.2f} ms on it: each waits until the device has caught up; keep them "
            "out of the step (any is too many)."
        )


def _synchronisations(answer, span_us):
    waiting_us = sum(line["sum_us"] for line in answer["synchronisations"])
    host_us = sum(line["host_us"] or 0.0 for line in answer["steps"]) or span_us
    if waiting_us > SYNC_ABOVE_PCT / 100 * host_us:
        names = ", ".join(line["name"] for line in answer["synchronisations"][:2])
        yield (
            f"The host waited {waiting_us / 1000:.2f} ms in {names} ({100 * waiting_us / host_us:.1f} % of its time, "
            f"over {SYNC_ABOVE_PCT} %): look at who calls it."
        )


def _unknown(answer, span_us):
    pct = next((line["pct"] for line in answer["categories"] if line["category"] == "other"), 0.0)
    if pct > UNKNOWN_ABOVE_PCT:
        yield (
            f"{pct:.1f} % of kernel time has no known category (over {UNKNOWN_ABOVE_PCT} %): give rules of your own "
            "with --rules."
        )
