"""Passports: measurements of what devices can reach, and the ceilings they give.  results/passports/ keeps a JSON file
of each, which git ignores like all data of a machine.

    {"schema_version", "at", "took_s", "device": "cuda" | "cpu", "environment": {...}, "foreign_cpu_cores",
     "omitted": [what there was no time for], "collectives": [Figure],
     "devices": [{"id", "name", "index", "figures": [Figure], "under_load": {...}}]}

id: a GPU's salted UUID, as in records; for a CPU, a hash of its model, usable cores and memory, since a record has no
more about it.  Nothing in a passport identifies a person or a machine's name.

A ceiling is a figure's "high", or for a launch its "low": what the device sustained in the best tenth of its samples.
For a size or shape that was not measured, the nearest counts: by the sum of its factors' ratios, in powers of two.
"""

import contextlib
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, TypedDict, cast

import msgspec

from bench.base import atomic, paths, private, text_table, utc
from bench.base.paths import results_root
from bench.base.reading import json_file
from bench.base.units import GIB, format_s
from bench.machine.preflight import MAX_FOREIGN_CPU_CORES

Positive = Annotated[float, msgspec.Meta(gt=0)]
Count = Annotated[int, msgspec.Meta(gt=0)]
Kind = Literal["gemm", "copy", "collective", "launch", "clock"]
UNIT = {"gemm": "TFLOP/s", "copy": "GiB/s", "collective": "GiB/s", "launch": "us", "clock": "MHz"}
LOWER_IS_BETTER = ("launch",)
HOST_LAUNCH = "kernel, host time"  # for one of many kernels, without waiting for it
MAX_DISTANCE = 3.0  # powers of two over m, k and n together; beyond it, a shape's rate is unknown
Line = dict[str, Any]
NUM_EARLIER = 5  # the newest ones, with the range of whose samples a figure is compared
PEER_FRAC = 0.03  # limit below the median of its peers: healthy GPUs of one model differ by a few percent at most


class Figure(TypedDict):
    """A measurement.  what: the same in every passport, such as "gemm bfloat16 4096x4096x4096"; value, low, high:
    median, 10th and 90th percentile of the samples, in unit (TFLOP is 1e12, GiB 2**30).

    shape: [m, k, n]; num_bytes: of a copy, read and written; of a collective as nccl-tests counts it, whose bus
    bandwidth the value is; num_threads: of a CPU.
    """

    what: str
    kind: Kind
    unit: str
    value: Positive
    low: Positive
    high: Positive
    num_samples: Count
    name: NotRequired[str]  # only of a collective or a launch
    precision: NotRequired[str]
    shape: NotRequired[Annotated[list[Count], msgspec.Meta(min_length=3, max_length=3)]]
    num_bytes: NotRequired[Count]
    num_threads: NotRequired[Count]
    world_size: NotRequired[Count]


@dataclass(frozen=True)
class Ceilings:
    """of: figures of one device and of its machine's collectives; at: when they were measured, UTC; num_threads: those
    of the figures, None on a GPU; foreign_cores: CPU use of other programs during the measurement of a CPU, else 0."""

    of: Sequence[Figure]
    at: str
    num_threads: int | None = None
    foreign_cores: float = 0.0

    @property
    def source(self) -> str:
        """Text for a person: where these figures come from."""
        beside = f" beside programs that took {self.foreign_cores:.1f} cores" if self.foreign_cores else ""
        return f"measured{beside}, passport of {self.at[:10]}"

    def peak_flops(self, precision: str | None) -> float | None:
        """Returns FLOP/s of the best shape in a precision ("bfloat16", "tf32", ...), or None if it was not measured."""
        rates = [figure["high"] for figure in self._of("gemm") if figure.get("precision") == precision]
        return 1e12 * max(rates) if rates else None

    def shape_flops(self, precision: str | None, shape: Sequence[int]) -> float | None:
        """Returns FLOP/s of the shape nearest to m, k, n, or None if none is near."""
        near = [
            (sum(abs(math.log2(ours / theirs)) for ours, theirs in zip(shape, figure["shape"])), figure["high"])
            for figure in self._of("gemm")
            if figure.get("precision") == precision and min(shape) > 0
        ]
        distance, rate = min(near, default=(math.inf, 0.0))
        return 1e12 * rate if distance <= MAX_DISTANCE else None

    def bytes_per_s(self, num_bytes: float) -> float | None:
        """Returns the memory bandwidth of a copy of about num_bytes, read and written, or None."""
        return self._nearest(self._of("copy"), num_bytes)

    @property
    def launch_s(self) -> float | None:
        """The host time of launching a kernel, in the best tenth of the samples, or None if it was not measured."""
        return next((1e-6 * figure["low"] for figure in self._of("launch") if figure.get("name") == HOST_LAUNCH), None)

    def bus_bytes_per_s(self, name: str, num_bytes: float, world_size: int) -> float | None:
        """Returns the bus bandwidth of a collective of about num_bytes, or None if it was not measured."""
        among = [figure for figure in self._of("collective") if figure.get("world_size") == world_size]
        return self._nearest([figure for figure in among if figure.get("name") == name], num_bytes)

    def _of(self, kind: Kind) -> list[Figure]:
        return [
            figure
            for figure in self.of
            if figure["kind"] == kind and (self.num_threads is None or figure.get("num_threads") == self.num_threads)
        ]

    @staticmethod
    def _nearest(figures: Sequence[Figure], num_bytes: float) -> float | None:
        if not figures or num_bytes <= 0:
            return None
        nearest = min(figures, key=lambda figure: abs(math.log2(num_bytes / figure["num_bytes"])))
        return GIB * nearest["high"]


