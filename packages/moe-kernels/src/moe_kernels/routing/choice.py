"""Which experts see which token, and how much each counts."""

from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from moe_kernels.routing.check import check_route

NEVER = -torch.inf


class Routing(NamedTuple):
    """The experts of each token.

    Attributes:
        weight_TK: float32 or float64, as the logits; how much each chosen expert contributes.
            Differentiable. 0 where masked.
        expert_TK: int32, in ``0..E-1``, best first; no expert twice in a row. -1 where masked.
        score_TE: The scores of all experts, for the balance loss. Differentiable. 0 in masked rows.
        num_bad: int32 without axes: real tokens that were masked since their logits are not finite.
    """

    weight_TK: Tensor
    expert_TK: Tensor
    score_TE: Tensor
    num_bad: Tensor


def route(
    logits_TE: Tensor,
    top_k: int,
    *,
    score: Literal["softmax", "sigmoid"] = "softmax",
    renormalize: bool = False,
    bias_E: Tensor | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
    scale: float = 1.0,
    mask_T: Tensor | None = None,
) -> Routing:
    """Choose ``top_k`` experts for each token. Equal experts are taken in order of their ids.

    The weight of a chosen expert is its score, or with ``renormalize`` its share of the chosen
    scores, times ``scale``. A bias takes part in the choice and never in the weight (Wang et al.
    2024, "Auxiliary-loss-free load balancing"). With groups, only experts of the ``top_groups``
    best groups can be chosen, where a group counts as much as the sum of its best two experts
    (DeepSeek-V3, 2024). The host does not wait for the device.

    A logit of -inf says "never this expert". A row with a NaN, with +inf, or with fewer than
    ``top_k`` experts to choose from is masked and counted in ``num_bad``; it gets no gradient and
    does not touch that of other rows.

    Args:
        logits_TE: float32 or float64.
        top_k: In ``1..E``.
        score: Softmax over all experts, or a sigmoid of each.
        renormalize: Let the weights of a token sum to ``scale``.
        bias_E: float32 or float64, added to the scores for the choice.
        num_groups: Groups of ``E / num_groups`` neighbouring experts.
        top_groups: Groups a token may use.
        scale: Factor of all weights.
        mask_T: bool, True for real tokens. Others are masked and not counted as bad.

    Returns:
        The routing.

    Raises:
        TypeError: If the logits or the bias are not float32 or float64.
        ValueError: If shapes or numbers do not fit together.

    Examples:
        >>> import torch
        >>> routing = route(torch.tensor([[0.0, 2.0, 2.0]]), top_k=2, renormalize=True)
        >>> routing.expert_TK, routing.weight_TK
        (tensor([[1, 2]], dtype=torch.int32), tensor([[0.5000, 0.5000]]))
    """
    check_route(logits_TE, top_k, score, bias_E, num_groups, top_groups, mask_T)
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
    return Routing(
        (weight_TK * scale).masked_fill(out_T[:, None], 0.0),
        expert_TK.masked_fill(out_T[:, None], -1).to(torch.int32),
        score_TE.masked_fill(out_T[:, None], 0.0),
        (bad_T if mask_T is None else bad_T & mask_T).sum(dtype=torch.int32),
    )


def finite_rows(logits_TE: Tensor) -> Tensor:
    """Tell which rows have no NaN, no +inf, and something besides -inf."""
    peak_T = logits_TE.detach().amax(dim=1)  # NaN if there is one
    return peak_T.isfinite()


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
    biased_TE = score_TE if bias_E is None else score_TE + bias_E
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
