"""Can a model class of the user's own be trained?  Asked before anything is started, and answered with all it lacks.

The launcher has no torch, so a process of its own imports the class, and makes the model on torch's meta device, where
no memory is needed:  python -m bench.launch.own_model < questions.json
"""

import functools
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Sequence

import models
from bench.base.paths import CHECKOUT, CODE, REPO, working_folder
from bench.config import schema, user_code
from bench.machine import code_state, lazy_dynamo, processes

METHODS = {  # what a run calls: what it must do
    "forward": "forward(tokens_BT, targets_BT): the mean loss in nats per token",
    "init_weights": "init_weights(generator): draw every parameter again, from a CPU torch.Generator",
    "flops_per_token": "flops_per_token(seq_len): of forward and backward, for MFU",
    "flops_per_token_causal": "flops_per_token_causal(seq_len): the same without masked pairs of tokens",
    "set_window": "set_window(window_tokens): how far back it looks from now on, as the run's stages say",
    "set_untied": "set_untied(untied): whether its embedding is apart from the head, as the run's stages say",
    "hidden_matrices": "hidden_matrices(): the 2-D weights that optim=muon and optim=groups may take",
    "logits": "logits(tokens_BT): the scores of the next token, [B, T, V], from which the referee computes the loss; "
    "track=free accepts models without it",
}
OF_STAGES = {"window_tokens": "set_window", "untied": "set_untied"}
SOMETIMES = ("hidden_matrices", "logits", *OF_STAGES.values())  # not in every run
INHERITED = {  # what LanguageModel's methods use: what it must be
    "logits": "logits(tokens_BT): [B, T, V], which LanguageModel.forward needs",
    "blocks": "self.blocks: an nn.ModuleList, whose 2-D weights are the hidden matrices",
    "num_heads": "self.num_heads: attention heads, for flops_per_token",
    "head_dim": "self.head_dim: the width of a head, for flops_per_token",
    "head_weight": "head_weight(): the [V, D] matrix of the output, for flops_per_token",
}
CHILDREN_WITHIN_S = 5.0
MATRIX_OPTIMIZERS = ("muon", "groups")
REMEDY = (
    "class {name}(LanguageModel) with `from models.base import LanguageModel` inherits forward, flops_per_token and "
    "hidden_matrices; `./run.sh init` writes an example"
)


def check(config: schema.Config) -> None:
    """Raises ValueError that names all that config.model's class lacks; of a model of models/ its args and stages."""
    if why := refusals([config])[0]:
        raise ValueError(why)


def refusals(configs: Sequence[schema.Config]) -> list[str]:
    """What check() says of each config, "" of one that may be trained; one process makes all models."""
    is_asked = [bool(user_code.is_import_path(one.model.arch) or one.model.args or _of_stages(one)) for one in configs]
    asked = [config for config, asks in zip(configs, is_asked, strict=True) if asks]
    faults = iter(faults_of_configs(asked) if asked else ())
    return [
        _words_of(next(faults), one.model.arch) if asks else "" for one, asks in zip(configs, is_asked, strict=True)
    ]


def _words_of(faults, arch):
    if not faults:
        return ""
    lines = "".join(f"\n  - {fault}" for fault in faults)
    remedy = "\n" + REMEDY.format(name=user_code.short(arch)) if len(faults) > 1 else ""
    return f"model.arch={arch} cannot be trained:{lines}{remedy}"


def faults_of_configs(configs: Sequence[schema.Config]) -> list[list[str]]:
    """Of each config's model all that it lacks, [] for nothing; one process makes them all."""
    own = filter(user_code.is_import_path, [config.model.arch for config in configs])
    files = code_state.raced_files(CODE, user_code.sources(own))
    return _answers(json.dumps([_question(config) for config in configs], default=str), tuple(files.items()))


def _question(config):
    return schema.to_dict(config.model) | {
        "seq_len": config.data.seq_len,
        "optim": config.optim.name,
        "methods": [*_of_stages(config), *(["logits"] if config.track.name != "free" else [])],
    }


def _of_stages(config):
    """What the model must have for them."""
    stages = config.stages or ()
    return [name for key, name in OF_STAGES.items() if any(getattr(stage, key) is not None for stage in stages)]


@functools.lru_cache(maxsize=256)  # a sweep asks for every point
def _answers(questions, files):
    env = os.environ | {"SPEEDRUN_CWD": working_folder(), CHECKOUT: str(REPO)}
    words = [sys.executable, "-m", "bench.launch.own_model"]
    done = subprocess.run(words, cwd=CODE, env=env, input=questions, capture_output=True, text=True)
    try:
        return json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        words = f"importing it ended the process with exit code {done.returncode}: {last}"
        return [[words] for _ in json.loads(questions)]


# ---- in the process that has torch


def faults_of(question: dict) -> list[str]:
    """A ModelConfig's values with seq_len and optim -> sentences, each something that the class lacks."""
    import torch

    try:
        arch = question["arch"]
        model_class = user_code.load("model.arch", arch) if user_code.is_import_path(arch) else models.load(arch)
    except ValueError as error:
        return [str(error).partition(": ")[2]]
    if not issubclass(model_class, torch.nn.Module):
        return [f"{model_class.__name__} is not a torch.nn.Module"]
    shape = {name: question[name] for name in ("seq_len", "num_layers", "num_heads", "width")}
    arguments = {"vocab_size": question["vocab_size"] or 64, **shape}
    faults = _faults_of_methods(model_class, question["optim"], question.get("methods", ()))
    wrong_arguments = _faults_of_arguments(model_class, arguments, question["args"] or {})
    faults += wrong_arguments
    if not wrong_arguments:
        faults += _faults_of_model(model_class, arguments | (question["args"] or {}), question, bool(faults))
    return faults


