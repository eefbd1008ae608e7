"""Everything about a run, in one tree."""

from dataclasses import dataclass, field
from pathlib import Path

from moe_train.config.data import DataConfig
from moe_train.config.log import LogConfig
from moe_train.config.mesh import MeshConfig
from moe_train.config.model import ModelConfig
from moe_train.config.optimizer import OptimizerConfig
from moe_train.config.routing import RoutingConfig
from moe_train.config.rules import is_text, require, require_positive
from moe_train.config.train import TrainConfig
from moe_train.errors import RunError


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """Everything about a run.

    Attributes:
        run_dir: Where checkpoints, metrics and the report are. A run found there is continued.
        nproc: Ranks to start on this machine; 1 runs in this process.
        model: The shape of the transformer.
        routing: How tokens choose experts.
        data: The text.
        mesh: How the ranks divide the work.
        optimizer: AdamW and its schedule.
        train: The loop.
        log: What the run tells about itself.
    """

    run_dir: Path = Path("runs/main")
    nproc: int = 1
    model: ModelConfig = field(default_factory=ModelConfig)
    routing: RoutingConfig = field(default_factory=RoutingConfig)
    data: DataConfig = field(default_factory=DataConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    log: LogConfig = field(default_factory=LogConfig)

    def __post_init__(self) -> None:
        require_positive(nproc=self.nproc)
        self.routing.check_experts(self.model.num_experts, self.model.top_k)
        for name, path in (
            ("run_dir", self.run_dir),
            ("data.path", self.data.path),
            ("routing.replay", self.routing.replay),
            ("log.record_experts", self.log.record_experts),
        ):
            require(
                path is None or is_text(str(path)),
                f"{name} {str(path)!r} is not UTF-8, as files that name it must be",
            )

    def check_batch(self, dp: int) -> None:
        """Raise unless ``dp`` ranks can divide the batch.

        Raises:
            RunError: If a rank's share is not a whole number of microbatches.
        """
        batch, micro = self.train.batch_size, self.train.microbatch_size
        if batch % dp:
            usable = [d for d in range(1, min(batch, 1024) + 1) if batch % d == 0]
            raise RunError(
                f"train.batch_size {batch} cannot be divided among {dp} ranks; usable ranks: "
                f"{usable}"
            )
        if micro and (batch // dp) % micro:
            raise RunError(
                f"train.microbatch_size {micro} does not divide the {batch // dp} sequences of a "
                "rank"
            )
