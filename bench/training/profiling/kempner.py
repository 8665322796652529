"""KempnerForge's profiler summary (kempnerforge/profiling/profiler.py) of a stopped torch profile, counted correctly.

    print_profiler_summary(profile, trace_dir="traces")

The thirteen figures are by kind of kernel.  The classifier "fixed" counts each kernel once: device events only, without
the ranges around them, and communication first, whatever else a name contains.  "kempner_v0" counts as KempnerForge
does, for comparison with old reports: it adds host operators, ranges and kernels together, so NCCL counts three times,
a third of it as matmul because "record_param_comms" contains "mm".
"""

import logging
from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType

from bench.analysis.trace import categories
from bench.base import atomic, escape
from bench.machine import peak_rates

V0_WORDS = {  # KempnerForge's table, in its order: the first match within the lower-case name decides
    "matmul": ("gemm", "mm", "matmul", "dot", "bmm", "cublas", "nvjet", "cutlass"),
    "comm": ("nccl", "allreduce", "allgather", "reduce_scatter"),
    "memory": ("memcpy", "memset"),
}
KINDS = {
    categories.MATMUL: "matmul",
    categories.COMMUNICATION: "comm",
    categories.MEMORY_COPY: "memory",
}  # all other categories are "other"
LABELS = {"matmul": "MatMul/GEMM", "comm": "Communication", "memory": "Memory ops", "other": "Other kernels"}
OPERATORS = ("aten::", "autograd::", "Optimizer", "c10d::", "gloo:")
LOG = logging.getLogger(__name__)
RULE = "=" * 100
MAX_NAME_CHARS = 60
NUM_TOP = 20
Figures = dict[str, float | None]


def print_profiler_summary(
    prof: Any, trace_dir: Path | str | None = None, classifier: str = "fixed", shown_dir: Path | str | None = None
) -> Figures:
    """Prints KempnerForge's three blocks, writes trace_dir/summary.md, and returns the thirteen figures.

    If trace_dir is None, no file is written.  classifier is "fixed" or "kempner_v0".  shown_dir, if given, replaces
    trace_dir in the text.  A profile that recorded nothing gives zeros and a warning, never an exception, because this
    runs at the end of a training run.
    """
    try:
        averages = prof.key_averages()
    except (AssertionError, AttributeError, RuntimeError) as error:  # raised by a profile that never started
        LOG.warning("profiler: nothing was recorded (%s): the figures are zeros", error)
        averages = []
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
    peak_flops = None if gpu is None else peak_rates.peak_flops(gpu, "bfloat16")  # dense
    numbers = figures(averages, None if peak_flops is None else peak_flops / 1e12, classifier)
    if averages:
        _block("TOP CUDA KERNELS (by total CUDA time)", averages.table(sort_by="cuda_time_total", row_limit=30))
        _block("TOP CUDA KERNELS (by FLOPS)", averages.table(sort_by="flops", row_limit=NUM_TOP))
    _block("AGGREGATE GPU TIME BREAKDOWN", "\n".join(_breakdown_lines(numbers)))
    if trace_dir is not None:
        path = Path(trace_dir) / "summary.md"
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = _summary_lines(averages, numbers, gpu, shown_dir or trace_dir, classifier)
        atomic.write_text(path, "\n".join(lines) + "\n", durable=False)
    return numbers


def _block(title: str, text: str) -> None:
    print(f"\n{RULE}\n{title}\n{RULE}\n{text}", flush=True)


def _breakdown_lines(numbers: dict[str, Any]) -> list[str]:
    lines = [("Total CUDA time", f"{numbers['total_cuda_time_us'] / 1e6:.3f} s")]
    for name, label in LABELS.items():
        lines.append((label, f"{numbers[f'{name}_time_us'] / 1e6:.3f} s ({numbers[f'{name}_pct']:.1f}%)"))
    lines.append(("Total FLOPS", f"{numbers['total_flops'] / 1e12:.2f} TFLOP"))
    if numbers["total_cuda_time_us"] > 0:
        lines += _efficiency(numbers)
    return [f"  {label + ':':<19} {value}" for label, value in lines]


def _efficiency(numbers: dict[str, Any]) -> list[tuple[str, str]]:
    def formatted(value: float | None, text: str) -> str:
        return "unknown" if value is None else text.format(value)

    return [
        ("Achieved TFLOPS", f"{numbers['achieved_tflops']:.1f}"),
        ("GPU peak (bf16)", formatted(numbers["peak_tflops"], "{:.0f} TFLOPS")),
        ("Kernel efficiency", formatted(numbers["kernel_efficiency_pct"], "{:.1f}%")),
    ]


