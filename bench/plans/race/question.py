"""Chooses the question of a race: time, loss, time_to_target or steps_to_target, by on= or by how the arms differ.

Facts are those of bench/plans/race/arm_process.py: {arm: facts}, the baseline first.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from bench.compare.eligibility import AMOUNTS
from bench.compare.questions import QUESTIONS

OF_TRACK = {
    "time": ("time", "time_to_target"),
    "steps": ("steps_to_target",),
    "metric": ("loss",),
}  # {what a track judges: questions that answer it}
Facts = Mapping[str, Mapping[str, Any]]


def chosen(facts: Facts, judged: str) -> tuple[str, str]:
    """Returns (one of QUESTIONS, why) if on= names none. judged: what the track judges, time, steps or metric."""
    if judged == "steps":
        return "steps_to_target", "the track judges steps"
    if judged == "metric":
        return "loss", "the track judges its metric"
    if any((arm.get("row") or {}).get("budget") for arm in facts.values()):
        return "loss", "every run has the same budget"
    first, *others = [arm.get("changes_losses") or {} for arm in facts.values()]  # {}: an older revision
    differing = [name for name in first if any(changes and changes[name] != first[name] for changes in others)]
    has_target = not any(_lacks_target(facts))
    if unequal := next(_unequal(facts), None):
        return ("time_to_target" if has_target else "time"), unequal
    if not differing:
        one_code = len({arm["source_sha256"] for arm in facts.values()}) == 1
        return "time", "no setting that differs changes losses" if one_code else "the arms differ in code"
    why = f"the arms differ in {' and '.join(differing)}"
    if has_target and all(arm["row"]["stop_at_target"] for arm in facts.values()):
        return "time_to_target", f"{why}, and every run ends at the target"
    return "loss", why


def sentence(plan: Mapping[str, Any]) -> str:
    """Returns the question of a plan, and the reason for it if the user did not choose it."""
    on, why = plan["on"], plan["why_on"]
    other = "loss" if on == "time" else "time"
    return QUESTIONS[on] + (f", because {why}; on={other} asks another" if why else "")


def refuse_unanswerable(on: str, facts: Facts) -> None:
    """Raises ValueError for a question that these arms can never answer."""
    if on.endswith("to_target") and (lacking := next(_lacks_target(facts), None)):
        raise ValueError(f"on={on}: {lacking}: give goal.target_val_loss=LOSS beside the arms, or on=loss")
    has_budget = all((arm.get("row") or {}).get("budget") for arm in facts.values())
    if on == "loss" and not has_budget:
        if unequal := next(_unequal(facts), None):
            remedy = "give them the same, or goal.target_val_loss=LOSS and on=time_to_target"
            raise ValueError(f"on=loss: {unequal}, and losses are compared after equal training: {remedy}")
        if ends := [name for name, arm in facts.items() if (arm.get("row") or {}).get("stop_at_target")]:
            why = f"runs of {ends[0]} end at their target, whatever they could reach"
            raise ValueError(f"on=loss: {why}: give goal.stop_at_target=false, or on=time_to_target")


def _lacks_target(facts: Facts) -> Iterator[str]:
    """Yields why the arms have no target in common, or nothing."""
    targets = {name: (arm.get("row") or {}).get("target") for name, arm in facts.items()}
    for name, target in targets.items():
        if target is None:
            yield f"{name} has no target loss"
    if len(set(targets.values())) > 1:
        yield f"the arms have different targets ({', '.join(f'{loss} in {name}' for name, loss in targets.items())})"


def _unequal(facts: Facts) -> Iterator[str]:
    """Yields a sentence for each amount of training in which the arms differ. An unknown amount differs from none."""
    for column, _, unit in AMOUNTS:
        amounts = {name: (arm.get("row") or {}).get(column) for name, arm in facts.items()}
        if len({amount for amount in amounts.values() if amount is not None}) > 1:
            yield f"the arms take different numbers of {unit} ({', '.join(map(str, amounts.values()))})"
