"""Update rules for the groups of optim=groups, one per file.  Importing them does not import torch."""

from dataclasses import dataclass
from typing import Any

from models.settings import Positive


@dataclass(kw_only=True)
class Group:
    """Settings of every group; models/updates/NAME.py extends them."""

    PACKAGE = __name__
    name: str  # update rule: models/updates/NAME.py
    # which tensors: embedding, head, matrices (of the blocks), vectors, or names with wildcards, blocks.*.proj.weight;
    # where two groups have a tensor, the later one takes it
    tensors: list[str]
    lr: Positive  # learning rate at the schedule's peak; optim.lr multiplies it

    def build(self, tensors: list[Any], lr: float, rank: int, world_size: int, device_type: str) -> Any:
        """Returns a torch optimizer of these tensors; each of its param_groups has lr and peak_lr."""
        raise NotImplementedError

    def set_step(self, optimizer: Any, step: int, num_steps: int) -> None:
        """Sets what changes with the step, 0 to num_steps - 1, except the learning rate."""