def _summary_lines(
    averages: Sequence[Any], numbers: dict[str, Any], gpu: str | None, trace_dir: Path | str, classifier: str
) -> list[str]:
    """Returns the lines of summary.md, with KempnerForge's headings, tables and rows."""
    total_us = numbers["total_cuda_time_us"]
    times = [
        (
            label + " (NCCL)" * (name == "comm"),
            f"{numbers[f'{name}_time_us'] / 1e6:.3f}",
            f"{numbers[f'{name}_pct']:.1f}",
        )
        for name, label in LABELS.items()
    ]
    times.append(("**Total**", f"**{total_us / 1e6:.3f}**", "**100.0**"))
    lines = ["# Profiling Summary", "", f"**Date**: {datetime.now():%Y-%m-%d %H:%M}", f"**GPU**: {gpu or 'unknown'}"]
    lines += [f"**Traces**: `{trace_dir}/`", "", "## GPU Time Breakdown", ""]
    lines += _table(("Category", "Time (s)", "%"), times)
    if classifier == "fixed":
        others_us = {name: us for name, us in by_category(averages).items() if name not in KINDS}
        rows = [(name, f"{us / 1e6:.3f}", f"{100 * us / max(total_us, 1):.1f}") for name, us in others_us.items()]
        lines += ["Other kernels are:", "", *_table(("Of other", "Time (s)", "%"), rows)]
    else:
        lines += ["Counted as KempnerForge does (classifier kempner_v0): the same time several times over.", ""]
    efficiency = [("Total FLOPS", f"{numbers['total_flops'] / 1e12:.2f} TFLOP"), *_efficiency(numbers)]
    lines += ["## Efficiency", "", *_table(("Metric", "Value"), efficiency), "## Top CUDA Kernels", ""]
    lines += _top_table(counted(averages, classifier), "Kernel", "CUDA", "self_device_time_total")
    if not total_us:  # a run without a GPU has no kernels, but operators that took CPU time
        own = [row for row in averages if row.key.startswith(OPERATORS) and row.self_cpu_time_total > 0]
        own = [row for row in own if not row.is_user_annotation]
        note = "No device was recorded.  Own time of the operators on the processor:"
        lines += ["## CPU Time Breakdown", "", note, "", *_top_table(own, "Operator", "CPU", "self_cpu_time_total")]
    lines += ["## Viewing Traces", ""]
    lines += ["Open a trace at https://ui.perfetto.dev or in chrome://tracing, or the folder in TensorBoard:"]
    return lines + ["", "```bash", f"tensorboard --logdir {trace_dir}", "```"]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Returns a Markdown table in KempnerForge's layout, numbers from the second column on, and an empty line."""
    rule = ["---", *["---:"] * (len(head) - 1)]
    return [f"| {' | '.join(cells)} |" for cells in (head, rule, *rows)] + [""]


def _top_table(rows: Sequence[Any], header: str, device: str, time_key: str) -> list[str]:
    """Returns the table of the rows of key_averages() with the largest time_key, which is in microseconds."""
    total_us = max(sum(getattr(row, time_key) for row in rows), 1)
    cells = []
    for row in sorted(rows, key=lambda row: getattr(row, time_key), reverse=True)[:NUM_TOP]:
        time_us, gflop = getattr(row, time_key), f"{row.flops / 1e9:.1f}" if row.flops else "—"
        name = row.key if len(row.key) <= MAX_NAME_CHARS else row.key[: MAX_NAME_CHARS - 3] + "..."
        times = f"{time_us / 1e3:.1f}", f"{100 * time_us / total_us:.1f}"
        cells.append((escape.markdown(name), *times, str(row.count), gflop))
    return _table((header, f"{device} (ms)", "%", "Calls", "GFLOPS"), cells)


def figures(averages: Iterable[Any], peak_tflops: float | None = None, classifier: str = "fixed") -> Figures:
    """Returns the thirteen figures: microseconds and per cent of device time by kind, FLOPs, TFLOP/s, share of peak.

    total_flops is torch's with_flops: matrix products and sums, without attention and fused kernels.  The two figures
    that need peak_tflops are None if it is.
    """
    averages = list(averages)
    times_us = dict.fromkeys(LABELS, 0)
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


def counted(averages: Iterable[Any], classifier: str = "fixed") -> list[Any]:
    """Returns the rows of key_averages() to sum; "fixed" has each kernel and copy once, and no operators or ranges."""
    rows = [row for row in averages if "profilerstep" not in row.key.lower()]
    if classifier == "kempner_v0":
        return rows
    rows = [row for row in rows if row.device_type != DeviceType.CPU]  # operators on the host
    return [row for row in rows if not (row.is_user_annotation or row.key.startswith(categories.HOST_RANGES))]


def kind(name: str, classifier: str = "fixed") -> str:
    """Returns "matmul", "comm", "memory" or "other" for the name of a kernel."""
    if classifier == "kempner_v0":
        lower = name.lower()
        return next((kind for kind, parts in V0_WORDS.items() if any(part in lower for part in parts)), "other")
    return KINDS.get(categories.category(name), "other")


def by_category(averages: Iterable[Any]) -> dict[str, float]:
    """Returns {category: device microseconds} for all categories in their order, counting each kernel once."""
    device_us: dict[str, float] = dict.fromkeys(categories.CATEGORIES, 0)
    for row in counted(averages):
        device_us[categories.category(row.key)] += row.self_device_time_total
    return device_us
