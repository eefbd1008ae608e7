"""Muon: momentum made orthogonal, for matrices."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_parallel.bucket import Bucket

# Newton-Schulz steps on so many elements at a time, to bound the memory of their products.
BATCH_ELEMENTS = 1 << 26


@dataclass(frozen=True, slots=True, kw_only=True)
class MuonConfig:
    """Hyperparameters of Muon.

    Learning rate, weight decay and clipping are AdamW's: an update is scaled to the size of one
    of AdamW's (0.2 times the root of the longer side), so both rules share one schedule.

    Attributes:
        momentum: Decay of the momentum.
        nesterov: Whether the gradient is mixed into the momentum once more.
        steps: Newton-Schulz iterations.
        dtype: What these compute in. bfloat16 is what torch and others use.
    """

    momentum: float = 0.95
    nesterov: bool = True
    steps: int = 5
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must be in [0, 1), got {self.momentum}")
        if self.steps < 1:
            raise ValueError(f"steps must be 1 or more, got {self.steps}")
        if not self.dtype.is_floating_point:
            raise ValueError(f"dtype must be a floating-point type, got {self.dtype}")


def orthogonalize(x_NFD: Tensor, steps: int, dtype: torch.dtype) -> Tensor:
    """Return, for each matrix, nearly the orthogonal one closest to it, scaled by no number.

    Brings every singular value to about 1 (between 0.7 and 1.2 after 5 steps, unless it was tiny)
    by the quintic Newton-Schulz iteration of Jordan et al., *Muon* (2024). A zero matrix stays
    zero. 2*F*D*min(F, D) FLOPs and twice ``min(F, D)**3`` each for a step and matrix.

    Args:
        x_NFD: N matrices.
        steps: Iterations.
        dtype: To compute in.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    wide = x_NFD.shape[-2] <= x_NFD.shape[-1]
    y = (x_NFD if wide else x_NFD.mT).to(dtype)
    y = y / (torch.linalg.vector_norm(y, dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = y @ y.mT
        y = a * y + (b * gram + c * gram @ gram) @ y
    return y if wide else y.mT


def update_muon(
    bucket: Bucket, *, coef: Tensor, skipped: Tensor, lr: float, config: MuonConfig
) -> None:
    """Update this rank's matrices of a bucket; if the step is skipped, change none.

    Args:
        bucket: With the summed gradient in ``grad_S``.
        coef: What gradients are multiplied by; 0 if skipped.
        skipped: bool, on the device.
        lr: Learning rate.
        config: The rest.
    """
    shape = bucket.layout.matrix or (1, 1)
    at_once = max(1, BATCH_ELEMENTS // math.prod(shape)) * math.prod(shape)
    for decay in bucket.decays:
        for run in bucket.runs(decay):
            for start in range(run.start, run.stop, at_once):
                part = slice(start, min(run.stop, start + at_once))
                _update_part(bucket, part, shape, decay, coef, skipped, lr, config)


def _update_part(
    bucket: Bucket,
    part: slice,
    shape: tuple[int, int],
    decay: float,
    coef: Tensor,
    skipped: Tensor,
    lr: float,
    config: MuonConfig,
) -> None:
    master_NFD, grad_NFD, momentum_NFD = (
        x[part].view(-1, *shape)
        for x in (bucket.master_S, bucket.grad_S, bucket.moments_S["momentum"])
    )
    # A non-finite gradient times 0 is still not finite, so it is replaced, not multiplied away.
    grad_NFD = torch.where(skipped, 0.0, grad_NFD * coef.to(grad_NFD.dtype))
    moved_NFD = torch.lerp(momentum_NFD, grad_NFD, 1 - config.momentum)
    mixed = torch.lerp(grad_NFD, moved_NFD, config.momentum) if config.nesterov else moved_NFD
    update_NFD = orthogonalize(mixed, config.steps, config.dtype).to(master_NFD.dtype)
    scale = lr * 0.2 * math.sqrt(max(shape))
    new_NFD = master_NFD * (1 - lr * decay) - scale * update_NFD
    momentum_NFD.copy_(torch.where(skipped, momentum_NFD, moved_NFD))
    master_NFD.copy_(torch.where(skipped, master_NFD, new_NFD))
