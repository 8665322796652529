"""Predicts how long a collective takes among some number of GPUs, by NCCL's own model of a link or by measured tables.

NCCL chooses among its algorithms (ring, tree) and protocols (LL, LL128, Simple) by latency + bytes / bandwidth, with
constants of version 2.30 (src/graph/tuning.cc, src/graph/topo.h); so does Nccl below.  NVLink SHARP, which reduces in
the switch, is not modelled: it gains on messages above about 100 MB.  Nothing here was fitted to a step time.
"""

import bisect
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from bench.base.paths import user_path
from bench.base.reading import plain_file
from bench.base.units import GIB
from bench.machine.passports import BUS_FACTORS, Passport, bus_bytes
from bench.machine.passports import read as read_passport

COLLECTIVES = tuple(BUS_FACTORS)
PROTOCOLS = ("LL", "LL128", "Simple")
BASE_US = {"ring": (6.6, 14.0, 8.4), "tree": (6.8, 14.0, 8.4)}  # by protocol
NVLINK_HOP_US = {"ring": (0.6, 1.9, 3.4), "tree": (0.6, 1.25, 4.0)}
NETWORK_HOP_US = {"ring": (2.7, 4.0, 14.0), "tree": (5.0, 8.5, 14.0)}
NETWORK_POST_US = (1.0, 1.0, 3.0)  # the least time of a hop within a node if the ring leaves it
NETWORK_LL_GB_PER_S = 20.4  # LL's limit between nodes
ROW = re.compile(r"^\s*(?:\d+:\s*)?(\d+(?:\s+\S+)+)\s*$")  # srun -l prints the rank before each line
RANK = re.compile(r"#\s+Rank\s+\d+\s")
NAME = re.compile(r"\b(all_reduce|all_gather|reduce_scatter)_perf")


class Link(NamedTuple):
    """A link.  gb_per_s: of one GPU, one way, in a ring; ll_gb_per_s: the limit of protocol LL.  GB is 1e9 bytes."""

    gb_per_s: float
    ll_gb_per_s: float
    joins_nodes: bool
    source: str


LINKS = {
    "nvlink3": Link(12 * 20.0, 87.7, False, "12 links of 20.0 GB/s, NCCL 2.30"),
    "nvlink4": Link(18 * 20.6, 141.0, False, "18 links of 20.6 GB/s, NCCL 2.30"),
    "nvlink5": Link(18 * 40.1, 282.0, False, "18 links of 40.1 GB/s, NCCL 2.30"),
    "ib200": Link(23.5, NETWORK_LL_GB_PER_S, True, "a NIC of 200 Gb/s a GPU, at the share of ib400 (assumed)"),
    "ib400": Link(47.0, NETWORK_LL_GB_PER_S, True, "a NIC of 400 Gb/s a GPU, 46 to 48 GB/s: NVIDIA/nccl-tests#290"),
}


@dataclass(frozen=True)
class Nccl:
    """GPUs joined by one link in a node and another between nodes.  network None: one node.  name: as for --link."""

    node: str
    network: str | None = None

    @property
    def name(self) -> str:
        return "+".join(filter(None, (self.node, self.network)))

    @property
    def source(self) -> str:
        names = [name for name in (self.node, self.network) if name]
        return "; ".join(f"{name}: {LINKS[name].source}" for name in names)

    def seconds(self, collective: str, num_bytes: float, num_gpus: int, num_nodes: int = 1) -> float:
        """Returns the seconds of a collective by its fastest algorithm and protocol; 0 for one GPU.

        num_bytes: as nccl-tests counts them, the whole message of all ranks together.  Raises ValueError for several
        nodes without a network.
        """
        if num_gpus < 2:
            return 0.0
        per_node, link, bus = num_gpus / num_nodes, LINKS[self.node], LINKS[self.node].gb_per_s
        ll_gb_per_s = link.ll_gb_per_s
        if num_nodes > 1:
            if self.network is None:
                raise ValueError(f"--link {self.name}: it ends at a node; name what joins {num_nodes} nodes too: ib400")
            bus, ll_gb_per_s = min(bus, per_node * LINKS[self.network].gb_per_s), NETWORK_LL_GB_PER_S
        us = []
        rounds = 2 if collective == "all_reduce" else 1
        hops, far_hops = rounds * (num_gpus - 1), rounds * (num_nodes - 1)
        for index in range(len(PROTOCOLS)):
            rate = (min(ll_gb_per_s, bus / 2), 0.92 * bus, bus)[index]
            near_us = max(NVLINK_HOP_US["ring"][index], NETWORK_POST_US[index] if num_nodes > 1 else 0.0)
            latency_us = (hops - far_hops) * near_us + far_hops * NETWORK_HOP_US["ring"][index]
            us.append(BASE_US["ring"][index] + latency_us + hops / num_gpus * num_bytes / rate / 1e3)
            if collective == "all_reduce":
                tree = 0.92 * bus
                rate = (min(tree / 3.8, ll_gb_per_s), tree * (7 / 9 if num_nodes == 1 else 120 / 128), tree)[index]
                latency_us = (per_node - 1) * NVLINK_HOP_US["tree"][index]
                latency_us += math.floor(math.log2(num_nodes)) * NETWORK_HOP_US["tree"][index]
                us.append(BASE_US["tree"][index] + 2 * latency_us + 2 * num_bytes / rate / 1e3)
        return min(us) * 1e-6


