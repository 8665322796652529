"""A composed config -> one that can run: what was left to the machine derived, what cannot be together refused.

Every refusal is a ValueError that names the setting, its value and what to try.
"""

import re
from pathlib import Path

from bench.config import micro_batch, schema
from bench.user_code import classes

WITH_RESIDUAL_DTYPE = ("gpt2", "modern")  # what takes the setting; models/ladder/ has model.args.activations


def resolve(config: schema.Config, machine: schema.Machine, vocab_size: int) -> schema.Config:
    """A copy of config with every "derive it" derived.  vocab_size is the data's.  Raises ValueError."""
    config = schema.build(schema.Config, schema.to_dict(config))
    resolve_hardware(config.hardware, machine)
    if config.script is not None:
        _resolve_script(config, vocab_size)
        return config
    _resolve_model(config, vocab_size)
    _resolve_batch(config, machine.gpu_memory_gib)
    _check_goal(config)
    if config.name is None:
        config.name = f"{classes.short(config.model.arch)}-{classes.short(config.optim.name)}"
    return config


def _resolve_script(config, vocab_size):
    """Of what a script decides itself, dtype, compilation and reduction among it, nothing is known."""
    config.data.vocab_size = vocab_size
    config.hardware.dtype = config.hardware.compile = config.hardware.micro_batch_seqs = None
    config.hardware.reducer = None
    if config.name is None:
        path = Path(config.script.path)
        config.name = re.sub(r"[^A-Za-z0-9._-]+", "-", f"{path.parent.name}-{path.stem}").strip("-.") or "script"


def _refuse(what, value, remedy):
    raise ValueError(f"{what}={'null' if value is None else value}: {remedy}")


def resolve_hardware(hardware: schema.HardwareConfig, machine: schema.Machine) -> None:
    """In place: what was left to the machine, derived.  Raises ValueError."""
    if hardware.device == "auto":
        hardware.device = "cuda" if machine.num_gpus else "cpu"
    on_gpu = hardware.device == "cuda"
    if on_gpu and not machine.num_gpus:
        _refuse("hardware.device", "cuda", "this machine shows no NVIDIA GPU: use hardware=cpu or hardware=auto")
    if hardware.num_processes is None:
        hardware.num_processes = machine.num_gpus if on_gpu else 1
    if on_gpu and hardware.num_processes > machine.num_gpus:
        remedy = f"this machine has {machine.num_gpus} GPU(s), one process each"
        _refuse("hardware.num_processes", hardware.num_processes, remedy)
    if hardware.num_threads is None:
        hardware.num_threads = max(1, machine.num_cpus // hardware.num_processes)
    if hardware.dtype is None:
        hardware.dtype = "bfloat16" if on_gpu else "float32"
    if hardware.compile is None:
        hardware.compile = on_gpu
    if not on_gpu and hardware.tf32 is not None:
        _refuse("hardware.tf32", hardware.tf32, "a CPU has no TF32: leave it null")
    if not on_gpu and hardware.sdpa in ("efficient", "cudnn"):
        _refuse("hardware.sdpa", hardware.sdpa, "a CPU has flash and math")
    if hardware.num_processes == 1:
        hardware.reducer = None  # nothing to reduce: one config with one id, whatever the machine of many is to do
    if hardware.gc == "freeze":
        hardware.gc = None  # given or not, the default is one config with one id
    if hardware.gc == "manual" and hardware.gc_every_steps is None:
        remedy = "hardware.gc=manual needs it: give hardware.gc_every_steps=NUMBER"
        _refuse("hardware.gc_every_steps", None, remedy)
    if hardware.gc != "manual" and hardware.gc_every_steps is not None:
        remedy = f"it has no effect with hardware.gc={hardware.gc or 'freeze'}: remove it"
        _refuse("hardware.gc_every_steps", hardware.gc_every_steps, remedy)


def _resolve_batch(config, gpu_memory_gib):
    """batch_tokens = world_size * num_micro_steps * micro_batch_seqs * seq_len, exactly."""
    data, hardware = config.data, config.hardware
    step_tokens = data.seq_len * hardware.num_processes
    for name, tokens in (("data.batch_tokens", data.batch_tokens), ("goal.val_tokens", config.goal.val_tokens)):
        if tokens % step_tokens:
            near = max(1, round(tokens / step_tokens)) * step_tokens
            product = f"{data.seq_len} * {hardware.num_processes} = {step_tokens}"
            _refuse(name, tokens, f"it must be a multiple of seq_len * num_processes = {product}; try {name}={near}")
    rank_seqs = data.batch_tokens // step_tokens
    if hardware.micro_batch_seqs is None and hardware.device == "cuda":
        hardware.micro_batch_seqs = micro_batch.largest(config, rank_seqs, gpu_memory_gib)
    limit = min(hardware.micro_batch_seqs or rank_seqs, rank_seqs)
    hardware.micro_batch_seqs = next(seqs for seqs in range(limit, 0, -1) if rank_seqs % seqs == 0)


def _resolve_model(config, vocab_size):
    model = config.model
    if not classes.is_import_path(model.arch) and model.width % (2 * model.num_heads):
        _refuse("model.width", model.width, f"it must be a multiple of 2 * num_heads = {2 * model.num_heads}")
    if model.residual_dtype is not None and model.arch not in WITH_RESIDUAL_DTYPE:
        remedy = f"{classes.short(model.arch)} chooses its dtypes itself: leave it null, and see model.args"
        _refuse("model.residual_dtype", model.residual_dtype, remedy)
    if model.residual_dtype == "bfloat16" and config.hardware.dtype != "bfloat16":
        remedy = f"hardware.dtype is {config.hardware.dtype}: use hardware.dtype=bfloat16, or leave it null"
        _refuse("model.residual_dtype", model.residual_dtype, remedy)
    config.data.vocab_size = vocab_size
    if model.vocab_size is None:
        model.vocab_size = -(-vocab_size // 64) * 64  # e.g. 50257 -> 50304
    if model.vocab_size < vocab_size:
        remedy = f"the data uses tokens up to {vocab_size - 1}: use {vocab_size} or more"
        _refuse("model.vocab_size", model.vocab_size, remedy)


def _check_goal(config):
    goal, source = config.goal, config.data.source
    if goal.target_val_loss is not None and goal.target_gap_nats is not None:
        remedy = f"target_val_loss={goal.target_val_loss} is set too: keep one of them"
        _refuse("goal.target_gap_nats", goal.target_gap_nats, remedy)
    if goal.target_gap_nats is not None and source != "markov":
        remedy = f"only data=markov has a known floor, this is data={source}"
        _refuse("goal.target_gap_nats", goal.target_gap_nats, remedy)
    if goal.stop_at_target and goal.target_val_loss is None and goal.target_gap_nats is None:
        _refuse("goal.stop_at_target", True, "there is no target: set goal.target_val_loss or goal.target_gap_nats")
