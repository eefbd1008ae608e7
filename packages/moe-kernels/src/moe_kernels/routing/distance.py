"""A balance loss that is a distance: zero for even loads, and more the further they are from it.

The usual balance loss multiplies two deviations from even, that of the load and that of the scores.
A product of two different vectors can be small, or negative, while both are large. Here the load
is multiplied by itself, and the scores only say in which direction it could move.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from moe_kernels.routing.balance import count_rows
from moe_kernels.routing.check import check_balance

_LEAST = 1e-30
"""Scores below this lose every duel alike; it also keeps their derivative finite in float32."""


class Unevenness(NamedTuple):
    """How uneven a load is, and how uneven the usual balance loss says it is.

    All are 0-dim or have the leading axes of what came in, float64, and are 0 for an even load.

    Attributes:
        distance: ``E * sum_e (f_e - 1/E)^2``, the squared distance from even; with K routes a
            token at most ``E/K - 1``.
        score: ``E * sum_e (f_e - 1/E) (P_e - 1/E)``, the usual balance loss less one. Has a sign.
        spread: ``E * sum_e (P_e - 1/E)^2``, the squared distance of the scores from even.
        entropy_deficit: ``ln E`` less the entropy of the load, nats; at most ``ln(E/K)``.
    """

    distance: Tensor
    score: Tensor
    spread: Tensor
    entropy_deficit: Tensor


def unevenness(count_E: Tensor, share_E: Tensor) -> Unevenness:
    """Compare what a router did with what the usual balance loss says about it.

    By Cauchy and Schwarz ``score^2 <= distance * spread``: where scores follow the load the score
    lies between the other two, and where they do not it says nothing of the load.

    Args:
        count_E: int64 rows of each expert; leading axes are kept.
        share_E: Shares of the scores summed over the tokens, of the same shape.

    Returns:
        The comparison. A load without rows is even.

    Examples:
        >>> even = unevenness(torch.tensor([2, 2]), torch.tensor([1.9, 2.1]))
        >>> even.distance.item(), even.score.item()
        (0.0, 0.0)
    """
    if count_E.shape != share_E.shape:
        raise ValueError(
            f"count_E has shape {tuple(count_E.shape)}, share_E {tuple(share_E.shape)}"
        )
    E = count_E.shape[-1]
    dev_E = _deviation(count_E)
    share_E = share_E.double()
    total = share_E.sum(-1, keepdim=True)
    # Without any score, as without rows, nothing is uneven.
    drift_E = torch.where(total > 0, share_E / total.where(total > 0, 1) - 1 / E, 0.0)
    ratio_E = 1 + E * dev_E  # of each load to its even share
    return Unevenness(
        distance=E * dev_E.square().sum(-1),
        score=E * (dev_E * drift_E).sum(-1),
        spread=E * drift_E.square().sum(-1),
        entropy_deficit=torch.special.xlogy(ratio_E, ratio_E).mean(-1),
    )


def distance_loss(
    score_TE: Tensor,
    expert_TK: Tensor,
    *,
    tokens_per_sequence: int | None = None,
    mask_T: Tensor | None = None,
    load_E: Tensor | None = None,
) -> Tensor:
    """Return the squared distance of the load from even, summed over tokens.

    For each sequence of n valid tokens that is ``n * E * sum_e (f_e - 1/E)^2``, with f_e the
    fraction of its routes that expert e got. It is 0 if and only if every expert got as many, and
    at most ``n * (E/K - 1)``, where K experts get everything.

    Counts have no derivative, so backward takes that of soft counts in their place: an expert is
    counted ``s / (s + rival)`` for a token of which it has the score s, where the rival of a chosen
    expert is the best one left out, and that of one left out is the worst chosen. This counts the
    chosen more than half and the others less, and tends to the count as scores grow apart. So the
    gradient lowers an expert with more than its share, and raises its rival, where the two are
    close, which is where the choice can change. Scores that no choice hangs on have nearly none.

    With two experts and one choice the soft count is the score itself, and the gradient is twice
    that of ``balance_loss``.

    Args:
        score_TE: float32 or float64 scores of all experts.
        expert_TK: int32 or int64 ids. A token with no route at all is not valid.
        tokens_per_sequence: A sequence is so many consecutive tokens; all T if None.
        mask_T: bool, True for real tokens.
        load_E: float32 or float64 fractions that sum to one, in place of those of each sequence.

    Returns:
        The loss, without axes. Differentiable in the scores.

    Raises:
        TypeError: If the scores are not float32 or float64.
        ValueError: If shapes do not fit together.

    Examples:
        >>> score_TE = torch.tensor([[0.9, 0.1], [0.6, 0.4]])
        >>> distance_loss(score_TE, torch.tensor([[0], [1]])).item()
        0.0
        >>> distance_loss(score_TE, torch.tensor([[0], [0]])).item()  # 2 tokens * (2/1 - 1)
        2.0
    """
    check_balance(score_TE, expert_TK, tokens_per_sequence, mask_T, load_E)
    T, E = score_TE.shape
    length = T if tokens_per_sequence is None else tokens_per_sequence
    if T == 0:
        return score_TE.sum()
    K, S = expert_TK.shape[1], T // length
    if mask_T is not None:
        expert_TK = expert_TK.masked_fill(~mask_T[:, None], -1)
    valid_T = (expert_TK >= 0).any(dim=1)
    valid_S = valid_T.view(S, length).sum(dim=1)
    if load_E is None:
        dev_SE = _deviation(count_rows(expert_TK.reshape(S, length * K), E)).to(score_TE.dtype)
    else:
        dev_SE = (load_E - 1 / E).to(score_TE.dtype).expand(S, E)
    soft_SE = _soft_count(score_TE, expert_TK, valid_T).view(S, length, E).sum(dim=1)
    value = (valid_S * E * dev_SE.square().sum(dim=1)).sum()
    # The difference is 0, and has the derivative of the soft counts.
    return value + (2 * E / max(K, 1) * dev_SE * (soft_SE - soft_SE.detach())).sum()


def _deviation(count_E: Tensor) -> Tensor:
    """Return ``f_e - 1/E`` in float64, exactly 0 for equal counts, as integers are subtracted."""
    E = count_E.shape[-1]
    total = count_E.sum(-1, keepdim=True)
    return (E * count_E - total).double() / (E * total.clamp(min=1)).double()


def _soft_count(score_TE: Tensor, expert_TK: Tensor, valid_T: Tensor) -> Tensor:
    """Return for each token how much of each expert it counts as, 0 where it is not valid."""
    E = score_TE.shape[1]
    # Masked routes go to one more column, and off.
    ids_TK = torch.where(expert_TK >= 0, expert_TK, E).long()
    chosen_TE = torch.zeros(
        score_TE.shape[0], E + 1, dtype=torch.bool, device=score_TE.device
    ).scatter_(1, ids_TK, True)[:, :E]
    best_out_T1 = score_TE.masked_fill(chosen_TE, 0.0).amax(dim=1, keepdim=True)
    worst_in_T1 = score_TE.masked_fill(~chosen_TE, torch.inf).amin(dim=1, keepdim=True)
    worst_in_T1 = worst_in_T1.masked_fill(~valid_T[:, None], 1.0)
    rival_TE = torch.where(chosen_TE, best_out_T1, worst_in_T1)
    soft_TE = score_TE / (score_TE + rival_TE + _LEAST)
    return soft_TE.masked_fill(~valid_T[:, None], 0.0)
