"""Converts and formats units, for the whole program.

Numbers are in seconds, milliseconds, bytes or GiB (2**30), and their names end in the unit.  GB (1e9) is not used.
Every format_* returns "" for None, which means not measured.
"""

import re

KIB = 2**10
MIB = 2**20
GIB = 2**30
MS_PER_S = 1e3
NS_PER_US = 1000
NS_PER_MS = 1e6
NS_PER_S = 1e9


def ms_from_s(seconds: float) -> float:
    """Converts seconds to milliseconds: 1.5 -> 1500.0."""
    return MS_PER_S * seconds


def s_from_ms(ms: float) -> float:
    """Converts milliseconds to seconds: 1500 -> 1.5."""
    return ms / MS_PER_S


def ms_from_ns(ns: float) -> float:
    """Converts nanoseconds to milliseconds: 1,500,000 -> 1.5."""
    return ns / NS_PER_MS


def s_from_ns(ns: float) -> float:
    """Converts nanoseconds to seconds: 1,500,000,000 -> 1.5."""
    return ns / NS_PER_S


def gib_from_bytes(num_bytes: float) -> float:
    """Converts bytes to GiB: 3 * 2**29 -> 1.5."""
    return num_bytes / GIB


def number_from(text: str) -> float | None:
    """Parses a number: "1.5" -> 1.5; None for text that is not a number."""
    try:
        return float(text)
    except ValueError:
        return None


def seconds_of(text: str) -> float:
    """Parses a duration as users type it: "90s", "45m", "2h", "1h30m", "1.5h".  Raises ValueError for other text."""
    parts = re.findall(r"(\d+(?:\.\d+)?)([hms])", text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise ValueError(f"{text}: is not a duration: write 90s, 45m, 2h or 1h30m")
    return sum(float(number) * {"h": 3600.0, "m": 60.0, "s": 1.0}[unit] for number, unit in parts)


def format_s(seconds: float | None) -> str:
    """Formats seconds: 11.021 -> "11.02 s", 754 -> "12 min 34 s", 3725 -> "1 h 02 min"."""
    if seconds is None:
        return ""
    if seconds < 600:
        return f"{seconds:.2f} s"
    minutes, rest_s = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest_s:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def format_about_s(seconds: float | None) -> str:
    """Formats an estimate in seconds: 44.6 -> "about 45 s", 720 -> "about 12 min", 12600 -> "about 3.5 h"."""
    if seconds is None:
        return ""
    if seconds < 120:
        return f"about {seconds:.0f} s"
    return f"about {seconds / 60:.0f} min" if seconds < 7200 else f"about {seconds / 3600:.1f} h"


def format_ms(ms: float | None) -> str:
    """Formats milliseconds: 11.021 -> "11.02 ms"."""
    return "" if ms is None else f"{ms:.2f} ms"


def format_bytes(num_bytes: int | None) -> str:
    """Formats bytes: 65536 -> "64.0 KiB", 2402048 -> "2.3 MiB"."""
    if num_bytes is None:
        return ""
    for size, suffix in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:.1f} {suffix}"
    return f"{num_bytes} B"


def format_gib(gib: float | None) -> str:
    """Formats GiB: 11.021 -> "11.0 GiB"."""
    return "" if gib is None else f"{gib:.1f} GiB"
