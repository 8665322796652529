"""Can a user's own optimizer be trained with?  Asked in the process of bench/launch/own_model.py, which has torch.

It makes two steps on random gradients of a small model of the run's class, from the state that a run begins with, and
again from that state after it was restored, as after a warm-up.
"""

import copy
import inspect
from collections.abc import Mapping
from typing import Any

import models
from bench.config import typed, user_code
from models import optimizers

SIGNATURE = "build(self, model, rank, world_size, device_type)"
HEADS, VOCAB_SIZE, SEQ_LEN = 2, 64, 16  # of the small model, at most; the layers and a head's width are the run's
NUM_STEPS = 2
MAX_NAMES = 3


def faults_of(question: Mapping[str, Any]) -> list[str]:
    """A ModelConfig's values with seq_len, num_steps and optim, an optimizer's -> sentences, each a fault of that.

    A model that cannot be made tells nothing about the optimizer: [].
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
        model = _small_model(question)
    except Exception:
        return []
    try:
        return _faults_of_steps(config, model, question["num_steps"])
    except Exception as error:  # whatever the user's code raises
        if isinstance(error, NotImplementedError):
            return []  # of a CPU, as a kernel for a GPU alone
        message = f"{type(error).__name__}: {str(error).strip() or 'no message'}{user_code.line_of(error)}"
        return [f"a step on random gradients fails: {message}"]
    finally:
        torch.manual_seed(0)


def _small_model(question: Mapping[str, Any]) -> Any:
    import torch

    arch, heads = question["arch"], min(question["num_heads"], HEADS)
    model_class = user_code.load("model.arch", arch) if user_code.is_import_path(arch) else models.load(arch)
    shape = {"vocab_size": VOCAB_SIZE, "seq_len": min(question["seq_len"], SEQ_LEN), "num_heads": heads}
    shape |= {"num_layers": question["num_layers"], "width": question["width"] // question["num_heads"] * heads}
    model = model_class(**shape, **(question["args"] or {}))
    model.init_weights(torch.Generator().manual_seed(0))
    return model


def _faults_of_steps(config: optimizers.Config, model: Any, num_steps: int) -> list[str]:
    import torch

    optimizer = config.optimizer(model, 0, 1, "cpu")
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    start = {name: weight.detach().clone() for name, weight in trained.items()}
    state = copy.deepcopy(optimizer.state_dict())

    def steps() -> dict[str, Any]:
        """The weights after NUM_STEPS steps, with the same gradients each time."""
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
        return [f"it does not train {_some(missing)}: put every parameter into a group, or set its requires_grad=False"]
    first = steps()
    if wrong := [name for name, weight in first.items() if not torch.isfinite(weight).all()]:
        return [f"{NUM_STEPS} steps on random gradients give values that are not finite in {_some(wrong)}: see step()"]
    if still := [name for name, weight in first.items() if torch.equal(weight, start[name])]:
        return [f"{NUM_STEPS} steps on random gradients do not change {_some(still)}: see step()"]
    optimizer.load_state_dict(copy.deepcopy(state))
    if other := [name for name, weight in steps().items() if not torch.equal(weight, first[name])]:
        return [
            f"its state is not restored by load_state_dict(), which undoes a run's warm-up: the same steps then change "
            f"{_some(other)} differently: keep all that changes in self.state[parameter] or in param_groups"
        ]
    return []


def _some(names: list[str]) -> str:
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return ", ".join(names[:MAX_NAMES]) + more
