"""Mesh, sharded optimizer and gradient reduction for MoE training.

Suffixes of tensors: P elements of a padded bucket, S = P / W elements of one rank's slice of it,
N elements of any vector.
"""

from moe_parallel.layout import ParamSpec
from moe_parallel.mesh import Mesh
from moe_parallel.mesh_plan import MeshError, MeshPlan, plan_mesh
from moe_parallel.self_check import MismatchError, check_same
from moe_parallel.shard import Shard
from moe_parallel.sharded_adamw import AdamWConfig, ShardedAdamW, StepStats

__all__ = [
    "AdamWConfig",
    "Mesh",
    "MeshError",
    "MeshPlan",
    "MismatchError",
    "ParamSpec",
    "Shard",
    "ShardedAdamW",
    "StepStats",
    "check_same",
    "plan_mesh",
]