# Bytes on each rank's link per byte of the message: nccl-tests, doc/PERFORMANCE.md
BUS_FACTORS = {
    "all_reduce": lambda num_ranks: 2 * (num_ranks - 1) / num_ranks,
    "all_gather": lambda num_ranks: (num_ranks - 1) / num_ranks,
    "reduce_scatter": lambda num_ranks: (num_ranks - 1) / num_ranks,
}


def bus_bytes(name: str, num_bytes: float, world_size: int) -> float:
    """Returns the bytes that a message of num_bytes puts on the bus.  name: a key of BUS_FACTORS."""
    return BUS_FACTORS[name](world_size) * num_bytes


SCHEMA_VERSION = 1
FOLDER = "passports"
NO_TIME, CANNOT = "no time", "this device, or this torch, cannot do it"  # why a figure is omitted


class Device(TypedDict):
    """A device's figures.  under_load: clock_mhz, and for a GPU temp_c, power_w, throttle_reasons, None if unknown."""

    id: str
    name: str
    index: int
    figures: list[Figure]
    under_load: NotRequired[dict[str, Any]]


class Passport(TypedDict):
    """A machine's figures.  took_s: time to measure; foreign_cpu_cores: CPU use of other programs before, or None."""

    schema_version: int
    at: str
    took_s: float
    device: str
    environment: dict[str, Any]
    devices: list[Device]
    collectives: list[Figure]
    omitted: list[str]
    foreign_cpu_cores: NotRequired[float | None]


def folder() -> Path:
    """Returns the folder of passports, which may not exist yet."""
    return results_root() / FOLDER


def write(passport: Passport) -> Path:
    """Writes a passport into folder(), under a name from its date; returns the path."""
    stamp = passport["at"].replace("-", "").replace(":", "").partition(".")[0]
    path = folder() / f"{stamp}Z.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic.write_json(path, passport)
    return path


def read(path: Path | str) -> Passport:
    """Reads a passport.  Raises ValueError for anything else."""
    passport = cast(Passport, json_file.read(path, Passport))
    if passport["schema_version"] > SCHEMA_VERSION:
        raise ValueError(f"{path}: schema_version {passport['schema_version']} is newer than this harness: update it")
    return passport


def every() -> list[Passport]:
    """Returns all readable passports, the oldest first."""
    passports = []
    for path in sorted(folder().glob("*.json")):
        with contextlib.suppress(ValueError):  # not a passport, or a damaged one
            passports.append(read(path))
    return sorted(passports, key=lambda passport: passport["at"])


def cpu_id(env: Mapping[str, Any]) -> str:
    """Returns the id of a CPU.  env: environment(), or a run.json's."""
    return private.salted_hash(f"{env['cpu_model']}|{env['num_cpus']}|{round(env['memory_gib'] or 0)}")


