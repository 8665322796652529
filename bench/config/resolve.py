"""Resolves a composed config: derives what was left to the machine, and refuses settings that contradict each other.

Every refusal is a ValueError that names the setting, its value and what to try. deviations_of() lists what a run
changes of the settings that its track fixes.

If hardware.micro_batch_seqs is left to the machine, the number of sequences that fit a GPU is estimated, not measured,
from what `./run.sh doctor --rehearse-gpu` counts on FakeTensors, compiled and in bfloat16, for gpt2, modern, simple,
r12, r26, r45 and r53. A layer keeps 37 to 43 bytes per token and feature for the backward pass. Logits are stored once
in bfloat16, 2 bytes each; r26 to r53, whose 8-bit product is outside inductor's kernels, take 3.2 to 3.7 in a step;
simple takes 10, because it has them twice in float32 as well. A validation keeps only the logits. Not compiled,
models/modern.py took 80 to 90 GiB for 64 sequences of 1,024 tokens. Weights, gradients and two moments in float32 are
16 bytes a parameter; a validation has no gradients, and only one rank has the momentum of a matrix that Muon updates.
"""

import re
from pathlib import Path

from bench.config import refusals, schema, typed, user_code
from bench.config import stages as resolved_stages
from bench.config.compose import track_values
from bench.config.refusals import BUDGETS, refuse
from bench.config.typed import leaves
from models import stages as run_stages

# models that have the setting; models/ladder/ has model.args.activations instead
WITH_RESIDUAL_DTYPE = ("gpt2", "modern", "windowed")
WITH_CHECKPOINTING = WITH_RESIDUAL_DTYPE  # they call their blocks through LanguageModel.through()
# fixed as well if a track fixes its target: the target's metric, and the budget to reach it
FINISH_LINE = (
    *("goal.metric", "goal.metric_unit", "goal.metric_direction", "goal.metric_pattern", "goal.target"),
    *(f"goal.{name}" for name in BUDGETS),
)
UNFIXED = ("data.vocab_size", "track.repeats")  # derived from the data; repeats change no run
LAYER_BYTES = 39.0  # bytes per token and feature that a layer keeps for the backward pass
OTHER_LAYER_BYTES = {"gpt2": 35.0}  # it keeps no normed queries and keys
TIED = ("gpt2",)  # models whose head is their embedding
STREAM_BYTES = 4  # bytes per token and feature that a layer keeps if it recomputes its activations
LOGITS_BYTES = (2.0, 2.0)  # bytes per token and logit, in a step and in a validation
OTHER_LOGITS_BYTES = {"simple": (10.0, 10.0), **dict.fromkeys((f"r{rung}" for rung in range(19, 54)), (3.0, 2.0))}
REFEREE_LOGITS_BYTES = 4.5  # bytes per token and logit of a row whose logits the referee computes, in float32
EAGER_TIMES = 3  # factor of activations without torch.compile
PARAMETER_BYTES = (16, 8)  # bytes per parameter, in a step and in a validation
OTHER_GIB = 0.6  # the CUDA context, NCCL's and the optimizer's buffers
USABLE_FRAC = 0.9  # the rest is lost to fragmentation in the allocator
UNKNOWN_GIB = 16.0  # assumed if the driver does not report the memory


def resolve(config: schema.Config, machine: schema.Machine, vocab_size: int) -> schema.Config:
    """Returns a resolved copy of config. vocab_size is that of the data. Raises ValueError if settings conflict."""
    config = schema.build(schema.Config, schema.to_dict(config))
    if (numbers := config.data.shard_numbers) is not None:  # 9-12 and 9,10,11,12 must have the same config_id
        config.data.shards = [str(number) for number in numbers]
        config.data.num_train_shards = None
    resolve_hardware(config.hardware, machine)
    if config.model is None or config.optim is None:
        _resolve_script(config, vocab_size)
    else:
        _resolve_model(config, config.model, vocab_size)
        _resolve_batch(config, machine.gpu_memory_gib)
        _resolve_budget(config)
        config.name = config.name or f"{user_code.short(config.model.arch)}-{user_code.short(config.optim.name)}"
    refusals.check(config)
    for stage in config.stages or ():  # a default that is given is the same config and must have the same id
        stage.untied = stage.untied or None
        stage.window_rounding = None if stage.window_rounding == "down" else stage.window_rounding
    return config


def _resolve_script(config: schema.Config, vocab_size: int) -> None:
    """Sets to None what a script decides itself, such as dtype, compilation and reduction."""
    config.data.vocab_size = vocab_size
    config.hardware.dtype = config.hardware.compile = config.hardware.micro_batch_seqs = None
    config.hardware.reducer = None
    if config.name is None:
        assert config.script is not None
        its = config.script
        path = Path(its.path or (its.module or "").replace(".", "/") or (its.command or [""])[0])
        folder = path.parent if its.root is None else Path(its.root)
        config.name = re.sub(r"[^A-Za-z0-9._-]+", "-", f"{folder.name}-{path.stem}").strip("-.") or "script"


