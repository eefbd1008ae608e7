"""What a run is made of: one frozen class for each concern, checked when it is made."""

from moe_train.config.data import DataConfig
from moe_train.config.log import LogConfig
from moe_train.config.mesh import MeshConfig
from moe_train.config.model import ModelConfig
from moe_train.config.optimizer import OptimizerConfig
from moe_train.config.routing import RoutingConfig
from moe_train.config.run import RunConfig
from moe_train.config.train import TrainConfig

__all__ = [
    "DataConfig",
    "LogConfig",
    "MeshConfig",
    "ModelConfig",
    "OptimizerConfig",
    "RoutingConfig",
    "RunConfig",
    "TrainConfig",
]
