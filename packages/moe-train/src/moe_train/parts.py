"""A part of a block as steps, each cheap before dear, so that the cheap half can be recomputed.

``cheap`` norms, rotates, multiplies; ``dear`` is a product of matrices, or attention, or experts.
What a step hands from its cheap to its dear half is what backward would keep. With recomputation
it keeps what the cheap half started from instead, and no product is computed twice.
"""

from collections.abc import Callable, Sequence
from typing import Any

from moe_parallel import recompute

Step = tuple[Callable[..., Any], Callable[..., Any]]


def run_steps(steps: Sequence[Step], *values: Any, recomputed: bool) -> Any:
    """Run the steps one after the other, each on what the one before returned.

    Args:
        steps: Pairs (cheap, dear). What a half returns as a tuple, the next takes as arguments.
        values: Arguments of the first.
        recomputed: Whether backward computes the cheap halves again.
    """
    for cheap, dear in steps:
        if recomputed:
            result = recompute(cheap, *values, then=dear)
        else:
            handed = cheap(*values)
            result = dear(*handed) if isinstance(handed, tuple) else dear(handed)
        values = result if isinstance(result, tuple) else (result,)
    return values if len(values) > 1 else values[0]
