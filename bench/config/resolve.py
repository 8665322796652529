"""A composed config -> one that can run: what was left to the machine derived, what cannot be together refused.

Every refusal is a ValueError that names the setting, its value and what to try.  Last, what a run changes of the things
that its track fixes.

Where hardware.micro_batch_seqs is left to the machine, how many sequences fit a GPU at once is estimated, not measured:
the saved activations of models/modern.py at 124M, 64 sequences of 1,024 tokens, bfloat16 and compiled, were counted on
fake tensors as 30.4 GiB (the partitioner's cut), and the logits' gradient as 6.1 GiB: 0.6 GiB a sequence, of which the
logits are a third.  Not compiled it was 80 to 90 GiB.  Weights, gradients and two moments in float32 are 16 bytes a
parameter.
"""

import re
from pathlib import Path
from typing import Any, NoReturn

from bench.config import schema, stages, typed, user_code, windows
from bench.config.compose import track_values
from bench.config.typed import leaves

# what takes the setting; models/ladder/ has model.args.activations
WITH_RESIDUAL_DTYPE = ("gpt2", "modern", "windowed")
WITH_CHECKPOINTING = WITH_RESIDUAL_DTYPE  # that call their blocks through LanguageModel.through()
UNFIXED = ("data.vocab_size", "track.repeats")  # derived from the data; how often a run is made changes no run
BLOCKS_GIB = 0.4  # a sequence of 1,024 tokens through 12 layers of width 768
LOGITS_GIB = 0.2  # a sequence of 1,024 tokens, with 50,304 logits each
STREAM_GIB = 1024 * 4 / 2**30  # a feature of the stream, of a sequence of 1,024 tokens
PARAMETER_BYTES = 16
OTHER_GIB = 0.6  # the CUDA context, NCCL's and the optimizer's buffers
USABLE_FRAC = 0.9  # the allocator's fragments and validation take the rest
UNKNOWN_GIB = 16.0  # where the driver does not say


def resolve(config: schema.Config, machine: schema.Machine, vocab_size: int) -> schema.Config:
    """A copy of config with every "derive it" derived.  vocab_size is the data's.  Raises ValueError."""
    config = schema.build(schema.Config, schema.to_dict(config))
    if (numbers := config.data.shard_numbers) is not None:  # 9-12 or 9,10,11,12: one config with one id
        config.data.shards = [str(number) for number in numbers]
        config.data.num_train_shards = None
    resolve_hardware(config.hardware, machine)
    assert config.hardware.num_processes is not None
    windows.check_ranks(config.instruments, config.hardware.num_processes)
    if config.model is None or config.optim is None:
        _resolve_script(config, vocab_size)
    else:
        _resolve_model(config, config.model, vocab_size)
        _resolve_batch(config, machine.gpu_memory_gib)
        _check_goal(config)
        config.name = config.name or f"{user_code.short(config.model.arch)}-{user_code.short(config.optim.name)}"
    return config


def _resolve_script(config: schema.Config, vocab_size: int) -> None:
    """Of what a script decides itself, dtype, compilation and reduction among it, nothing is known."""
    config.data.vocab_size = vocab_size
    config.hardware.dtype = config.hardware.compile = config.hardware.micro_batch_seqs = None
    config.hardware.reducer = None
    if config.name is None:
        assert config.script is not None and config.script.path is not None
        path = Path(config.script.path)
        config.name = re.sub(r"[^A-Za-z0-9._-]+", "-", f"{path.parent.name}-{path.stem}").strip("-.") or "script"


def _refuse(what: str, value: Any, remedy: str) -> NoReturn:
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


def _resolve_ranks(hardware: schema.HardwareConfig, machine: schema.Machine, on_gpu: bool) -> None:
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
        typed.host_and_port(hardware.rendezvous)


