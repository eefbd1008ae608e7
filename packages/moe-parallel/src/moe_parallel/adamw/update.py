"""AdamW on a bucket: the kernel on a GPU, torch's fused loop elsewhere."""

import torch
from torch import Tensor

from moe_parallel.adamw.config import AdamWConfig
from moe_parallel.adamw.dispatch import find_kernel
from moe_parallel.bucket import Bucket


def step_scalars(coef: Tensor, skipped: Tensor, step: Tensor, config: AdamWConfig) -> Tensor:
    """Return what a kernel needs and the host does not know, see ``adamw_kernel``.

    The corrections are worked out in float64: of ``1 - 0.999**1`` float32 leaves 4 digits.
    """
    beta1, beta2 = config.betas
    count = step.double()
    correction1 = 1 / (1 - beta1**count)
    correction2 = (1 - beta2**count).rsqrt()
    return torch.stack([coef.double(), skipped.double(), correction1, correction2]).float()


def update_adamw(
    bucket: Bucket,
    *,
    coef: Tensor,
    found_inf: Tensor,
    step: Tensor,
    scalars_4: Tensor,
    lr: float,
    config: AdamWConfig,
) -> None:
    """Update this rank's slice of a bucket, and on a GPU its parameters in the same pass.

    Args:
        bucket: With the summed gradient in ``grad_S``.
        coef: What gradients are multiplied by, float64; 0 if skipped.
        found_inf: float32, 1 if the step is skipped: then nothing is touched.
        step: float32, which update this is, counted from 1.
        scalars_4: From ``step_scalars``.
        lr: Learning rate.
        config: The rest.
    """
    kernel = find_kernel(bucket.master_S)
    if kernel is None:
        _update_with_torch(bucket, coef, found_inf, step, lr, config)
    else:
        kernel.launch_adamw(
            bucket.master_S,
            bucket.grad_S,
            bucket.moments_S["exp_avg"],
            bucket.moments_S["exp_avg_sq"],
            bucket.own_S if bucket.has_copy else None,
            bucket.decay_C,
            scalars_4,
            lr=lr,
            betas=config.betas,
            eps=config.eps,
        )
        bucket.written = True


def _update_with_torch(
    bucket: Bucket,
    coef: Tensor,
    found_inf: Tensor,
    step: Tensor,
    lr: float,
    config: AdamWConfig,
) -> None:
    (beta1, beta2), scale = config.betas, coef.reciprocal().float()
    if bucket.grad_S.dtype == torch.float64:
        # The kernel's scale is float32, which would cost half of the digits.
        bucket.grad_S.mul_(coef)
        scale = None
    state_S = bucket.master_S, bucket.grad_S, *bucket.moments_S.values()
    for decay in bucket.decays:
        runs = bucket.runs(decay)
        if not runs:
            continue
        masters, grads, exp_avgs, exp_avg_sqs = ([x[run] for run in runs] for x in state_S)
        torch._fused_adamw_(
            masters,
            grads,
            exp_avgs,
            exp_avg_sqs,
            [],
            [step] * len(masters),
            lr=lr,
            beta1=beta1,
            beta2=beta2,
            weight_decay=decay,
            eps=config.eps,
            amsgrad=False,
            maximize=False,
            grad_scale=scale,
            found_inf=found_inf,
        )
