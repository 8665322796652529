"""Checks before a run whether a user's model and optimizer can be trained, and lists all that they lack in one message.

The launcher has no torch, so a separate process imports the class and tries the model on torch's meta device, which
needs no memory:  python -m bench.launch.own_model < questions.json
"""

import copy
import functools
import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import models
from bench.base.paths import CHECKOUT, CODE, REPO, working_folder
from bench.config import schema, typed, user_code
from bench.machine import code_state, lazy_dynamo, processes
from models import optimizers

METHODS = {  # method that a run calls: what it must do
    "forward": "forward(tokens_BT, targets_BT): the mean loss in nats per token",
    "init_weights": "init_weights(generator): draw every parameter again, from a CPU torch.Generator",
    "flops_per_token": "flops_per_token(seq_len): of forward and backward, for MFU",
    "flops_per_token_causal": "flops_per_token_causal(seq_len): the same without masked pairs of tokens",
    # the following are called by some runs only
    "set_window": "set_window(window_tokens): how far back it looks from now on, as the run's stages say",
    "set_untied": "set_untied(untied): whether its embedding is apart from the head, as the run's stages say",
    "hidden_matrices": "hidden_matrices(): the 2-D weights that optim=muon and optim=groups may take",
    "logits": "logits(tokens_BT): the scores of the next token, [B, T, V], from which the referee computes the loss; "
    "track=free accepts models without it",
}
OF_EVERY_RUN = ("forward", "init_weights", "flops_per_token", "flops_per_token_causal")
OF_STAGES = {"window_tokens": "set_window", "untied": "set_untied"}
MATRIX_OPTIMIZERS = ("muon", "groups")
CHILDREN_WITHIN_S = 5.0
SIGNATURE = "build(self, model, rank, world_size, device_type)"
HEADS, VOCAB_SIZE, SEQ_LEN = 2, 64, 16  # limits of the small model; its layers and its heads' width are the run's
NUM_STEPS = 2
MAX_NAMES = 3
OF_META = re.compile(r"(?<!')\bmeta\b", re.I)  # torch's messages on that device, not MetaFormer or 'meta'
REMEDY = (
    "class {name}(LanguageModel) with `from models.base import LanguageModel` inherits forward, flops_per_token and "
    "hidden_matrices; `./run.sh init` writes an example"
)


def check(config: schema.Config) -> None:
    """Raises ValueError if the model class cannot be trained with the config's args and stages, naming everything it
    lacks, or if the user's optimizer or schedule is faulty."""
    if why := refusals([config])[0]:
        raise ValueError(why)


def refusals(configs: Sequence[schema.Config]) -> list[str]:
    """Returns check()'s message for each config, "" for one that can be trained; one process tries them all."""
    tried = []  # (index of the config, the setting that would be refused, the question)
    for number, config in enumerate(configs):
        if config.hardware.sandbox:
            continue  # nothing of its code is imported before its ranks are in their sandbox
        model, optim = _model(config), config.optim
        if user_code.is_import_path(model.arch) or model.args or _methods_of_stages(config):
            tried.append((number, f"model.arch={model.arch}", _question(config)))
        if optim and any(map(user_code.is_import_path, (optim.name, optim.schedule.name))):
            question = _question(config) | {"optim": schema.to_dict(optim), "num_steps": config.goal.num_steps}
            tried.append((number, f"optim.name={optim.name}", question))
    whys = [""] * len(configs)
    for (number, setting, question), faults in zip(tried, _answered([question for *_, question in tried]), strict=True):
        if faults and not whys[number]:
            lines = "".join(f"\n  - {fault}" for fault in faults)
            remedy = "\n" + REMEDY.format(name=user_code.short(question["arch"])) if len(faults) > 1 else ""
            why = f": {faults[0]}" if "optim" in question else f" cannot be trained:{lines}{remedy}"
            whys[number] = setting + why
    return whys


def _model(config: schema.Config) -> schema.ModelConfig:
    assert config.model is not None  # only a script has none
    return config.model


def faults_of_configs(configs: Sequence[schema.Config]) -> list[list[str]]:
    """Returns all that each config's model lacks, [] for nothing; one process tries them all."""
    return _answered([_question(config) for config in configs])


