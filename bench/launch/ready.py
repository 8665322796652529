"""Is the machine fit?  Asked before the first of several runs; the person at the terminal decides, else the verb."""

import math
from collections.abc import Iterable

from bench import text_table
from bench.launch.console import confirmed
from bench.machine import check_host, environment, preflight
from bench.paths import results_root

BUSY = ("cpu load", "gpus idle")  # checks which say that other programs run
SAMPLE_S = 1.0  # of the load; longer than a single run's, because an answer hangs on it
ANYWAY = "go on where the machine is busy, or what is asked can give no verdict"


def checks(job, env=None, results=None, foreign_cores=None) -> list[preflight.Check]:
    """The quick checks for this run, now.  job: of bench/launch/prepare.py.

    env: environment.environment(), results: the results folder, foreign_cores: what other programs use; None: asked.
    """
    foreign_cores = check_host.sample_foreign_cores(SAMPLE_S) if foreign_cores is None else foreign_cores
    env, results = env or environment.environment(), results or results_root()
    return [*preflight.checks(job.config.hardware, job.data_bytes, env, results, foreign_cores), epochs(job)]


def epochs(job):
    """Whether a run sees training tokens again, which makes its loss another one."""
    num_shards, asked = len(job.dataset.train), job.config.data.num_train_shards
    found = f"{job.epochs:.2f} epochs of {text_table.counted(num_shards, 'training shard')}"
    if job.epochs <= 1:
        return preflight.Check("epochs", "ok", found)
    more = f", or data.num_train_shards={math.ceil(num_shards * job.epochs)}" if asked else ""
    return preflight.Check("epochs", "warn", f"{found}: tokens are seen again", f"fewer steps{more}")


def agree(found: Iterable[preflight.Check], anyway: bool, what: str | None = None, are_shown=False) -> None:
    """Say what is not well, unless are_shown; ask before going on where other programs run or a check fails.

    anyway: do not ask.  what: what would be worthless on a busy machine, then refused where nobody can be asked; None:
    it goes on there.  Raises ValueError where it does not go on.
    """
    odd = list({check.name: check for check in found if check.status != "ok"}.values())
    if odd and not are_shown:
        print(preflight.report(odd), flush=True)
    stops = [check for check in odd if check.name in BUSY or check.status == "fail"]
    if not stops or anyway:
        return
    answer = confirmed("go on all the same?")
    if answer is False or (answer is None and what):
        why = "; ".join(f"{check.name}: {check.found}" for check in stops)
        worth = f", and {what} would be that of a disturbed machine" if what else ""
        raise ValueError(f"{why}{worth}: try again when it is quiet, or with --anyway")
