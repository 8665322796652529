"""The columns of telemetry.csv.  A cell is empty where the device has no such figure.

All rows of one tick share its t_ns (time.perf_counter_ns, as the steps have it), so that devices can be laid over each
other; late_ms is how long after it this device was read.  Values in MIB_S columns are rates since the row before.
"""

FIELDS = (
    "t_ns",
    "device",
    "late_ms",
    # a GPU's; power_w: instant where the board measures that, else its usage (from Ampere on a mean over a second)
    "power_w",
    "power_average_w",
    "energy_j",
    "sm_clock_mhz",
    "mem_clock_mhz",
    "temp_c",
    "throttle_reasons",
    "util_pct",
    "mem_gib",
    "mem_util_pct",
    "mem_temp_c",
    "pcie_tx_mib_s",
    "pcie_rx_mib_s",
    "nvlink_tx_mib_s",
    "nvlink_rx_mib_s",
    # a GPU's, asked once a second and held until then
    "power_limit_w",
    "ecc_corrected",
    "ecc_uncorrected",
    "remapped_rows",
    "num_processes",
    # the host's, device "cpu"; temp_c is in both
    "cpu_util_pct",
    "cpu_freq_mhz",
    "rss_gib",
    "load",
)


def line(row):
    """{column: value} -> its line of the file; reasons are joined by "|" and hold no comma."""
    values = ("" if row.get(field) is None else row[field] for field in FIELDS)
    return ",".join(f"{value:.12g}" if isinstance(value, float) else str(value) for value in values) + "\n"
