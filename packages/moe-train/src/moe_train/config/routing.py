"""How tokens choose experts."""

from dataclasses import dataclass
from typing import Literal

from moe_train.config.rules import require_no_less_than_zero


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutingConfig:
    """How tokens choose experts and what keeps the load even.

    Attributes:
        score: How logits become scores.
        renormalize: Whether the weights of a token's K experts are made to sum to one.
        balance: Weight of the balance loss, taken over each sequence.
        z: Weight of the z-loss, the mean squared log-partition of the router.
        bias: Whether a selection bias keeps the load even (loss-free balancing).
        bias_rate: Step of that bias after each optimizer step; 0 leaves it as it has become.
    """

    score: Literal["softmax", "sigmoid"] = "softmax"
    renormalize: bool = True
    balance: float = 0.01
    z: float = 0.0
    bias: bool = False
    bias_rate: float = 0.001

    def __post_init__(self) -> None:
        require_no_less_than_zero(balance=self.balance, z=self.z, bias_rate=self.bias_rate)
