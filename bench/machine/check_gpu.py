"""What a run needs of its GPUs (facts of bench/machine/gpus.py): idle, all alike, healthy, not slowed."""

from bench.machine.check import Check

SLOWED_BY = ("sw_thermal", "hw_slowdown", "hw_thermal", "hw_power_brake")  # reasons that no healthy idle GPU has
POWER_SLACK_W = 1.0  # the driver rounds
UNKNOWN = "unknown: the driver does not say"


def checks(gpus: list[dict]) -> list[Check]:
    """Facts of the GPUs that a run uses -> list of Check."""
    return [idle(gpus), alike(gpus), persistent(gpus), power_limit(gpus), slowed(gpus), ecc(gpus), pcie(gpus)]


def _check(name, faults, remedy, good, lead=""):
    """A warning with all faults where there are some."""
    return Check(name, "warn", lead + "; ".join(faults), remedy) if faults else Check(name, "ok", good)


def idle(gpus):
    """No other program computes on them."""
    busy = [f"GPU {gpu['visible']}: {gpu['num_compute_processes']}" for gpu in gpus if gpu["num_compute_processes"]]
    remedy = "wait or end them (nvidia-smi shows which), or choose others with CUDA_VISIBLE_DEVICES"
    is_known = all(gpu["num_compute_processes"] is not None for gpu in gpus)
    good = f"no other program computes on {len(gpus)} GPU(s)" if is_known else f"{UNKNOWN} who computes"
    return _check("gpus idle", [", ".join(busy)] * bool(busy), remedy, good, "other programs compute on ")


def alike(gpus):
    """One model and one power limit; the slowest sets the pace of all."""
    kinds = {(gpu["name"], gpu["power_limit_w"]) for gpu in gpus}
    result = " and ".join(sorted(name if limit_w is None else f"{name} at {limit_w:.0f} W" for name, limit_w in kinds))
    remedy = "nvidia-smi -pl WATTS sets a power limit; CUDA_VISIBLE_DEVICES chooses GPUs of one model"
    return _check("gpus alike", [result] * (len(kinds) > 1), remedy, f"{len(gpus)} x {result}")


def persistent(gpus):
    """Persistence mode keeps the driver loaded: without it clocks and start-up vary."""
    without = [str(gpu["visible"]) for gpu in gpus if gpu["persistence"] is False]
    good = UNKNOWN if any(gpu["persistence"] is None for gpu in gpus) else "on"
    return _check("persistence", [", ".join(without)] * bool(without), "sudo nvidia-smi -pm 1", good, "off on GPU ")


def power_limit(gpus):
    """As the maker set it: a lower limit is a slower GPU, whose times compare with no other's."""
    other = []
    for gpu in gpus:
        limit_w, default_w = gpu.get("power_limit_w"), gpu.get("default_power_limit_w")
        if None not in (limit_w, default_w) and abs(limit_w - default_w) > POWER_SLACK_W:
            other.append(f"GPU {gpu['visible']}: {limit_w:.0f} W instead of {default_w:.0f} W")
    known_w = gpus[0].get("power_limit_w")
    good = UNKNOWN if known_w is None else f"{known_w:.0f} W, the default"
    return _check("power limit", other, "sudo nvidia-smi -pl WATTS with the default", good)


def slowed(gpus):
    """Clocks that something holds down while nothing runs: heat, or a power supply that does not suffice."""
    slow = []
    for gpu in gpus:
        reasons = [reason for reason in gpu.get("clocks_event_reasons") or () if reason in SLOWED_BY]
        if reasons:
            slow.append(f"GPU {gpu['visible']}: {', '.join(reasons)} at {gpu.get('temp_c')} C")
    tops = sorted({gpu["max_sm_clock_mhz"] for gpu in gpus if gpu.get("max_sm_clock_mhz") is not None})
    good = f"nothing slows them down; at most {' and '.join(map(str, tops)) or '?'} MHz"
    if all(gpu.get("clocks_event_reasons") is None for gpu in gpus):
        good = UNKNOWN
    remedy = "let it cool, look at fans, airflow and power supply (nvidia-smi -q -d PERFORMANCE,TEMPERATURE)"
    return _check("clocks", slow, remedy, good, "slowed down: ")


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
    if len(modes) > 1 and not bad:
        return Check("ecc", "warn", "on for some GPUs, off for others", "sudo nvidia-smi -e 1, then reboot")
    remedy = "reset the GPU (sudo nvidia-smi -r) or reboot; if that does not help, replace the GPU"
    return _check("ecc", bad, remedy, {True: "on, no errors", False: "off", None: UNKNOWN}[next(iter(modes), None)])


def pcie(gpus):
    """Fewer lanes than board and slot have: a badly seated card.  The generation is not compared: it drops at rest."""
    thin, widths = [], set()
    for gpu in gpus:
        width, most = gpu.get("pcie_width"), gpu.get("pcie_max_width")
        widths |= {width} - {None}
        if None not in (width, most) and width < most:
            thin.append(f"GPU {gpu['visible']}: x{width} of x{most}")
    good = f"x{' and x'.join(map(str, sorted(widths)))}" if widths else UNKNOWN
    return _check("pcie", thin, "seat the card again, or use another slot", good)
