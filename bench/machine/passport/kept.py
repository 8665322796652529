"""Passports on disk: results/passports/, a JSON each, git-ignored like all that is a machine's own.

    {"schema_version", "at", "took_s", "device": "cuda" | "cpu", "environment": {...}, "foreign_cpu_cores",
     "omitted": [what there was no time for], "collectives": [Figure],
     "devices": [{"id", "name", "index", "figures": [Figure], "under_load": {...}}]}

id: a GPU's salted UUID as records have it; of a CPU a hash of its model, usable cores and memory, as a record says no
more of it.  Nothing in a passport leads to a person or a machine's name.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from bench.base import atomic, private, utc
from bench.base.paths import results_root
from bench.base.reading import json_file
from bench.machine.passport.figures import Ceilings, Figure
from bench.machine.preflight import MAX_FOREIGN_CPU_CORES

SCHEMA_VERSION = 1
FOLDER = "passports"
NO_TIME, CANNOT = "no time", "this device, or this torch, cannot do it"  # why a figure is omitted


class Device(TypedDict):
    """under_load: clock_mhz, and of a GPU temp_c, power_w, throttle_reasons, each None where it is not known."""

    id: str
    name: str
    index: int
    figures: list[Figure]
    under_load: NotRequired[dict]


class Passport(TypedDict):
    """took_s: how long it was measured; foreign_cpu_cores: what other programs took before it, None: unknown."""

    schema_version: int
    at: str
    took_s: float
    device: str
    environment: dict
    devices: list[Device]
    collectives: list[Figure]
    omitted: list[str]
    foreign_cpu_cores: NotRequired[float | None]


def folder() -> Path:
    """Where they are kept, made or not."""
    return results_root() / FOLDER


def write(passport: Passport) -> Path:
    """Into folder(), under a name by its date."""
    stamp = passport["at"].replace("-", "").replace(":", "").partition(".")[0]
    path = folder() / f"{stamp}Z.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic.write_json(path, passport)
    return path


def read(path: Path | str) -> Passport:
    """ValueError for anything that is not a passport."""
    passport = json_file.read(path, Passport)
    if passport["schema_version"] > SCHEMA_VERSION:
        version = passport["schema_version"]
        raise ValueError(f"{path}: schema_version {version} is newer than this harness: update it")
    return passport


def every() -> list[Passport]:
    """All that can be read, the oldest first."""
    result = []
    for path in sorted(folder().glob("*.json")):
        try:
            result.append(read(path))
        except ValueError:
            continue  # no passport, or a damaged one: it says nothing of others
    return sorted(result, key=lambda passport: passport["at"])


def cpu_id(env: dict) -> str:
    """env: environment(), or a run.json's -> the id of its CPU."""
    return private.salted_hash(f"{env['cpu_model']}|{env['num_cpus']}|{round(env['memory_gib'] or 0)}")


def of_run(run: Mapping[str, Any], rank: int = 0) -> Ceilings | None:
    """A record -> what the device of this rank reached by the passport nearest in time; None where there is none.

    A CPU's that was measured beside other programs only where there is no other.
    """
    env = run["environment"]
    gpus = env.get("gpus") or []
    if gpus and rank >= len(gpus) or None in (env.get("cpu_model"), env.get("num_cpus")) and not gpus:
        return None
    wanted = gpus[rank].get("uuid_hash") if gpus else cpu_id(env)
    fitting = [(passport, device) for passport in every() for device in passport["devices"] if device["id"] == wanted]
    if not fitting:
        return None
    started_s = _seconds(run.get("started_at"))
    passport, device = min(
        fitting, key=lambda one: (_foreign_cores(one[0]) > 0, abs(utc.seconds(one[0]["at"]) - started_s))
    )
    return ceilings(passport, device, None if gpus else env.get("num_threads"))


def of_file(path: Path | str, device_name: str | None) -> Ceilings:
    """A passport that the user names, for a trace: its device of this name, else its first.

    Of a CPU the figures with the most threads.
    """
    passport = read(path)
    if not passport["devices"]:
        raise ValueError(f"{path}: this passport has no device: measure another, ./run.sh doctor --passport")
    device = next((one for one in passport["devices"] if one["name"] == device_name), passport["devices"][0])
    threads = [figure["num_threads"] for figure in device["figures"] if "num_threads" in figure]
    return ceilings(passport, device, max(threads, default=None))


def ceilings(passport: Passport, device: Device, num_threads: int | None) -> Ceilings:
    """num_threads: of a CPU, as the run had it; where it was not measured with so many, that with the most below."""
    measured = {figure["num_threads"] for figure in device["figures"] if "num_threads" in figure}
    if measured:
        below = [number for number in measured if num_threads is None or number <= num_threads]
        num_threads = max(below, default=min(measured))
    of = [*device["figures"], *({**one, **_threads(num_threads)} for one in passport["collectives"])]
    return Ceilings(of, passport["at"], num_threads, _foreign_cores(passport))


def _foreign_cores(passport):
    """What disturbed a CPU's figures, 0 below the limit; a GPU's are its own."""
    cores = passport.get("foreign_cpu_cores") or 0.0
    return cores if passport["device"] == "cpu" and cores > MAX_FOREIGN_CPU_CORES else 0.0


def _threads(num_threads):
    """A collective is of whatever number of threads."""
    return {} if num_threads is None else {"num_threads": num_threads}


def _seconds(text):
    return utc.seconds(text) if text else utc.seconds(utc.now())
