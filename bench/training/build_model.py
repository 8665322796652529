"""config.model -> the model on its device, with the same weights on every rank."""

import inspect

import torch

import models
from bench.config import user_code
from bench.config.schema import Config
from bench.config.stages import longest_seq_len
from models.roles import is_meant, with_roles


def build_model(config: Config, device: torch.device, eos_token: int | None) -> torch.nn.Module:
    """Drawn on the CPU from the run's seed.  eos_token: the token before each document, if the data have one."""
    arch = config.model.arch
    model_class = user_code.load("model.arch", arch) if user_code.is_import_path(arch) else models.load(arch)
    takes_eos = "eos_token" in inspect.signature(model_class.__init__).parameters
    model = model_class(
        vocab_size=config.model.vocab_size,
        seq_len=longest_seq_len(config),
        num_layers=config.model.num_layers,
        num_heads=config.model.num_heads,
        width=config.model.width,
        **({"eos_token": eos_token} if takes_eos else {}),
        **({"residual_dtype": config.model.residual_dtype} if config.model.residual_dtype else {}),
        **(config.model.args or {}),
    )
    if hasattr(model, "eos_token"):
        model.eos_token = eos_token
    if config.model.activation_checkpointing:
        model.recomputes_blocks = True
    model.init_weights(torch.Generator().manual_seed(config.seed))
    _to_bfloat16(model, config.model.bfloat16_params or ())
    torch.manual_seed(config.seed)
    return model.to(device)


def _to_bfloat16(model, patterns):
    """Those parameters, drawn in float32 and rounded.  ValueError: one of patterns means none."""
    parameters = list(with_roles(model)) if patterns else ()
    for pattern in patterns:
        meant = [parameter for name, role, parameter in parameters if is_meant([pattern], name, role)]
        if not meant:
            roles = sorted({role for _, role, _ in parameters})
            raise ValueError(f"model.bfloat16_params={pattern}: no parameter of that name; it has {', '.join(roles)}")
        for parameter in meant:
            parameter.data = parameter.data.to(torch.bfloat16)
