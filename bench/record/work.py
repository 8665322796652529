"""How much a run did in its steps, by what its record says of their batches: tokens, floating point operations.

measured: run.json["measured"].  Without stages every step has batch_tokens; with them each stage says, and batch_tokens
is the mean over the whole run.
"""

from collections.abc import Collection


def num_tokens(measured: dict, num_steps: int, without: Collection[int] = ()) -> int | None:
    """Of the first num_steps steps but those in without, counted from 1; None where the record does not say."""
    if measured.get("stages"):
        return sum(num * stage["batch_tokens"] for stage, num in _in_stages(measured, num_steps, without))
    batch_tokens = measured.get("batch_tokens")
    return None if batch_tokens is None else (num_steps - len(without)) * batch_tokens


def flops_per_token(run: dict, num_steps: int, without: Collection[int] = ()) -> dict:
    """{"flops_per_token", "flops_per_token_causal"}, means over the tokens of those steps; None where unknown."""
    names = ("flops_per_token", "flops_per_token_causal")
    tokens = num_tokens(run["measured"], num_steps, without)
    if not run["measured"].get("stages") or not tokens:
        return {name: run["model"].get(name) for name in names}
    result = _in_stages(run["measured"], num_steps, without)
    return {name: sum(num * one["batch_tokens"] * one[name] for one, num in result) / tokens for name in names}


def mean_flops_per_token(stages: list[dict]) -> dict:
    """The same of all steps of a run's stages, rounded to whole ones."""
    num_steps = sum(stage["num_steps"] for stage in stages)
    means = flops_per_token({"measured": {"stages": stages}}, num_steps)
    return {name: stages[0][name] if len(stages) == 1 else round(mean) for name, mean in means.items()}


def _in_stages(measured, num_steps, without):
    """[(stage, how many of those steps it has)]."""
    result = []
    for stage in measured["stages"]:
        first, last = stage["first_step"], min(num_steps, stage["first_step"] + stage["num_steps"] - 1)
        excluded = sum(first <= step <= last for step in without)
        result.append((stage, max(0, last - first + 1) - excluded))
    return result
