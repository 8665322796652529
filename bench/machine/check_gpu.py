"""What a run needs of its GPUs (facts of bench/machine/gpus.py): idle, all alike, healthy, not slowed."""

from bench.machine.check import Check

SLOWED_BY = ("sw_thermal", "hw_slowdown", "hw_thermal", "hw_power_brake")  # reasons that no healthy idle GPU has
POWER_SLACK_W = 1.0  # the driver rounds


def checks(gpus):
    """Facts of the GPUs that a run uses -> list of Check."""
    return [idle(gpus), alike(gpus), persistent(gpus), power_limit(gpus), slowed(gpus), ecc(gpus), pcie(gpus)]


def idle(gpus):
    """No other program computes on them."""
    busy = [f"GPU {gpu['visible']}: {gpu['num_compute_processes']}" for gpu in gpus if gpu["num_compute_processes"]]
    if busy:
        remedy = "wait or end them (nvidia-smi shows which), or choose others with CUDA_VISIBLE_DEVICES"
        return Check("gpus idle", "warn", f"other programs compute on {', '.join(busy)}", remedy)
    if any(gpu["num_compute_processes"] is None for gpu in gpus):
        return Check("gpus idle", "ok", "unknown: the driver does not say who computes")
    return Check("gpus idle", "ok", f"no other program computes on {len(gpus)} GPU(s)")


def alike(gpus):
    """One model and one power limit; the slowest sets the pace of all."""
    kinds = {(gpu["name"], gpu["power_limit_w"]) for gpu in gpus}
    limits = {kind: "" if kind[1] is None else f" at {kind[1]:.0f} W" for kind in kinds}
    found = " and ".join(sorted(f"{name}{limits[name, limit]}" for name, limit in kinds))
    if len(kinds) == 1:
        return Check("gpus alike", "ok", f"{len(gpus)} x {found}")
    remedy = "nvidia-smi -pl WATTS sets a power limit; CUDA_VISIBLE_DEVICES chooses GPUs of one model"
    return Check("gpus alike", "warn", found, remedy)


def persistent(gpus):
    """Persistence mode keeps the driver loaded: without it clocks and start-up vary."""
    without = [str(gpu["visible"]) for gpu in gpus if gpu["persistence"] is False]
    if without:
        return Check("persistence", "warn", f"off on GPU {', '.join(without)}", "sudo nvidia-smi -pm 1")
    unknown = any(gpu["persistence"] is None for gpu in gpus)
    return Check("persistence", "ok", "unknown: the driver does not say" if unknown else "on")


def power_limit(gpus):
    """As the maker set it: a lower limit is a slower GPU, whose times compare with no other's."""
    other = [
        f"GPU {gpu['visible']}: {gpu['power_limit_w']:.0f} W instead of {gpu['default_power_limit_w']:.0f} W"
        for gpu in gpus
        if _differ(gpu.get("power_limit_w"), gpu.get("default_power_limit_w"), POWER_SLACK_W)
    ]
    if other:
        return Check("power limit", "warn", "; ".join(other), "sudo nvidia-smi -pl WATTS with the default")
    known = gpus[0].get("power_limit_w")
    words = "unknown: the driver does not say" if known is None else f"{known:.0f} W, the default"
    return Check("power limit", "ok", words)


def slowed(gpus):
    """Clocks that something holds down while nothing runs: heat, or a power supply that does not suffice."""
    slow = []
    for gpu in gpus:
        reasons = [reason for reason in gpu.get("clocks_event_reasons") or () if reason in SLOWED_BY]
        if reasons:
            slow.append(f"GPU {gpu['visible']}: {', '.join(reasons)} at {gpu.get('temp_c')} C")
    if slow:
        remedy = "let it cool, look at fans, airflow and power supply (nvidia-smi -q -d PERFORMANCE,TEMPERATURE)"
        return Check("clocks", "warn", f"slowed down: {'; '.join(slow)}", remedy)
    if all(gpu.get("clocks_event_reasons") is None for gpu in gpus):
        return Check("clocks", "ok", "unknown: the driver does not say")
    tops = sorted({gpu["max_sm_clock_mhz"] for gpu in gpus if gpu.get("max_sm_clock_mhz") is not None})
    return Check("clocks", "ok", f"nothing slows them down; at most {' and '.join(map(str, tops)) or '?'} MHz")


def ecc(gpus):
    """Errors that were not corrected, and memory rows that wait for a reset to be replaced."""
    bad, modes = [], {gpu.get("ecc") for gpu in gpus} - {None}
    for gpu in gpus:
        who = f"GPU {gpu['visible']}"
        if gpu.get("ecc_uncorrected"):
            bad.append(f"{who}: {gpu['ecc_uncorrected']} uncorrected errors since the driver was loaded")
        if gpu.get("remap_failed"):
            bad.append(f"{who}: a memory row could not be replaced")
        elif gpu.get("remap_pending"):
            bad.append(f"{who}: a memory row waits to be replaced")
    if bad:
        remedy = "reset the GPU (sudo nvidia-smi -r) or reboot; if that does not help, replace the GPU"
        return Check("ecc", "warn", "; ".join(bad), remedy)
    if len(modes) > 1:
        return Check("ecc", "warn", "on for some GPUs, off for others", "sudo nvidia-smi -e 1, then reboot")
    words = {True: "on, no errors", False: "off", None: "unknown: the driver does not say"}
    return Check("ecc", "ok", words[next(iter(modes), None)])


def pcie(gpus):
    """Fewer lanes than board and slot have: a badly seated card.  The generation is not compared: it drops at rest."""
    thin = [
        f"GPU {gpu['visible']}: x{gpu['pcie_width']} of x{gpu['pcie_max_width']}"
        for gpu in gpus
        if None not in (gpu.get("pcie_width"), gpu.get("pcie_max_width")) and gpu["pcie_width"] < gpu["pcie_max_width"]
    ]
    if thin:
        return Check("pcie", "warn", "; ".join(thin), "seat the card again, or use another slot")
    widths = sorted({gpu["pcie_width"] for gpu in gpus if gpu.get("pcie_width") is not None})
    return Check("pcie", "ok", f"x{' and x'.join(map(str, widths))}" if widths else "unknown: the driver does not say")


def _differ(one, other, slack):
    return one is not None and other is not None and abs(one - other) > slack
