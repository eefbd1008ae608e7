"""The optimizer and its schedule."""

from dataclasses import dataclass

from moe_train.config.rules import require, require_no_less_than_zero, require_positive


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """AdamW and its schedule: linear warm-up, then a constant rate, so that runs can be extended.

    Attributes:
        lr: The rate after warm-up.
        warmup_steps: Steps over which the rate rises from zero.
        beta1: Decay of the first moment.
        beta2: Decay of the second moment.
        eps: Added to the root of the second moment.
        weight_decay: Decoupled decay of matrices; vectors and the router are not decayed.
        max_norm: Gradients are scaled down to this global norm; 0 for no limit.
    """

    lr: float = 3e-3
    warmup_steps: int = 30
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    max_norm: float = 1.0

    def __post_init__(self) -> None:
        require_positive(lr=self.lr, eps=self.eps)
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            require(0 <= value < 1, f"{name} must be in [0, 1), got {value}")
        require_no_less_than_zero(
            warmup_steps=self.warmup_steps, weight_decay=self.weight_decay, max_norm=self.max_norm
        )
