"""Bring routed rows into the order that grouped kernels want: by expert."""

from typing import NamedTuple

from torch import Tensor

from moe_kernels.routing.check import check_ids
from moe_kernels.routing.groups import op

__all__ = ["Groups", "group_rows"]


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

    On CUDA three small Triton kernels count, sum and place; ids elsewhere, and more than 4096
    experts anywhere, take a stable sort of torch.

    Args:
        expert_TK: int32 or int64 ids, fewer than ``2**31``; -1 for masked routes, which get no row.
            On a GPU, where checking would wait, any id out of range gets none either.
        num_experts: E.

    Returns:
        The order.

    Raises:
        TypeError: If the ids are not integers.
        ValueError: If an id on the CPU is not in ``-1..E-1``, or there are too many.

    Examples:
        >>> import torch
        >>> groups = group_rows(torch.tensor([[1, 0], [1, -1]]), num_experts=2)
        >>> groups.offsets_E1.tolist(), groups.slot_of_row_N.tolist()
        ([0, 1, 3], [1, 0, 2, -1])
        >>> groups.row_of_slot_TK.tolist()
        [[1, 0], [2, -1]]
    """
    check_ids(expert_TK, num_experts)
    return Groups(*op.group_rows(expert_TK, num_experts))
