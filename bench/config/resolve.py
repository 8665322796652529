"""A composed config -> one that can run: what was left to the machine derived, what cannot be together refused.

Every refusal is a ValueError that names the setting, its value and what to try.
"""

import re
from pathlib import Path

from bench.config import micro_batch, ranges, schema, stages
from bench.config.user_code import classes

# what takes the setting; models/ladder/ has model.args.activations
WITH_RESIDUAL_DTYPE = ("gpt2", "modern", "windowed")
WITH_CHECKPOINTING = WITH_RESIDUAL_DTYPE  # that call their blocks through LanguageModel.through()


def resolve(config: schema.Config, machine: schema.Machine, vocab_size: int) -> schema.Config:
    """A copy of config with every "derive it" derived.  vocab_size is the data's.  Raises ValueError."""
    config = schema.build(schema.Config, schema.to_dict(config))
    if config.data.shards is not None:  # 9-12 or 9,10,11,12: one config with one id
        config.data.shards = [str(number) for number in config.data.shard_numbers]
        config.data.num_train_shards = None
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
    _resolve_ranks(hardware, machine, on_gpu)
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


def _resolve_ranks(hardware, machine, on_gpu):
    """machine is each of the nodes: they are alike."""
    if hardware.nodes == 1:
        hardware.nodes = None  # given or not, one node is one config with one id
    num_nodes = hardware.nodes or 1
    if hardware.num_processes is None:
        hardware.num_processes = num_nodes * (machine.num_gpus if on_gpu else 1)
    if hardware.num_processes % num_nodes:
        _refuse("hardware.num_processes", hardware.num_processes, f"as many on each of hardware.nodes={num_nodes}")
    of_node = hardware.num_processes // num_nodes
    if on_gpu and of_node > machine.num_gpus:
        each = "each machine" if num_nodes > 1 else "this machine"
        remedy = f"{each} has {machine.num_gpus} GPU(s), one process each"
        _refuse("hardware.num_processes", hardware.num_processes, remedy)
    if hardware.num_threads is None:
        hardware.num_threads = max(1, machine.num_cpus // of_node)
    if num_nodes == 1 and hardware.rendezvous is not None:
        remedy = "it is where several nodes meet: give hardware.nodes=NUMBER"
        _refuse("hardware.rendezvous", hardware.rendezvous, remedy)
    if hardware.rendezvous is not None:
        ranges.host_and_port(hardware.rendezvous)


def _resolve_batch(config, gpu_memory_gib):
    """batch_tokens = world_size * num_micro_steps * micro_batch_seqs * seq_len, exactly."""
    data, hardware = config.data, config.hardware
    for name, tokens, seq_len in (
        ("data.batch_tokens", data.batch_tokens, data.seq_len),
        ("goal.val_tokens", config.goal.val_tokens, stages.val_seq_len(config)),
    ):
        step_tokens = seq_len * hardware.num_processes
        if tokens % step_tokens:
            near = max(1, round(tokens / step_tokens)) * step_tokens
            product = f"{seq_len} * {hardware.num_processes} = {step_tokens}"
            _refuse(name, tokens, f"it must be a multiple of seq_len * num_processes = {product}; try {name}={near}")
    asked_seqs = hardware.micro_batch_seqs

    def at_once(seq_len, rank_seqs):
        if asked_seqs is not None:
            return max(1, asked_seqs * data.seq_len // seq_len)
        if hardware.device == "cuda":
            return micro_batch.largest(config, seq_len, rank_seqs, gpu_memory_gib)
        return rank_seqs

    stages.resolve(config, at_once)
    rank_seqs = data.batch_tokens // (data.seq_len * hardware.num_processes)
    limit = min(at_once(data.seq_len, rank_seqs), rank_seqs)
    hardware.micro_batch_seqs = next(seqs for seqs in range(limit, 0, -1) if rank_seqs % seqs == 0)


def _resolve_model(config, vocab_size):
    model = config.model
    if not classes.is_import_path(model.arch) and model.width % (2 * model.num_heads):
        _refuse("model.width", model.width, f"it must be a multiple of 2 * num_heads = {2 * model.num_heads}")
    if model.residual_dtype is not None and model.arch not in WITH_RESIDUAL_DTYPE:
        remedy = f"{classes.short(model.arch)} chooses its dtypes itself: leave it null, and see model.args"
        _refuse("model.residual_dtype", model.residual_dtype, remedy)
    for name in ("residual_dtype", "bfloat16_params"):
        if getattr(model, name) not in (None, "float32") and config.hardware.dtype != "bfloat16":
            remedy = f"hardware.dtype is {config.hardware.dtype}: use hardware.dtype=bfloat16, or leave it null"
            _refuse(f"model.{name}", getattr(model, name), remedy)
    model.activation_checkpointing = model.activation_checkpointing or None
    if model.activation_checkpointing and model.arch not in WITH_CHECKPOINTING:
        remedy = f"{classes.short(model.arch)} does not know it: {', '.join(WITH_CHECKPOINTING)} do; in a class of "
        remedy += "your own call torch.utils.checkpoint.checkpoint, with a setting in model.args"
        _refuse("model.activation_checkpointing", "true", remedy)
    config.data.bos_aligned = config.data.bos_aligned or None  # given or not, the default is one config with one id
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
