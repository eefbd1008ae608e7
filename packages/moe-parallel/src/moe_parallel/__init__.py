"""Mesh, sharded optimizer and gradient reduction for MoE training.

Suffixes of tensors: P elements of a padded bucket, S = P / W elements of one rank's slice of it,
C runs of 64 elements of a slice, N elements of any vector or N matrices of F rows and D columns.
"""

from moe_parallel.adamw import AdamWConfig
from moe_parallel.deferral import WeightGradient, sink_of
from moe_parallel.diagnostics import (
    Beat,
    Heartbeat,
    StragglerMonitor,
    StragglerReport,
    find_desync,
)
from moe_parallel.gradients import Gradients, GradientTarget
from moe_parallel.layout import ParamSpec
from moe_parallel.mesh import Mesh, leave
from moe_parallel.mesh_plan import MeshError, MeshPlan, plan_mesh
from moe_parallel.muon import MuonConfig
from moe_parallel.ownership import OwnershipError, check_mesh, check_ownership
from moe_parallel.pipeline import Outcome, Pipeline, StageError, StageResult
from moe_parallel.recomputation import RecomputeError, recompute, recomputing, replayed
from moe_parallel.schedule import Schedule, ScheduleError, make_schedule, simulate
from moe_parallel.self_check import MismatchError, check_same
from moe_parallel.shard import Shard
from moe_parallel.sharded_adamw import ShardedAdamW
from moe_parallel.split_linear import SplitLinear, split_linears
from moe_parallel.step_stats import StepStats

__all__ = [
    "AdamWConfig",
    "Beat",
    "GradientTarget",
    "Gradients",
    "Heartbeat",
    "Mesh",
    "MeshError",
    "MeshPlan",
    "MismatchError",
    "MuonConfig",
    "Outcome",
    "OwnershipError",
    "ParamSpec",
    "Pipeline",
    "RecomputeError",
    "Schedule",
    "ScheduleError",
    "Shard",
    "ShardedAdamW",
    "SplitLinear",
    "StageError",
    "StageResult",
    "StepStats",
    "StragglerMonitor",
    "StragglerReport",
    "WeightGradient",
    "check_mesh",
    "check_ownership",
    "check_same",
    "find_desync",
    "leave",
    "make_schedule",
    "plan_mesh",
    "recompute",
    "recomputing",
    "replayed",
    "simulate",
    "sink_of",
    "split_linears",
]
