"""Peak rates of devices: dense FLOP/s by precision, and memory bandwidth.  Unknown is None, never a guess.

A device is looked up by its full name from the driver, without vendor words: "NVIDIA H100 PCIe" is not an H100 SXM, an
"A10G" is not an A10, and a "MIG 1g.10gb" slice or a "Laptop GPU" is unknown.  Data sheets list tensor-core rates "with
sparsity"; those are halved here.  fp32 is the plain FP32 pipeline, tf32 the tensor cores; GeForce rates are for FP32
accumulation, which training uses.
"""

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bench.base.units import GIB

T = 1e12
PRECISIONS = ("bf16", "fp16", "tf32", "fp32", "fp8")
MAX_SHEET_FRAC = 1.25  # of the data sheet's rate: boards run above its clock, an RTX 4090 by up to a fifth
ALIASES = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float8": "fp8"}


@dataclass(frozen=True)
class Device:
    """Peak rates.  names: from the driver, without vendor words; None: not supported, or not known for certain."""

    names: tuple[str, ...]
    bf16: float | None
    fp16: float | None
    tf32: float | None
    fp32: float | None
    fp8: float | None
    mem_bytes_per_s: float | None
    peak_clock_mhz: int | None
    source: str
    link_bytes_per_s: float | None = None  # all NVLink or Infinity Fabric links of a device together, one way


def _both(
    names: list[str],
    half: float,
    tf32: float | None,
    fp32: float | None,
    fp8: float | None,
    mem: float | None,
    clock_mhz: int | None,
    source: str,
    link: float | None = None,
) -> Device:
    """Returns a device with the same rate in bf16 and fp16.  Rates are in FLOP/s and bytes/s."""
    return Device(tuple(names), half, half, tf32, fp32, fp8, mem, clock_mhz, source, link)


def _geforce(name: str, cores: int, boost_mhz: int, mem: float | None, source: str) -> Device:
    """Returns a GeForce board from its cores and boost clock: two FLOP per core and clock in FP32, tensor cores with
    FP32 accumulation at that rate in TF32 and twice in 16 bits, and from Ada on four times in FP8, which agrees with
    the tables in the whitepapers."""
    fp32 = 2 * cores * boost_mhz * 1e6
    fp8 = None if source == GA102 else 4 * fp32
    return Device((name,), 2 * fp32, 2 * fp32, fp32, fp32, fp8, mem, boost_mhz, source)


