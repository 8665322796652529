"""Before the first run: arms that can never be compared, arms that are one and the same, a machine that is busy."""

import itertools

from bench.compare import eligibility
from bench.launch import ready
from bench.machine.preflight import Check
from bench.record.rows import COLUMNS

MEASURED = {"target_val_loss": 0.0, "val_loss": 0.0}  # which all reach; how much it is does not matter here


def refuse(facts: dict[str, dict], anyway: bool, measures_target: bool = False) -> None:
    """facts: {arm: arm_process.facts()}, the baseline first.  Raises ValueError unless anyway.

    measures_target: arms without a target are compared on their way to one that is measured in the race (a ladder's).
    """
    if not anyway:
        _refuse_identical(facts)
        _refuse_incomparable(facts, MEASURED if measures_target else {})
    agree_on_machine(facts, anyway)


def agree_on_machine(facts: dict[str, dict], anyway: bool) -> None:
    """As each arm's own code sees it.  Raises ValueError where the race is not to go on."""
    checks = [Check(**check) for one in facts.values() for check in one.get("preflight", ())]
    ready.agree(checks, anyway, "the verdict")


def _refuse_identical(facts):
    for (name, one), (other_name, other) in itertools.combinations(facts.items(), 2):
        if all(one[key] == other[key] for key in ("config_id", "source_sha256")):
            same = f"are the same config ({one['config_id']}) and code and differ by noise alone"
            raise ValueError(f"{name} and {other_name} {same}: ./run.sh calibrate measures that, --anyway races them")


def _refuse_incomparable(facts, measured):
    """By the rules of the verdict, on the rows that the arms' runs would have at best."""
    said = {name: one["row"] for name, one in facts.items() if "row" in one}  # an older revision's code does not say
    rows = {name: dict.fromkeys(COLUMNS) | row | {"run_id": name} for name, row in said.items()}
    rows = {name: row | (measured if row["target_val_loss"] is None else {}) for name, row in rows.items()}
    baseline = next(iter(facts))
    for name in [name for name in rows if name != baseline and baseline in rows]:
        refusals = eligibility.judge([rows[baseline]], [rows[name]], (baseline, name)).refusals
        if refusals:
            raise ValueError(
                f"the times of {baseline} and {name} could not be compared: {'; '.join(refusals)}: give all arms the "
                "same (what is written beside the arms holds for all); --anyway races them without a verdict on time"
            )
