"""Hyperparameters of AdamW."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamWConfig:
    """Hyperparameters, with the meaning they have in ``torch.optim.AdamW``.

    Attributes:
        lr: Learning rate, unless a step is given another.
        betas: Decay of the first and the second moment.
        eps: Added to the root of the second moment.
        weight_decay: Decay of the parameters that ask for it, per unit of learning rate.
        max_norm: Gradients with a larger global norm are scaled down to it; ``inf``: never.
    """

    lr: float
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    max_norm: float = 1.0

    def __post_init__(self) -> None:
        check_lr(self.lr)
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must be two numbers in [0, 1), got {self.betas}")
        if not (self.eps > 0 and math.isfinite(self.eps)):
            raise ValueError(f"eps must be positive and finite, got {self.eps}")
        if not (self.weight_decay >= 0 and math.isfinite(self.weight_decay)):
            raise ValueError(f"weight_decay must be finite, 0 or more, got {self.weight_decay}")
        if not self.max_norm > 0:
            raise ValueError(f"max_norm must be positive (inf: no clipping), got {self.max_norm}")


def check_lr(lr: float) -> None:
    """Refuse a learning rate that is negative or not finite."""
    if not (lr >= 0 and math.isfinite(lr)):
        raise ValueError(f"lr must be finite, 0 or more, got {lr}")