def ceilings_of_run(run: Mapping[str, Any], rank: int = 0) -> Ceilings | None:
    """Returns what the device of this rank reached, by the passport nearest in time to the run, or None without one.

    A CPU's passport that was measured beside other programs counts only if there is no other.
    """
    env = run["environment"]
    gpus = env.get("gpus") or []
    if gpus and rank >= len(gpus) or None in (env.get("cpu_model"), env.get("num_cpus")) and not gpus:
        return None
    wanted = gpus[rank].get("uuid_hash") if gpus else cpu_id(env)
    fitting = [(passport, device) for passport in every() for device in passport["devices"] if device["id"] == wanted]
    if not fitting:
        return None
    started_s = utc.seconds(run.get("started_at") or utc.now())
    passport, device = min(
        fitting, key=lambda pair: (_foreign_cores(pair[0]) > 0, abs(utc.seconds(pair[0]["at"]) - started_s))
    )
    return ceilings(passport, device, None if gpus else env.get("num_threads"))


def ceilings_of_file(path: Path | str, device_name: str | None) -> Ceilings:
    """Returns the ceilings of a passport that the user names, for a trace: of its device of this name, else its first.

    For a CPU, these are the figures with the most threads.
    """
    passport = read(path)
    if not passport["devices"]:
        raise ValueError(f"{path}: this passport has no device: measure another, ./run.sh doctor --passport")
    device = next((other for other in passport["devices"] if other["name"] == device_name), passport["devices"][0])
    threads = [figure["num_threads"] for figure in device["figures"] if "num_threads" in figure]
    return ceilings(passport, device, max(threads, default=None))


def ceilings(passport: Passport, device: Device, num_threads: int | None) -> Ceilings:
    """Returns a device's ceilings.  num_threads: of the run, on a CPU; if not measured, the next lower one counts."""
    measured = {figure["num_threads"] for figure in device["figures"] if "num_threads" in figure}
    if measured:
        below = [number for number in measured if num_threads is None or number <= num_threads]
        num_threads = max(below, default=min(measured))
    collectives = passport["collectives"]
    if num_threads is not None:  # collectives count for any number of threads
        collectives = [figure | {"num_threads": num_threads} for figure in collectives]
    return Ceilings([*device["figures"], *collectives], passport["at"], num_threads, _foreign_cores(passport))


def _foreign_cores(passport: Passport) -> float:
    """Returns the CPU use that disturbed a CPU's figures, 0 below the limit and for a GPU."""
    cores = passport.get("foreign_cpu_cores") or 0.0
    return cores if passport["device"] == "cpu" and cores > MAX_FOREIGN_CPU_CORES else 0.0


def changes(passport: Passport, earlier: Sequence[Passport]) -> list[Line]:
    """Returns [{"device", "what", "unit", "before", "now", "change_pct", "num_earlier", "beyond_spread", "is_worse"}]
    for figures that an earlier passport of the same device has too; device: its index, None for a collective.

    before: the median of the NUM_EARLIER newest.  beyond_spread: the samples, 10th to 90th percentile, lie wholly
    outside the range of those earlier ones.
    """
    lines: list[Line] = []
    for device in passport["devices"]:
        past = [other["figures"] for old in earlier for other in old["devices"] if other["id"] == device["id"]]
        lines += _changes(device["index"], device["figures"], past)
    ids = {device["id"] for device in passport["devices"]}
    same_box = [old["collectives"] for old in earlier if {device["id"] for device in old["devices"]} == ids]
    return lines + _changes(None, passport["collectives"], same_box)


def _changes(index: int | None, figures: Sequence[Figure], earlier: Sequence[Sequence[Figure]]) -> list[Line]:
    lines: list[Line] = []
    for figure in figures:
        same = (figure["what"], figure["unit"])
        old = [past for group in earlier for past in group if (past["what"], past["unit"]) == same][-NUM_EARLIER:]
        before = statistics.median(past["value"] for past in old) if old else None
        if not before:
            continue
        low, high = (min(past["low"] for past in old), max(past["high"] for past in old))
        rises = figure["value"] > before
        lines.append(
            {"device": index, "what": figure["what"], "unit": figure["unit"], "before": before, "now": figure["value"]}
            | {"change_pct": 100 * (figure["value"] / before - 1), "num_earlier": len(old)}
            | {"beyond_spread": figure["low"] > high or figure["high"] < low}
            | {"is_worse": rises == (figure["kind"] in LOWER_IS_BETTER)}
        )
    return lines


