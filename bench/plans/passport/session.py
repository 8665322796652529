"""Measures a passport: starts and follows the ranks of bench/plans/passport/rank.py, and collects their figures."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.base import utc
from bench.base.units import GIB
from bench.config.schema import HardwareConfig
from bench.launch import probe, ranks
from bench.machine import gpus, passports, peak_rates, preflight

LIMIT_S = 140.0  # time for measuring
WHOLE_S = 155.0  # from the start, imports included: the last case and the end stay under three minutes
LOOK_EVERY_S = 0.2
MIN_COPY_BYTES = GIB  # more than any cache of peak_rates.DEVICES: a smaller copy may be faster than memory
RANK = "bench.plans.passport.rank"
ENVIRONMENT = ("cpu_model", "num_cpus", "memory_gib", "driver", "governor")


class NotMeasured(RuntimeError):
    """Raised if the ranks did not answer, or their answer is impossible; the message says why and what to try."""


def measure(
    hardware: HardwareConfig,
    env: dict[str, Any],
    say: Callable[[str], object],
    limit_s: float = LIMIT_S,
    precisions: Sequence[str] | None = None,
) -> passports.Passport:
    """Measures a passport of resolved hardware. env is environment(); say() gets lines such as "12/58 copy 32.0 MiB".

    limit_s bounds the measuring; the whole takes less than three minutes in any case. precisions: measure only products
    of these and few other figures (works.few), on a CPU with hardware's threads; None: all figures. Raises NotMeasured.
    """
    foreign_cores, started_s, at = preflight.sample_foreign_cores(), time.perf_counter(), utc.now()
    is_whole_cpu = hardware.device == "cpu" and precisions is None  # measures collectives too
    num_ranks = min(2, env["num_cpus"]) if is_whole_cpu else hardware.num_processes or 1
    num_threads = sorted({1, env["num_cpus"]}) if precisions is None else [hardware.num_threads or env["num_cpus"]]
    question = {"device": hardware.device, "num_threads": num_threads, "limit_s": limit_s}
    question |= {"precisions": precisions, "until_s": time.monotonic() + WHOLE_S}

    def wait(group: ranks.Group, folder: Path) -> bool:
        return _follow(group, folder / "progress", probe.START_S + 1.5 * limit_s, say)

    answers = probe.answers_of_ranks(RANK, question, hardware, num_ranks, num_threads[-1], wait)
    if len(answers.received) < num_ranks:
        raise NotMeasured(f"{answers.why_missing().found}: ./run.sh doctor says more")
    first = answers.received[0]
    if not first["figures"]:
        raise NotMeasured(f"its processes took more than {WHOLE_S:.0f} s to start: end other programs, and try again")
    if hardware.device == "cpu":
        names = [(passports.cpu_id(env), env["cpu_model"])]
    else:
        names = [(gpu["uuid_hash"], gpu["name"]) for gpu in gpus.used_by_run(env["gpus"], hardware)]
    devices: list[passports.Device] = [
        {"id": id, "name": name, "index": index, "figures": answer["figures"], "under_load": answer["under_load"]}
        for index, ((id, name), answer) in enumerate(zip(names, answers.received))
    ]
    for device in devices:
        _refuse_beyond_sheet(device)
    return {
        "schema_version": passports.SCHEMA_VERSION,
        "at": at,
        "took_s": time.perf_counter() - started_s,
        "device": hardware.device,
        "environment": {name: env[name] for name in ENVIRONMENT} | first["torch_facts"],
        "foreign_cpu_cores": foreign_cores,
        "devices": devices,
        "collectives": first["collectives"],
        "omitted": first["omitted"],
    }


def _refuse_beyond_sheet(device: passports.Device) -> None:
    """Raises NotMeasured if a product, or a copy larger than any cache, is faster than the data sheet allows."""
    for figure in device["figures"]:
        rate, sheet, name = figure["low"], None, device["name"]
        if figure["kind"] == "gemm":
            rate, sheet = 1e12 * rate, peak_rates.peak_flops(name, figure.get("precision"))
        elif figure["kind"] == "copy" and figure["num_bytes"] >= MIN_COPY_BYTES:
            rate, sheet = GIB * rate, peak_rates.mem_bytes_per_s(name)
        if peak_rates.is_beyond_sheet(rate, sheet):
            why = f"{figure['what']} came to {rate / (sheet or 1):,.1f} times what the data sheet of {name} says"
            raise NotMeasured(f"{why}: is device {device['index']} what its driver says, and its clock real?")


def _follow(group: ranks.Group, progress: Path, limit_s: float, say: Callable[[str], object]) -> bool:
    """Reports each line of the file until the ranks end, or limit_s have passed. Returns whether they have ended."""
    until_s, num_said = time.perf_counter() + limit_s, 0
    while True:
        has_ended = group.has_ended(LOOK_EVERY_S)
        lines = progress.read_text().splitlines() if progress.exists() else []
        for line in lines[num_said:]:
            say(line)
        num_said = len(lines)
        if has_ended or time.perf_counter() > until_s:
            return bool(has_ended)
