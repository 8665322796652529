"""What the numbers of one rank mean, as an engineer would say it.  Every sentence has its figure and its threshold.

Nothing is said where nothing is known.
"""

BUSY_BELOW_PCT = 80
EXPOSED_ABOVE_PCT = 20
SHORT_KERNEL_US, SHORT_SHARE_PCT, SHORT_MIN_COUNT = 10, 50, 100
COPY_ABOVE_PCT = 5
UNKNOWN_ABOVE_PCT = 10
SYNC_ABOVE_PCT = 5
STARVED_ABOVE_PCT = 50


def of(found):
    """found: one rank's analysis (bench/trace/analysis.py) -> sentences, the most important first."""
    sentences = []
    time = found["temporal"]
    span_us = time.get("span_us")
    if not span_us:
        return sentences
    busy_pct = 100 - time["idle_pct"]
    if busy_pct < BUSY_BELOW_PCT:
        waits = {
            name: sum(line[f"{name}_us"] for line in found["idle"]) for name in ("host_wait", "kernel_wait", "other")
        }
        why = max(waits, key=waits.get)
        rest = {
            "host_wait": "most of it waits for the host: launch less (torch.compile, fused optimizers, CUDA graphs) or look at the largest gaps",
            "kernel_wait": "most of it lies between short kernels: fuse them or use CUDA graphs",
            "other": "most of it is launched and waits for something else: another stream or an event",
        }[why]
        sentences.append(f"The device is busy {busy_pct:.1f} % of the time (under {BUSY_BELOW_PCT} %): {rest}.")
    if found["exposed_comm_us"] is not None and found["exposed_comm_us"] > EXPOSED_ABOVE_PCT / 100 * span_us:
        share = 100 * found["exposed_comm_us"] / span_us
        sentences.append(
            f"Communication that nothing hides takes {share:.1f} % of the time (over {EXPOSED_ABOVE_PCT} %): overlap it with backward, or send less; see which rank is late."
        )
    sentences += _short_kernels(found)
    copies = found["host_copies"]
    if copies["exposed_us"] > COPY_ABOVE_PCT / 100 * span_us:
        is_pageable = copies["pageable_us"] > copies["sum_us"] / 2
        how = (
            "pin the host's memory and copy with non_blocking=True"
            if is_pageable
            else "copy the next batch earlier, on a stream of its own"
        )
        sentences.append(
            f"Copies to the device that overlap with nothing take {100 * copies['exposed_us'] / span_us:.1f} % of the time (over {COPY_ABOVE_PCT} %): {how}."
        )
    if found["items"]["count"]:
        sentences.append(_items(found))
    waiting_us = sum(line["sum_us"] for line in found["synchronisations"])
    host_us = sum(line["host_us"] or 0.0 for line in found["steps"]) or span_us
    if waiting_us > SYNC_ABOVE_PCT / 100 * host_us:
        names = ", ".join(line["name"] for line in found["synchronisations"][:2])
        sentences.append(
            f"The host waited {waiting_us / 1000:.2f} ms in {names} ({100 * waiting_us / host_us:.1f} % of its time, over {SYNC_ABOVE_PCT} %): look at who calls it."
        )
    other = next((line for line in found["categories"] if line["category"] == "other"), None)
    if other and other["pct"] > UNKNOWN_ABOVE_PCT:
        sentences.append(
            f"{other['pct']:.1f} % of kernel time is of no known category (over {UNKNOWN_ABOVE_PCT} %): give rules of your own with --rules."
        )
    return sentences


def _short_kernels(found):
    count = sum(line["count"] for line in found["kernels"])
    short = sum(
        line["count"] for line in found["kernels"] if line["mean_us"] < SHORT_KERNEL_US and line["type"] != "MEMORY"
    )
    if count >= SHORT_MIN_COUNT and 100 * short / count > SHORT_SHARE_PCT:
        yield f"{short} of {count} kernels take under {SHORT_KERNEL_US} us on average (over {SHORT_SHARE_PCT} %): launching costs as much; fuse them or use CUDA graphs."


def _items(found):
    count, num_steps = found["items"]["count"], len(found["profiler_steps"])
    often = f"{count} value{'s' * (count > 1)}" + (f", {count / num_steps:.1f} a step," if num_steps > 1 else "")
    return f"The host read {often} from the device (.item(), float(), printing a tensor) and spent {found['items']['sum_us'] / 1000:.2f} ms on it: each waits until the device has caught up; keep them out of the step (any is too many)."
