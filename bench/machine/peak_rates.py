"""What a device can do at most: dense FLOP/s by precision, and memory bandwidth.  Unknown is None, never a guess.

A device is found by its full name as the driver gives it, without vendor words: "NVIDIA H100 PCIe" is not an H100 SXM,
an "A10G" no A10, a "MIG 1g.10gb" slice or a "Laptop GPU" nothing we know.  Data sheets print tensor-core numbers "with
sparsity"; those are halved here.  fp32 is the plain FP32 pipeline, tf32 the tensor cores; GeForce numbers are for FP32
accumulation, which training uses.
"""

import functools
import re
from dataclasses import dataclass

T = 1e12
PRECISIONS = ("bf16", "fp16", "tf32", "fp32", "fp8")
ALIASES = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float8": "fp8"}


@dataclass(frozen=True)
class Device:
    """names: as the driver prints them, without vendor words; None: not supported, or not known for certain."""

    names: tuple[str, ...]
    bf16: float | None
    fp16: float | None
    tf32: float | None
    fp32: float | None
    fp8: float | None
    mem_bytes_per_s: float | None
    peak_clock_mhz: int | None
    source: str


def _both(
    names: list[str],
    half: float,
    tf32: float | None,
    fp32: float | None,
    fp8: float | None,
    mem: float | None,
    clock_mhz: int | None,
    source: str,
) -> Device:
    """A row whose bf16 and fp16 are the same, in FLOP/s and bytes/s."""
    return Device(tuple(names), half, half, tf32, fp32, fp8, mem, clock_mhz, source)


