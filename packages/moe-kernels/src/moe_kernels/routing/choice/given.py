"""Routing to experts that somebody else has chosen: recorded ones, or forced ones."""

import torch
from torch import Tensor
from torch.nn import functional as F

from moe_kernels.operator import operator
from moe_kernels.routing.choice.op import route_backward
from moe_kernels.routing.choice.reference import finite_rows


@operator("route_to")
def route_to(
    logits_TE: Tensor,
    expert_TK: Tensor,
    score: str,
    renormalize: bool,
    scale: float,
    mask_T: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the fields of ``Routing``. Plain torch on every device: ``12 T E`` bytes in float32.

    A row with a route of -1 is masked. Backward is that of ``route``, which wants the ids alone.
    """
    logits_TE = logits_TE if logits_TE.dtype == torch.float64 else logits_TE.float()
    asked_T = (expert_TK >= 0).all(dim=1)
    if mask_T is not None:
        asked_T = asked_T & mask_T
    ids_TK = expert_TK.clamp(min=0).long()
    bad_T = ~finite_rows(logits_TE) | ~logits_TE.gather(1, ids_TK).isfinite().all(dim=1)
    out_T1 = (bad_T | ~asked_T)[:, None]
    safe_TE = logits_TE.masked_fill(out_T1, 0.0)
    score_TE = safe_TE.softmax(dim=1) if score == "softmax" else safe_TE.sigmoid()
    if renormalize:
        log_TE = safe_TE if score == "softmax" else F.logsigmoid(safe_TE)
        weight_TK = log_TE.gather(1, ids_TK).softmax(dim=1)
    else:
        weight_TK = score_TE.gather(1, ids_TK)
    return (
        (weight_TK * scale).masked_fill(out_T1, 0.0).contiguous(),
        expert_TK.masked_fill(out_T1, -1).to(torch.int32).contiguous(),
        score_TE.masked_fill(out_T1, 0.0).contiguous(),
        (bad_T & asked_T).sum(dtype=torch.int32),
    )


@torch.library.register_fake("moe_kernels::route_to")
def _(
    logits_TE: Tensor,
    expert_TK: Tensor,
    score: str,
    renormalize: bool,
    scale: float,
    mask_T: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    del score, renormalize, scale, mask_T
    wide = torch.float64 if logits_TE.dtype == torch.float64 else torch.float32
    return (
        logits_TE.new_empty(expert_TK.shape, dtype=wide),
        logits_TE.new_empty(expert_TK.shape, dtype=torch.int32),
        logits_TE.new_empty(logits_TE.shape, dtype=wide),
        logits_TE.new_empty((), dtype=torch.int32),
    )


def _save(ctx, inputs: tuple, output: tuple[Tensor, ...]) -> None:
    logits_TE, _, ctx.score, ctx.renormalize, ctx.scale, _ = inputs
    ctx.save_for_backward(logits_TE, output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx, dweight_TK: Tensor | None, dexpert_TK, dscore_TE: Tensor | None, dnum_bad):
    del dexpert_TK, dnum_bad
    logits_TE, expert_TK = ctx.saved_tensors
    if dweight_TK is None and dscore_TE is None:
        return None, None, None, None, None, None
    if dweight_TK is None:
        wide = torch.float64 if logits_TE.dtype == torch.float64 else torch.float32
        dweight_TK = expert_TK.new_zeros(expert_TK.shape, dtype=wide)
    dlogits_TE = route_backward(
        dweight_TK, dscore_TE, logits_TE, expert_TK, ctx.score, ctx.renormalize, ctx.scale
    )
    return dlogits_TE, None, None, None, None, None


torch.library.register_autograd("moe_kernels::route_to", _backward, setup_context=_save)
