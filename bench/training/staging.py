"""The stages of a run as its parts want them: the model as it is at a step, the loader its shapes, the record facts."""

from bench.config.schema import Config
from bench.config.stages import num_micro_steps, stages_of
from bench.data.course import BatchShape
from models.base import LanguageModel
from models.stages import Timeline, check_window
from models.together import copy_state

NEW = ("frozen_steps", "ahead_weights", "end_ahead_weights", "untied")  # of a portion, where they are set
METHODS = {  # what a stage sets: how the model is given it, and what it is
    "window_tokens": ("set_window", "windows, set_window(window_tokens)"),
    "ahead_weights": ("set_ahead_weights", "loss of several tokens, that of LanguageModel.forward()"),
    "untied": ("set_untied", "embedding that parts from the head, set_untied(untied)"),
}


def timeline_of(config: Config, model: LanguageModel) -> Timeline:
    """ValueError: stages set what the model does not have, or its windows to no multiples of its blocks."""
    stages, val_window_tokens = stages_of(config), config.goal.val_window_tokens
    for setting, (method, what) in METHODS.items():
        for index, stage in enumerate(stages):
            if getattr(stage, setting) is not None and not _has(model, method):
                remedy = f"model.arch={config.model.arch} has no {what}: use one that has"
                raise ValueError(f"stages[{index}].{setting}={getattr(stage, setting)}: {remedy}")
    window_block = getattr(model, "window_block", 1)
    check_window("goal.val_window_tokens", val_window_tokens, window_block)
    return Timeline(stages, config.goal.num_steps, window_block)


def _has(model, method):
    if method == "set_ahead_weights" and type(model).forward is not LanguageModel.forward:
        return False
    return hasattr(model, method)


class StagedModel:
    """A model as a step of the timeline has it: its window, what its loss is of, whether its embedding is its own."""

    def __init__(self, model: LanguageModel, optimizer, timeline: Timeline):
        self.model, self.optimizer, self.timeline = model, optimizer, timeline
        self._window_tokens, self._untied, self._ahead_weights = None, False, None

    def at(self, step: int) -> None:
        """Before step number step; goal.num_steps: at the end of the run."""
        self.set_window(self.timeline.window_after(step))
        self.set_untied(bool(self.timeline.at(step).stage.untied))
        weights = self.timeline.ahead_weights(step)
        if weights != self._ahead_weights:
            self.model.set_ahead_weights(weights)
            self._ahead_weights = weights

    def set_window(self, window_tokens: int | None) -> None:
        """None: the model has none, or its own."""
        if window_tokens != self._window_tokens:
            self.model.set_window(window_tokens)
            self._window_tokens = window_tokens

    def set_untied(self, untied: bool) -> None:
        """Where the embedding parts from the head it begins with the head's weights and state of the optimizer."""
        if untied != self._untied:
            embedding, head = self.model.set_untied(untied)
            if untied:
                copy_state(self.optimizer, head, embedding)
            self._untied = untied


def batch_shapes(config: Config, timeline: Timeline) -> list[BatchShape]:
    """The stages as the loader wants them."""
    shapes, before = [], 0
    for stage, end in zip(stages_of(config), timeline.ends, strict=True):
        num_steps = None if end == timeline.num_steps else end - before
        shapes.append(BatchShape(num_steps, stage.batch_tokens, stage.seq_len, num_micro_steps(config, stage)))
        before = end
    return shapes


def facts(config: Config, timeline: Timeline, flops: list[tuple[int, int]]) -> list[dict]:
    """run.json["measured"]["stages"]: what each portion of the run is.

    flops: of a token in each, and the same without masked pairs.  first_step is counted as the run prints it, from 1.
    """
    return [
        {
            "first_step": portion.first_step + 1,
            "num_steps": portion.num_steps,
            "batch_tokens": portion.stage.batch_tokens,
            "seq_len": portion.stage.seq_len,
            "num_micro_steps": num_micro_steps(config, portion.stage),
            "window_tokens": portion.window_tokens,
            "lr_frac": portion.stage.lr_frac,
            "momenta": portion.stage.momenta,
            "update_every_steps": portion.stage.update_every_steps,
            **{name: getattr(portion.stage, name) for name in NEW if getattr(portion.stage, name) is not None},
            "flops_per_token": all_pairs,
            "flops_per_token_causal": causal,
        }
        for portion, (all_pairs, causal) in zip(timeline.portions, flops, strict=True)
    ]
