"""The order of routed rows and the map of tiles as torch operators: dispatch by device."""

import torch
from torch import Tensor

from moe_kernels.backend import HAS_TRITON
from moe_kernels.operator import operator
from moe_kernels.routing.groups.reference import group_rows_reference, tile_rows_reference

KERNEL_EXPERTS = 4096  # the counts of a block stay in registers


def _runs_kernel(ids: Tensor, num_experts: int) -> bool:
    return ids.is_cuda and HAS_TRITON and num_experts <= KERNEL_EXPERTS


@operator("group_rows")
def group_rows(expert_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the fields of ``Groups``: three launches on CUDA, the reference elsewhere."""
    if _runs_kernel(expert_TK, num_experts):
        from moe_kernels.routing.groups.kernel import (  # noqa: PLC0415 - triton is optional
            group_rows_triton,
        )

        offsets_E1, slot_of_row_N, row_of_slot_TK = group_rows_triton(expert_TK, num_experts)
        return offsets_E1, slot_of_row_N, row_of_slot_TK
    return group_rows_reference(expert_TK, num_experts)


@operator("group_rows_and_tiles")
def group_rows_and_tiles(
    expert_TK: Tensor, num_experts: int, block_n: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the fields of ``Groups`` and of ``Tiles``: the same three launches."""
    if _runs_kernel(expert_TK, num_experts):
        from moe_kernels.routing.groups.kernel import group_rows_triton  # noqa: PLC0415

        offsets_E1, slot_of_row_N, row_of_slot_TK, tile_map, num_tiles = group_rows_triton(
            expert_TK, num_experts, block_n
        )
        return offsets_E1, slot_of_row_N, row_of_slot_TK, tile_map, num_tiles
    groups = group_rows_reference(expert_TK, num_experts)
    return *groups, *tile_rows_reference(groups[0], expert_TK.numel(), block_n)


@operator("tile_rows")
def tile_rows(offsets_E1: Tensor, num_rows: int, block_n: int) -> tuple[Tensor, Tensor]:
    """Return the fields of ``Tiles``: one launch on CUDA, the reference elsewhere."""
    if _runs_kernel(offsets_E1, offsets_E1.shape[0] - 1):
        from moe_kernels.routing.groups.kernel import tile_rows_triton  # noqa: PLC0415

        return tile_rows_triton(offsets_E1, num_rows, block_n)
    return tile_rows_reference(offsets_E1, num_rows, block_n)


def _fake_groups(expert_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    def empty(*shape: int) -> Tensor:
        return expert_TK.new_empty(shape, dtype=torch.int32)

    return empty(num_experts + 1), empty(expert_TK.numel()), empty(*expert_TK.shape)


def _fake_tiles(offsets_E1: Tensor, num_rows: int, block_n: int) -> tuple[Tensor, Tensor]:
    length = num_rows // block_n + offsets_E1.shape[0] - 1
    return (
        offsets_E1.new_empty(length, dtype=torch.int32),
        offsets_E1.new_empty(1, dtype=torch.int32),
    )


torch.library.register_fake("moe_kernels::group_rows", _fake_groups)
torch.library.register_fake("moe_kernels::tile_rows", _fake_tiles)


@torch.library.register_fake("moe_kernels::group_rows_and_tiles")
def _(
    expert_TK: Tensor, num_experts: int, block_n: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    groups = _fake_groups(expert_TK, num_experts)
    return *groups, *_fake_tiles(groups[0], expert_TK.numel(), block_n)
