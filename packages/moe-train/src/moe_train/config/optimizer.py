"""The optimizer and its schedule."""

from dataclasses import dataclass
from typing import Literal

from moe_train.config.rules import require, require_no_less_than_zero, require_positive


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """The rule of the update and the schedule of its rate, see ``schedule.py``.

    Attributes:
        lr: The rate after warm-up.
        schedule: How the rate goes on after a linear warm-up: ``constant``, so that runs can be
            extended; ``cosine`` or ``linear`` down to the floor; ``wsd``, stable and then linear
            over its last steps.
        warmup_steps: Steps over which the rate rises from zero.
        total_steps: Step at which a schedule that decays has reached its floor. 0 for the step
            at which the first start of the run was to end; what later starts add does not bend it.
        decay_steps: Steps before ``total_steps`` over which the rate falls. 0 for all after
            warm-up, and for a fifth of ``total_steps`` with ``wsd``.
        floor: Part of ``lr`` at which a schedule that decays ends.
        rule: ``adamw``; or ``muon``, for the matrices inside of blocks, each expert's by itself,
            while vectors, router, embedding and head stay with AdamW. Muon's updates are scaled
            to the size of AdamW's, so both share one rate.
        expert_lr: Rate of the experts' matrices, as a multiple of the others'.
        router_lr: Rate of the routers, likewise.
        embedding_lr: Rate of the embedding and the head, likewise.
        beta1: Decay of the first moment; Muon's momentum decays by 0.95.
        beta2: Decay of the second moment.
        eps: Added to the root of the second moment.
        weight_decay: Decoupled decay of matrices, for each unit of the rate; vectors and the
            router are not decayed.
        max_norm: Gradients are scaled down to this global norm; 0 for no limit.
    """

    lr: float = 3e-3
    schedule: Literal["constant", "cosine", "linear", "wsd"] = "constant"
    warmup_steps: int = 30
    total_steps: int = 0
    decay_steps: int = 0
    floor: float = 0.0
    rule: Literal["adamw", "muon"] = "adamw"
    expert_lr: float = 1.0
    router_lr: float = 1.0
    embedding_lr: float = 1.0
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
            warmup_steps=self.warmup_steps, total_steps=self.total_steps,
            decay_steps=self.decay_steps, weight_decay=self.weight_decay, max_norm=self.max_norm,
            expert_lr=self.expert_lr, router_lr=self.router_lr, embedding_lr=self.embedding_lr,
        )  # fmt: skip
        require(0 <= self.floor <= 1, f"floor must be in [0, 1], got {self.floor}")
        if self.schedule == "constant":
            for name in ("total_steps", "decay_steps", "floor"):
                value = getattr(self, name)
                require(
                    not value,
                    f"{name}={value} belongs to a schedule that decays, and schedule is 'constant'",
                )
