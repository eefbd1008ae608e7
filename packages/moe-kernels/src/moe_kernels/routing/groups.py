"""Bring routed rows into the order that grouped kernels want: by expert."""

from typing import NamedTuple

import torch
from torch import Tensor

from moe_kernels.routing.check import check_ids


class Groups(NamedTuple):
    """An order of routed rows: by expert, then token, then place among the token's experts.

    A slot is a flat index into ``expert_TK``: ``t * K + k``. A row is a place in the order.

    Attributes:
        offsets_E1: int32; expert ``e`` has rows ``offsets_E1[e]:offsets_E1[e + 1]``. Starts at 0.
        slot_of_row_N: int32; -1 at and past ``offsets_E1[-1]``.
        row_of_slot_TK: int32, its inverse; -1 for masked routes.
    """

    offsets_E1: Tensor
    slot_of_row_N: Tensor
    row_of_slot_TK: Tensor


def group_rows(expert_TK: Tensor, num_experts: int) -> Groups:
    """Sort routed rows by expert, stably, without making the host wait.

    Args:
        expert_TK: int32 or int64 ids; -1 for masked routes, which get no row. On a GPU, where
            checking would wait, any id out of range gets none either.
        num_experts: E.

    Returns:
        The order.

    Raises:
        TypeError: If the ids are not integers.
        ValueError: If an id on the CPU is not in ``-1..E-1``.

    Examples:
        >>> groups = group_rows(torch.tensor([[1, 0], [1, -1]]), num_experts=2)
        >>> groups.offsets_E1.tolist(), groups.slot_of_row_N.tolist()
        ([0, 1, 3], [1, 0, 2, -1])
        >>> groups.row_of_slot_TK.tolist()
        [[1, 0], [2, -1]]
    """
    check_ids(expert_TK, num_experts)
    flat_N = expert_TK.reshape(-1)
    masked_N = (flat_N < 0) | (flat_N >= num_experts)
    sorted_N, slot_of_row_N = torch.where(masked_N, num_experts, flat_N).sort(stable=True)
    experts_E1 = torch.arange(num_experts + 1, device=flat_N.device, dtype=sorted_N.dtype)
    row_N = torch.arange(flat_N.shape[0], device=flat_N.device, dtype=torch.int32)
    row_of_slot_N = torch.empty_like(row_N).scatter_(0, slot_of_row_N, row_N)
    return Groups(
        torch.searchsorted(sorted_N, experts_E1, out_int32=True),
        slot_of_row_N.to(torch.int32).masked_fill(sorted_N == num_experts, -1),
        row_of_slot_N.masked_fill(masked_N, -1).view(expert_TK.shape),
    )
