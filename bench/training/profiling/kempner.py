"""KempnerForge's profiler API (kempnerforge/profiling/profiler.py) with exact steps and right figures.

    prof = build_profiler(ProfilingConfig(enable=True, start_step=5, end_step=8, trace_dir="traces"), rank)
    prof.start()
    for ...: train; prof.step()          once after every step, the first of which is step 1
    prof.stop()
    print_profiler_summary(prof, trace_dir="traces")

Warm-up is start_step, recorded are start_step + 1 to end_step: what KempnerForge's profiler does, whatever its log
says.  A window that is not reached is a warning and no file.

The thirteen figures are by kind of kernel.  fixed counts each kernel once: device events only, no ranges around them,
communication before what its names contain.  kempner_v0 counts as KempnerForge does, so that old reports can be
compared: it adds operators on the host, ranges and kernels together, NCCL three times over, a third of it as matmul
because "mm" is in "record_param_comms".
"""

import logging
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerAction

from bench.analysis.trace import categories
from bench.base import atomic, text_table
from bench.config.windows import KEMPNER_FLAGS, span
from bench.machine import peak_rates
from bench.training.profiling import files
from bench.training.profiling.recording import ExclusiveProfile

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
LOG = logging.getLogger(__name__)
RULE = "=" * 100
MAX_NAME_CHARS = 60
NUM_TOP = 20


@dataclass
class ProfilingConfig:
    enable: bool = False
    start_step: int = 5
    end_step: int = 8
    trace_dir: str = "profiler_traces"

    def __post_init__(self):
        if self.end_step <= self.start_step:
            raise ValueError(
                f"end_step={self.end_step}: end_step must be greater than start_step, which is {self.start_step}"
            )


class WindowProfile(ExclusiveProfile):
    """torch.profiler.profile that counts steps from 1 and says what became of its window."""

    def __init__(self, first_step: int, last_step: int, trace_dir: Path | str, rank: int):
        self.first_step, self.last_step = first_step, last_step
        self.status, self.path = "not reached", None
        self._trace_dir, self._rank = Path(trace_dir), rank
        self.owner = f"window of {span(first_step, last_step)}"
        super().__init__(
            activities=torch.profiler.supported_activities(),
            schedule=self._action,
            on_trace_ready=WindowProfile._save,
            **KEMPNER_FLAGS,
        )
        self.step_num = 1  # torch counts from 0; so counted, ProfilerStep#6 is step 6
        self.current_action = self._action(self.step_num)

    def _action(self, step):
        if self.first_step <= step <= self.last_step:
            return ProfilerAction.RECORD_AND_SAVE if step == self.last_step else ProfilerAction.RECORD
        return ProfilerAction.WARMUP if step == self.first_step - 1 else ProfilerAction.NONE

    def _save(self):
        recorded = min(self.step_num - 1, self.last_step)  # the last step that was finished
        if recorded < self.first_step:
            return
        self.status = "recorded" if recorded == self.last_step else "cut short"
        self.path = self._trace_dir / f"rank{self._rank:05d}.{time.time_ns()}.pt.trace.json"
        begun = [(f"ProfilerStep#{recorded + 1}", "no step: training ended")]  # torch opens the next range at once
        files.save(self, self.path, renamed=begun)
        LOG.info("profiler: %s recorded, %s", span(self.first_step, recorded), self.path)

    def stop(self):
        super().stop()
        if self.status != "recorded":
            LOG.warning("profiler: %s %s: training ended at step %d", self.owner, self.status, self.step_num - 1)


def build_profiler(config, rank: int = 0) -> WindowProfile | None:
    """config: anything with enable, start_step, end_step and trace_dir -> WindowProfile, or None where not enabled."""
    if not config.enable:
        return None
    Path(config.trace_dir).mkdir(parents=True, exist_ok=True)
    prof = WindowProfile(config.start_step + 1, config.end_step, config.trace_dir, rank)
    LOG.info("profiler: will record %s, traces in %s", span(prof.first_step, prof.last_step), config.trace_dir)
    return prof


