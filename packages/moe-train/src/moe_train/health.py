"""How well the routers spread the load, in numbers that grow with layers and not with experts.

Four vectors, each over layers, of the largest load over the mean: what experts were asked for
(``requested``) and what they got (``kept``), counted per expert and per rank. The first says how
uneven the choice is, the last what a step waits for. Then how far the load is from even, and what
the usual balance loss says of it; `moe_kernels.unevenness` defines them.
"""

from typing import Any

import torch
from moe_kernels import unevenness
from torch import Tensor

from moe_train.trainer import StepResult


def largest_to_mean(count_LN: Tensor) -> Tensor:
    """Return the largest over the mean of each row; 1 for a row of zeros.

    Examples:
        >>> largest_to_mean(torch.tensor([[1, 3], [0, 0]])).tolist()
        [1.5, 1.0]
    """
    total_L = count_LN.sum(-1)
    ratio_L = count_LN.amax(-1) * count_LN.shape[-1] / total_L.clamp(min=1)
    return torch.where(total_L > 0, ratio_L, 1.0)


def router_health(result: StepResult, window_LE: Tensor, ep: int) -> dict[str, Any]:
    """Return the health of every layer's router, as lists over layers.

    Args:
        result: Of the step. Waits for the device.
        window_LE: int64, rows of each expert since the record before.
        ep: Ranks that share the experts, which lie on them in blocks.

    Returns:
        ``expert_requested``, ``expert_kept``, ``rank_requested``, ``rank_kept``: largest to mean.
        ``dropped``: fraction of the routes that were dropped, and, only if any was, ``drops``:
        fractions of the tokens that lost 0 to K routes. ``entropy_deficit`` (nats),
        ``never_selected`` (experts without a row in the window), ``score``, ``distance``.
    """
    count_LE, kept_LE = result.count_LE.cpu(), result.kept_LE.cpu()
    uneven = unevenness(count_LE, result.share_LE.cpu())
    vectors = {
        "expert_requested": largest_to_mean(count_LE),
        "expert_kept": largest_to_mean(kept_LE),
        "rank_requested": largest_to_mean(_of_ranks(count_LE, ep)),
        "rank_kept": largest_to_mean(_of_ranks(kept_LE, ep)),
        "dropped": 1 - kept_LE.sum(1) / count_LE.sum(1).clamp(min=1),
        "entropy_deficit": uneven.entropy_deficit,
        "never_selected": (window_LE == 0).sum(1),
        "score": uneven.score,
        "distance": uneven.distance,
    }
    health: dict[str, Any] = {
        name: [_short(x) for x in vector.tolist()] for name, vector in vectors.items()
    }
    if bool((kept_LE != count_LE).any()):
        tokens_LK1 = result.dropped_LK1.cpu()
        total_L1 = tokens_LK1.sum(1, keepdim=True).clamp(min=1)
        health["drops"] = [[_short(x) for x in row] for row in (tokens_LK1 / total_L1).tolist()]
    return health


def _of_ranks(count_LE: Tensor, ep: int) -> Tensor:
    return count_LE.unflatten(1, (ep, -1)).sum(2)


def _short(value: float) -> float:
    """Round to six digits: a record is read by people and machines, and kept for months."""
    return float(f"{value:.6g}")
