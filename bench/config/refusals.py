"""Refuses settings that contradict each other in a resolved config, and names a remedy."""

from typing import Any, NoReturn

from bench.base.metric import COMPUTED, METRICS, VAL_LOSS
from bench.base.reading import patterns
from bench.config import schema
from models.stages import Stage

OF_PARTS = ("momenta", "update_every_steps", "frozen_steps")  # settings of a stage, given per part of the optimizer
BUDGETS = ("time_budget_s", "token_budget", "flop_budget")


def refuse(setting: str, value: Any, remedy: str) -> NoReturn:
    """Raises ValueError with the setting, its value, and what to try."""
    raise ValueError(f"{setting}={'null' if value is None else value}: {remedy}")


def check(config: schema.Config) -> None:
    """Raises ValueError if settings of a resolved config contradict each other."""
    check_ranks(config.instruments, config.hardware.num_processes or 1)
    check_clocks(config)
    _check_metric(config.goal, config.script is not None)
    if config.script is None:
        _check_goal(config.goal, config.data.source)
        _check_stages(config, config.stages or [])


def check_ranks(instruments: dict[str, Any], num_processes: int) -> None:
    """Raises ValueError if an instrument is set to record a rank that the run does not have."""
    for name, settings in instruments.items():
        chosen = [(f"instruments.{name}.ranks", settings.get("ranks"))]
        windows = settings.get("windows") or ()
        chosen += [(f"instruments.{name}.windows: ranks", window.get("ranks")) for window in windows]
        for key, ranks in chosen:
            if missing := [rank for rank in ranks or () if rank >= num_processes]:
                processes = f"{num_processes} process{'es' * (num_processes > 1)}"
                refuse(key, list(ranks), f"the run has {processes}, ranks from 0: remove {missing[0]}")


def check_clocks(config: schema.Config) -> None:
    """Refuses windows by the clock for scripts and on several nodes: ranks need our loop, and memory in common."""
    for name, settings in config.instruments.items():
        listed = [
            window for window in (settings, *(settings.get("windows") or ())) if window.get("first_s") is not None
        ]
        if listed and ((config.hardware.nodes or 1) > 1 or config.script is not None):
            why = "a script" if config.script is not None else "a run on several nodes"
            remedy = f"{why} has no clock for it: use first_step, or profile.every=STEPS"
            refuse(f"instruments.{name}.first_s", listed[0]["first_s"], remedy)


def _check_metric(goal: schema.GoalConfig, is_script: bool) -> None:
    metric = goal.of
    if metric.name == VAL_LOSS.name and goal.target is not None:
        remedy = "for val_loss, set goal.target_val_loss instead; otherwise choose a goal.metric"
        refuse("goal.target", goal.target, remedy)
    if metric.name != VAL_LOSS.name:
        for name in ("target_val_loss", "target_gap_nats"):
            if (target := getattr(goal, name)) is not None:
                remedy = f"the goal is {metric.name}: set goal.target=NUMBER and goal.{name}=null"
                refuse(f"goal.{name}", target, remedy)
        if not is_script and metric.name not in COMPUTED:
            reason = f"the harness measures its own models in {' and '.join(COMPUTED)}"
            refuse("goal.metric", metric.name, f"{reason}: choose one of them; only a script can have another")
    budgets = [name for name in BUDGETS if getattr(goal, name) is not None]
    if len(budgets) > 1:
        refuse(f"goal.{budgets[1]}", getattr(goal, budgets[1]), f"goal.{budgets[0]} is set too: keep one of them")
    if is_script and goal.flop_budget is not None:
        refuse("goal.flop_budget", goal.flop_budget, "a script's FLOPs are unknown: use goal.time_budget_s")
    for name in ("metric_unit", "metric_direction", "metric_pattern"):
        value = getattr(goal, name)
        if value is not None and metric in METRICS.values():
            refuse(f"goal.{name}", value, f"{metric.name} already defines it: remove it, or name a metric of your own")
    if goal.metric_pattern is not None:
        try:
            groups = set(patterns.compiled(goal.metric_pattern).groupindex)
            is_right = "value" in groups <= {"value", "step"}
            why = "" if is_right else "it needs the group (?P<value>...), and may have (?P<step>...)"
        except ValueError as error:
            why = f"it {error}"
        if why:
            refuse("goal.metric_pattern", goal.metric_pattern, why)
    if metric not in METRICS.values() and goal.metric_pattern is None and is_script:
        remedy = "this metric is unknown: set goal.metric_pattern='TEXT (?P<value>\\S+)', or choose one of"
        refuse("goal.metric", metric.name, f"{remedy} {', '.join(METRICS)}")


