"""The stages of a run as its parts want them: the model its windows, the loader its shapes, the record its facts."""

from bench.config.schema import Config
from bench.config.stages import num_micro_steps, stages_of
from bench.data.course import BatchShape
from models.base import LanguageModel
from models.stages import Timeline, check_window


def timeline_of(config: Config, model: LanguageModel) -> Timeline:
    """ValueError: stages have windows and the model has none, or they are no multiples of its blocks."""
    stages, val_window_tokens = stages_of(config), config.goal.val_window_tokens
    if stages[0].window_tokens is not None and not hasattr(model, "set_window"):
        remedy = f"model.arch={config.model.arch} has no windows, set_window(window_tokens): use one that has"
        raise ValueError(f"stages[0].window_tokens={stages[0].window_tokens}: {remedy}")
    window_block = getattr(model, "window_block", 1)
    check_window("goal.val_window_tokens", val_window_tokens, window_block)
    return Timeline(stages, config.goal.num_steps, window_block)


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
            "flops_per_token": all_pairs,
            "flops_per_token_causal": causal,
        }
        for portion, (all_pairs, causal) in zip(timeline.portions, flops, strict=True)
    ]
