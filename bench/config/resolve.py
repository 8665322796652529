"""A composed config -> one that can be raced: what was left to the machine derived, what cannot be refused.

Every refusal is a ValueError that names the setting, its value and what to try.
"""

from bench.config import schema


def resolve(config, machine, vocab_size):
    """A copy of config with every "derive it" derived.  vocab_size is the data's.  Raises ValueError, all checks made."""
    config = schema.build(schema.Config, schema.to_dict(config))
    resolve_hardware(config.hardware, machine)
    _resolve_batch(config)
    _resolve_model(config, vocab_size)
    _check_optim(config.optim)
    _check_goal(config)
    if config.name is None:
        config.name = f"{config.model.arch}-{config.optim.name}"
    elif not config.name or not all(char.isalnum() or char in "._-" for char in config.name) or config.name[0] == ".":
        _refuse("name", config.name, "it becomes part of a folder's name: use letters, digits, '-', '_' and '.'")
    if config.seed < 0:
        _refuse("seed", config.seed, "use 0 or more")
    return config


def _refuse(what, value, remedy):
    raise ValueError(f"{what}={value}: {remedy}")


def _positive(config, *names):
    for name in names:
        value = schema.get(config, name)
        if value is not None and value <= 0:
            _refuse(name, value, "it must be above 0")


