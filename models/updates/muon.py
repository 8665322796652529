"""Muon (models/muon_update.py) in the variants of successive records."""

from dataclasses import dataclass, field
from typing import Annotated, Any

from models import updates
from models.settings import Frac, Momentum, NotNegative, PositiveInt, one_of

FIRST_MOMENTUM = 0.85  # modded-nanogpt, record 9 and since


@dataclass(kw_only=True)
class Config(updates.Group):
    momentum: Momentum = 0.95  # Nesterov momentum
    first_momentum: Momentum = FIRST_MOMENTUM  # the momentum at step 0 of its warm-up
    momentum_warmup_frac: Frac = 0.0  # fraction of num_steps in which it rises linearly from first_momentum to momentum
    # the momentum buffer: a running sum, as in the records of 2024, or a mean, as in torch.optim.Muon; the same
    # direction, unless the momentum changes
    accumulate: Annotated[str, one_of("sum", "mean")] = "mean"
    # factor of the update of a matrix of R rows and C columns: spectral sqrt(max(1, R/C)), rms sqrt(max(R, C)), where
    # a full-rank update has a root mean square of 1
    scale: Annotated[str, one_of("spectral", "rms")] = "spectral"
    weight_decay: NotNegative = 0.0  # weight decay per step, times the learning rate
    ns_steps: PositiveInt = 5  # Newton-Schulz iterations
    # update matrices of one shape together, eager or compiled by torch.compile; null: one by one
    batched: Annotated[str, one_of("eager", "compiled")] | None = None
    ns_coefficients: list[float] = field(default_factory=lambda: [3.4445, -4.7750, 2.0315])  # of x, x^3 and x^5

    def build(self, tensors: list[Any], lr: float, rank: int, world_size: int, device_type: str) -> Any:
        """Returns Muon, with its work divided among the ranks."""
        from models.muon_update import Muon

        return Muon(tensors, lr=lr, rank=rank, world_size=world_size, **self.settings())

    def settings(self) -> dict[str, Any]:
        """Returns the arguments of Muon."""
        return {
            "momentum": self.momentum,
            "weight_decay": self.weight_decay,
            "ns_steps": self.ns_steps,
            "accumulate": self.accumulate,
            "scale": self.scale,
            "coefficients": tuple(self.ns_coefficients),
            "batched": self.batched,
        }

    def set_step(self, optimizer: Any, step: int, num_steps: int) -> None:
        """Sets the momentum of this step."""
        (group,) = optimizer.param_groups
        group["momentum"] = momentum_at(step, num_steps, self.momentum_warmup_frac, self.first_momentum, self.momentum)


def momentum_at(step: int, num_steps: int, warmup_frac: float, first: float, last: float) -> float:
    """Returns a momentum that rises linearly from first at step 0 to last at step warmup_frac * num_steps."""
    num_warmup_steps = round(warmup_frac * num_steps)
    risen = min(step / num_warmup_steps, 1.0) if num_warmup_steps else 1.0
    return (1 - risen) * first + risen * last
