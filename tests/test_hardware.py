"""Peaks by device name: the names that other tables confuse."""

import pytest

from bench.machine import peak_rates

T = 1e12


@pytest.mark.parametrize(
    ("name", "bf16_t"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200", 989),
        ("NVIDIA H200 NVL", 835),
        ("NVIDIA H20", 148),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100-SXM4-40GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("A100-SXM4-40GB", 312),  # as older drivers say
        ("NVIDIA A10", 125),
        ("NVIDIA A10G", 70),
        ("NVIDIA L4", 121),
        ("NVIDIA L40", 181),
        ("NVIDIA L40S", 362),
        ("NVIDIA GeForce RTX 5090", 209.5),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA GeForce RTX 4080", 97.5),
        ("NVIDIA GeForce RTX 3090 Ti", 80),
        ("NVIDIA GeForce RTX 3090", 71),
        ("AMD Instinct MI300X", 1307.4),
        ("AMD Instinct MI300X VF", 1307.4),  # as a virtual machine sees a whole one
        ("AMD Instinct MI355X", 2500),
        ("AMD Instinct MI250X", 191.5),  # one of the two dies
    ],
)
def test_dense_bf16_peak_by_full_name(name, bf16_t):
    assert peak_rates.peak_flops(name, "bf16") == pytest.approx(bf16_t * T, rel=5e-3)  # as rounded on the sheet


@pytest.mark.parametrize(
    "name",
    [
        None,
        "",
        "NVIDIA H100",  # SXM, PCIe or NVL: unknown
        "NVIDIA H800",  # 989 or 756, depending on a form factor that the name does not show
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA A100-SXM-64GB",  # a custom A100 with more cores
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 3080",  # two chips of one name
        "AMD EPYC",
        "Some GPU of 2031",
    ],
)
def test_an_unknown_device_has_no_peak(name):
    assert peak_rates.peak_flops(name, "bf16") is None
    assert peak_rates.mem_bytes_per_s(name) is None


def test_each_precision_has_its_own_peak():
    name = "NVIDIA H100 80GB HBM3"
    peaks = [peak_rates.peak_flops(name, dtype) for dtype in ("fp8", "bf16", "fp16", "tf32", "fp32")]
    assert peaks == [1979 * T, 989 * T, 989 * T, 494.5 * T, 67 * T]


def test_torch_names_of_precisions_are_understood_and_unknown_ones_have_no_peak():
    assert peak_rates.peak_flops("NVIDIA H200", "bfloat16") == 989 * T
    assert peak_rates.peak_flops("NVIDIA H200", "float32") == 67 * T
    assert peak_rates.peak_flops("NVIDIA H200", "int3") is None
    assert peak_rates.peak_flops("NVIDIA H200", None) is None
    assert peak_rates.peak_flops("NVIDIA A100-SXM4-80GB", "fp8") is None  # it has no fp8
    assert peak_rates.peak_flops("Tesla V100-SXM2-16GB", "bfloat16") is None


def test_memory_bandwidth_by_variant():
    assert peak_rates.mem_bytes_per_s("NVIDIA H100 80GB HBM3") == 3.35e12
    assert peak_rates.mem_bytes_per_s("NVIDIA H100 PCIe") == 2.0e12
    assert peak_rates.mem_bytes_per_s("NVIDIA A100-SXM4-40GB") == 1.555e12


def test_every_row_names_its_source_and_no_name_is_there_twice():
    names = [peak_rates._key(name) for device in peak_rates.DEVICES for name in device.names]
    assert len(names) == len(set(names))
    assert all(len(device.source) > 10 for device in peak_rates.DEVICES)


def test_faster_precisions_are_not_slower():
    """fp32 <= tf32 <= bf16 <= fp8 wherever two of them are known: a sparse or swapped number would break it."""
    for device in peak_rates.DEVICES:
        peaks = [peak for peak in (device.fp32, device.tf32, device.bf16, device.fp8) if peak is not None]
        assert peaks == sorted(peaks), device.names


@pytest.mark.parametrize(
    ("name", "num_sms", "flop_per_clock"),
    [
        ("NVIDIA H100 80GB HBM3", 132, 4096),
        ("NVIDIA H200", 132, 4096),
        ("NVIDIA H100 PCIe", 114, 4096),
        ("NVIDIA A100-SXM4-80GB", 108, 2048),
        ("NVIDIA A30", 56, 2048),
        ("NVIDIA A10", 72, 1024),
        ("NVIDIA A40", 84, 1024),
        ("NVIDIA RTX A6000", 84, 1024),
        ("NVIDIA RTX A4000", 48, 1024),
        ("NVIDIA GeForce RTX 3090", 82, 512),
        ("NVIDIA L4", 58, 1024),
        ("NVIDIA L40S", 142, 1024),
        ("NVIDIA RTX 6000 Ada Generation", 142, 1024),
        ("NVIDIA GeForce RTX 4090", 128, 512),
        ("NVIDIA GeForce RTX 5090", 170, 512),
        ("Tesla V100-SXM2-16GB", 80, 1024),
        ("Tesla T4", 40, 1024),
    ],
)
def test_the_peak_holds_at_its_clock(name, num_sms, flop_per_clock):
    """Each streaming multiprocessor does this many dense half-precision FLOP per clock with FP32 accumulation."""
    computed = num_sms * flop_per_clock * peak_rates.peak_clock_mhz(name) * 1e6
    assert computed == pytest.approx(peak_rates.peak_flops(name, "fp16"), rel=0.005)