# peak_clock_mhz: the SM clock at which the data sheet's tensor-core peak holds: peak / (SMs * dense bf16 FLOP per clock
# and SM), such as 989.4e12 / (132 * 4096) for H100 SXM or 312e12 / (108 * 2048) for A100.  SM counts and FLOP are
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
RTX_50 = "NVIDIA RTX Blackwell GPU Architecture whitepaper, dense, FP32 accumulate"
CDNA3 = "AMD Instinct MI300X and MI325X data sheets, dense"
CDNA4 = "AMD Instinct MI350 series data sheets, dense"
# fmt: off
DEVICES = (
    _both(["GB200"], 2500*T, 1250*T, None, 5000*T, 8.0*T, None, BLACKWELL, 0.9*T),
    _both(["B200"], 2250*T, 1100*T, None, 4500*T, 8.0*T, None, BLACKWELL, 0.9*T),
    _both(["GH200 480GB"], 989*T, 494.5*T, 67*T, 1979*T, None, 1830,
          "NVIDIA GH200 datasheet, with sparsity / 2", 0.45*T),
    _both(["H200 NVL"], 835*T, 417.5*T, 60*T, 1670.5*T, 4.8*T, None, H200_SHEET, 0.45*T),
    _both(["H200"], 989*T, 494.5*T, 67*T, 1979*T, 4.8*T, 1830, H200_SHEET, 0.45*T),
    _both(["H100 NVL"], 835*T, 417.5*T, 60*T, 1670.5*T, 3.9*T, None, H100_SHEET, 0.3*T),
    _both(["H100 PCIe"], 756*T, 378*T, 51*T, 1513*T, 2.0*T, 1620, H100_SHEET),
    _both(["H100 80GB HBM3", "H100 SXM5 80GB"], 989*T, 494.5*T, 67*T, 1979*T, 3.35*T, 1830, H100_SHEET, 0.45*T),
    _both(["H20"], 148*T, 74*T, 44*T, 296*T, 4.0*T, None,
          "NVIDIA H20 specification as published by server makers, dense", 0.45*T),
    _both(["A100-SXM4-80GB"], 312*T, 156*T, 19.5*T, None, 2.039*T, 1410, A100_SHEET, 0.3*T),
    _both(["A100 80GB PCIe", "A100-PCIE-80GB"], 312*T, 156*T, 19.5*T, None, 1.935*T, 1410, A100_SHEET),
    _both(["A100-SXM4-40GB", "A100-PCIE-40GB"], 312*T, 156*T, 19.5*T, None, 1.555*T, 1410, A100_SHEET),
    _both(["A800-SXM4-80GB"], 312*T, 156*T, 19.5*T, None, 2.039*T, None, "NVIDIA A800 datasheet, dense", 0.2*T),
    _both(["A40"], 149.7*T, 74.8*T, 37.4*T, None, 0.696*T, 1740, "NVIDIA A40 datasheet, dense"),
    _both(["A30"], 165*T, 82*T, 10.3*T, None, 0.933*T, 1440, "NVIDIA A30 datasheet, dense"),
    _both(["A10G"], 70*T, 35*T, 35*T, None, 0.600*T, None, "NVIDIA A10G datasheet (AWS), dense"),
    _both(["A10"], 125*T, 62.5*T, 31.2*T, None, 0.600*T, 1695, "NVIDIA A10 datasheet, dense"),
    _both(["L40S"], 362*T, 183*T, 91.6*T, 733*T, 0.864*T, 2490, "NVIDIA L40S datasheet, dense"),
    _both(["L40"], 181*T, 90.5*T, 90.5*T, 362*T, 0.864*T, None, "NVIDIA L40 datasheet, dense"),
    _both(["L4"], 121*T, 60*T, 30.3*T, 242*T, 0.300*T, 2040, "NVIDIA L4 datasheet, with sparsity / 2"),
    _both(["RTX 6000 Ada Generation"], 364.2*T, 182.1*T, 91.1*T, 728.5*T, 0.960*T, 2505, ADA),
    _both(["RTX A6000"], 154.8*T, 77.4*T, 38.7*T, None, 0.768*T, 1800, GA102),
    _both(["RTX A4000"], 76.7*T, 38.3*T, 19.2*T, None, 0.448*T, 1560, "NVIDIA RTX A4000 datasheet, with sparsity / 2"),
    # The driver has one name for both memory versions of the 3060 and of the 4070, and for both chips of the 3080.
    _geforce("RTX 5090", 21760, 2407, 1.792*T, RTX_50),
    _geforce("RTX 5080", 10752, 2617, 0.960*T, RTX_50),
    _geforce("RTX 5070 Ti", 8960, 2452, 0.896*T, RTX_50),
    _geforce("RTX 5070", 6144, 2512, 0.672*T, RTX_50),
    _geforce("RTX 5060 Ti", 4608, 2572, 0.448*T, RTX_50),
    _geforce("RTX 4090", 16384, 2520, 1.008*T, ADA),
    _geforce("RTX 4080 SUPER", 10240, 2550, 0.736*T, ADA),
    _geforce("RTX 4080", 9728, 2505, 0.717*T, ADA),
    _geforce("RTX 4070 Ti SUPER", 8448, 2610, 0.672*T, ADA),
    _geforce("RTX 4070 Ti", 7680, 2610, 0.504*T, ADA),
    _geforce("RTX 4070 SUPER", 7168, 2475, 0.504*T, ADA),
    _geforce("RTX 4070", 5888, 2475, None, ADA),
    _geforce("RTX 4060 Ti", 4352, 2535, 0.288*T, ADA),
    _geforce("RTX 4060", 3072, 2460, 0.272*T, ADA),
    _geforce("RTX 3090 Ti", 10752, 1860, 1.008*T, GA102),
    _geforce("RTX 3090", 10496, 1695, 0.936*T, GA102),
    _geforce("RTX 3080 Ti", 10240, 1665, 0.912*T, GA102),
    _geforce("RTX 3070 Ti", 6144, 1770, 0.608*T, GA102),
    _geforce("RTX 3070", 5888, 1725, 0.448*T, GA102),
    _geforce("RTX 3060 Ti", 4864, 1665, 0.448*T, GA102),
    _geforce("RTX 3060", 3584, 1777, None, GA102),
    # In CDNA 2 the driver's device is one of a package's two dies: half of the data sheet's rates.
    _both(["Instinct MI250X"], 191.5*T, None, 23.9*T, None, 1.638*T, 1700, "AMD Instinct MI250X data sheet / 2"),
    _both(["Instinct MI250"], 181*T, None, 22.6*T, None, 1.638*T, 1700, "AMD Instinct MI250 data sheet / 2"),
    _both(["Instinct MI210"], 181*T, None, 22.6*T, None, 1.638*T, 1700, "AMD Instinct MI210 data sheet"),
    _both(["Instinct MI300X", "Instinct MI300X VF"], 1307.4*T, 653.7*T, 163.4*T, 2614.9*T, 5.3*T, 2100, CDNA3, 0.448*T),
    _both(["Instinct MI325X", "Instinct MI325X VF"], 1307.4*T, 653.7*T, 163.4*T, 2614.9*T, 6.0*T, 2100, CDNA3, 0.448*T),
    _both(["Instinct MI350X"], 2300*T, None, 144.2*T, 4600*T, 8.0*T, 2200, CDNA4, 0.538*T),
    _both(["Instinct MI355X"], 2500*T, None, 157.3*T, 5000*T, 8.0*T, 2400, CDNA4, 0.538*T),
    Device(("V100-SXM2-16GB", "V100-SXM2-32GB"), None, 125*T, None, 15.7*T, None, 0.900*T, 1530,
           "NVIDIA V100 datasheet", 0.15*T),
    Device(("T4",), None, 65*T, None, 8.1*T, None, 0.320*T, 1590, "NVIDIA T4 datasheet; memory: deviceQuery"),
)
# fmt: on

