"""Trains a contestant for some seconds before it is raced: a small part of its training, on random tokens.

    python -m bench.plans.audit.short SECONDS MOST_S WORDS...     prints {"why": a sentence or null} as JSON

A model of ours makes NUM_STEPS steps, and validates on a tenth of the tokens. A script is ended once it has trained for
SECONDS by its own clock, or has run for MOST_S. Doubts of the launcher's clock and of the referee's checks would also
arise in a whole run.
"""

import dataclasses
import json
import sys
from typing import Any, cast

from bench.base.paths import results_root
from bench.launch.prepare import Job, prepare
from bench.plans.audit import auditing, counterfactual
from bench.record import outside_clock, step_files, validity
from bench.record.certificates import FAILED
from bench.record.rows import row_of

NUM_STEPS = 20
VALIDATION_FRAC = 0.1
BUSY_FRAC = 0.1  # of a claimed time that waiting for a core may hide: at load 20 on 2 cores it was 0.018
KIND = "random_tokens"
OF_CONTESTANT = {  # kinds of failure that are the contestant's fault
    *("exception", "no_gpu", "non_finite_loss", "not_causal", "no_metric_lines"),
    *("rank_crashed", "out_of_memory", "stalled", "over_limit"),
}


def shortened(job: Job, seconds: float, most_s: float) -> Job:
    """Returns the job of the same contestant with less to do."""
    goal, hardware = job.config.goal, job.config.hardware
    if job.script:
        goal = dataclasses.replace(goal, time_budget_s=seconds, token_budget=None, flop_budget=None)
        hardware = dataclasses.replace(hardware, wall_timeout_s=most_s)
    else:
        unit = (goal.val_seq_len or job.config.data.seq_len) * (hardware.num_processes or 1)
        val_tokens = max(1, round(VALIDATION_FRAC * goal.val_tokens / unit)) * unit
        num_steps = min(NUM_STEPS, goal.num_steps)
        goal = dataclasses.replace(goal, num_steps=num_steps, val_every_steps=num_steps, val_tokens=val_tokens)
    config = dataclasses.replace(job.config, goal=goal, hardware=hardware)
    return dataclasses.replace(job, config=config).with_look(False)


def refusal(job: Job) -> str | None:
    """Returns why this contestant cannot win a race: it fails, its clock is not honest, or it sees what it predicts.

    Returns None if no fault was found. Raises NotPossible, and KeyboardInterrupt after an interrupt.
    """
    facts, run = auditing.run_on_other_data(KIND, job, "a submission", results_root())
    if run["status"] != "complete":
        failure = run["failure"]
        return f"it fails: {failure['message']}" if failure["kind"] in OF_CONTESTANT else None
    excused = (outside_clock.CLOCK,) if _waited(run) else ()
    doubts = [doubt for doubt in run.get("doubts", ()) if doubt["instrument"] not in excused]
    run["validity"], run["validity_reasons"] = validity.validity({**run, "audit": None, "doubts": doubts})
    machine_doubts = row_of(cast(Any, run))["machine_doubts"]
    reasons = [reason for reason in run["validity_reasons"] if reason not in machine_doubts]
    if reasons:
        return reasons[0]
    nats = list(step_files.validations(run["folder"]).values())
    if run["data"]["source"] == "script" or not nats:
        return None  # its losses are of other tokens
    verdict: dict[str, Any] = counterfactual.verdict(KIND, facts, 0.0, nats)
    return verdict["why"] if verdict["outcome"] == FAILED else None


def _waited(run: auditing.Run) -> bool:
    """Whether its clock may differ from the launcher's because other programs kept it from a core."""
    clock = (run["referee"] or {}).get("clock") or {}
    claimed_s, outside_s = (clock.get(name) for name in ("claimed_train_s", "outside_train_s"))
    if claimed_s is None or outside_s is None or not validity.is_busy(run):
        return False
    return bool(abs(outside_s - claimed_s) <= BUSY_FRAC * claimed_s)


def main(seconds: str, most_s: str, *overrides: str) -> int:
    """Prints the refusal as JSON. Returns the exit code: 0, or 2 if the contestant cannot be checked."""
    try:
        job = prepare(list(overrides), say=lambda text: print(text, file=sys.stderr), check_own=False)
        why = refusal(shortened(job, float(seconds), float(most_s)))
    except ValueError as error:  # a plan has accepted these settings before
        print(error, file=sys.stderr)
        return 2
    print(json.dumps({"why": why}))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
