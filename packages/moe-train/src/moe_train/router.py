"""How the router of one layer chooses, what it is charged for, and what is counted of it."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from moe_kernels import (
    Routing,
    balance_loss,
    count_experts,
    distance_loss,
    route,
    route_to,
    z_loss,
)
from torch import Tensor

from moe_train.config import RoutingConfig


class RouterStats(NamedTuple):
    """What one layer's router did with the tokens of one microbatch.

    Attributes:
        balance: 0-dim, balance loss summed over tokens; differentiable.
        z: 0-dim, squared log-partition summed over tokens; differentiable.
        count_E: int64, tokens that chose each expert.
        kept_E: int64, those that the expert got: fewer where rows were dropped.
        share_E: Scores of each expert, as shares of a token's scores, summed over tokens.
        dropped_K1: int64, tokens of which 0 to K of their routes were dropped.
        entropy: 0-dim, entropy of the scores in nats, summed over tokens.
        num_bad: int32, tokens that could not be routed since their scores were not finite.
    """

    balance: Tensor
    z: Tensor
    count_E: Tensor
    kept_E: Tensor
    share_E: Tensor
    dropped_K1: Tensor
    entropy: Tensor
    num_bad: Tensor


def choose(
    config: RoutingConfig,
    logits_TE: Tensor,
    top_k: int,
    bias_E: Tensor,
    mask_T: Tensor | None,
    given_TK: Tensor | None,
) -> Routing:
    """Choose the experts of each token, or take the given ones."""
    if given_TK is not None:
        return route_to(
            logits_TE,
            given_TK,
            score=config.score,
            renormalize=config.renormalize,
            scale=config.scale,
            mask_T=mask_T,
        )
    return route(
        logits_TE,
        top_k,
        score=config.score,
        renormalize=config.renormalize,
        bias_E=bias_E if config.bias else None,
        num_groups=config.num_groups,
        top_groups=config.top_groups,
        scale=config.scale,
        mask_T=mask_T,
    )


def router_stats(
    config: RoutingConfig,
    logits_TE: Tensor,
    routing: Routing,
    mask_T: Tensor | None,
    *,
    kept_TK: Tensor | None,
    load_E: Tensor,
    tokens_per_sequence: int,
) -> RouterStats:
    """Return the losses of a router and what is counted of it.

    Args:
        config: Which balance loss.
        logits_TE: Of the router.
        routing: What came of them.
        mask_T: True for real tokens.
        kept_TK: False for routes that were dropped or masked; None if none was dropped.
        load_E: Fraction of the rows that each expert got on all ranks in the step before.
        tokens_per_sequence: S.
    """
    expert_TK, E = routing.expert_TK, logits_TE.shape[1]
    loss = distance_loss if config.balance_form == "distance" else balance_loss
    balance = loss(
        routing.score_TE,
        expert_TK,
        tokens_per_sequence=tokens_per_sequence if config.balance_over == "sequence" else None,
        mask_T=mask_T,
        load_E=load_E if config.balance_over == "global" else None,
    )
    with torch.no_grad():
        total_T1 = routing.score_TE.sum(-1, keepdim=True)
        p_TE = routing.score_TE / total_T1.where(total_T1 > 0, 1)  # masked rows are zero
        entropy = -torch.special.xlogy(p_TE, p_TE).sum()
        count_E = count_experts(expert_TK, E)
        kept_E, dropped_K1 = _drops(expert_TK, kept_TK, count_E)
    return RouterStats(
        balance=balance,
        z=z_loss(logits_TE, mask_T=mask_T),
        count_E=count_E,
        kept_E=kept_E,
        share_E=p_TE.sum(dim=0),
        dropped_K1=dropped_K1,
        entropy=entropy,
        num_bad=routing.num_bad,
    )


def _drops(expert_TK: Tensor, kept_TK: Tensor | None, count_E: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows that were kept of each expert, and the tokens that lost 0 to K routes."""
    K = expert_TK.shape[1]
    if kept_TK is None:  # a token has all its routes or none
        return count_E, F.pad((count_E.sum() // K)[None], (0, K))
    asked_TK = expert_TK >= 0
    lost_TK = asked_TK & ~kept_TK
    lost_T = torch.where(asked_TK.any(dim=1), lost_TK.sum(dim=1), K + 1)  # not routed: falls off
    ones_T = torch.ones_like(lost_T)
    dropped_K1 = lost_T.new_zeros(K + 2).scatter_add_(0, lost_T, ones_T)[: K + 1]
    return count_experts(expert_TK.masked_fill(lost_TK, -1), len(count_E)), dropped_K1
