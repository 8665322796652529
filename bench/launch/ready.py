"""Checks whether the machine is quiet before several runs; asks a user at a terminal, else the verb decides."""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

from bench.base import text_table
from bench.base.paths import REPO, results_root
from bench.launch.console import confirmed
from bench.launch.prepare import Job
from bench.machine import code_state, environment, leases, preflight

BUSY = ("cpu load", "gpus idle", "gpu memory")  # checks that notice other programs
SAMPLE_S = 1.0  # of CPU load; longer than before a single run, because a decision depends on it
ANYWAY = "continue although the machine is busy, or no verdict is possible"


def checks(
    job: Job, env: dict[str, Any] | None = None, foreign_cores: float | None = None, code: dict[str, Any] | None = None
) -> list[preflight.Check]:
    """Runs the quick checks for this job now.  code: run.json["code"]; None: it is determined here."""
    if env is None:
        env, foreign_cores = environment.environment(), preflight.sample_foreign_cores(SAMPLE_S)
    hardware = dataclasses.replace(job.config.hardware, num_processes=job.config.hardware.ranks_of_node, nodes=None)
    machine_checks = preflight.checks(hardware, job.data_bytes, env, results_root(), foreign_cores)
    failure = code_state.git_failure() if code is None else code.get("git_failure")
    return [*machine_checks, preflight.git(failure, REPO), epochs(job)]


def epochs(job: Job) -> preflight.Check:
    """Checks whether a run repeats training tokens, which changes its loss."""
    num_shards, num_chosen = len(job.dataset.train), job.config.data.num_train_shards
    found = f"{job.epochs:.2f} epochs of {text_table.counted(num_shards, 'training shard')}"
    if job.epochs <= 1:
        return preflight.Check("epochs", "ok", found)
    or_shards = f", or data.num_train_shards={math.ceil(num_shards * job.epochs)}" if num_chosen else ""
    return preflight.Check("epochs", "warn", f"{found}: tokens are seen again", f"fewer steps{or_shards}")


def show_odd(checks: Iterable[preflight.Check]) -> list[preflight.Check]:
    """Prints and returns the checks that are not ok; of several with one name the last."""
    odd = list({check.name: check for check in checks if check.status != "ok"}.values())
    if odd:
        print(preflight.report(odd), flush=True)
    return odd


def agree(checks: Iterable[preflight.Check], anyway: bool, purpose: str | None = None, are_shown: bool = False) -> None:
    """Shows checks that are not ok, unless are_shown, and asks before going on if other programs run or a check failed.

    anyway: do not ask.  purpose: what would be unreliable on a busy machine, refused if nobody can be asked; None:
    it goes on then.  Raises ValueError if it does not go on, leases.Busy if only other programs stop it.
    """
    odd = checks if are_shown else show_odd(checks)
    stops = [check for check in odd if check.status == "fail" or (check.name in BUSY and check.status != "ok")]
    if not stops or anyway:
        return
    answer = confirmed("continue anyway?")
    if answer is False or (answer is None and purpose):
        why = "; ".join(f"{check.name}: {check.found}" for check in stops)
        worth = f", and {purpose} would be unreliable" if purpose else ""
        is_busy = answer is None and all(check.name in BUSY for check in stops)
        kind = leases.Busy if is_busy else ValueError
        raise kind(f"{why}{worth}: try again when the machine is quiet, or add --anyway")
