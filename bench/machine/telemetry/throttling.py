"""Why clocks were held down, and what of it spoils a run."""

from collections import Counter

SLOWDOWNS = ("hw_slowdown", "sw_thermal", "hw_thermal", "hw_power_brake")  # a power cap is normal under load
MAX_SLOWED_FRAC = 0.01
LIMIT_SLACK_W = 1.0  # the driver rounds


def reason_shares(samples):
    """{reason: share of these samples in which it held the clocks, 0 to 1}; {} where reasons are not known."""
    known = [row["throttle_reasons"].split("|") for row in samples if row.get("throttle_reasons")]
    counts = Counter(reason for reasons in known for reason in reasons if reason != "none")
    return {reason: count / len(known) for reason, count in sorted(counts.items())}


def slows(sample):
    """Whether heat or hardware held the clocks down; None where it is not known."""
    reasons = sample.get("throttle_reasons")
    return any(reason in SLOWDOWNS for reason in reasons.split("|")) if reasons else None


def slowed_frac(samples):
    """Share of the samples in which something slowed the device down, 0 to 1; None where it is not known."""
    known = [slowed for sample in samples if (slowed := slows(sample)) is not None]
    return sum(known) / len(known) if known else None


def doubts(summary: dict) -> list[str]:
    """The record's summary of telemetry -> sentences, each a reason with its figure."""
    result = []
    for name, device in summary["by_device"].items():
        if (device["slowed_frac"] or 0.0) > MAX_SLOWED_FRAC:
            reasons = ", ".join(reason for reason in device["throttle_frac"] if reason in SLOWDOWNS)
            share = f"{100 * device['slowed_frac']:.1f} % of {device['num_timed_samples']} samples"
            result.append(f"{name} was slowed down by {reasons} in {share} (limit {100 * MAX_SLOWED_FRAC:g} %)")
    for name, num in summary["foreign_processes"].items():
        result.append(f"{num} other process{'es' if num > 1 else ''} computed on {name} during the run")
    return result + _unequal_limits(summary["by_device"])


def _unequal_limits(devices):
    limited = {name: device for name, device in devices.items() if "min_power_limit_w" in device}
    for name, device in limited.items():
        if device["max_power_limit_w"] - device["min_power_limit_w"] > LIMIT_SLACK_W:
            ends = f"{device['min_power_limit_w']:.0f} and {device['max_power_limit_w']:.0f} W"
            return [f"the power limit of {name} was changed in the run, between {ends}"]
    limits_w = {name: device["min_power_limit_w"] for name, device in limited.items()}
    if limits_w and max(limits_w.values()) - min(limits_w.values()) > LIMIT_SLACK_W:
        words = ", ".join(f"{name} {limit_w:.0f} W" for name, limit_w in limits_w.items())
        return [f"the GPUs have unequal power limits: {words}"]
    return []
