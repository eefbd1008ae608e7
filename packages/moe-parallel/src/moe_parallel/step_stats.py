"""The one reduction of a step: the norm, and whether to make the step at all."""

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from moe_parallel.mesh import Mesh
from moe_parallel.norm import sum_of_squares


class StepStats(NamedTuple):
    """What a step did. 0-dim tensors on the parameters' device: reading one waits for it.

    Attributes:
        grad_norm: Global norm before clipping, float64, the same bits on every rank; NaN if
            the step was skipped.
        clip_coef: What the gradients were multiplied by, float64; 0 if skipped.
        skipped: bool. No rank changed anything, for one of the following reasons or since a
            gradient was not finite on some rank.
        vetoed: bool. Some rank gave a veto.
        desynced: bool. Ranks of a stage reduced different buckets, or in another order, since
            the start: their sums are worthless. See ``ShardedAdamW.launches``.
    """

    grad_norm: Tensor
    clip_coef: Tensor
    skipped: Tensor
    vetoed: Tensor
    desynced: Tensor


def measure(
    grads: Iterable[Tensor],
    mesh: Mesh,
    device: torch.device,
    *,
    max_norm: float,
    veto: Tensor | None,
    launch_hash: int,
) -> StepStats:
    """Find the norm, and everybody's reasons not to step, with one reduction over the world.

    Every element of the model has one owner, so a plain sum over ranks counts it once. That all
    ranks of a stage hold the same 16-bit hash h shows in two more sums, exact in float64: n ranks
    agree if and only if ``n * sum(h * h) == sum(h)**2``.

    Args:
        grads: This rank's slices of the summed gradients.
        mesh: The mesh.
        device: Of the gradients.
        max_norm: Larger norms are clipped.
        veto: bool on the device; None: no veto of this rank.
        launch_hash: Of what this rank reduced, in what order; 16 bits.
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    for grad_S in grads:
        total += sum_of_squares(grad_S)
    finite = total.isfinite()
    sums = torch.zeros(3 + 2 * mesh.plan.pp, dtype=torch.float64, device=device)
    sums[0] = torch.where(finite, total, 0.0)
    sums[1] = ~finite
    if veto is not None:
        sums[2] = veto
    hashes = sums[3:].view(mesh.plan.pp, 2)
    # Filled by kernels with the number as an argument: copying it would wait for the device.
    hashes[mesh.pp_rank, 0].fill_(launch_hash)
    hashes[mesh.pp_rank, 1].fill_(launch_hash * launch_hash)
    if mesh.world_group is not None:
        dist.all_reduce(sums, group=mesh.world_group)
    vetoed = sums[2] > 0
    desynced = (hashes[:, 0].square() != mesh.plan.dp * hashes[:, 1]).any()
    # A sum of finite parts can still overflow.
    skipped = (sums[1] > 0) | ~sums[0].isfinite() | vetoed | desynced
    norm = torch.where(skipped, math.nan, sums[0].sqrt())
    coef = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    return StepStats(norm, torch.where(skipped, 0.0, coef), skipped, vetoed, desynced)
