"""NorMuon (models/muon_update.py): Muon with Polar Express, normalised by rows, with cautious weight decay.

optim.groups.matrices.name=normuon replaces Muon by it; it has Muon's settings too.
"""

from dataclasses import dataclass
from typing import Annotated, Any

from models.settings import Frac, Momentum, one_of
from models.updates import muon


@dataclass(kw_only=True)
class Config(muon.Config):
    momentum_cooldown_frac: Frac = 0.0  # linear fall back to first_momentum at the end, as a part of num_steps
    beta2: Momentum | None = 0.95  # decay of the mean square of each row's updates; null: rows are not normalised
    # what ends up with one mean square, rows or columns; null: the longer side's, of a square matrix rows
    evened: Annotated[str, one_of("rows", "columns")] | None = None
    cautious: bool = True  # weight decay only where the step shrinks the weight, and times the learning rate's square
    polar_express: bool = True  # its five polynomials in place of ns_steps of ns_coefficients

    def build(self, tensors: list[Any], lr: float, rank: int, world_size: int, device_type: str) -> Any:
        """Returns NorMuon, with its work divided among the ranks."""
        from models.muon_update import NorMuon, polar_coefficients

        settings = self.settings()
        if self.polar_express:
            coefficients = polar_coefficients()
            settings |= {"ns_steps": len(coefficients), "coefficients": coefficients}
        settings |= {"beta2": self.beta2, "cautious": self.cautious, "evened": self.evened}
        return NorMuon(tensors, lr=lr, rank=rank, world_size=world_size, **settings)

    def set_step(self, optimizer: Any, step: int, num_steps: int) -> None:
        """Sets the momentum of this step."""
        super().set_step(optimizer, step, num_steps)
        num_cooldown_steps = round(self.momentum_cooldown_frac * num_steps)
        if num_steps - step < num_cooldown_steps:
            remaining_frac = (num_steps - step) / num_cooldown_steps
            (group,) = optimizer.param_groups
            group["momentum"] = (1 - remaining_frac) * self.first_momentum + remaining_frac * group["momentum"]