def resolve_hardware(hardware: schema.HardwareConfig, machine: schema.Machine) -> None:
    """Derives in place what was left to the machine; other nodes are assumed to equal it. Raises ValueError."""
    if hardware.device == "auto":
        hardware.device = "cuda" if machine.num_gpus else "cpu"
    on_gpu = hardware.device == "cuda"
    if on_gpu and not machine.num_gpus:
        refuse("hardware.device", "cuda", "this machine shows no NVIDIA GPU: use hardware=cpu or hardware=auto")
    num_nodes = hardware.nodes or 1
    hardware.nodes = None if num_nodes == 1 else num_nodes  # a default that is given must not change the id
    if hardware.num_processes is None:
        hardware.num_processes = num_nodes * (machine.num_gpus if on_gpu else 1)
    if hardware.num_processes % num_nodes:
        refuse("hardware.num_processes", hardware.num_processes, f"as many on each of hardware.nodes={num_nodes}")
    if on_gpu and hardware.ranks_of_node > machine.num_gpus:
        machine_text = "each machine" if num_nodes > 1 else "this machine"
        remedy = f"{machine_text} has {machine.num_gpus} GPU(s), one process each"
        refuse("hardware.num_processes", hardware.num_processes, remedy)
    _check_hardware(hardware, on_gpu)
    if hardware.rendezvous is not None:
        typed.host_and_port(hardware.rendezvous)
    if hardware.num_threads is None:
        hardware.num_threads = max(1, machine.num_cpus // hardware.ranks_of_node)
    if hardware.dtype is None:
        hardware.dtype = "bfloat16" if on_gpu else "float32"
    if hardware.compile is None:
        hardware.compile = on_gpu
    if hardware.num_processes == 1:
        hardware.reducer = None  # nothing to reduce
    hardware.gc = None if hardware.gc == "freeze" else hardware.gc


def _check_hardware(hardware: schema.HardwareConfig, on_gpu: bool) -> None:
    if hardware.nodes is None and hardware.rendezvous is not None:
        refuse("hardware.rendezvous", hardware.rendezvous, "it is where several nodes meet: give hardware.nodes=NUMBER")
    if not on_gpu and hardware.tf32 is not None:
        refuse("hardware.tf32", hardware.tf32, "a CPU has no TF32: leave it null")
    if not on_gpu and hardware.sdpa in ("efficient", "cudnn"):
        refuse("hardware.sdpa", hardware.sdpa, "a CPU has flash and math")
    every = hardware.gc_every_steps
    if hardware.gc == "manual" and every is None:
        refuse("hardware.gc_every_steps", every, "hardware.gc=manual needs it: give hardware.gc_every_steps=NUMBER")
    if hardware.gc != "manual" and every is not None:
        refuse(
            "hardware.gc_every_steps", every, f"it has no effect with hardware.gc={hardware.gc or 'freeze'}: remove it"
        )


def _resolve_model(config: schema.Config, model: schema.ModelConfig, vocab_size: int) -> None:
    if not user_code.is_import_path(model.arch) and model.width % (2 * model.num_heads):
        refuse("model.width", model.width, f"it must be a multiple of 2 * num_heads = {2 * model.num_heads}")
    if model.residual_dtype is not None and model.arch not in WITH_RESIDUAL_DTYPE:
        remedy = f"{user_code.short(model.arch)} chooses its dtypes itself: leave it null, and see model.args"
        refuse("model.residual_dtype", model.residual_dtype, remedy)
    for name in ("residual_dtype", "bfloat16_params"):
        if getattr(model, name) not in (None, "float32") and config.hardware.dtype != "bfloat16":
            remedy = f"hardware.dtype is {config.hardware.dtype}: use hardware.dtype=bfloat16, or leave it null"
            refuse(f"model.{name}", getattr(model, name), remedy)
    model.activation_checkpointing = model.activation_checkpointing or None
    if model.activation_checkpointing and model.arch not in WITH_CHECKPOINTING:
        remedy = f"{user_code.short(model.arch)} does not know it: {', '.join(WITH_CHECKPOINTING)} do; in a class of "
        remedy += "your own call torch.utils.checkpoint.checkpoint, with a setting in model.args"
        refuse("model.activation_checkpointing", "true", remedy)
    config.data.bos_aligned = config.data.bos_aligned or None  # a default that is given must not change the id
    config.data.vocab_size = vocab_size
    if model.vocab_size is None:
        model.vocab_size = -(-vocab_size // 64) * 64  # 50257 -> 50304
    if model.vocab_size < vocab_size:
        remedy = f"the data uses tokens up to {vocab_size - 1}: use {vocab_size} or more"
        refuse("model.vocab_size", model.vocab_size, remedy)


def _resolve_batch(config: schema.Config, gpu_memory_gib: float | None) -> None:
    """Sets micro_batch_seqs: batch_tokens = world_size * num_micro_steps * micro_batch_seqs * seq_len, exactly."""
    data, hardware, num_processes = config.data, config.hardware, config.hardware.num_processes
    assert num_processes is not None
    for name, tokens, seq_len in (
        ("data.batch_tokens", data.batch_tokens, data.seq_len),
        ("goal.val_tokens", config.goal.val_tokens, resolved_stages.val_seq_len(config)),
    ):
        step_tokens = seq_len * num_processes
        if tokens % step_tokens:
            near = max(1, round(tokens / step_tokens)) * step_tokens
            product = f"{seq_len} * {num_processes} = {step_tokens}"
            refuse(name, tokens, f"it must be a multiple of seq_len * num_processes = {product}; try {name}={near}")
    asked_seqs = hardware.micro_batch_seqs

    def at_once(seq_len: int, rank_seqs: int) -> int:
        if asked_seqs is not None:
            return max(1, asked_seqs * data.seq_len // seq_len)
        if hardware.device == "cuda":
            return largest_micro_batch(config, seq_len, rank_seqs, gpu_memory_gib)
        return rank_seqs

    def largest_divisor(rank_seqs: int, limit: int) -> int:
        return next(seqs for seqs in range(min(limit, rank_seqs), 0, -1) if rank_seqs % seqs == 0)

    if hardware.device == "cuda" and asked_seqs is None and gpu_memory_gib is not None:
        _refuse_what_never_fits(config, gpu_memory_gib)
    if config.stages:
        run_stages.ends_of(config.stages, config.goal.num_steps)
    config.stages = config.stages or None
    for index, stage in enumerate(config.stages or ()):
        stage.batch_tokens = stage.batch_tokens or data.batch_tokens
        stage.seq_len = stage.seq_len or data.seq_len
        row_tokens = stage.seq_len * num_processes
        if stage.batch_tokens % row_tokens:
            near = max(1, round(stage.batch_tokens / row_tokens)) * row_tokens
            product = f"its seq_len * num_processes = {stage.seq_len} * {num_processes} = {row_tokens}"
            refuse(f"stages[{index}].batch_tokens", stage.batch_tokens, f"use a multiple of {product}; try {near}")
        rank_seqs = stage.batch_tokens // row_tokens
        limit = stage.micro_batch_seqs or at_once(stage.seq_len, rank_seqs)
        stage.micro_batch_seqs = largest_divisor(rank_seqs, limit)
    rank_seqs = data.batch_tokens // (data.seq_len * num_processes)
    hardware.micro_batch_seqs = largest_divisor(rank_seqs, at_once(data.seq_len, rank_seqs))


def largest_micro_batch(config: schema.Config, seq_len: int, rank_seqs: int, memory_gib: float | None) -> int:
    """Returns how many of a rank's rank_seqs sequences to compute at once: all if they fit, else a power of two.

    The power of two divides rank_seqs. memory_gib is the smallest GPU's memory, None if unknown. Returns at least 1
    even if none should fit; resolve() refuses such sequences.
    """
    fixed_gib, seq_gib = estimated_gib(config, seq_len)
    room = (USABLE_FRAC * (memory_gib or UNKNOWN_GIB) - fixed_gib) / seq_gib
    if rank_seqs <= room:
        return rank_seqs
    fits = [2**power for power in range(rank_seqs.bit_length()) if rank_seqs % 2**power == 0 and 2**power <= room]
    return max(fits, default=1)


def estimated_gib(config: schema.Config, seq_len: int, trains: bool = True) -> tuple[float, float]:
    """Returns (GiB that a rank needs at any micro-batch, GiB that each of its sequences of seq_len tokens adds).

    trains: True estimates a training step, False a validation.
    """
    model, hardware = config.model, config.hardware
    assert model is not None and model.vocab_size is not None  # not a script, and resolved
    num_features, layer_bytes = model.num_layers * model.width, OTHER_LAYER_BYTES.get(model.arch, LAYER_BYTES)
    layers_bytes = layer_bytes * num_features if trains else 0.0
    if trains and model.activation_checkpointing:  # one layer's activations, and the float32 stream before each layer
        layers_bytes = layer_bytes * model.width + STREAM_BYTES * num_features
    part = 0 if trains else 1
    token_bytes = layers_bytes + OTHER_LOGITS_BYTES.get(model.arch, LOGITS_BYTES)[part] * model.vocab_size
    token_bytes *= (1 if hardware.compile else EAGER_TIMES) * (2 if hardware.dtype == "float32" else 1)
    num_params = 12 * num_features * model.width + (2 - (model.arch in TIED)) * model.vocab_size * model.width
    # 3.0 and 0.44 GiB in a step, for 124M parameters and 1,024 tokens
    return OTHER_GIB + PARAMETER_BYTES[part] * num_params / 2**30, seq_len * token_bytes / 2**30


def _refuse_what_never_fits(config: schema.Config, memory_gib: float) -> None:
    """Raises ValueError if a single sequence should not fit the smallest GPU. Skips models of the user's own."""
    model, data = config.model, config.data
    assert model is not None  # not a script
    if user_code.is_import_path(model.arch):
        return
    val_seq_len = resolved_stages.val_seq_len(config)
    lengths = {f"stages[{number}].seq_len": stage.seq_len for number, stage in enumerate(config.stages or ())}
    needs = [
        (estimated_gib(config, seq_len or data.seq_len), where, seq_len or data.seq_len)
        for where, seq_len in (lengths or {"data.seq_len": data.seq_len}).items()
    ]
    fixed_gib, val_seq_gib = estimated_gib(config, val_seq_len, trains=False)
    val_seq_gib = max(val_seq_gib, val_seq_len * REFEREE_LOGITS_BYTES * (model.vocab_size or 0) / 2**30)
    needs.append(((fixed_gib, val_seq_gib), "goal.val_seq_len", val_seq_len))
    (fixed_gib, seq_gib), where, seq_len = max(needs, key=lambda need: sum(need[0]))
    usable_gib = USABLE_FRAC * memory_gib
    if fixed_gib + seq_gib <= usable_gib:
        return
    fitting = int((usable_gib - fixed_gib) / seq_gib * seq_len) // 128 * 128
    remedies = [f"sequences of {fitting} tokens or fewer"] if fitting > 0 else ["a smaller model"]
    is_step = where != "goal.val_seq_len"
    if is_step and not model.activation_checkpointing and model.arch in WITH_CHECKPOINTING:
        remedies.append("model.activation_checkpointing=true")
    if not config.hardware.compile:
        remedies.append("hardware.compile=true")
    if config.hardware.dtype == "float32":
        remedies.append("hardware.dtype=bfloat16")
    refuse(
        where,
        seq_len,
        f"one sequence needs an estimated {fixed_gib + seq_gib:.1f} GiB ({fixed_gib:.1f} of them for weights, "
        f"gradients and the optimizer's state), and the smallest GPU has {memory_gib:.1f} GiB, {usable_gib:.1f} of "
        f"them usable: try {', '.join(remedies)}, or a GPU with more memory; hardware.micro_batch_seqs=1 starts it "
        "without this estimate",
    )


def _resolve_budget(config: schema.Config) -> None:
    """Converts a token budget into a number of steps, which the schedule needs from the start."""
    goal, batch_tokens = config.goal, config.data.batch_tokens
    if goal.budget and config.stages:
        unit = next(name for name in BUDGETS if getattr(goal, name) is not None)
        remedy = "stages are parts of a run of goal.num_steps: give that, without a budget"
        refuse(f"goal.{unit}", getattr(goal, unit), remedy)
    if goal.token_budget is not None:
        if goal.token_budget < batch_tokens:
            why = f"a step has {batch_tokens} tokens (data.batch_tokens)"
            refuse("goal.token_budget", goal.token_budget, f"{why}: give as many or more, or smaller steps")
        goal.num_steps = goal.token_budget // batch_tokens


def deviations_of(config: schema.Config) -> list[str]:
    """Returns what a run changes of the settings that its track fixes, as "key: value instead of value"."""
    track = config.track
    if not track.fixed:
        return []
    rules, deviations = dict(leaves(track_values(track.name))), []
    has_finish_line = any(_is_in("goal.target_val_loss", fixed) for fixed in track.fixed)
    fixed_keys = [*track.fixed, "track", *(FINISH_LINE if has_finish_line else ())]
    for key, value in leaves(schema.to_dict(config)):
        is_fixed = any(_is_in(key, fixed) for fixed in fixed_keys)
        if is_fixed and rules.get(key) != value and key not in UNFIXED:
            deviations.append(f"{key}: {value} instead of {rules.get(key)}")
    for key, change in resolved_stages.changed(config).items():
        if any(_is_in(key, fixed) or _is_in(fixed, key) for fixed in track.fixed):
            deviations.append(f"{change} in the place of {key}, which the track fixes")
    return deviations


def _is_in(key: str, group: str) -> bool:
    return f"{key}.".startswith(f"{group}.")
