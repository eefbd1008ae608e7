"""Pipeline parallelism: stages on ranks, microbatches through them, by a static schedule."""

from moe_parallel.pipeline.failure import StageError
from moe_parallel.pipeline.pipeline import Pipeline
from moe_parallel.pipeline.stage import StageResult
from moe_parallel.pipeline.step import Outcome

__all__ = ["Outcome", "Pipeline", "StageError", "StageResult"]
