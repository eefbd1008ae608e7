"""How the ranks divide the work."""

from dataclasses import dataclass
from typing import Literal

from moe_train.config.rules import require, require_positive


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshConfig:
    """How the ranks divide the work.

    Attributes:
        ep: Ranks that divide the experts of a block among them.
        pp: Pipeline stages; 1 in this version.
        tp: Tensor parallelism, which this version does not have; only 1.
        cp: Context parallelism, which this version does not have; only 1.
        nvlink_domain: GPUs that reach each other over NVLink; expert parallelism stays inside.
        overlap: Sum gradients over ranks while backward goes on, and share the new parameters
            during the next forward. The same bits either way.
        dispatcher: What carries rows between ranks: ``all_to_all`` of torch.distributed, for which
            the host waits in every layer; or ``rowwise``, stores into the memory of the other
            ranks, for which it never does.
        overflow: What ``rowwise`` has room for: ``exact``, the most rows that can come to a rank;
            or ``retry``, ``capacity_factor`` times the mean, and a step to which more came is
            repeated with a larger buffer.
        capacity_factor: Size of the first buffer of ``retry``.
    """

    ep: int = 1
    pp: int = 1
    tp: int = 1
    cp: int = 1
    nvlink_domain: int = 8
    overlap: bool = True
    dispatcher: Literal["all_to_all", "rowwise"] = "all_to_all"
    overflow: Literal["exact", "retry"] = "exact"
    capacity_factor: float = 2.0

    def __post_init__(self) -> None:
        require_positive(
            ep=self.ep, pp=self.pp, nvlink_domain=self.nvlink_domain,
            capacity_factor=self.capacity_factor,
        )  # fmt: skip
        require(
            self.overflow == "exact" or self.dispatcher == "rowwise",
            f"overflow={self.overflow!r} belongs to dispatcher 'rowwise', and dispatcher is "
            f"{self.dispatcher!r}, which has no buffer to overflow",
        )
        for name, what in (("tp", "tensor"), ("cp", "context"), ("pp", "pipeline")):
            value = getattr(self, name)
            require(value == 1, f"{name}={value}: the trainer has no {what} parallelism, use 1")
