"""How the ranks divide the work."""

from dataclasses import dataclass

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
    """

    ep: int = 1
    pp: int = 1
    tp: int = 1
    cp: int = 1
    nvlink_domain: int = 8

    def __post_init__(self) -> None:
        require_positive(ep=self.ep, pp=self.pp, nvlink_domain=self.nvlink_domain)
        for name, what in (("tp", "tensor"), ("cp", "context"), ("pp", "pipeline")):
            value = getattr(self, name)
            require(value == 1, f"{name}={value}: the trainer has no {what} parallelism, use 1")