def _resolve_model(config: schema.Config, model: schema.ModelConfig, vocab_size: int) -> None:
    if not user_code.is_import_path(model.arch) and model.width % (2 * model.num_heads):
        _refuse("model.width", model.width, f"it must be a multiple of 2 * num_heads = {2 * model.num_heads}")
    if model.residual_dtype is not None and model.arch not in WITH_RESIDUAL_DTYPE:
        remedy = f"{user_code.short(model.arch)} chooses its dtypes itself: leave it null, and see model.args"
        _refuse("model.residual_dtype", model.residual_dtype, remedy)
    for name in ("residual_dtype", "bfloat16_params"):
        if getattr(model, name) not in (None, "float32") and config.hardware.dtype != "bfloat16":
            remedy = f"hardware.dtype is {config.hardware.dtype}: use hardware.dtype=bfloat16, or leave it null"
            _refuse(f"model.{name}", getattr(model, name), remedy)
    model.activation_checkpointing = model.activation_checkpointing or None
    if model.activation_checkpointing and model.arch not in WITH_CHECKPOINTING:
        remedy = f"{user_code.short(model.arch)} does not know it: {', '.join(WITH_CHECKPOINTING)} do; in a class of "
        remedy += "your own call torch.utils.checkpoint.checkpoint, with a setting in model.args"
        _refuse("model.activation_checkpointing", "true", remedy)
    config.data.bos_aligned = config.data.bos_aligned or None  # given or not, the default is one config with one id
    config.data.vocab_size = vocab_size
    if model.vocab_size is None:
        model.vocab_size = -(-vocab_size // 64) * 64  # e.g. 50257 -> 50304
    if model.vocab_size < vocab_size:
        remedy = f"the data uses tokens up to {vocab_size - 1}: use {vocab_size} or more"
        _refuse("model.vocab_size", model.vocab_size, remedy)


def _resolve_batch(config: schema.Config, gpu_memory_gib: float | None) -> None:
    """batch_tokens = world_size * num_micro_steps * micro_batch_seqs * seq_len, exactly."""
    data, hardware, num_processes = config.data, config.hardware, config.hardware.num_processes
    assert num_processes is not None
    for name, tokens, seq_len in (
        ("data.batch_tokens", data.batch_tokens, data.seq_len),
        ("goal.val_tokens", config.goal.val_tokens, stages.val_seq_len(config)),
    ):
        step_tokens = seq_len * num_processes
        if tokens % step_tokens:
            near = max(1, round(tokens / step_tokens)) * step_tokens
            product = f"{seq_len} * {num_processes} = {step_tokens}"
            _refuse(name, tokens, f"it must be a multiple of seq_len * num_processes = {product}; try {name}={near}")
    asked_seqs = hardware.micro_batch_seqs

    def at_once(seq_len: int, rank_seqs: int) -> int:
        if asked_seqs is not None:
            return max(1, asked_seqs * data.seq_len // seq_len)
        if hardware.device == "cuda":
            return largest_micro_batch(config, seq_len, rank_seqs, gpu_memory_gib)
        return rank_seqs

    stages.resolve(config, at_once)
    rank_seqs = data.batch_tokens // (data.seq_len * num_processes)
    limit = min(at_once(data.seq_len, rank_seqs), rank_seqs)
    hardware.micro_batch_seqs = next(seqs for seqs in range(limit, 0, -1) if rank_seqs % seqs == 0)


def largest_micro_batch(config: schema.Config, seq_len: int, rank_seqs: int, memory_gib: float | None) -> int:
    """Sequences of seq_len tokens at once, of a rank's rank_seqs: all if they fit, else a power of two that divides.

    memory_gib: of the smallest GPU, None where it is unknown.  At least 1, also where the estimate says that none fits.
    """
    model, hardware = config.model, config.hardware
    assert model is not None and model.vocab_size is not None  # of no script, and resolved
    num_vocab = model.vocab_size
    blocks, logits = model.num_layers * model.width / (12 * 768), num_vocab / 50304  # against the counted model's
    kept = blocks
    if model.activation_checkpointing:  # one block at a time, and the float32 stream before each
        kept = blocks / model.num_layers + model.num_layers * model.width * STREAM_GIB / BLOCKS_GIB
    seq_gib = seq_len / 1024 * (BLOCKS_GIB * kept + LOGITS_GIB * logits)
    seq_gib *= (1 if hardware.compile else 2) * (2 if hardware.dtype == "float32" else 1)
    num_params = 12 * model.num_layers * model.width**2 + 2 * num_vocab * model.width
    fixed_gib = OTHER_GIB + PARAMETER_BYTES * num_params / 2**30  # 3.0 at 124M
    room = (USABLE_FRAC * (memory_gib or UNKNOWN_GIB) - fixed_gib) / seq_gib
    if rank_seqs <= room:
        return rank_seqs
    fits = [2**power for power in range(rank_seqs.bit_length()) if rank_seqs % 2**power == 0 and 2**power <= room]
    return max(fits, default=1)


def _check_goal(config: schema.Config) -> None:
    goal, source = config.goal, config.data.source
    if goal.target_val_loss is not None and goal.target_gap_nats is not None:
        remedy = f"target_val_loss={goal.target_val_loss} is set too: keep one of them"
        _refuse("goal.target_gap_nats", goal.target_gap_nats, remedy)
    if goal.target_gap_nats is not None and source != "markov":
        remedy = f"only data=markov has a known floor, this is data={source}"
        _refuse("goal.target_gap_nats", goal.target_gap_nats, remedy)
    if goal.stop_at_target and goal.target_val_loss is None and goal.target_gap_nats is None:
        _refuse("goal.stop_at_target", True, "there is no target: set goal.target_val_loss or goal.target_gap_nats")


def deviations_of(config: schema.Config) -> list[str]:
    """What a run changes of the things its track fixes, as 'key: value instead of value'."""
    track = config.track
    if not track.fixed:
        return []
    rules, deviations = dict(leaves(track_values(track.name))), []
    for key, value in leaves(schema.to_dict(config)):
        is_fixed = any(_is_in(key, fixed) for fixed in [*track.fixed, "track"])
        if is_fixed and rules.get(key) != value and key not in UNFIXED:
            deviations.append(f"{key}: {value} instead of {rules.get(key)}")
    for key, words in stages.changed(config).items():
        if any(_is_in(key, fixed) or _is_in(fixed, key) for fixed in track.fixed):
            deviations.append(f"{words} in the place of {key}, which the track fixes")
    return deviations


def _is_in(key: str, group: str) -> bool:
    return f"{key}.".startswith(f"{group}.")