def _faults_of_methods(model_class, optim, more):
    """more: methods that this run asks for beside those of every run."""
    import torch

    more = [*more, *(["hidden_matrices"] if optim in MATRIX_OPTIMIZERS else [])]
    wanted = {name: words for name, words in METHODS.items() if name not in SOMETIMES or name in more}
    lacking = [name for name in wanted if not callable(getattr(model_class, name, None))]
    if model_class.forward is torch.nn.Module.forward:
        lacking.insert(0, "forward")
    return [f"it lacks {wanted[name]}" for name in lacking]


def _faults_of_arguments(model_class, arguments, args):
    parameters = _parameters_of(model_class)
    named = {one.name for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)}
    takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters)
    needed = {one.name for one in parameters if one.name in named and one.default is one.empty}
    faults = [
        f"model.args.{name} is given by the harness: remove it from model.args" for name in arguments if name in args
    ]
    if not takes_all:
        faults += [f"its __init__ must take {name}" for name in arguments if name not in named]
        has = ", ".join(sorted(named - arguments.keys() - {"residual_dtype"})) or "no more than the usual ones"
        faults += [f"model.args.{name}: its __init__ takes {has}" for name in args if name not in named]
    unset = sorted(needed - arguments.keys() - args.keys())
    return faults + [f"its __init__ needs {name}: give model.args.{name}" for name in unset]


def _parameters_of(model_class):
    """Of its __init__, and where that hands on **options, of those of its bases up to the first that does not.

    LanguageModel and what it is made of take none: what is handed on to them the class takes itself.
    """
    import torch

    from models.base import LanguageModel

    result = []
    for base in model_class.__mro__:
        if base in (LanguageModel, torch.nn.Module):
            break
        if "__init__" in vars(base):
            result = [one for one in result if one.kind is not one.VAR_KEYWORD]
            result += list(inspect.signature(base.__init__).parameters.values())[1:]
            if not any(one.kind is one.VAR_KEYWORD for one in result):
                break
    return result


def _faults_of_model(model_class, arguments, question, has_faults):
    """What only a model that is made can show.  What the meta device cannot do is not a fault."""
    import torch

    try:
        with torch.device("meta"):
            model = model_class(**arguments)
    except Exception as error:
        return [] if _is_of_meta(error) else [f"it cannot be made with {_words(arguments)}: {_failure(error)}"]
    faults = _faults_of_inherited(model, question["optim"])
    if has_faults or faults:
        return faults
    try:
        tokens_BT = torch.zeros(1, question["seq_len"], dtype=torch.int64, device="meta")
        with torch.no_grad():
            loss = model(tokens_BT, tokens_BT)
        shape = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
        if shape != ():
            faults.append(f"forward must return one number, the mean loss as a tensor of shape (); it returns {shape}")
        if "logits" in question.get("methods", ()):
            faults += _faults_of_logits(model, tokens_BT, arguments["vocab_size"])
        model.flops_per_token(question["seq_len"]), model.flops_per_token_causal(question["seq_len"])
    except Exception as error:
        faults += [] if _is_of_meta(error) else [f"a forward pass fails: {_failure(error)}"]
    return faults


def _faults_of_logits(model, tokens_BT, vocab_size):
    import torch

    with torch.no_grad():
        logits_BTV = model.logits(tokens_BT)
    shape = tuple(logits_BTV.shape) if isinstance(logits_BTV, torch.Tensor) else type(logits_BTV).__name__
    if isinstance(shape, tuple) and shape[:-1] == tuple(tokens_BT.shape) and shape[-1] >= vocab_size:
        return []
    return [f"logits must return (1, {tokens_BT.shape[1]}, {vocab_size}) for one sequence; it returns {shape}"]


def _faults_of_inherited(model, optim):
    from models.base import LanguageModel

    def inherits(name):
        return getattr(type(model), name, None) is getattr(LanguageModel, name)

    used = ["logits"] if inherits("forward") else []
    if inherits("hidden_matrices") and (optim in MATRIX_OPTIMIZERS or inherits("flops_per_token")):
        used += ["blocks"]
    if inherits("flops_per_token") or inherits("flops_per_token_causal"):
        used += [name for name in ("blocks", "num_heads", "head_dim", "head_weight") if name not in used]
    return [f"it lacks {INHERITED[name]}" for name in used if not hasattr(model, name)]


def _is_of_meta(error):
    return isinstance(error, NotImplementedError) or "meta" in str(error).lower()


def _failure(error):
    return f"{type(error).__name__}: {str(error).strip() or 'no message'}{user_code.line_of(error)}"


def _words(arguments):
    return ", ".join(f"{name}={value}" for name, value in arguments.items())


if __name__ == "__main__":
    lazy_dynamo.install()  # random numbers on the meta device would import all of torch.compile
    processes.adopt_orphans()
    print("\n" + json.dumps([faults_of(question) for question in json.load(sys.stdin)]))
    processes.end_descendants(CHILDREN_WITHIN_S)  # what importing it has started would hold this process' output open
