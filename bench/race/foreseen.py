"""Before the first run: arms that can never be compared, arms that are one and the same, a machine that is busy."""

import itertools

from bench.compare import eligibility
from bench.launch import ready
from bench.machine.preflight import Check
from bench.record.rows import COLUMNS


def refuse(found: dict[str, dict], anyway: bool) -> None:
    """found: {arm: arm_process.facts()}, the baseline first.  Raises ValueError unless anyway."""
    if not anyway:
        _refuse_identical(found)
        _refuse_incomparable(found)
    agree_on_machine(found, anyway)


def agree_on_machine(found: dict[str, dict], anyway: bool) -> None:
    """As each arm's own code sees it.  Raises ValueError where the race is not to go on."""
    checks = [Check(**check) for one in found.values() for check in one.get("preflight", ())]
    ready.agree(checks, anyway, "the verdict")


def _refuse_identical(found):
    for (name, one), (other_name, other) in itertools.combinations(found.items(), 2):
        if all(one[key] == other[key] for key in ("config_id", "source_sha256")):
            same = f"are the same config ({one['config_id']}) and code and differ by noise alone"
            raise ValueError(f"{name} and {other_name} {same}: ./run.sh calibrate measures that, --anyway races them")


def _refuse_incomparable(found):
    """By the rules of the verdict, on the rows that the arms' runs would have at best."""
    said = {name: one["row"] for name, one in found.items() if "row" in one}  # an older revision's code does not say
    rows = {name: dict.fromkeys(COLUMNS) | row | {"run_id": name} for name, row in said.items()}
    baseline = next(iter(found))
    for name in [name for name in rows if name != baseline and baseline in rows]:
        refusals = eligibility.judge([rows[baseline]], [rows[name]], (baseline, name)).refusals
        if refusals:
            raise ValueError(
                f"the times of {baseline} and {name} could not be compared: {'; '.join(refusals)}: give all arms the "
                "same (what is written beside the arms holds for all); --anyway races them without a verdict on time"
            )