def _check_goal(goal: schema.GoalConfig, source: str) -> None:
    gap_nats = goal.target_gap_nats
    if goal.target_val_loss is not None and gap_nats is not None:
        refuse("goal.target_gap_nats", gap_nats, f"target_val_loss={goal.target_val_loss} is set too: keep one of them")
    if gap_nats is not None and source != "markov":
        refuse("goal.target_gap_nats", gap_nats, f"only data=markov has a known floor, this is data={source}")
    if goal.stop_at_target and goal.target_value is None and gap_nats is None:
        target = "target_val_loss or goal.target_gap_nats" if goal.of.name == VAL_LOSS.name else "target"
        refuse("goal.stop_at_target", True, f"there is no target: set goal.{target}")


def _check_stages(config: schema.Config, stages: list[Stage]) -> None:
    optim, val_window_tokens = config.optim, config.goal.val_window_tokens
    assert optim is not None  # the run is not a script
    if val_window_tokens is not None and not (stages and stages[0].window_tokens):
        remedy = "no stage has a window: add one, stages=[{window_tokens:NUMBER}], or remove it"
        refuse("goal.val_window_tokens", val_window_tokens, remedy)
    parts = optim.part_names()
    has_windows = any(stage.window_tokens is not None for stage in stages)
    with_momentum = {name for stage in stages for name in stage.momenta or ()}
    for index, stage in enumerate(stages):
        where, before = f"stages[{index}]", stages[index - 1] if index else stage
        ahead, end_ahead, end_window = stage.ahead_weights, stage.end_ahead_weights, stage.end_window_tokens
        if stage.first_window_tokens is not None and stage.window_tokens is None:
            refuse(f"{where}.first_window_tokens", stage.first_window_tokens, "set window_tokens, its end, too")
        if stage.window_rounding is not None and stage.first_window_tokens is None:
            remedy = "only a growing window is rounded: set first_window_tokens, or remove it"
            refuse(f"{where}.window_rounding", stage.window_rounding, remedy)
        if end_ahead is not None and len(end_ahead) != len(ahead or ()):
            refuse(f"{where}.end_ahead_weights", end_ahead, f"ahead_weights={ahead}: both lists need the same length")
        if ahead is not None and not 0 < len(ahead) < (stage.seq_len or 0):
            most = (stage.seq_len or 0) - 1
            refuse(f"{where}.ahead_weights", ahead, f"use 1 to {most}, the next tokens of a sequence")
        for setting in OF_PARTS:
            for name, value in (getattr(stage, setting) or {}).items():
                if name not in parts:
                    has = f"has the parts {', '.join(parts)}" if parts else "is all one part"
                    refuse(f"{where}.{setting}.{name}", value, f"optim={optim.name} {has}")
        if stage.update_every_steps and optim.grad_clip_norm is not None:
            remedy = "update_every_steps sums gradients over steps, and each would clip the sum: use null"
            refuse("optim.grad_clip_norm", optim.grad_clip_norm, remedy)
        if stage.frozen_steps and optim.grad_clip_norm is not None and config.hardware.reducer == "shard":
            remedy = "the shards hold no gradients of frozen parts, which the norm would include: use null"
            refuse("optim.grad_clip_norm", optim.grad_clip_norm, remedy)
        if has_windows and stage.window_tokens is None:  # there is no value that this stage could return to
            refuse(f"{where}.window_tokens", None, "another stage sets it: set it in every stage")
        if end_window is not None and stage is not stages[-1]:
            refuse(f"{where}.end_window_tokens", end_window, "only the last stage ends the run: move it there")
        if end_window is not None and (stage.window_tokens is None or val_window_tokens is not None):
            remedy = "set window_tokens too, and remove goal.val_window_tokens"
            refuse(f"{where}.end_window_tokens", end_window, remedy)
        if before.untied and not stage.untied:
            refuse(f"{where}.untied", None, "the stage before sets it: an untied embedding stays untied")
        for name in sorted(with_momentum - set(stage.momenta or ())):
            refuse(f"{where}.momenta.{name}", None, "another stage sets it: set it in every stage")
