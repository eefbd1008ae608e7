"""Routing as a torch operator: dispatch by device, and its gradients."""

import torch
from torch import Tensor

from moe_kernels.backend import runs_kernel
from moe_kernels.operator import operator
from moe_kernels.routing.choice.reference import route_backward_reference, route_reference

KERNEL_EXPERTS = 1024  # a row stays in registers


def _runs_kernel(logits_TE: Tensor) -> bool:
    return runs_kernel(logits_TE) and logits_TE.shape[1] <= KERNEL_EXPERTS


@operator("route")
def route(
    logits_TE: Tensor,
    top_k: int,
    score: str,
    renormalize: bool,
    bias_E: Tensor | None,
    num_groups: int,
    top_groups: int,
    scale: float,
    mask_T: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the fields of ``Routing``: a Triton kernel on CUDA, the reference elsewhere."""
    args = (top_k, score, renormalize, bias_E, num_groups, top_groups, scale, mask_T)
    if _runs_kernel(logits_TE):
        from moe_kernels.routing.choice.kernel import route_triton  # noqa: PLC0415 - optional

        return route_triton(logits_TE, *args)
    return route_reference(logits_TE, *args)


@operator("route_backward")
def route_backward(
    dweight_TK: Tensor,
    dscore_TE: Tensor | None,
    logits_TE: Tensor,
    expert_TK: Tensor,
    score: str,
    renormalize: bool,
    scale: float,
) -> Tensor:
    """Return the gradient of the logits: a Triton kernel on CUDA, the reference elsewhere."""
    args = (dweight_TK, dscore_TE, logits_TE, expert_TK, score, renormalize, scale)
    if _runs_kernel(logits_TE):
        from moe_kernels.routing.choice.kernel import route_backward_triton  # noqa: PLC0415

        return route_backward_triton(*args)
    return route_backward_reference(*args)


@torch.library.register_fake("moe_kernels::route")
def _(
    logits_TE: Tensor,
    top_k: int,
    score: str,
    renormalize: bool,
    bias_E: Tensor | None,
    num_groups: int,
    top_groups: int,
    scale: float,
    mask_T: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    del score, renormalize, bias_E, num_groups, top_groups, scale, mask_T
    T, E = logits_TE.shape
    wide = torch.float64 if logits_TE.dtype == torch.float64 else torch.float32
    return (
        logits_TE.new_empty(T, top_k, dtype=wide),
        logits_TE.new_empty(T, top_k, dtype=torch.int32),
        logits_TE.new_empty(T, E, dtype=wide),
        logits_TE.new_empty((), dtype=torch.int32),
    )


@torch.library.register_fake("moe_kernels::route_backward")
def _(
    dweight_TK: Tensor,
    dscore_TE: Tensor | None,
    logits_TE: Tensor,
    expert_TK: Tensor,
    score: str,
    renormalize: bool,
    scale: float,
) -> Tensor:
    del dweight_TK, dscore_TE, expert_TK, score, renormalize, scale
    return logits_TE.new_empty(logits_TE.shape)


def _save(ctx, inputs: tuple, output: tuple[Tensor, ...]) -> None:
    logits_TE, _, ctx.score, ctx.renormalize, _, _, _, ctx.scale, _ = inputs
    ctx.save_for_backward(logits_TE, output[1])
    ctx.set_materialize_grads(False)  # an unused score costs backward no read


def _backward(ctx, dweight_TK: Tensor | None, dexpert_TK, dscore_TE: Tensor | None, dnum_bad):
    del dexpert_TK, dnum_bad
    logits_TE, expert_TK = ctx.saved_tensors
    dlogits_TE = None
    if dweight_TK is not None or dscore_TE is not None:
        if dweight_TK is None:
            wide = torch.float64 if logits_TE.dtype == torch.float64 else torch.float32
            dweight_TK = expert_TK.new_zeros(expert_TK.shape, dtype=wide)
        dlogits_TE = route_backward(
            dweight_TK, dscore_TE, logits_TE, expert_TK, ctx.score, ctx.renormalize, ctx.scale
        )
    return dlogits_TE, None, None, None, None, None, None, None, None


def _save_backward(ctx, inputs: tuple, output: Tensor) -> None:
    del output
    *tensors, ctx.score, ctx.renormalize, ctx.scale = inputs
    ctx.save_for_backward(*tensors)


def _backward_of_backward(ctx, ddlogits_TE: Tensor):
    """Differentiate the reference, which is plain torch; nothing trains through this."""
    dweight_TK, dscore_TE, logits_TE, expert_TK = ctx.saved_tensors
    used = [x for x in (dweight_TK, dscore_TE, logits_TE) if x is not None]
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in used]
        dlogits_TE = route_backward_reference(
            leaves[0],
            None if dscore_TE is None else leaves[1],
            leaves[-1],
            expert_TK,
            ctx.score,
            ctx.renormalize,
            ctx.scale,
        )
        grads = torch.autograd.grad(dlogits_TE, leaves, ddlogits_TE)
    return grads[0], None if dscore_TE is None else grads[1], grads[-1], None, None, None, None


torch.library.register_autograd("moe_kernels::route", _backward, setup_context=_save)
torch.library.register_autograd(
    "moe_kernels::route_backward", _backward_of_backward, setup_context=_save_backward
)