# {(compute capability, multiprocessors, GiB of memory in steps of 8): name}, if all devices with these properties have
# the same rates in the table: for traces and drivers that give no name, or the board's internal one.
BY_PROPERTIES = {
    ((8, 0), 108, 40): "A100-SXM4-40GB",  # the PCIe card has the same peaks and bandwidth
    ((9, 0), 104, 64): "Instinct MI210",  # or a die of an MI250, which has the same rates
    ((9, 4), 304, 192): "Instinct MI300X",
    ((9, 4), 304, 256): "Instinct MI325X",
}


def known_name(device_name: str | None, properties: Mapping[str, Any]) -> str | None:
    """Returns the name if it is in the table, else that of the only device with these properties, else the name.

    properties: an entry of a Kineto trace's deviceProperties.
    """
    facts: list[Any] = [properties.get(key) for key in ("computeMajor", "computeMinor", "numSms", "totalGlobalMem")]
    if find(device_name) is not None or any(type(fact) is not int for fact in facts):
        return device_name
    major, minor, num_multiprocessors, num_bytes = map(int, facts)
    memory_gib = 8 * round(num_bytes / GIB / 8)
    return BY_PROPERTIES.get(((major, minor), num_multiprocessors, memory_gib)) or device_name


@functools.cache
def find(device_name: str | None) -> Device | None:
    """Returns the Device with this full name, such as "NVIDIA H100 80GB HBM3", or None."""
    by_name = {_key(name): device for device in DEVICES for name in device.names}
    return by_name.get(_key(device_name)) if device_name else None


def peak_clock_mhz(device_name: str | None) -> int | None:
    """Returns the SM clock at which peak_flops() holds, or None if it is not in the table."""
    device = find(device_name)
    return None if device is None else device.peak_clock_mhz


def peak_flops(device_name: str | None, dtype: str | None) -> float | None:
    """Returns the dense peak FLOP/s of one device, None if device or dtype is unknown.  dtype: our name or torch's."""
    precision, device = ALIASES.get(dtype or "", dtype), find(device_name)
    if device is None or precision not in PRECISIONS:
        return None
    peak: float | None = getattr(device, precision)
    return peak


def is_beyond_sheet(measured: float, sheet: float | None) -> bool:
    """Whether a rate exceeds what the device can do, so that its clock or name is wrong.  sheet: None if unknown."""
    return sheet is not None and measured > MAX_SHEET_FRAC * sheet


def mem_bytes_per_s(device_name: str | None) -> float | None:
    """Returns the memory bandwidth of one device in bytes/s, or None."""
    device = find(device_name)
    return None if device is None else device.mem_bytes_per_s


def link_bytes_per_s(device_name: str | None) -> float | None:
    """Returns the bandwidth of all links of one device to its peers together, one way, in bytes/s, or None."""
    device = find(device_name)
    return None if device is None else device.link_bytes_per_s


def _key(name: str) -> str:
    parts = re.split(r"[\s-]+", name.strip().lower())
    return " ".join(part for part in parts if part not in ("nvidia", "tesla", "geforce", "amd"))
