"""How tokens choose experts."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from moe_train.config.rules import require, require_no_less_than_zero, require_positive


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutingConfig:
    """How tokens choose experts and what keeps the load even.

    Attributes:
        score: How logits become scores.
        renormalize: Whether the weights of a token's K experts are made to sum to one.
        num_groups: Groups of neighbouring experts; a token chooses among those of its best groups.
            A group counts as much as its best two experts (DeepSeek-V3). 1 for no groups.
        top_groups: Groups that a token may use.
        scale: Factor of all weights.
        balance: Weight of the balance loss.
        balance_over: Whose load the balance loss evens out: that of each ``sequence``; the
            ``global`` one of all ranks, as it was one step before (even before the first step); or
            that of each ``microbatch`` of each rank, which depends on how the batch is split.
        balance_form: ``product``, the usual loss, load times scores: it has a sign, and can fall
            while the load gets worse. ``distance``: the squared distance of the load from even.
        z: Weight of the z-loss, the mean squared log-partition of the router.
        bias: Whether a selection bias keeps the load even (loss-free balancing).
        bias_rate: Step of that bias after each optimizer step; 0 leaves it as it has become.
        forced: For benchmarks: experts that the router does not choose. ``uniform``: as many rows
            for each; ``random``: drawn once for each place in a microbatch; ``replay``: recorded.
        replay: Recording of the experts to replay, a folder that ``log.record_experts`` wrote.
    """

    score: Literal["softmax", "sigmoid"] = "softmax"
    renormalize: bool = True
    num_groups: int = 1
    top_groups: int = 1
    scale: float = 1.0
    balance: float = 0.01
    balance_over: Literal["sequence", "global", "microbatch"] = "sequence"
    balance_form: Literal["product", "distance"] = "product"
    z: float = 0.0
    bias: bool = False
    bias_rate: float = 0.001
    forced: Literal["none", "uniform", "random", "replay"] = "none"
    replay: Path | None = None

    def __post_init__(self) -> None:
        require_positive(
            num_groups=self.num_groups, top_groups=self.top_groups, scale=self.scale
        )  # fmt: skip
        require(
            self.top_groups <= self.num_groups,
            f"top_groups must be in 1..num_groups ({self.num_groups}), got {self.top_groups}",
        )
        require_no_less_than_zero(balance=self.balance, z=self.z, bias_rate=self.bias_rate)
        require(
            (self.forced == "replay") == (self.replay is not None),
            f"forced {self.forced} and replay {self.replay} do not fit: forced replay needs the "
            "folder of a recording in replay, and nothing else takes one",
        )

    def check_experts(self, num_experts: int, top_k: int) -> None:
        """Raise ValueError unless this many experts can be divided and chosen from."""
        require(
            num_experts % self.num_groups == 0,
            f"routing.num_groups ({self.num_groups}) must divide model.num_experts ({num_experts})",
        )
        usable = self.top_groups * (num_experts // self.num_groups)
        require(
            top_k <= usable,
            f"model.top_k ({top_k}) is more than the {usable} experts of routing.top_groups "
            f"({self.top_groups}) of {self.num_groups} groups",
        )
