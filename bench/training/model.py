"""Sets up what the config asks for: torch's kernels, the model with its weights, its validation rows, its stages.

Legend: B sequences, T tokens.
"""

import contextlib
import inspect
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch.backends import cuda

import models
from bench.config import user_code
from bench.config.schema import Config, HardwareConfig
from bench.config.stages import longest_seq_len, num_micro_steps, stages_of, val_seq_len
from bench.data.course import BatchShape
from bench.data.loader import ValRows
from bench.data.shards import Shard
from bench.machine import lazy_dynamo
from bench.training import distributed
from models.base import LanguageModel
from models.stages import Timeline, check_window
from models.together import is_meant, with_roles

NEW_FACTS = ("frozen_steps", "ahead_weights", "end_ahead_weights", "untied")  # recorded of a portion if they are set
METHODS = {  # {setting of a stage: (the model's method for it, its description in refusals)}
    "window_tokens": ("set_window", "windows, set_window(window_tokens)"),
    "ahead_weights": ("set_ahead_weights", "loss of several tokens, that of LanguageModel.forward()"),
    "untied": ("set_untied", "embedding that parts from the head, set_untied(untied)"),
}
SDPA = {  # {value of hardware.sdpa: (the function that enables it, the one that says whether it is enabled)}
    "flash": (cuda.enable_flash_sdp, cuda.flash_sdp_enabled),
    "efficient": (cuda.enable_mem_efficient_sdp, cuda.mem_efficient_sdp_enabled),
    "cudnn": (cuda.enable_cudnn_sdp, cuda.cudnn_sdp_enabled),
    "math": (cuda.enable_math_sdp, cuda.math_sdp_enabled),
}
DTYPES: dict[str | None, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def choose_kernels(hardware: HardwareConfig) -> None:
    """Sets torch's kernels for this process as hardware asks; null keeps torch's default."""
    if hardware.device == "cpu" and not hardware.compile:  # runs on GPUs use torch unmodified
        lazy_dynamo.install()
        torch.set_deterministic_debug_mode("error" if hardware.deterministic else "default")
    else:
        torch.use_deterministic_algorithms(hardware.deterministic)  # imports the compiler, to set its flag too
    if hardware.tf32 is not None:
        torch.set_float32_matmul_precision("high" if hardware.tf32 else "highest")
    if hardware.sdpa is not None:
        for name, (enable, _) in SDPA.items():
            enable(name == hardware.sdpa)


def kernel_facts() -> dict[str, str | list[str]]:
    """Returns this process's settings for run.json["measured"], beside the backends that attention really used."""
    try:
        precision = torch.get_float32_matmul_precision()  # highest is float32, high TF32 on a GPU
    except RuntimeError:  # a model has set what is read here, and torch answers in one of the two ways only
        precision = {"tf32": "high", "bf16": "medium"}.get(cuda.matmul.fp32_precision, "highest")
    return {
        "float32_matmul_precision": precision,
        "sdpa_enabled": [name for name, (_, enabled) in SDPA.items() if enabled()],
    }


def build_model(config: Config, device: torch.device, eos_token: int | None) -> torch.nn.Module:
    """Builds the model, its weights drawn on the CPU from the seed.  eos_token precedes each document, or is None."""
    wanted = config.model
    assert wanted is not None and wanted.arch is not None, "a script has a model of its own"
    arch = wanted.arch
    model_class = user_code.load("model.arch", arch) if user_code.is_import_path(arch) else models.load(arch)
    takes_eos = "eos_token" in inspect.signature(model_class).parameters
    model = model_class(
        vocab_size=wanted.vocab_size,
        seq_len=longest_seq_len(config),
        num_layers=wanted.num_layers,
        num_heads=wanted.num_heads,
        width=wanted.width,
        **({"eos_token": eos_token} if takes_eos else {}),
        **({"residual_dtype": wanted.residual_dtype} if wanted.residual_dtype else {}),
        **(wanted.args or {}),
    )
    if hasattr(model, "eos_token"):
        model.eos_token = eos_token
    if wanted.activation_checkpointing:
        model.recomputes_blocks = True
    model.init_weights(torch.Generator().manual_seed(config.seed))
    _to_bfloat16(model, wanted.bfloat16_params or ())
    torch.manual_seed(config.seed)
    return model.to(device)


def _to_bfloat16(model: torch.nn.Module, patterns: Sequence[str]) -> None:
    """Rounds the parameters that match patterns to bfloat16.  Raises ValueError if a pattern matches none."""
    parameters = list(with_roles(model)) if patterns else ()
    for pattern in patterns:
        meant = [parameter for name, role, parameter in parameters if is_meant([pattern], name, role)]
        if not meant:
            roles = sorted({role for _, role, _ in parameters})
            raise ValueError(f"model.bfloat16_params={pattern}: no parameter of that name; it has {', '.join(roles)}")
        for parameter in meant:
            parameter.data = parameter.data.to(torch.bfloat16)


def autocast(config: Config, device_type: str) -> contextlib.AbstractContextManager[None]:
    """Returns the context of the run's forward passes for hardware.dtype."""
    dtype = DTYPES[config.hardware.dtype]
    return contextlib.nullcontext() if dtype is torch.float32 else torch.autocast(device_type, dtype=dtype)


def val_rows(config: Config, shards: Sequence[Shard], rank: int, world_size: int, device: torch.device) -> ValRows:
    """Returns this rank's rows of a validation."""
    seq_len, rank_tokens = val_seq_len(config), cast(int, config.hardware.micro_batch_seqs) * config.data.seq_len
    shape = (seq_len, max(1, rank_tokens // seq_len))
    return ValRows(shards, config.goal.val_tokens, *shape, rank, world_size, device)


def mean_nats(losses: Iterable[torch.Tensor], batch_tokens: int, device: torch.device) -> float:
    """Returns nats per token, the same on every rank, from the losses of this rank's batches of batch_tokens each.

    Sums in float64, so that dividing the batches among more ranks changes only the last digits of float32 losses.
    """
    nats_and_tokens = torch.zeros(2, dtype=torch.float64, device=device)
    for loss in losses:
        nats_and_tokens[0] += loss.double() * batch_tokens
        nats_and_tokens[1] += batch_tokens
    nats, num_tokens = distributed.all_sum(nats_and_tokens).tolist()
    return float(nats / num_tokens)


def timeline_of(config: Config, model: LanguageModel) -> Timeline:
    """Returns the run's Timeline.  Raises ValueError if stages set what the model lacks, or a window cuts a block."""
    stages, val_window_tokens = stages_of(config), config.goal.val_window_tokens
    for setting, (method, feature) in METHODS.items():
        # an overridden forward() does not support a loss of several tokens
        is_own = setting == "ahead_weights" and type(model).forward is not LanguageModel.forward
        for index, stage in enumerate(stages):
            if getattr(stage, setting) is not None and (is_own or not hasattr(model, method)):
                remedy = f"model.arch={config.model and config.model.arch} has no {feature}: use one that has"
                raise ValueError(f"stages[{index}].{setting}={getattr(stage, setting)}: {remedy}")
    window_block = getattr(model, "window_block", 1)
    check_window("goal.val_window_tokens", val_window_tokens, window_block)
    return Timeline(stages, config.goal.num_steps, window_block)


class StagedModel:
    """Sets the model to a step of the timeline: its window, the tokens of its loss, whether its embedding is untied."""

    def __init__(self, model: Any, reducer: Any, timeline: Timeline):
        self.model, self.reducer, self.timeline = model, reducer, timeline
        self._window_tokens: int | None = None
        self._untied = False
        self._ahead_weights: list[float] | None = None

    def at(self, step: int) -> None:
        """Sets the model for the given step; goal.num_steps is the end of the run."""
        self.set_window(self.timeline.window_after(step))
        untied = bool(self.timeline.at(step).stage.untied)
        if untied != self._untied:  # an untied embedding begins with the head's weights and optimizer state
            self.reducer.set_untied(untied, *self.model.set_untied(untied))
            self._untied = untied
        weights = self.timeline.ahead_weights(step)
        if weights != self._ahead_weights:
            self.model.set_ahead_weights(weights)
            self._ahead_weights = weights

    def set_window(self, window_tokens: int | None) -> None:
        """Sets the model's window; None is for a model that has none, or keeps its default."""
        if window_tokens != self._window_tokens:
            self.model.set_window(window_tokens)
            self._window_tokens = window_tokens


def batch_shapes(config: Config, timeline: Timeline) -> list[BatchShape]:
    """Returns the stages as the loader takes them."""
    shapes, before = [], 0
    for stage, end in zip(stages_of(config), timeline.ends, strict=True):
        num_steps = None if end == timeline.num_steps else end - before
        shape = cast(int, stage.batch_tokens), cast(int, stage.seq_len)  # set in a resolved config
        shapes.append(BatchShape(num_steps, *shape, num_micro_steps(config, stage)))
        before = end
    return shapes


def stage_facts(config: Config, timeline: Timeline, flops: list[tuple[int, int]]) -> list[dict[str, Any]]:
    """Returns run.json["measured"]["stages"], the facts of each portion of the run.

    flops has (FLOPs per token, the same without masked pairs) of each.  first_step counts from 1, as in step lines.
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
            **{name: getattr(portion.stage, name) for name in NEW_FACTS if getattr(portion.stage, name) is not None},
            "flops_per_token": all_pairs,
            "flops_per_token_causal": causal,
        }
        for portion, (all_pairs, causal) in zip(timeline.portions, flops, strict=True)
    ]
