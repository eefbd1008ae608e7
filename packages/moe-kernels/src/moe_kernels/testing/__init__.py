"""Hypothesis strategies for users of these kernels. Needs ``moe-kernels[testing]``."""

from moe_kernels.testing.strategies import (
    GroupedProblem,
    grouped_problems,
    randn,
    routings,
    row_counts,
    seeds,
)

__all__ = ["GroupedProblem", "grouped_problems", "randn", "routings", "row_counts", "seeds"]
