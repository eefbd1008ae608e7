"""Keep the experts equally busy: counts, auxiliary losses, selection bias."""

import torch
from torch import Tensor

from moe_kernels.routing.check import (
    check_balance,
    check_ids,
    check_logits,
    check_router_dtype,
)
from moe_kernels.routing.choice import finite_rows


def count_experts(expert_TK: Tensor, num_experts: int) -> Tensor:
    """Count the rows of each expert. Masked routes (-1) do not count. The host does not wait.

    Args:
        expert_TK: int32 or int64 ids.
        num_experts: E.

    Returns:
        ``count_E``, int64: counts are summed over ranks and steps, and must stay exact.

    Raises:
        TypeError: If the ids are not integers.
        ValueError: If an id on the CPU is not in ``-1..E-1``.

    Examples:
        >>> count_experts(torch.tensor([[1, 2], [1, -1]]), num_experts=3)
        tensor([0, 2, 1])
    """
    check_ids(expert_TK, num_experts)
    return count_rows(expert_TK.reshape(1, -1), num_experts)[0]


def balance_loss(
    score_TE: Tensor,
    expert_TK: Tensor,
    *,
    tokens_per_sequence: int | None = None,
    mask_T: Tensor | None = None,
    load_E: Tensor | None = None,
) -> Tensor:
    """Return the load-balancing loss, summed over tokens.

    For each sequence of n valid tokens that is ``n * E * sum_e f_e P_e`` (Fedus et al. 2022), with
    f_e the fraction of its routes that expert e got, and P_e its mean share of the scores. Uniform
    routing gives exactly n. Divide by the number of valid tokens of the whole batch, and neither
    accumulation nor parallelism changes the result. Scores are divided by their sum over the
    experts, so sigmoid scores do as well (DeepSeek-V3, 2024).

    As both f and P sum to one, that is ``n * (1 + E * sum_e (f_e - 1/E) (P_e - 1/E))``: a product
    of two deviations, which has a sign. It can fall below n, and fall while the load gets worse.
    ``distance_loss`` is the one that cannot.

    With ``load_E``, f is what the caller says, such as the load of all ranks in the step before.
    Then the loss is linear in the scores of each token, and the same however tokens are divided.

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
        >>> ids_TK = torch.tensor([[0], [1], [2], [3]])
        >>> balance_loss(torch.full((4, 4), 0.25), ids_TK)
        tensor(4.)
    """
    check_balance(score_TE, expert_TK, tokens_per_sequence, mask_T, load_E)
    T, E = score_TE.shape
    length = T if tokens_per_sequence is None else tokens_per_sequence
    if T == 0:
        return score_TE.sum()
    K = expert_TK.shape[1]
    valid_T = (expert_TK >= 0).any(dim=1)
    if mask_T is not None:
        valid_T = valid_T & mask_T
        expert_TK = expert_TK.masked_fill(~mask_T[:, None], -1)
    total_T1 = score_TE.sum(dim=1, keepdim=True)
    share_TE = score_TE / total_T1.masked_fill(total_T1 == 0, 1.0)
    share_TE = share_TE.masked_fill(~valid_T[:, None], 0.0)
    if load_E is not None:
        return (share_TE.sum(dim=0) * load_E.to(score_TE.dtype)).sum() * E
    share_SE = share_TE.unflatten(0, (T // length, length)).sum(dim=1)
    count_SE = count_rows(expert_TK.reshape(T // length, length * K), E).to(score_TE.dtype)
    routes_S = valid_T.view(T // length, length).sum(dim=1) * K
    return ((count_SE * share_SE).sum(dim=1) * E / routes_S.clamp(min=1)).sum()


def z_loss(logits_TE: Tensor, *, mask_T: Tensor | None = None) -> Tensor:
    """Return the sum over valid tokens of ``logsumexp(logits)**2`` (Zoph et al. 2022).

    Rows that ``route`` would count as bad for their logits (NaN, +inf, all -inf) add nothing.

    Args:
        logits_TE: float32 or float64.
        mask_T: bool, True for real tokens.

    Returns:
        The loss, without axes, to be divided by the valid tokens of the whole batch.

    Raises:
        TypeError: If the logits are not float32 or float64.
        ValueError: If the mask does not fit.

    Examples:
        >>> z_loss(torch.zeros(3, 1) + 2.0)
        tensor(12.)
    """
    check_logits(logits_TE, mask_T)
    valid_T = finite_rows(logits_TE)
    if mask_T is not None:
        valid_T = valid_T & mask_T
    lse_T = logits_TE.masked_fill(~valid_T[:, None], 0.0).logsumexp(dim=1)
    return lse_T.square().masked_fill(~valid_T, 0.0).sum()


def update_bias(bias_E: Tensor, count_E: Tensor, rate: float) -> Tensor:
    """Raise the bias of experts with fewer rows than the mean and lower that of the others.

    ``bias + rate * sign(mean count - count)`` (Wang et al. 2024). The sign comes from integers, so
    one row in a billion decides it rightly. Once an optimizer step, with counts of the whole batch.

    Args:
        bias_E: float32 or float64; never half precision, in which such steps vanish.
        count_E: int64 counts.
        rate: Step of the bias, in units of the score.

    Returns:
        The new bias; the old one is left as it was.

    Raises:
        TypeError: If the bias or the counts have another dtype.
        ValueError: If the shapes differ.

    Examples:
        >>> update_bias(torch.zeros(3), torch.tensor([1, 2, 3]), rate=0.5)
        tensor([ 0.5000,  0.0000, -0.5000])
    """
    check_router_dtype("bias_E", bias_E)
    if count_E.dtype != torch.int64:
        raise TypeError(f"count_E must be int64 so that counts stay exact, got {count_E.dtype}")
    if bias_E.ndim != 1 or count_E.shape != bias_E.shape:
        raise ValueError(
            f"E differs: bias_E has shape {tuple(bias_E.shape)}, count_E {tuple(count_E.shape)}"
        )
    below_E = torch.sign(count_E.sum() - count_E.shape[0] * count_E)
    return bias_E + rate * below_E.to(bias_E.dtype)


def count_rows(expert_SN: Tensor, num_experts: int) -> Tensor:
    """Count the ids of each row; what is out of range falls into one more bin, and off."""
    known_SN = (expert_SN >= 0) & (expert_SN < num_experts)
    bin_SN = torch.where(known_SN, expert_SN, num_experts).to(torch.int64)
    count = bin_SN.new_zeros(expert_SN.shape[0], num_experts + 1)
    return count.scatter_add_(1, bin_SN, torch.ones_like(bin_SN))[:, :num_experts]
