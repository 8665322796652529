"""Is this machine fit to measure?  Each check gives its result and, where that is not good, what to do.

fail: the run cannot start or its record cannot be written.  warn: it can, and its times will be worth less.
checks() is the quick part, which every run makes and records; ./run.sh doctor (bench/cli/doctor.py) asks more.
"""

from pathlib import Path

from bench.machine import check_gpu, check_host, environment, gpus
from bench.machine.check import Check, report

__all__ = ["Check", "checks", "report"]


def checks(
    hardware, dataset_bytes: int, env: dict, results: Path | str, foreign_cpu_cores: float | None = None
) -> list[Check]:
    """hardware: resolved; env: environment().  Samples the CPU for 0.3 s where foreign_cpu_cores is None."""
    quota_cores = env.get("cpu_quota_cores")
    foreign_cpu_cores = check_host.sample_foreign_cores() if foreign_cpu_cores is None else foreign_cpu_cores
    result = [
        check_host.disk_space(results),
        check_host.memory(hardware.num_processes, dataset_bytes, environment.available_memory_gib()),
        check_host.cpu_load(hardware, foreign_cpu_cores, env["num_cpus"]),
        check_host.threads(hardware, env["num_cpus"], quota_cores),
        check_host.governor(env.get("governor")),
        check_host.quota(env["num_cpus"], quota_cores),
    ]
    if hardware.device == "cpu":
        return [*result, check_host.waiting_threads(hardware, env["env"])]
    if hardware.compile is not False:  # None: not yet resolved, and compiled on a GPU
        result.append(check_host.compiler())
    used = gpus.of_run(env["gpus"], hardware)
    return [*result, *check_gpu.checks(used)] if used else result