def slower_than_peers(passport: Passport) -> list[Line]:
    """Returns [{"device", "id", "what", "value", "unit", "peers", "slower_pct"}], the largest first, of figures more
    than PEER_FRAC worse than the median of the other devices of the same name.  Launches are not compared."""
    lines: list[Line] = []
    for device in passport["devices"]:
        peers = [peer for peer in passport["devices"] if peer is not device and peer["name"] == device["name"]]
        by_what = {figure["what"]: figure for figure in device["figures"]}
        for what, figure in by_what.items():
            values = [other["value"] for peer in peers for other in peer["figures"] if other["what"] == what]
            if not values or figure["kind"] in LOWER_IS_BETTER:
                continue  # the time of a launch depends on the host
            median = statistics.median(values)
            if figure["value"] < (1 - PEER_FRAC) * median:
                line = {"device": device["index"], "id": device["id"], "what": what, "value": figure["value"]}
                slower_pct = 100 * (1 - figure["value"] / median)
                lines.append(line | {"unit": figure["unit"], "peers": median, "slower_pct": slower_pct})
    return sorted(lines, key=lambda line: -line["slower_pct"])


def as_text(passport: Passport, path: Path, changes: Sequence[Line], slow: Sequence[Line]) -> str:
    """Returns the passport as text.  changes, slow: from changes() and slower_than_peers(); path: where it is kept."""
    return "\n".join(_lines(passport, path, changes, slow))


def _lines(passport: Passport, path: Path, changes: Sequence[Line], slow: Sequence[Line]) -> Iterator[str]:
    devices = passport["devices"]
    for device in devices:
        facts = [f"{name} {value}" for name, value in device.get("under_load", {}).items() if value is not None]
        yield f"{passport['device']}{device['index']}: {device['name']}; under load {', '.join(facts) or 'unknown'}"
    yield ""
    yield _table(passport, changes)
    yield ""
    foreign_cores = passport.get("foreign_cpu_cores") or 0.0
    if foreign_cores > MAX_FOREIGN_CPU_CORES:
        yield f"warn: other programs used {foreign_cores:.2f} cores: end them and measure again"
    for why in (NO_TIME, CANNOT):
        names = [line.removesuffix(f": {why}") for line in passport["omitted"] if line.endswith(why)]
        if names:
            shown = f"{', '.join(names[:3])}{' ...' if len(names) > 3 else ''}"
            yield f"not measured, {why}: {text_table.counted(len(names), 'figure')}: {shown}"
    yield from _changed_lines(changes)
    yield from _slow(slow, len(devices))
    yield f"measured in {format_s(passport['took_s'])}, kept in {paths.shown(path)}"


def _table(passport: Passport, changes: Sequence[Line]) -> str:
    change_of = {(line["device"], line["what"]): line for line in changes}
    rows = []
    figures_by_device: list[tuple[int | None, list[Figure]]] = [
        (device["index"], device["figures"]) for device in passport["devices"]
    ]
    for index, figures in [*figures_by_device, (None, passport["collectives"])]:
        for figure in figures:
            line = change_of.get((index, figure["what"]))
            change = f"{line['change_pct']:+.1f} %{' *' if line['beyond_spread'] else ''}" if line else ""
            spread = f"{_number(figure['low'])} to {_number(figure['high'])}"
            who = "all" if index is None else str(index)
            rows.append([who, figure["what"], _number(figure["value"]), figure["unit"], spread, change])
    header = ("device", "what", "median", "unit", "10th to 90th", "change")
    return text_table.render(header, rows, (False, False, True, False, False, True))


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _changed_lines(changes: Sequence[Line]) -> Iterator[str]:
    if not changes:
        yield "no earlier passport of this machine: the next one is compared with this one"
        return
    beyond = [line for line in changes if line["beyond_spread"]]
    worse = sum(line["is_worse"] for line in beyond)
    most = max(line["num_earlier"] for line in changes)
    compared = f"compared with {text_table.counted(most, 'earlier passport')}"
    if not beyond:
        yield f"{compared}: no figure is beyond the spread of its samples"
        return
    yield f"{compared}: {len(beyond)} of {len(changes)} figures beyond the spread (*), {worse} of them worse"


def _slow(slow: Sequence[Line], num_devices: int) -> Iterator[str]:
    for index in dict.fromkeys(line["device"] for line in slow):
        mine = [line for line in slow if line["device"] == index]
        first = mine[0]
        yield (
            f"warn: GPU {index} is slower than its peers: {first['what']} {first['slower_pct']:.1f} % below their "
            f"median, and {text_table.counted(len(mine) - 1, 'figure')} more: look at its temperature, power limit and "
            "slot, or leave it out with CUDA_VISIBLE_DEVICES"
        )
    if num_devices > 1 and not slow:
        yield "no GPU is slower than its peers"
