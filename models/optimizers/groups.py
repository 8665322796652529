"""A table of groups of tensors, each with its own update rule (models/updates/), learning rate and settings.

Every tensor must be in a group.  A group may be empty, for example the head's if the model's head is its embedding.
"""

from dataclasses import dataclass
from typing import Any

from models import optimizers, updates
from models.settings import Positive


@dataclass(kw_only=True)
class Config(optimizers.Config):
    lr: Positive = 1.0  # multiplies the learning rate of every group
    groups: dict[str, updates.Group | None]  # by a name of your choice; null: no such group

    def build(self, model: Any, rank: int, world_size: int, device_type: str) -> Any:
        """Returns the optimizers of all groups that have tensors.  Raises ValueError if a tensor is in no group."""
        from models.together import Together

        tensors = self.tensors_of(model)
        parts = {
            name: group.build(tensors[name], self.lr * group.lr, rank, world_size, device_type)
            for name, group in self.groups.items()
            if group and name in tensors
        }
        return Together(parts)

    def part_names(self) -> tuple[str, ...]:
        """Returns the names of the groups, including any that turn out to have no tensors."""
        return tuple(name for name, group in self.groups.items() if group)

    def set_step(self, optimizer: Any, step: int, num_steps: int) -> None:
        """Sets the learning rates, and what else the groups change with the step."""
        super().set_step(optimizer, step, num_steps)
        for name, group in self.groups.items():
            if group and name in optimizer.parts:
                group.set_step(optimizer.parts[name], step, num_steps)

    def tensors_of(self, model: Any) -> dict[str, list[Any]]:
        """Returns each non-empty group's parameters, in the model's order.  Raises ValueError if one is in no group."""
        from models.together import is_meant, with_roles

        tensors: dict[str, list[Any]] = {}
        for name, role, parameter in with_roles(model):
            groups = [key for key, group in self.groups.items() if group and is_meant(group.tensors, name, role)]
            if not groups:
                remedy = f"add {role}, or its name, to the tensors of a group"
                raise ValueError(f"optim.groups={', '.join(self.groups)}: none has the tensor {name}: {remedy}")
            tensors.setdefault(groups[-1], []).append(parameter)
        return {key: tensors[key] for key in self.groups if key in tensors}