# peak_clock_mhz: the SM clock at which the data sheet's tensor-core peak holds: peak / (SMs * dense bf16 FLOP a clock
# and SM), e.g. 989.4e12 / (132 * 4096) for H100 SXM, 312e12 / (108 * 2048) for A100.  SM counts and FLOP a clock are
# from memory, not looked up; with these clocks they give each sheet's peak within half a percent
# (tests/test_hardware.py).  H200 and GH200 are assumed to be like the H100 SXM.  It is not NVML's highest clock: that
# of an H100 is 1980.
# Sources name NVIDIA's document; "/ 2" marks a number that it prints with sparsity.  State of 2026-11.
H100_SHEET = "NVIDIA H100 Tensor Core GPU datasheet, with sparsity / 2"
H200_SHEET = "NVIDIA H200 Tensor Core GPU datasheet, with sparsity / 2"
A100_SHEET = "NVIDIA A100 Tensor Core GPU datasheet, dense"
BLACKWELL = "NVIDIA Blackwell Architecture Technical Brief, dense"
ADA = "NVIDIA Ada GPU Architecture whitepaper, dense, FP32 accumulate"
GA102 = "NVIDIA Ampere GA102 GPU Architecture whitepaper, dense, FP32 accumulate"
# fmt: off
DEVICES = (
    _both(["GB200"], 2500*T, 1250*T, None, 5000*T, 8.0*T, None, BLACKWELL),
    _both(["B200"], 2250*T, 1100*T, None, 4500*T, 8.0*T, None, BLACKWELL),
    _both(["GH200 480GB"], 989*T, 494.5*T, 67*T, 1979*T, None, 1830, "NVIDIA GH200 datasheet, with sparsity / 2"),
    _both(["H200 NVL"], 835*T, 417.5*T, 60*T, 1670.5*T, 4.8*T, None, H200_SHEET),
    _both(["H200"], 989*T, 494.5*T, 67*T, 1979*T, 4.8*T, 1830, H200_SHEET),
    _both(["H100 NVL"], 835*T, 417.5*T, 60*T, 1670.5*T, 3.9*T, None, H100_SHEET),
    _both(["H100 PCIe"], 756*T, 378*T, 51*T, 1513*T, 2.0*T, 1620, H100_SHEET),
    _both(["H100 80GB HBM3", "H100 SXM5 80GB"], 989*T, 494.5*T, 67*T, 1979*T, 3.35*T, 1830, H100_SHEET),
    _both(["H20"], 148*T, 74*T, 44*T, 296*T, 4.0*T, None,
          "NVIDIA H20 specification as published by server makers, dense"),
    _both(["A100-SXM4-80GB"], 312*T, 156*T, 19.5*T, None, 2.039*T, 1410, A100_SHEET),
    _both(["A100 80GB PCIe", "A100-PCIE-80GB"], 312*T, 156*T, 19.5*T, None, 1.935*T, 1410, A100_SHEET),
    _both(["A100-SXM4-40GB", "A100-PCIE-40GB"], 312*T, 156*T, 19.5*T, None, 1.555*T, 1410, A100_SHEET),
    _both(["A800-SXM4-80GB"], 312*T, 156*T, 19.5*T, None, 2.039*T, None, "NVIDIA A800 datasheet, dense"),
    _both(["A40"], 149.7*T, 74.8*T, 37.4*T, None, 0.696*T, 1740, "NVIDIA A40 datasheet, dense"),
    _both(["A30"], 165*T, 82*T, 10.3*T, None, 0.933*T, 1440, "NVIDIA A30 datasheet, dense"),
    _both(["A10G"], 70*T, 35*T, 35*T, None, 0.600*T, None, "NVIDIA A10G datasheet (AWS), dense"),
    _both(["A10"], 125*T, 62.5*T, 31.2*T, None, 0.600*T, 1695, "NVIDIA A10 datasheet, dense"),
    _both(["L40S"], 362*T, 183*T, 91.6*T, 733*T, 0.864*T, 2490, "NVIDIA L40S datasheet, dense"),
    _both(["L40"], 181*T, 90.5*T, 90.5*T, 362*T, 0.864*T, None, "NVIDIA L40 datasheet, dense"),
    _both(["L4"], 121*T, 60*T, 30.3*T, 242*T, 0.300*T, 2040, "NVIDIA L4 datasheet, with sparsity / 2"),
    _both(["RTX 6000 Ada Generation"], 364.2*T, 182.1*T, 91.1*T, 728.5*T, 0.960*T, 2505, ADA),
    _both(["RTX A6000"], 154.8*T, 77.4*T, 38.7*T, None, 0.768*T, 1800, GA102),
    _both(["RTX 5090"], 209.5*T, 104.8*T, 104.8*T, 419*T, 1.792*T, 2407,
          "NVIDIA RTX Blackwell GPU Architecture whitepaper, dense, FP32 accumulate"),
    _both(["RTX 4090"], 165.2*T, 82.6*T, 82.6*T, 330.3*T, 1.008*T, 2520, ADA),
    _both(["RTX 3090"], 71*T, 35.6*T, 35.6*T, None, 0.936*T, 1695, GA102),
    Device(("V100-SXM2-16GB", "V100-SXM2-32GB"), None, 125*T, None, 15.7*T, None, 0.900*T, 1530,
           "NVIDIA V100 datasheet"),
    Device(("T4",), None, 65*T, None, 8.1*T, None, None, 1590, "NVIDIA T4 datasheet"),
)
# fmt: on


def find(device_name: str | None) -> Device | None:
    """Full device name, e.g. "NVIDIA H100 80GB HBM3" -> its Device, or None."""
    return _by_name().get(_key(device_name)) if device_name else None


def peak_clock_mhz(device_name: str | None) -> int | None:
    """The SM clock of peak_flops; None for a device whose clock is not in the table."""
    device = find(device_name)
    return None if device is None else device.peak_clock_mhz


def peak_flops(device_name: str | None, dtype: str | None) -> float | None:
    """Dense peak FLOP/s of one device, or None if device or precision is unknown.  dtype as ours or as torch's."""
    precision, device = ALIASES.get(dtype or "", dtype), find(device_name)
    if device is None or precision not in PRECISIONS:
        return None
    peak: float | None = getattr(device, precision)
    return peak


def mem_bytes_per_s(device_name: str | None) -> float | None:
    """Memory bandwidth of one device in bytes per second (1e12 is a TB/s), or None."""
    device = find(device_name)
    return None if device is None else device.mem_bytes_per_s


@functools.cache
def _by_name() -> dict[str, Device]:
    return {_key(name): device for device in DEVICES for name in device.names}


def _key(name: str) -> str:
    parts = re.split(r"[\s-]+", name.strip().lower())
    return " ".join(word for word in parts if word not in ("nvidia", "tesla", "geforce"))
