"""Muon (models/muon_update.py) for the matrices inside the blocks, AdamW for everything else."""

from dataclasses import dataclass
from typing import Annotated, Any

from models.optimizers import adamw
from models.settings import Frac, Momentum, NotNegative, Positive, PositiveInt, one_of
from models.updates.muon import FIRST_MOMENTUM, momentum_at


@dataclass(kw_only=True)
class Config(adamw.Config):
    """Settings of both; lr, the betas, eps and weight_decay are AdamW's."""

    muon_lr: Positive  # Muon's learning rate at the peak, multiplied by sqrt(rows / columns) for tall matrices
    muon_momentum: Momentum  # Nesterov momentum
    # fraction of num_steps in which the momentum rises linearly from 0.85 to muon_momentum; null: no rise
    muon_momentum_warmup_frac: Frac | None = None
    muon_weight_decay: NotNegative  # Muon's weight decay per step, times the learning rate
    muon_ns_steps: PositiveInt  # Newton-Schulz iterations
    # update matrices of one shape together, eager or compiled by torch.compile; null: one by one, the same bits for any
    # number of processes
    muon_batched: Annotated[str, one_of("eager", "compiled")] | None = None

    def part_names(self) -> tuple[str, ...]:
        return ("adamw", "muon")

    def build(self, model: Any, rank: int, world_size: int, device_type: str) -> Any:
        """Returns both as one optimizer.  A world_size above 1 needs torch.distributed's default group."""
        from models.muon_update import Muon
        from models.together import Together

        matrices = model.hidden_matrices()
        matrix_ids = {id(matrix) for matrix in matrices}
        others = [parameter for parameter in model.parameters() if id(parameter) not in matrix_ids]
        muon = Muon(
            matrices,
            lr=self.muon_lr,
            momentum=self.muon_momentum,
            weight_decay=self.muon_weight_decay,
            ns_steps=self.muon_ns_steps,
            rank=rank,
            world_size=world_size,
            batched=self.muon_batched,
        )
        return Together({"adamw": self.adamw(others, device_type), "muon": muon})

    def set_step(self, optimizer: Any, step: int, num_steps: int) -> None:
        """Sets the learning rates, and Muon's momentum."""
        super().set_step(optimizer, step, num_steps)
        (group,) = optimizer.parts["muon"].param_groups
        warmup_frac = self.muon_momentum_warmup_frac or 0.0
        group["momentum"] = momentum_at(step, num_steps, warmup_frac, FIRST_MOMENTUM, self.muon_momentum)