@dataclass(frozen=True)
class Measured:
    """Measured times of collectives.  tables: {(collective, GPUs): [(bytes, seconds)] by size}, at least one."""

    name: str
    source: str
    tables: Mapping[tuple[str, int], Sequence[tuple[float, float]]]

    def seconds(self, collective: str, num_bytes: float, num_gpus: int, num_nodes: int = 1) -> float:
        """Returns seconds, interpolated in logarithms; the first size's below it, at the last one's bandwidth above it.

        An all-reduce is a reduce-scatter and an all-gather, so where one of them was not measured, the others stand in.
        Raises ValueError if no table is of so many GPUs.
        """
        if num_gpus < 2:
            return 0.0
        for stand_in, factor in ((collective, 1.0), ("all_reduce", 0.5), ("reduce_scatter", 2.0), ("all_gather", 2.0)):
            factor = 1.0 if factor == 2.0 and collective != "all_reduce" else factor
            if (stand_in, num_gpus) in self.tables:
                return factor * _at(self.tables[stand_in, num_gpus], num_bytes)
        among = ", ".join(map(str, sorted({number for _, number in self.tables})))
        remedy = "measure that, or name a link"
        raise ValueError(f"--link {self.name}: its tables are of {among} GPUs, none of {num_gpus}: {remedy}")


Curve = Nccl | Measured


def _at(table: Sequence[tuple[float, float]], num_bytes: float) -> float:
    index = bisect.bisect_left(table, (num_bytes, 0.0))
    if index == 0:
        return table[0][1]
    size, seconds = table[index - 1]
    if index == len(table):
        return seconds * num_bytes / size
    share = math.log(num_bytes / size) / math.log(table[index][0] / size)
    return float(seconds * (table[index][1] / seconds) ** share)


def read(link: str, num_nodes: int) -> Curve:
    """Returns what --link names: links joined by a comma or plus, or a file.  Raises ValueError for anything else."""
    names = re.split("[,+]", link)
    if all(name in LINKS for name in names):
        near = [name for name in names if not LINKS[name].joins_nodes]
        far = [name for name in names if LINKS[name].joins_nodes]
        if len(near) > 1 or len(far) > 1 or not near:
            raise ValueError(f"--link {link}: one link in a node, such as nvlink4, and with --nodes one between them")
        return Nccl(near[0], far[0] if far and num_nodes > 1 else None)
    path = user_path(link)
    if not path.is_file():
        raise ValueError(f"--link {link}: neither a file nor one of {', '.join(LINKS)}")
    return from_file(path)


def from_file(path: Path) -> Measured:
    """Reads the printed tables of nccl-tests, or a passport.  Raises ValueError if the file holds neither."""
    is_json = path.suffix == ".json"
    rows = _passport_rows(read_passport(path)) if is_json else _nccl_tests_rows(plain_file.text(path, errors="replace"))
    tables: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for name, num_gpus, num_bytes, seconds in rows:
        tables.setdefault((name, num_gpus), []).append((num_bytes, seconds))
    if not tables:
        missing = "no collective of several ranks" if is_json else "no table of nccl-tests with its # Rank lines"
        raise ValueError(f"--link {path}: {missing}")
    return Measured(path.name, f"measured: {path.name}", {key: sorted(table) for key, table in tables.items()})


def _passport_rows(passport: Passport) -> Iterator[tuple[str, int, float, float]]:
    """Yields (collective, GPUs, bytes, seconds) of the collectives in a passport."""
    for figure in passport["collectives"]:
        name, num_bytes, world_size = figure.get("name"), figure.get("num_bytes"), figure.get("world_size")
        if name in COLLECTIVES and num_bytes and world_size:
            yield name, world_size, num_bytes, bus_bytes(name, num_bytes, world_size) / (figure["value"] * GIB)


def _nccl_tests_rows(text: str) -> Iterator[tuple[str, int, float, float]]:
    """Yields (collective, GPUs, bytes, seconds out of place) of each row of the tables in a log."""
    name, num_gpus, column = "all_reduce", 0, None
    for line in text.splitlines():
        if match := NAME.search(line):
            name = match[1]
        if "Using devices" in line:
            num_gpus = 0
        elif RANK.search(line):
            num_gpus += 1
        elif "algbw" in line and "size" in line:
            headers = line[line.index("size") :].split()
            column = headers.index("time") if "time" in headers else None
        elif column is not None and num_gpus > 1 and (row := ROW.match(line)):
            cells = row[1].split()
            try:
                num_bytes, us = float(cells[0]), float(cells[column])
            except (IndexError, ValueError):
                continue
            if num_bytes > 0 and us > 0:
                yield name, num_gpus, num_bytes, us * 1e-6
