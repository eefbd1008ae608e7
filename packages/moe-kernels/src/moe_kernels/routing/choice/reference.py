"""What routing is, in plain torch, and its gradient."""

import torch
from torch import Tensor
from torch.nn import functional as F

NEVER = -torch.inf


def finite_rows(logits_TE: Tensor) -> Tensor:
    """Tell which rows have no NaN, no +inf, and something besides -inf."""
    peak_T = logits_TE.detach().amax(dim=1)  # NaN if there is one
    return peak_T.isfinite()


def route_reference(
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
    """Return the fields of ``Routing``. Half precision is widened to float32 first."""
    logits_TE = _widened(logits_TE)
    bad_T = ~finite_rows(logits_TE)
    with torch.no_grad():
        key_TE = _selection_key(logits_TE, bad_T, score, bias_E, num_groups, top_groups)
        # topk does not say which of equal values it takes; a stable sort does.
        key_TE, order_TE = key_TE.sort(dim=1, descending=True, stable=True)
        expert_TK = order_TE[:, :top_k]
        bad_T = bad_T | ~key_TE[:, :top_k].isfinite().all(dim=1)
    out_T = bad_T if mask_T is None else bad_T | ~mask_T
    # Masked rows are cut off before the first function that could make NaN of them, in both passes.
    safe_TE = logits_TE.masked_fill(out_T[:, None], 0.0)
    score_TE = safe_TE.softmax(dim=1) if score == "softmax" else safe_TE.sigmoid()
    if renormalize:
        # s_i / sum(s) as a softmax of log s: exact also where every chosen s underflows.
        log_TE = safe_TE if score == "softmax" else F.logsigmoid(safe_TE)
        weight_TK = log_TE.gather(1, expert_TK).softmax(dim=1)
    else:
        weight_TK = score_TE.gather(1, expert_TK)
    return (
        (weight_TK * scale).masked_fill(out_T[:, None], 0.0).contiguous(),
        expert_TK.masked_fill(out_T[:, None], -1).to(torch.int32).contiguous(),
        score_TE.masked_fill(out_T[:, None], 0.0).contiguous(),
        (bad_T if mask_T is None else bad_T & mask_T).sum(dtype=torch.int32),
    )


def route_backward_reference(
    dweight_TK: Tensor,
    dscore_TE: Tensor | None,
    logits_TE: Tensor,
    expert_TK: Tensor,
    score: str,
    renormalize: bool,
    scale: float,
) -> Tensor:
    """Return ``dlogits_TE``, in the dtype of the logits. Itself differentiable.

    With s the scores, a softmax passes on ``s * (ds - sum(s * ds))`` and a sigmoid
    ``ds * s * (1 - s)``. Renormalized weights are a softmax of log s over the chosen.
    """
    out_T1 = expert_TK[:, :1] < 0
    safe_TE = _widened(logits_TE).masked_fill(out_T1, 0.0)
    ids_TK = expert_TK.clamp(min=0).long()  # of masked rows any id does: all they add is 0
    dweight_TK = (dweight_TK * scale).masked_fill(out_T1, 0.0)
    softmax = score == "softmax"
    score_TE = safe_TE.softmax(dim=1) if softmax else safe_TE.sigmoid()
    dscore_TE = torch.zeros_like(safe_TE) if dscore_TE is None else dscore_TE
    dscore_TE = dscore_TE.masked_fill(out_T1, 0.0)
    if not renormalize:
        dscore_TE = dscore_TE.scatter_add(1, ids_TK, dweight_TK)
    if softmax:
        dlogits_TE = score_TE * (dscore_TE - (score_TE * dscore_TE).sum(dim=1, keepdim=True))
    else:
        dlogits_TE = dscore_TE * score_TE * (-safe_TE).sigmoid()
    if renormalize:
        log_TE = safe_TE if softmax else F.logsigmoid(safe_TE)
        share_TK = log_TE.gather(1, ids_TK).softmax(dim=1)
        dlog_TK = share_TK * (dweight_TK - (share_TK * dweight_TK).sum(dim=1, keepdim=True))
        if not softmax:
            dlog_TK = dlog_TK * (-safe_TE.gather(1, ids_TK)).sigmoid()
        dlogits_TE = dlogits_TE.scatter_add(1, ids_TK, dlog_TK)
    return dlogits_TE.masked_fill(out_T1, 0.0).to(logits_TE.dtype).contiguous()


def _widened(logits_TE: Tensor) -> Tensor:
    return logits_TE if logits_TE.dtype == torch.float64 else logits_TE.float()


def _selection_key(
    logits_TE: Tensor,
    bad_T: Tensor,
    score: str,
    bias_E: Tensor | None,
    num_groups: int,
    top_groups: int,
) -> Tensor:
    """Return what the choice is sorted by: -inf for experts that must not be chosen.

    Without a bias that is the logits, whose order is the scores' and which do not saturate.
    """
    safe_TE = logits_TE.masked_fill(bad_T[:, None], 0.0)
    if bias_E is None and num_groups == 1:
        return safe_TE
    score_TE = safe_TE.softmax(dim=1) if score == "softmax" else safe_TE.sigmoid()
    biased_TE = score_TE if bias_E is None else score_TE + bias_E.to(score_TE.dtype)
    biased_TE = biased_TE.masked_fill(safe_TE == NEVER, NEVER)
    key_TE = safe_TE if bias_E is None else biased_TE
    if num_groups == 1:
        return key_TE
    group_TGe = biased_TE.unflatten(1, (num_groups, -1))
    best_TG2 = group_TGe.topk(min(2, group_TGe.shape[2]), dim=2).values
    # One usable expert makes a group usable; none makes it the last choice.
    value_TG = best_TG2.masked_fill(best_TG2 == NEVER, 0.0).sum(dim=2)
    value_TG = value_TG.masked_fill(best_TG2[..., 0] == NEVER, NEVER)
    chosen_TG = value_TG.sort(dim=1, descending=True, stable=True).indices[:, :top_groups]
    closed_TG = torch.ones_like(value_TG, dtype=torch.bool).scatter(1, chosen_TG, False)
    return key_TE.masked_fill(closed_TG.repeat_interleave(group_TGe.shape[2], dim=1), NEVER)
