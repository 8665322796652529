"""Combines several optimizers into one, and finds the parameters that patterns match.

A parameter's role is embedding, head, matrices (of the blocks) or vectors; a pattern matches a role or a name.
"""

from collections.abc import Collection, Iterator
from fnmatch import fnmatchcase
from typing import Any

import torch


def copy_state(optimizer: Any, source: torch.Tensor, target: torch.Tensor) -> dict[str, Any]:
    """Copies source's state to target, in an optimizer or the parts of it that have the two tensors; returns it.

    Raises ValueError if they have different update rules, or Muon's, whose momentum of a matrix only one rank has.
    """
    parts = list(getattr(optimizer, "parts", {"": optimizer}).values())
    source_part, target_part = (next(part for part in parts if _has(part, tensor)) for tensor in (source, target))
    rules = [type(part).__name__ for part in (source_part, target_part)]
    if rules[0] != rules[1] or getattr(source_part, "world_size", 1) > 1:
        remedy = "give embedding and head the same group of optim.groups, or both adamw or cautious_adam"
        raise ValueError(f"stages: an untied embedding ({rules[1]}) takes over the head's state ({rules[0]}): {remedy}")
    copied: dict[str, Any] = {
        name: value.clone() if isinstance(value, torch.Tensor) else value
        for name, value in source_part.state.get(source, {}).items()
    }
    target_part.state[target] = copied
    return copied


def _has(part: torch.optim.Optimizer, tensor: torch.Tensor) -> bool:
    return any(parameter is tensor for group in part.param_groups for parameter in group["params"])


class Together:
    """An optimizer made of named parts, which are optimizers without common tensors."""

    def __init__(self, parts: dict[str, torch.optim.Optimizer]) -> None:
        self.parts = parts

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for part in self.parts.values() for group in part.param_groups]

    def step(self, names: Collection[str] | None = None) -> None:
        """Steps the named parts, or all of them.  All ranks must call it with the same names."""
        for part in self._named(names):
            part.step()

    def zero_grad(self, set_to_none: bool = True, names: Collection[str] | None = None) -> None:
        """Drops the gradients of the named parts, or of all; the next backward pass adds to those of the others."""
        for part in self._named(names):
            part.zero_grad(set_to_none=set_to_none)

    def _named(self, names: Collection[str] | None) -> list[torch.optim.Optimizer]:
        return [part for name, part in self.parts.items() if names is None or name in names]

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of all parts.  It refers to the live tensors: copy it to keep it."""
        return {name: part.state_dict() for name, part in self.parts.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores all parts.  A state from before the first step resets them entirely."""
        for name, part in self.parts.items():
            part.load_state_dict(state[name])


def is_meant(patterns: list[str], name: str, role: str) -> bool:
    """Whether a parameter matches one of the patterns: roles, or names with wildcards (blocks.*.proj.weight)."""
    return any(role == pattern or fnmatchcase(name, pattern) for pattern in patterns)


def with_roles(model: Any) -> Iterator[tuple[str, str, torch.nn.Parameter]]:
    """Yields (name, role, parameter) for all parameters; a head that is also the embedding has the role embedding."""
    matrices = {id(parameter) for parameter in model.hidden_matrices()}
    tables = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    for name, parameter in model.named_parameters():
        if id(parameter) in matrices:
            role = "matrices"
        elif parameter.ndim < 2:
            role = "vectors"
        else:
            role = "embedding" if id(parameter) in tables else "head"
        yield name, role, parameter