def _question(config: schema.Config) -> dict[str, Any]:
    """Returns the question about a config's model that faults_of() answers."""
    methods = [
        *_methods_of_stages(config),
        *(["hidden_matrices"] if config.optim and config.optim.name in MATRIX_OPTIMIZERS else []),
        *(["logits"] if config.track.name != "free" else []),
    ]
    return schema.to_dict(_model(config)) | {"seq_len": config.data.seq_len, "methods": methods}


def _answered(questions: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    if not questions:
        return []
    optims = [question["optim"] for question in questions if "optim" in question]
    names = [question["arch"] for question in questions]
    names += [name for optim in optims for name in (optim["name"], optim["schedule"]["name"])]
    files = code_state.raced_files(CODE, user_code.sources(filter(user_code.is_import_path, names)))
    return _ask(json.dumps(questions, default=str), tuple(files.items()))


def _methods_of_stages(config: schema.Config) -> list[str]:
    """Returns the methods that the model needs for the stages of this config."""
    stages = config.stages or ()
    return [name for key, name in OF_STAGES.items() if any(getattr(stage, key) is not None for stage in stages)]


@functools.lru_cache(maxsize=256)  # a sweep checks every point
def _ask(questions: str, files: tuple[tuple[str, str], ...]) -> list[list[str]]:
    env = os.environ | {"SPEEDRUN_CWD": working_folder(), CHECKOUT: str(REPO)}
    command = [sys.executable, "-m", "bench.launch.own_model"]
    done = subprocess.run(command, cwd=CODE, env=env, input=questions, capture_output=True, text=True)
    try:
        sentences: list[list[str]] = json.loads(done.stdout.splitlines()[-1])
        return sentences
    except (ValueError, IndexError):
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        why = f"importing it ended the process with exit code {done.returncode}: {last}"
        return [[why] for _ in json.loads(questions)]


# ---- in the process that imports torch


def faults_of(question: Mapping[str, Any]) -> list[str]:
    """Returns sentences, each about something that the class lacks.  question: the values of a ModelConfig, with
    seq_len and the methods that this run needs besides OF_EVERY_RUN."""
    import torch

    if "optim" in question:
        return _faults_of_optimizer(question)
    try:
        model_class = _loaded(question["arch"])
    except ValueError as error:
        return [str(error).partition(": ")[2]]
    if not issubclass(model_class, torch.nn.Module):
        return [f"{model_class.__name__} is not a torch.nn.Module"]
    needed = [name for name in METHODS if name in (*OF_EVERY_RUN, *question["methods"])]
    unset = (None, torch.nn.Module.forward)
    faults = [f"it lacks {METHODS[name]}" for name in needed if getattr(model_class, name, None) in unset]
    shape = {name: question[name] for name in ("seq_len", "num_layers", "num_heads", "width")}
    shape["vocab_size"] = question["vocab_size"] or VOCAB_SIZE
    args = question["args"] or {}
    if twice := sorted(shape.keys() & args.keys()):
        return [*faults, f"model.args.{twice[0]} is given by the harness: remove it from model.args"]
    try:
        with torch.device("meta"):
            model = model_class(**shape, **args)
    except Exception as error:
        arguments = ", ".join(f"{name}={value}" for name, value in (shape | args).items())
        return faults + _fault(error, f"it cannot be made with {arguments}")
    try:
        return faults or list(_faults_of_forward(model, shape["seq_len"], shape["vocab_size"], question["methods"]))
    except Exception as error:
        return _fault(error, "a forward pass fails")


def _loaded(arch: str) -> Any:
    """Returns the class that model.arch names.  Raises ValueError if it cannot be loaded."""
    return user_code.load("model.arch", arch) if user_code.is_import_path(arch) else models.load(arch)


def _fault(error: Exception, action: str) -> list[str]:
    """Returns a sentence, or [] if the error is due to the meta device, which lacks some kernels and all values."""
    if isinstance(error, NotImplementedError) or OF_META.search(str(error)):
        return []
    return [f"{action}: {type(error).__name__}: {str(error).strip() or 'no message'}{user_code.line_of(error)}"]


def _faults_of_forward(model: Any, seq_len: int, vocab_size: int, methods: Sequence[str]) -> Iterator[str]:
    """Yields the faults that a forward pass of one sequence shows on the meta device, without memory and numbers."""
    import torch

    def shape(value: object) -> tuple[int, ...] | str:
        return tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__

    tokens_BT = torch.zeros(1, seq_len, dtype=torch.int64, device="meta")
    with torch.no_grad():
        if (loss := shape(model(tokens_BT, tokens_BT))) != ():
            yield f"forward must return one number, the mean loss as a tensor of shape (); it returns {loss}"
        if "logits" in methods:
            logits = shape(model.logits(tokens_BT))
            if isinstance(logits, str) or logits[:-1] != (1, seq_len) or logits[-1] < vocab_size:
                yield f"logits must return (1, {seq_len}, {vocab_size}) for one sequence; it returns {logits}"
    if "hidden_matrices" in methods:
        model.hidden_matrices()
    model.flops_per_token(seq_len), model.flops_per_token_causal(seq_len)


def _faults_of_optimizer(question: Mapping[str, Any]) -> list[str]:
    """Returns sentences, each a fault of the optimizer.  question: as for faults_of(), with num_steps and optim.

    It makes two steps with random gradients on a small model of the run's class, from a run's initial state, and again
    after that state was restored, as after a warm-up.  If the model cannot be built, it returns [].
    """
    import torch

    config = typed.build(optimizers.Config, question["optim"], "optim.")
    build = type(config).build
    if build is optimizers.Config.build:
        return [f"{type(config).__name__} lacks {SIGNATURE}: give it one that returns a torch.optim.Optimizer"]
    try:
        inspect.signature(build).bind(config, None, 0, 1, "cpu")
    except TypeError:
        return [f"its build{inspect.signature(build)} does not take what a run gives it: make it {SIGNATURE}"]
    try:
        heads = min(question["num_heads"], HEADS)
        shape = {"vocab_size": VOCAB_SIZE, "seq_len": min(question["seq_len"], SEQ_LEN), "num_heads": heads}
        shape |= {"num_layers": question["num_layers"], "width": question["width"] // question["num_heads"] * heads}
        model = _loaded(question["arch"])(**shape, **(question["args"] or {}))
        model.init_weights(torch.Generator().manual_seed(0))
    except Exception:
        return []
    try:
        return _faults_of_steps(config, model, question["num_steps"])
    except Exception as error:
        return _fault(error, "a step on random gradients fails")
    finally:
        torch.manual_seed(0)


def _faults_of_steps(config: optimizers.Config, model: Any, num_steps: int) -> list[str]:
    import torch

    optimizer = config.optimizer(model, 0, 1, "cpu")
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    start = {name: weight.detach().clone() for name, weight in trained.items()}
    state = copy.deepcopy(optimizer.state_dict())

    def steps() -> dict[str, Any]:
        """Returns the weights after NUM_STEPS steps, with the same gradients each time."""
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for name, weight in trained.items():
                weight.copy_(start[name])
        for step in range(NUM_STEPS):
            config.set_step(optimizer, min(step, num_steps - 1), num_steps)
            for weight in trained.values():
                weight.grad = 0.01 * torch.randn(weight.shape, generator=generator)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return {name: weight.detach().clone() for name, weight in trained.items()}

    held = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
    if missing := [name for name, weight in trained.items() if id(weight) not in held]:
        return [f"it does not train {_join(missing)}: put every parameter into a group, or set its requires_grad=False"]
    first = steps()
    if wrong := [name for name, weight in first.items() if not torch.isfinite(weight).all()]:
        return [f"{NUM_STEPS} steps on random gradients give values that are not finite in {_join(wrong)}: see step()"]
    if still := [name for name, weight in first.items() if torch.equal(weight, start[name])]:
        return [f"{NUM_STEPS} steps on random gradients do not change {_join(still)}: see step()"]
    optimizer.load_state_dict(copy.deepcopy(state))
    if other := [name for name, weight in steps().items() if not torch.equal(weight, first[name])]:
        return [
            f"its state is not restored by load_state_dict(), which undoes a run's warm-up: the same steps then change "
            f"{_join(other)} differently: keep all that changes in self.state[parameter] or in param_groups"
        ]
    return []


def _join(names: list[str]) -> str:
    omitted = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return ", ".join(names[:MAX_NAMES]) + omitted


if __name__ == "__main__":
    lazy_dynamo.install()  # random numbers on the meta device would import all of torch.compile
    processes.adopt_orphans()
    print("\n" + json.dumps([faults_of(question) for question in json.load(sys.stdin)]))
    processes.end_descendants(CHILDREN_WITHIN_S)  # processes started by an import would keep this one's output open