def print_profiler_summary(
    prof: torch.profiler.profile,
    trace_dir: Path | str | None = None,
    classifier: str = "fixed",
    shown_dir: Path | str | None = None,
) -> dict[str, float | None]:
    """Print KempnerForge's three blocks, write trace_dir/summary.md, and return the thirteen figures.

    trace_dir: None writes no file.  classifier: fixed or kempner_v0.  shown_dir stands in the text for trace_dir, if
    given.  A profile that recorded nothing gives zeros and a warning, never an exception: this runs at the end of a
    training run.
    """
    averages = _averages(prof)
    figures_found = figures(averages, _peak_tflops(), classifier)
    if averages:
        _block("TOP CUDA KERNELS (by total CUDA time)", averages.table(sort_by="cuda_time_total", row_limit=30))
        _block("TOP CUDA KERNELS (by FLOPS)", averages.table(sort_by="flops", row_limit=NUM_TOP))
    _block("AGGREGATE GPU TIME BREAKDOWN", "\n".join(_breakdown_lines(figures_found)))
    if trace_dir is not None:
        path = Path(trace_dir) / "summary.md"
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = _summary_lines(averages, figures_found, shown_dir or trace_dir, classifier)
        atomic.write_text(path, "\n".join(lines) + "\n", durable=False)
    return figures_found


def _averages(prof):
    try:
        return prof.key_averages()
    except (AssertionError, AttributeError, RuntimeError) as error:  # torch's, of a profile that never started
        LOG.warning("profiler: nothing was recorded (%s): the figures are zeros", error)
        return []


def _peak_tflops():
    """Dense bf16 peak of this GPU, or None."""
    peak = peak_rates.peak_flops(torch.cuda.get_device_name(0), "bfloat16") if torch.cuda.is_available() else None
    return None if peak is None else peak / 1e12


def _block(title, text):
    print(f"\n{RULE}\n{title}\n{RULE}\n{text}", flush=True)


def _breakdown_lines(numbers):
    def line(label, name):
        return f"  {label + ':':<19} {numbers[f'{name}_time_us'] / 1e6:.3f} s ({numbers[f'{name}_pct']:.1f}%)"

    lines = [f"  {'Total CUDA time:':<19} {numbers['total_cuda_time_us'] / 1e6:.3f} s", line("MatMul/GEMM", "matmul")]
    lines += [line("Communication", "comm"), line("Memory ops", "memory"), line("Other kernels", "other")]
    lines += [f"  {'Total FLOPS:':<19} {numbers['total_flops'] / 1e12:.2f} TFLOP"]
    if numbers["total_cuda_time_us"] > 0:
        lines += [f"  {label + ':':<19} {value}" for label, value in _efficiency(numbers)]
    return lines


def _efficiency(numbers):
    def known(value, text):
        return "unknown" if value is None else text.format(value)

    return [
        ("Achieved TFLOPS", f"{numbers['achieved_tflops']:.1f}"),
        ("GPU peak (bf16)", known(numbers["peak_tflops"], "{:.0f} TFLOPS")),
        ("Kernel efficiency", known(numbers["kernel_efficiency_pct"], "{:.1f}%")),
    ]


