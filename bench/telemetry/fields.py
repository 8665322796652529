"""The columns of telemetry.csv.  A cell is empty where the device has no such figure."""

FIELDS = (
    "t_ns", "device",
    # a GPU's
    "power_w", "energy_j", "sm_clock_mhz", "mem_clock_mhz", "temp_c", "throttle_reasons", "util_pct", "mem_gib",
    "power_instant_w", "ecc_uncorrected", "power_limit_w", "pcie_tx_mib_s", "pcie_rx_mib_s", "nvlink_tx_mib_s", "nvlink_rx_mib_s",
    # the host's, device "cpu"; temp_c is in both
    "cpu_util_pct", "cpu_freq_mhz", "rss_gib", "load",
)  # fmt: skip


def line(row):
    """{column: value} -> its line of the file; reasons are joined by "|" and hold no comma."""
    cells = (row.get(field) for field in FIELDS)
    return ",".join("" if cell is None else f"{cell:.12g}" if isinstance(cell, float) else str(cell) for cell in cells) + "\n"
