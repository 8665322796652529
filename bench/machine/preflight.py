"""Is this machine fit to measure?  Each check says what it found and, where that is not good, what to do.

fail: the race cannot run or its record cannot be written.  warn: it can, and its times will be worth less.
checks() is the quick part, which every race makes and records; ./run.sh doctor (bench/cli/doctor.py) asks more.
"""

from bench.machine import check_gpu, check_host, environment
from bench.machine.check import Check, report

__all__ = ["Check", "checks", "raced_gpus", "report"]


def checks(hardware, dataset_bytes, env, results, foreign_cpu_cores=None):
    """hardware: resolved; env: environment(); results: folder of the records.  Samples the CPU for 0.3 s if not given.

    Returns a list of Check; those of GPUs only for a race on GPUs.
    """
    quota_cores = env.get("cpu_quota_cores")
    found = [
        check_host.disk_space(results),
        check_host.memory(hardware.num_processes, dataset_bytes, environment.available_memory_gib()),
        check_host.cpu_load(
            hardware, check_host.sample() if foreign_cpu_cores is None else foreign_cpu_cores, env["num_cpus"]
        ),
        check_host.threads(hardware, env["num_cpus"], quota_cores),
        check_host.governor(env.get("governor")),
        check_host.quota(env["num_cpus"], quota_cores),
    ]
    if hardware.device == "cpu":
        return [*found, check_host.waiting_threads(hardware, env["env"])]
    if hardware.compile is not False:  # None: not yet resolved, and compiled on a GPU
        found.append(check_host.compiler())
    gpus = raced_gpus(hardware, env)
    return [*found, *check_gpu.checks(gpus)] if gpus else found


def raced_gpus(hardware, env):
    """The facts of the GPUs that a race on this hardware uses, by rank."""
    visible = [one for one in env["gpus"] if one["visible"] is not None]
    return sorted(visible, key=lambda one: one["visible"])[: hardware.num_processes]
