"""AdamW on a flat slice, in plain torch. It is the specification."""

from torch import Tensor

from moe_parallel.adamw.config import AdamWConfig


def adamw_reference(
    master_S: Tensor,
    grad_S: Tensor,
    exp_avg_S: Tensor,
    exp_avg_sq_S: Tensor,
    decay_S: Tensor,
    *,
    step: int,
    coef: float,
    lr: float,
    config: AdamWConfig,
) -> None:
    """Update a slice in place: clip, moments, decay, step (Loshchilov and Hutter, 2019).

    Args:
        master_S: Weights in full precision.
        grad_S: Their gradients, not changed.
        exp_avg_S: First moment.
        exp_avg_sq_S: Second moment.
        decay_S: Weight decay of each element.
        step: Which update this is, counted from 1.
        coef: What gradients are multiplied by.
        lr: Learning rate.
        config: The rest.
    """
    beta1, beta2 = config.betas
    grad_S = grad_S * coef
    exp_avg_S.mul_(beta1).add_(grad_S, alpha=1 - beta1)
    exp_avg_sq_S.mul_(beta2).add_(grad_S.square(), alpha=1 - beta2)
    mean_S = exp_avg_S / (1 - beta1**step)
    root_S = (exp_avg_sq_S / (1 - beta2**step)).sqrt()
    master_S.mul_(1 - lr * decay_S).sub_(lr * mean_S / (root_S + config.eps))
