"""Cut grouped rows into tiles, of which none spans two experts."""

from typing import NamedTuple

from torch import Tensor

from moe_kernels.routing.check import check_ids, check_offsets, check_tiles
from moe_kernels.routing.groups import Groups, op


class Tiles(NamedTuple):
    """The work list of a grouped product: one entry for each tile of rows.

    How many tiles there are depends on the routing, and only the device knows it. So the map is as
    long as the most there can be, ``N // block_n + E``.

    Attributes:
        tile_map: int32; ``expert | (block << 12)``, where ``block`` counts the tiles of its expert.
            By expert, then block. -1 at and past ``num_tiles``.
        num_tiles: int32, one entry.
    """

    tile_map: Tensor
    num_tiles: Tensor


def tile_rows(offsets_E1: Tensor, num_rows: int, block_n: int) -> Tiles:
    """List the tiles of grouped rows, without making the host wait. One launch on CUDA.

    Args:
        offsets_E1: int32, as in ``Groups``; at most 4095 experts.
        num_rows: N, at least ``offsets_E1[-1]``.
        block_n: Rows of a tile; the last one of an expert may be partly filled.

    Returns:
        The tiles.

    Raises:
        TypeError: If the offsets are not int32.
        ValueError: If the offsets have not one axis, or a number does not fit into the map.

    Examples:
        >>> import torch
        >>> tiles = tile_rows(torch.tensor([0, 5, 5, 8], dtype=torch.int32), 8, block_n=4)
        >>> [(entry & 4095, entry >> 12) for entry in tiles.tile_map.tolist() if entry >= 0]
        [(0, 0), (0, 1), (2, 0)]
        >>> tiles.num_tiles
        tensor([3], dtype=torch.int32)
    """
    check_offsets(offsets_E1)
    check_tiles(offsets_E1.shape[0] - 1, num_rows, block_n)
    return Tiles(*op.tile_rows(offsets_E1, num_rows, block_n))


def group_rows_and_tiles(expert_TK: Tensor, num_experts: int, block_n: int) -> tuple[Groups, Tiles]:
    """Do what ``group_rows`` and ``tile_rows`` do, on CUDA in the launches of the first alone.

    Args:
        expert_TK: Ids, as in ``group_rows``.
        num_experts: E, at most 4095.
        block_n: Rows of a tile.

    Returns:
        The order and its tiles.

    Raises:
        TypeError: If the ids are not integers.
        ValueError: If an id on the CPU is out of range, or a number does not fit into the map.

    Examples:
        >>> import torch
        >>> groups, tiles = group_rows_and_tiles(torch.tensor([[1], [0], [1]]), 2, block_n=1)
        >>> [(entry & 4095, entry >> 12) for entry in tiles.tile_map[:3].tolist()]
        [(0, 0), (1, 0), (1, 1)]
    """
    check_ids(expert_TK, num_experts)
    check_tiles(num_experts, expert_TK.numel(), block_n)
    fields = op.group_rows_and_tiles(expert_TK, num_experts, block_n)
    return Groups(*fields[:3]), Tiles(*fields[3:])
