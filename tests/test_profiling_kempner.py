"""KempnerForge's profiler summary: the same headings and rows, with the right figures."""

import logging
import types
import warnings
from unittest.mock import MagicMock

import pytest
import torch
from profiled import names, read, step_names, train_under, watch_of
from torch.autograd import DeviceType

from bench.training.profiling import kempner
from bench.training.profiling.kempner import print_profiler_summary

KEYS = {
    "total_cuda_time_us",
    "matmul_time_us",
    "comm_time_us",
    "memory_time_us",
    "other_time_us",
    "matmul_pct",
    "comm_pct",
    "memory_pct",
    "other_pct",
    "total_flops",
    "achieved_tflops",
    "peak_tflops",
    "kernel_efficiency_pct",
}


def row(key, us, device=DeviceType.CUDA, flops=0, count=1, is_user_annotation=False):
    return types.SimpleNamespace(
        key=key,
        self_device_time_total=us,
        flops=flops,
        count=count,
        device_type=device,
        is_user_annotation=is_user_annotation,
        self_cpu_time_total=0,
    )


class Averages(list):
    def table(self, **settings):
        return "the table"


# A step as torch reports it on a GPU: each kernel, the operator on the host that launched it, and ranges around them.
STEP = [
    row("ProfilerStep*", 30_000, DeviceType.CPU),
    row("ProfilerStep*", 30_000, is_user_annotation=True),
    row("record_param_comms", 6_000, DeviceType.CPU),
    row("nccl:_all_gather_base", 6_000, is_user_annotation=True),
    row("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 6_000, count=3),
    row("aten::mm", 4_000, DeviceType.CPU, flops=2_000_000_000_000, count=8),
    row("nvjet_tst_256x128_64x4_1x2_h_bz_coopA_NNT", 4_000, count=8),
    row("void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<> > >", 1_000),
    row("triton_red_fused_add_mean_mul_pow_rsqrt_0", 500),
    row("triton_poi_fused_mul_silu_2", 300),
    row("Memcpy HtoD (Pinned -> Device)", 200),
]


def test_each_kernel_counts_once():
    figures = kempner.figures(STEP, peak_tflops=989.0)
    # 6000 communication, 4000 matmul, 200 copies, 1000 + 500 + 300 others: 12000
    assert figures["total_cuda_time_us"] == 12_000
    assert (figures["comm_time_us"], figures["matmul_time_us"]) == (6_000, 4_000)
    assert (figures["memory_time_us"], figures["other_time_us"]) == (200, 1_800)
    assert (figures["comm_pct"], figures["other_pct"]) == (50.0, 15.0)
    assert figures["achieved_tflops"] == pytest.approx(2.0 / 0.012)  # 2 TFLOP in 12 ms
    assert figures["kernel_efficiency_pct"] == pytest.approx(100 * 2.0 / 0.012 / 989)
    assert {name: us for name, us in kempner.by_category(STEP).items() if us} == {
        "matmul": 4_000,
        "attention": 1_000,
        "normalisation": 500,
        "communication": 6_000,
        "memory copy": 200,
        "triton": 300,
    }


def test_kempner_v0_counts_as_the_published_reports_do():
    figures = kempner.figures(STEP, classifier="kempner_v0")
    assert figures["comm_time_us"] == 12_000  # the range and the kernel
    assert figures["matmul_time_us"] == 6_000 + 4_000 + 4_000 + 1_000  # "comms", the operator, its kernel, "cutlass"
    assert figures["total_cuda_time_us"] == 28_000
    assert figures["kernel_efficiency_pct"] is None  # no peak is known: nothing is guessed


def test_the_13b_report_of_kempnerforge_turns_from_balanced_to_bound_by_communication():
    """Its rows, in milliseconds: benchmarks/profiling/13b_24gpu_profiling.md, without the other 14.6 s."""
    report = [
        row("record_param_comms", 24_818_600, DeviceType.CPU),
        row("ncclDevKernel_AllGather_RING_LL", 24_751_000),
        row("nccl:_all_gather_base", 24_750_700, is_user_annotation=True),
        row("aten::mm", 7_684_600, DeviceType.CPU),
        row("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT", 6_890_300),
    ]
    old, new = kempner.figures(report, classifier="kempner_v0"), kempner.figures(report)
    assert old["matmul_pct"] == pytest.approx(44.3, abs=0.1) and old["comm_pct"] == pytest.approx(55.7, abs=0.1)
    assert new["comm_pct"] == pytest.approx(78.2, abs=0.1)  # of what is listed: 24.751 of 31.641 s


def test_the_summary_has_kempnerforges_headings_tables_and_rows(tmp_path, capsys):
    prof = MagicMock()
    prof.key_averages.return_value = Averages([*STEP, row("a|b" * 40, 1)])
    print_profiler_summary(prof, tmp_path, shown_dir="traces/profiler_traces")
    out = capsys.readouterr().out
    assert (
        all(f"TOP CUDA KERNELS (by {what})" in out for what in ("total CUDA time", "FLOPS"))
        and "AGGREGATE GPU TIME BREAKDOWN" in out
    )
    lines = (tmp_path / "summary.md").read_text().splitlines()
    headings = [line for line in lines if line.startswith("#")]
    assert headings == [
        "# Profiling Summary",
        "## GPU Time Breakdown",
        "## Efficiency",
        "## Top CUDA Kernels",
        "## Viewing Traces",
    ]
    first = {line.split("|")[1].strip(): line for line in lines if line.startswith("|")}
    assert first["MatMul/GEMM"] == "| MatMul/GEMM | 0.004 | 33.3 |"
    assert first["Communication (NCCL)"] == "| Communication (NCCL) | 0.006 | 50.0 |"
    assert first["Memory ops"] == "| Memory ops | 0.000 | 1.7 |"
    assert first["Other kernels"] == "| Other kernels | 0.002 | 15.0 |"
    assert first["**Total**"] == "| **Total** | **0.012** | **100.0** |"
    assert first["attention"] == "| attention | 0.001 | 8.3 |"
    for metric in ("Total FLOPS", "Achieved TFLOPS", "GPU peak (bf16)", "Kernel efficiency"):
        assert metric in first
    assert "| Kernel | CUDA (ms) | % | Calls | GFLOPS |" in lines
    top = lines[lines.index("## Top CUDA Kernels") + 4 :][:7]
    assert top[0] == r"| ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage\<... | 6.0 | 50.0 | 3 | — |"
    assert not any("record_param_comms" in line or "nccl:" in line or "aten::mm" in line for line in lines)
    assert any(r"a\|ba\|b" in line for line in lines)  # a name cannot add cells
    assert "**Traces**: `traces/profiler_traces/`" in lines


def test_nothing_recorded_is_zeros_and_a_warning(tmp_path, caplog):
    prof = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    with caplog.at_level(logging.WARNING):
        figures = print_profiler_summary(prof, tmp_path)
    assert figures["total_cuda_time_us"] == 0 and figures["other_pct"] == 0
    assert "nothing was recorded" in caplog.text


def test_the_window_instrument_writes_the_summary_on_rank_0(tmp_path, capfd):
    watch = watch_of(tmp_path, {"window": {}})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train_under(watch)
        figures = watch.collect("summary")["window"]["window"]
    assert not watch.warnings
    folder = tmp_path / "traces" / "profiler_traces"
    expected = ["ProfilerStep#6", "ProfilerStep#7", "ProfilerStep#8"]
    assert step_names(read(folder / "window_rank0.pt.trace.json.gz")) == expected
    assert sorted(watch.collect("flags")["window"]) == [5, 6, 7, 8]
    assert figures["steps"] == [6, 8] and set(figures["breakdown"]) == KEYS and figures["classifier"] == "fixed"
    assert figures["files"][-1] == "traces/profiler_traces/summary.md"
    summary = (folder / "summary.md").read_text()
    assert "## CPU Time Breakdown" in summary and "| aten::addmm |" in summary  # no GPU here: its operators instead
    assert "TOP CUDA KERNELS (by FLOPS)" in capfd.readouterr().out
    assert "forward" in names(read(folder / "window_rank0.pt.trace.json.gz"))


def test_a_window_that_is_not_enabled_does_nothing(tmp_path):
    watch = watch_of(tmp_path, {"window": {"enable": False}})
    train_under(watch)
    assert watch.collect("summary")["window"] == {} and watch.collect("flags")["window"] == {}
    assert list(tmp_path.iterdir()) == []