def resolve_hardware(hardware, machine):
    """In place: what was left to the machine, derived.  Raises ValueError."""
    if hardware.device not in ("auto", "cpu", "cuda"):
        _refuse("hardware.device", hardware.device, "use auto, cpu or cuda")
    if hardware.device == "auto":
        hardware.device = "cuda" if machine.num_gpus else "cpu"
    on_gpu = hardware.device == "cuda"
    if on_gpu and not machine.num_gpus:
        _refuse("hardware.device", "cuda", "this machine shows no NVIDIA GPU: use hardware=cpu or hardware=auto")
    if hardware.num_processes is None:
        hardware.num_processes = machine.num_gpus if on_gpu else 1
    if hardware.num_processes < 1:
        _refuse("hardware.num_processes", hardware.num_processes, "use 1 or more")
    if on_gpu and hardware.num_processes > machine.num_gpus:
        _refuse(
            "hardware.num_processes",
            hardware.num_processes,
            f"this machine has {machine.num_gpus} GPU(s), one process each",
        )
    if hardware.num_threads is None:
        hardware.num_threads = max(1, machine.num_cpus // hardware.num_processes)
    if hardware.num_threads < 1:
        _refuse("hardware.num_threads", hardware.num_threads, "use 1 or more")
    if hardware.dtype is None:
        hardware.dtype = "bfloat16" if on_gpu else "float32"
    if hardware.dtype not in ("float32", "bfloat16"):
        _refuse("hardware.dtype", hardware.dtype, "use float32 or bfloat16")
    if hardware.compile is None:
        hardware.compile = on_gpu
    for name in ("collective_timeout_s", "wall_timeout_s"):
        value = getattr(hardware, name)
        if value is not None and value <= 0:
            _refuse(f"hardware.{name}", value, "use a number of seconds above 0")
    _resolve_collector(hardware)


def _resolve_collector(hardware):
    if hardware.gc == "freeze":
        hardware.gc = None  # said or not, the default is one config with one id
    if hardware.gc not in (None, "on", "off", "manual"):
        _refuse("hardware.gc", hardware.gc, "use freeze, on, off or manual")
    if hardware.gc_every_steps is not None and hardware.gc_every_steps < 1:
        _refuse("hardware.gc_every_steps", hardware.gc_every_steps, "use 1 or more")
    _needed_or_refused(
        "hardware.gc_every_steps",
        hardware.gc_every_steps,
        hardware.gc == "manual",
        f"hardware.gc={hardware.gc or 'freeze'}",
    )


def _resolve_batch(config):
    """batch_tokens = world_size * num_micro_steps * micro_batch_seqs * seq_len, exactly."""
    data, hardware = config.data, config.hardware
    _positive(config, "data.seq_len", "data.batch_tokens", "goal.val_tokens", "hardware.micro_batch_seqs")
    step_tokens = data.seq_len * hardware.num_processes
    for name, tokens in (("data.batch_tokens", data.batch_tokens), ("goal.val_tokens", config.goal.val_tokens)):
        if tokens % step_tokens:
            near = max(1, round(tokens / step_tokens)) * step_tokens
            _refuse(
                name,
                tokens,
                f"it must be a multiple of seq_len * num_processes = {data.seq_len} * "
                f"{hardware.num_processes} = {step_tokens}; try {name}={near}",
            )
    rank_seqs = data.batch_tokens // step_tokens
    limit = min(hardware.micro_batch_seqs or rank_seqs, rank_seqs)
    hardware.micro_batch_seqs = next(seqs for seqs in range(limit, 0, -1) if rank_seqs % seqs == 0)


def _resolve_model(config, vocab_size):
    model = config.model
    _positive(config, "model.num_layers", "model.num_heads", "model.width", "model.vocab_size")
    if model.width % (2 * model.num_heads):
        _refuse("model.width", model.width, f"it must be a multiple of 2 * num_heads = {2 * model.num_heads}")
    config.data.vocab_size = vocab_size
    if model.vocab_size is None:
        model.vocab_size = -(-vocab_size // 64) * 64  # e.g. 50257 -> 50304
    if model.vocab_size < vocab_size:
        _refuse(
            "model.vocab_size",
            model.vocab_size,
            f"the data uses tokens up to {vocab_size - 1}: use {vocab_size} or more",
        )


def _check_optim(optim):
    for name in ("lr", "eps", "grad_clip_norm", "muon_lr", "muon_ns_steps"):
        value = getattr(optim, name)
        if value is not None and value <= 0:
            _refuse(f"optim.{name}", value, "it must be above 0")
    for name in ("weight_decay", "muon_weight_decay"):
        value = getattr(optim, name)
        if value is not None and value < 0:
            _refuse(f"optim.{name}", value, "it must not be below 0")
    for name in ("beta1", "beta2", "muon_momentum"):
        value = getattr(optim, name)
        if value is not None and not 0 <= value < 1:
            _refuse(f"optim.{name}", value, "it must be in [0, 1)")
    for name in ("warmup_frac", "cooldown_frac", "final_lr_frac"):
        value = getattr(optim, name)
        if value is not None and not 0 <= value <= 1:
            _refuse(f"optim.{name}", value, "it must be in [0, 1]")
    needs = {"constant": (), "cosine": ("final_lr_frac",), "trapezoid": ("cooldown_frac", "final_lr_frac")}
    if optim.schedule in needs:
        for name in ("cooldown_frac", "final_lr_frac"):
            _needed_or_refused(
                f"optim.{name}", getattr(optim, name), name in needs[optim.schedule], f"optim.schedule={optim.schedule}"
            )
    for name in ("muon_lr", "muon_momentum", "muon_weight_decay", "muon_ns_steps"):
        _needed_or_refused(f"optim.{name}", getattr(optim, name), optim.name == "muon", f"optim={optim.name}")
    if optim.warmup_frac + (optim.cooldown_frac or 0) > 1:
        _refuse(
            "optim.warmup_frac",
            optim.warmup_frac,
            f"with cooldown_frac={optim.cooldown_frac} it is more than the whole race: make one smaller",
        )


def _needed_or_refused(name, value, needed, by):
    if needed and value is None:
        _refuse(name, value, f"{by} needs it: give {name}=NUMBER")
    if not needed and value is not None:
        _refuse(name, value, f"it has no effect with {by}: leave it out")


def _check_goal(config):
    goal = config.goal
    _positive(config, "goal.num_steps", "goal.val_every_steps", "goal.target_gap_nats", "track.repeats")
    if goal.target_val_loss is not None and goal.target_gap_nats is not None:
        _refuse(
            "goal.target_gap_nats",
            goal.target_gap_nats,
            f"target_val_loss={goal.target_val_loss} is set too: keep one of them",
        )
    if goal.target_gap_nats is not None and config.data.source != "markov":
        _refuse(
            "goal.target_gap_nats",
            goal.target_gap_nats,
            f"only data=markov has a known floor, this is data={config.data.source}",
        )
    if goal.stop_at_target and goal.target_val_loss is None and goal.target_gap_nats is None:
        _refuse("goal.stop_at_target", True, "there is no target: set goal.target_val_loss or goal.target_gap_nats")
    if not 0 < config.track.p_value < 1:
        _refuse("track.p_value", config.track.p_value, "it must be between 0 and 1")
