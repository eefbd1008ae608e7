"""Which experts see which token, and how much each counts."""

from typing import Literal, NamedTuple

from torch import Tensor

from moe_kernels.routing.check import check_given, check_route
from moe_kernels.routing.choice import given, op
from moe_kernels.routing.choice.reference import finite_rows

__all__ = ["Routing", "finite_rows", "route", "route_to"]


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

    float32 logits on CUDA with at most 1024 experts take one Triton kernel each way, others plain
    torch. Differentiable twice.

    A logit of -inf says "never this expert". A row with a NaN, with +inf, or with fewer than
    ``top_k`` experts to choose from is masked and counted in ``num_bad``; it gets no gradient and
    does not touch that of other rows.

    Args:
        logits_TE: float32 or float64.
        top_k: In ``1..E``.
        score: Softmax over all experts, or a sigmoid of each.
        renormalize: Let the weights of a token sum to ``scale``.
        bias_E: float32 or float64, added to the scores, in their dtype, for the choice.
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
    return Routing(
        *op.route(
            logits_TE,
            top_k,
            score,
            renormalize,
            bias_E,
            num_groups,
            top_groups,
            scale,
            mask_T,
        )
    )


def route_to(
    logits_TE: Tensor,
    expert_TK: Tensor,
    *,
    score: Literal["softmax", "sigmoid"] = "softmax",
    renormalize: bool = False,
    scale: float = 1.0,
    mask_T: Tensor | None = None,
) -> Routing:
    """Route to the given experts: recorded ones, to replay, or forced ones, to measure.

    Weights and scores are those of the logits, as ``route`` would give them had it chosen so, and
    so are their gradients. With the ids that ``route`` chose the two agree to the bit, in backward
    too. The host does not wait for the device.

    Args:
        logits_TE: float32 or float64.
        expert_TK: int32 or int64, no expert twice in a row. A row with a -1 is masked.
        score: Softmax over all experts, or a sigmoid of each.
        renormalize: Let the weights of a token sum to ``scale``.
        scale: Factor of all weights.
        mask_T: bool, True for real tokens. Others are masked and not counted as bad.

    Returns:
        The routing. A row whose logits are not finite, or -inf for a given expert, is masked and
        counted.

    Raises:
        TypeError: If the logits are not float32 or float64, or the ids not integers.
        ValueError: If shapes do not fit together, or an id on the CPU is not in ``-1..E-1``.

    Examples:
        >>> import torch
        >>> routing = route_to(torch.tensor([[0.0, 2.0, 2.0]]), torch.tensor([[2, 1]]))
        >>> routing.expert_TK, routing.weight_TK
        (tensor([[2, 1]], dtype=torch.int32), tensor([[0.4683, 0.4683]]))
    """
    check_given(logits_TE, expert_TK, score, mask_T)
    return Routing(*given.route_to(logits_TE, expert_TK, score, renormalize, scale, mask_T))
