"""Why a race cannot end well: what its runs have changed, left behind or failed at."""

from collections.abc import Mapping, Sequence
from typing import Any

from bench.base import utc
from bench.launch.script import work_folder
from bench.machine import surroundings
from bench.plans.race import arm_process
from bench.plans.race.state import Slot, State
from bench.record import failures, verification


def forged(race: State, known: set[tuple[str, int]]) -> str | None:
    """Returns why bytecode that was written since the plan ends the race, or None. known: as of forged_bytecode()."""
    since_s = utc.seconds(race.plan["made_at"])
    path = surroundings.forged_bytecode(arm_process.pythons_of(race.arms), since_s, known)
    return path and f"{path} was written during this race, and is not what its source compiles to"


def by(race: State, done: Slot, arm: Mapping[str, Any], strays: Sequence[str]) -> str | None:
    """Returns why the race cannot end well after this run, or None. strays: processes that outlived its launcher."""
    run_name, _ = done.attempts[-1]
    run = arm_process.record_of(race.results, run_name)
    names = [name for slot in race.slots for name, _ in slot.attempts]
    if gone := next((name for name in names if not (race.results / name).is_dir()), None):
        return f"the folder of {gone} was removed while the race was running: begin a new race"
    if strays:
        return f"{run_name} of {done.arm} left {', '.join(strays)}, which has been ended and may have slowed other runs"
    if run and run["failure"] and run["failure"]["kind"] == failures.ESCAPED:
        return f"{run_name} of {done.arm}: {run['failure']['message']}"
    if not done.is_done and "stop" in (race.plan.get("sequential") or {}):
        # nobody interrupted the race: a candidate that kills its launcher gets no second try
        return f"{run_name} of {done.arm} has no record of how it ended, and nobody interrupted the race"
    if run is None or done.status == "aborted":
        return None
    if (run["config_id"], run["code"]["source_sha256"]) != (arm["config_id"], arm["source_sha256"]):
        changed = f"{run['run_id']} is not what arm {done.arm} was planned to be"
        return f"the code or conf/ changed while the race was running: {changed}"
    if name := _changed_data(race, done.arm):
        return f"{name}, which {done.arm} reads, changed while the race was running: begin a new race"
    rules = verification.report(race.results / run_name)["rules"] if done.status == "complete" else ()
    if faults := [f"{rule['rule']}: {rule['evidence']}" for rule in rules if not rule["passed"]]:
        return f"{run['run_id']} of {done.arm} fails ./run.sh verify, so no verdict can include it: {faults[0]}"
    if done.status == "failed" and done.discarded:
        failure = run["failure"]
        return f"the warm-up of {done.arm} failed: {failure['kind']}: {failure['message']}; try: {failure['hint']}"
    if race.num_failed(done.arm) > race.plan["n"] - 2:
        return f"{race.num_failed(done.arm)} runs of {done.arm} failed: fewer than two times would be left"
    return None


def _changed_data(race: State, arm: str) -> str | None:
    """Returns the name of a file that a run of the arm found in another state than an earlier one, or None.

    The state at the plan is unknown: a file outside of the script's folder that the arm's first run found, rather than
    made, must not have changed since.
    """
    states: dict[str, list[int]] = {}
    first = next(name for slot in race.slots if slot.arm == arm for name, _ in slot.attempts)
    for name, found in _data_states(race, first).items():
        if not name.startswith(f"{work_folder.WORK}/") and found[1] > utc.seconds(race.plan["made_at"]) * 1e9:
            return name
    for run_name in race.runs(arm, discarded=True) + race.runs(arm):
        for name, found in _data_states(race, run_name).items():
            if states.setdefault(name, found) != found:
                return name
    return None


def _data_states(race: State, run_name: str) -> dict[str, list[int]]:
    run = arm_process.record_of(race.results, run_name) or {}
    states: dict[str, list[int]] = run.get("script", {}).get("data_states", {})
    return states
