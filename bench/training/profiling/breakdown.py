"""Averages of a torch profile -> where the device's time went, by kind of kernel: KempnerForge's thirteen figures.

fixed counts each kernel once: device events only, no ranges around them, communication before what its names contain.
kempner_v0 counts as KempnerForge (kempnerforge/profiling/profiler.py) does, so that old reports can be compared: it
adds operators on the host, ranges and kernels together, NCCL three times over, a third of it as matmul because "mm" is
in "record_param_comms".
"""

from torch.autograd import DeviceType

from bench.analysis.trace import categories

V0_WORDS = {  # KempnerForge's table, in its order: the first that is part of the lower-case name
    "matmul": ("gemm", "mm", "matmul", "dot", "bmm", "cublas", "nvjet", "cutlass"),
    "comm": ("nccl", "allreduce", "allgather", "reduce_scatter"),
    "memory": ("memcpy", "memset"),
}
KINDS = {
    categories.MATMUL: "matmul",
    categories.COMMUNICATION: "comm",
    categories.MEMORY_COPY: "memory",
}  # the rest: other


def counted(averages, classifier="fixed"):
    """Those rows of key_averages() whose own device time is time of the device, once."""
    rows = [row for row in averages if "profilerstep" not in row.key.lower()]
    return rows if classifier == "kempner_v0" else [row for row in rows if is_device_event(row)]


def is_device_event(row):
    """A kernel or a copy; not an operator on the host, nor a range on either side.

    What has no torch device type is a stand-in made by hand, and is taken as it is.
    """
    device_type = getattr(row, "device_type", None)
    if not isinstance(device_type, DeviceType):
        return True
    is_range = getattr(row, "is_user_annotation", False) or row.key.startswith(categories.HOST_RANGES)
    return device_type != DeviceType.CPU and not is_range


def kind(name, classifier="fixed"):
    """ "matmul", "comm", "memory" or "other"."""
    if classifier == "kempner_v0":
        lower = name.lower()
        return next((result for result, words in V0_WORDS.items() if any(word in lower for word in words)), "other")
    return KINDS.get(_category(name), "other")


def _category(name):
    """A stand-in may be called by a collective's range where there is no kernel of its own."""
    return categories.COMMUNICATION if name.startswith("nccl:") else categories.category(name)


def by_category(averages):
    """{category: device microseconds}, all categories in their order, each kernel once."""
    result = dict.fromkeys(categories.CATEGORIES, 0)
    for row in counted(averages):
        result[_category(row.key)] += row.self_device_time_total
    return result


def figures(averages, peak_tflops=None, classifier="fixed"):
    """The thirteen: microseconds and per cent of the device's time by kind, FLOPs, TFLOP/s, and share of the peak.

    total_flops is torch's with_flops: matrix products and sums, no attention, nothing fused.  The two that need
    peak_tflops are None where that is unknown.
    """
    averages = list(averages)
    times_us = dict.fromkeys(("matmul", "comm", "memory", "other"), 0)
    for row in counted(averages, classifier):
        times_us[kind(row.key, classifier)] += row.self_device_time_total
    total_us = sum(times_us.values())
    total_flops = sum(row.flops or 0 for row in averages if "profilerstep" not in row.key.lower())
    achieved_tflops = total_flops / (total_us / 1e6) / 1e12 if total_us > 0 else 0.0
    return {
        "total_cuda_time_us": total_us,
        **{f"{name}_time_us": time_us for name, time_us in times_us.items()},
        **{f"{name}_pct": 100 * time_us / max(total_us, 1) for name, time_us in times_us.items()},
        "total_flops": total_flops,
        "achieved_tflops": achieved_tflops,
        "peak_tflops": peak_tflops,
        "kernel_efficiency_pct": None if not peak_tflops else 100 * achieved_tflops / peak_tflops,
    }