def _summary_lines(averages, numbers, trace_dir, classifier):
    """KempnerForge's headings, tables and rows."""
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "unknown"
    lines = ["# Profiling Summary", ""]
    lines += [f"**Date**: {datetime.now():%Y-%m-%d %H:%M}", f"**GPU**: {gpu}", f"**Traces**: `{trace_dir}/`", ""]
    lines += ["## GPU Time Breakdown", "", *_time_table(numbers)]
    if classifier == "fixed":
        lines += ["Other kernels are:", "", *_other_table(averages, numbers["total_cuda_time_us"])]
    else:
        lines += ["Counted as KempnerForge does (classifier kempner_v0): the same time several times over.", ""]
    efficiency = [("Total FLOPS", f"{numbers['total_flops'] / 1e12:.2f} TFLOP"), *_efficiency(numbers)]
    lines += ["## Efficiency", "", *_table(("Metric", "Value"), efficiency)]
    kernels = counted(averages, classifier)
    lines += ["## Top CUDA Kernels", "", *_top_table(kernels, "Kernel", "CUDA", "self_device_time_total")]
    if not numbers["total_cuda_time_us"]:
        lines += [
            "## CPU Time Breakdown",
            "",
            "No device was recorded.  Own time of the operators on the processor:",
            "",
        ]
        lines += _top_table(_operators(averages), "Operator", "CPU", "self_cpu_time_total")
    lines += ["## Viewing Traces", ""]
    lines += ["Open a trace at https://ui.perfetto.dev or in chrome://tracing, or the folder in TensorBoard:"]
    return lines + ["", "```bash", f"tensorboard --logdir {trace_dir}", "```"]


def _table(head, rows):
    """Markdown laid out as KempnerForge does, the first column words, the others numbers; an empty line at its end."""
    rule = ["---", *["---:"] * (len(head) - 1)]
    return [f"| {' | '.join(cells)} |" for cells in (head, rule, *rows)] + [""]


def _time_table(numbers):
    kinds = {"MatMul/GEMM": "matmul", "Communication (NCCL)": "comm", "Memory ops": "memory", "Other kernels": "other"}
    rows = [
        (label, f"{numbers[f'{name}_time_us'] / 1e6:.3f}", f"{numbers[f'{name}_pct']:.1f}")
        for label, name in kinds.items()
    ]
    total = ("**Total**", f"**{numbers['total_cuda_time_us'] / 1e6:.3f}**", "**100.0**")
    return _table(("Category", "Time (s)", "%"), [*rows, total])


def _other_table(averages, total_us):
    """What "Other kernels" holds, by category."""
    by_name = {name: us for name, us in by_category(averages).items() if name not in KINDS}
    rows = [(name, f"{us / 1e6:.3f}", f"{100 * us / max(total_us, 1):.1f}") for name, us in by_name.items()]
    return _table(("Of other", "Time (s)", "%"), rows)


def _top_table(rows, what, device, time_key):
    """The rows of key_averages() that took longest by their time_key, in microseconds."""
    total_us = max(sum(getattr(row, time_key) for row in rows), 1)
    cells = []
    for row in sorted(rows, key=lambda row: getattr(row, time_key), reverse=True)[:NUM_TOP]:
        time_us, gflop = getattr(row, time_key), f"{row.flops / 1e9:.1f}" if row.flops else "—"
        cells.append(
            (_short(row.key), f"{time_us / 1e3:.1f}", f"{100 * time_us / total_us:.1f}", str(row.count), gflop)
        )
    return _table((what, f"{device} (ms)", "%", "Calls", "GFLOPS"), cells)


def _operators(averages):
    """A run without a GPU has no kernels; its operators took the processor's time."""
    prefixes = ("aten::", "autograd::", "Optimizer", "c10d::", "gloo:")
    rows = [row for row in averages if row.key.startswith(prefixes) and row.self_cpu_time_total > 0]
    return [row for row in rows if not getattr(row, "is_user_annotation", False)]


def _short(name):
    """A kernel's name as a cell: of bounded length, and no markup of its own."""
    return text_table.line(name if len(name) <= MAX_NAME_CHARS else name[: MAX_NAME_CHARS - 3] + "...", True)


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
        return next(
            (kind_of_kernel for kind_of_kernel, words in V0_WORDS.items() if any(word in lower for word in words)),
            "other",
        )
    return KINDS.get(_category(name), "other")


def by_category(averages):
    """{category: device microseconds}, all categories in their order, each kernel once."""
    device_us = dict.fromkeys(categories.CATEGORIES, 0)
    for row in counted(averages):
        device_us[_category(row.key)] += row.self_device_time_total
    return device_us


def _category(name):
    """A stand-in may be called by a collective's range where there is no kernel of its own."""
    return categories.COMMUNICATION if name.startswith("nccl:") else categories.category(name)
