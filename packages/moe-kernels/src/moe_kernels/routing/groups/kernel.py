"""How the GPU brings routed rows into the order of their experts: three launches.

The N slots are cut into B blocks of neighbours. ``_count_kernel`` counts the experts of each block,
``_scan_kernel`` sums the counts of the blocks before each block, and ``_place_kernel`` adds up
where each slot goes: the rows of experts before, rows of the same expert in blocks before, and
slots of the same expert before it in its own block. Every row has one writer and nothing depends
on the order in which programs run.

Cost: ids are read twice and two int32 for each slot are written, half of them scattered. The
counts take ``B * E`` int32, written, read, written and read again; B is at most 2048.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_kernels.scratch import scratch


class Blocks(NamedTuple):
    """How slots are cut into blocks.

    Attributes:
        n: Slots that a program looks at together. It compares each with each.
        most: Most blocks. A block takes several steps of ``n`` slots where these were too many.
        scan: Blocks whose counts are summed together, of 8 experts.
        num_warps: Warps of 32 threads to compare ``n`` with ``n`` slots.
        scan_warps: Warps to sum counts.
    """

    n: int = 128
    most: int = 2048
    scan: int = 1024
    num_warps: int = 4
    scan_warps: int = 8


@triton.jit
def _load_experts(expert_ptr, slot, N, E):
    """Return the experts of slots, -1 for masked ones, ids out of range and slots past the end."""
    expert = tl.load(expert_ptr + slot, mask=slot < N, other=-1)
    # Compared before it is cut: a 64-bit id may be out of range and its lower half in range.
    return tl.where((expert >= 0) & (expert < E), expert, -1).to(tl.int32)


@triton.jit
def _count_kernel(
    expert_ptr, count_ptr,
    N, E, steps,
    BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Count the slots of each expert in one block: ``count_BE``.

    Example: ids (1, 0, 1, -1, 1), E = 2, BLOCK_N = 2, steps = 1. The counts are (1, 1), (0, 1)
    and (0, 1).
    """
    block = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BLOCK_E)
    count = tl.zeros((BLOCK_E,), dtype=tl.int32)
    for step in range(steps):
        slot = (block * steps + step) * BLOCK_N + tl.arange(0, BLOCK_N)
        expert = _load_experts(expert_ptr, slot, N, E)
        count += tl.histogram(expert, BLOCK_E, mask=expert >= 0)
    tl.store(count_ptr + block * E + e, count, mask=e < E)


@triton.jit
def _scan_kernel(
    count_ptr, total_ptr,
    B, E,
    BLOCK_B: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Replace each count of some experts by the sum of those of the blocks before; add up all.

    Example: counts (1, 1), (0, 1), (0, 1) become (0, 0), (1, 1), (1, 2), and the totals are (1, 3).
    """
    e = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    total = tl.zeros((BLOCK_E,), dtype=tl.int32)
    for first in range(0, B, BLOCK_B):
        block = (first + tl.arange(0, BLOCK_B)).to(tl.int64)
        mask = (block < B)[:, None] & (e < E)[None, :]
        count_ptrs = count_ptr + block[:, None] * E + e[None, :]
        count = tl.load(count_ptrs, mask=mask, other=0)  # [BLOCK_B, BLOCK_E]
        tl.store(count_ptrs, total[None, :] + tl.cumsum(count, 0) - count, mask=mask)
        total += tl.sum(count, 0)
    tl.store(total_ptr + e, total, mask=e < E)


@triton.jit
def _place_block(
    expert_ptr, before_ptr, slot_of_row_ptr, row_of_slot_ptr,
    start, total, pid, N, E, steps,
    BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Give a row to each slot of a block; masked slots get those past the rows of all experts."""
    block = pid.to(tl.int64)
    e = tl.arange(0, BLOCK_E)
    before = tl.load(before_ptr + block * E + e, mask=e < E, other=0)
    first_slot = block * steps * BLOCK_N
    row_of_expert = start + before  # [BLOCK_E], of its next slot
    row_of_masked = tl.sum(total) + first_slot.to(tl.int32) - tl.sum(before)
    i = tl.arange(0, BLOCK_N)
    for step in range(steps):
        slot = first_slot + step * BLOCK_N + i
        expert = _load_experts(expert_ptr, slot, N, E)
        known = expert >= 0
        # Slots past the end look masked and come last, so they displace nobody. Of the same expert
        # and before slot i are those whose key is 1 to i lower; unsigned, that is one comparison.
        key = expert * BLOCK_N + i
        lower = (key[None, :] - 1 - key[:, None]).to(tl.uint32, bitcast=True)
        rank = tl.sum((lower < i[None, :].to(tl.uint32)).to(tl.int32), 0)  # [BLOCK_N]
        first_row = tl.gather(row_of_expert, tl.maximum(expert, 0), 0)
        row = rank + tl.where(known, first_row, row_of_masked)
        found = slot < N
        tl.store(slot_of_row_ptr + row, tl.where(known, slot.to(tl.int32), -1), mask=found)
        tl.store(row_of_slot_ptr + slot, tl.where(known, row, -1), mask=found)
        row_of_expert += tl.histogram(expert, BLOCK_E, mask=known)
        row_of_masked += tl.sum((~known).to(tl.int32))


@triton.jit
def _write_tiles(
    tile_map_ptr, num_tiles_ptr,
    start, end, group, E, length,
    TILE_N: tl.constexpr, BLOCK_E: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Write the tiles of one expert; with ``group`` = E what follows the last tile, and how many.

    Example: rows 0:5, 5:5 and 5:8 in tiles of 4, ``length`` = 5. Expert 0 writes entries 0 and 1,
    (0, block 0) and (0, block 1); expert 1 nothing; expert 2 entry 2; and group 3 writes -1 to the
    last two entries and 3 as the number of tiles.
    """
    e = tl.arange(0, BLOCK_E)
    tiles = (end - start) // TILE_N + ((end - start) % TILE_N != 0).to(tl.int32)  # [BLOCK_E]
    first = tl.sum(tl.where(e < group, tiles, 0))
    stop = tl.where(group < E, first + tl.sum(tl.where(e == group, tiles, 0)), length)
    if group == E:
        tl.store(num_tiles_ptr, tl.minimum(first, length))
    for t_start in range(first, stop, STEP):
        t = t_start + tl.arange(0, STEP)
        entry = tl.where(group < E, group | ((t - first) << 12), -1)
        tl.store(tile_map_ptr + t, entry, mask=t < tl.minimum(stop, length))


@triton.jit
def _place_kernel(
    expert_ptr, before_ptr, total_ptr,
    offsets_ptr, slot_of_row_ptr, row_of_slot_ptr, tile_map_ptr, num_tiles_ptr,
    N, E, B, steps, length,
    BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr, TILE_N: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Place the slots of one of B blocks, or write the tiles of one of E + 1 groups.

    Invariant: rows are sorted by (expert, slot), masked slots last; a slot's row is its rank there.

    Example: ids (1, 0, 1, -1, 1), E = 2, BLOCK_N = 2. Totals are (1, 3), so expert 1 starts at
    row 1 and masked slots at row 4. Block 1 holds slots 2 and 3. Before it each expert has got 1
    row, so slot 2 gets row 1 + 1 = 2; no slot before was masked, so slot 3 gets row 4, where
    ``slot_of_row`` is -1.
    """
    pid = tl.program_id(0)
    e = tl.arange(0, BLOCK_E)
    total = tl.load(total_ptr + e, mask=e < E, other=0)
    end = tl.cumsum(total, 0)
    start = end - total
    if pid < B:
        if pid == 0:
            tl.store(offsets_ptr + e, start, mask=e < E)
            tl.store(offsets_ptr + E, tl.sum(total))
        _place_block(
            expert_ptr, before_ptr, slot_of_row_ptr, row_of_slot_ptr,
            start, total, pid, N, E, steps, BLOCK_N, BLOCK_E,
        )  # fmt: skip
    else:
        _write_tiles(
            tile_map_ptr, num_tiles_ptr, start, end, pid - B, E, length, TILE_N, BLOCK_E, STEP
        )


@triton.jit
def _tiles_kernel(
    offsets_ptr, tile_map_ptr, num_tiles_ptr,
    E, length,
    TILE_N: tl.constexpr, BLOCK_E: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Write the tiles of one of E + 1 groups, from offsets alone."""
    e = tl.arange(0, BLOCK_E)
    start = tl.load(offsets_ptr + e, mask=e < E, other=0)
    end = tl.load(offsets_ptr + e + 1, mask=e < E, other=0)
    _write_tiles(
        tile_map_ptr, num_tiles_ptr, start, end, tl.program_id(0), E, length, TILE_N, BLOCK_E, STEP
    )


def _tile_buffers(like: Tensor, num_rows: int, num_experts: int, block_n: int):
    """Return ``tile_map`` and ``num_tiles``, not yet written."""
    length = num_rows // block_n + num_experts
    return scratch(like, length, dtype=torch.int32), scratch(like, 1, dtype=torch.int32)


def group_rows_triton(
    expert_TK: Tensor, num_experts: int, block_n: int | None = None, blocks: Blocks | None = None
) -> tuple[Tensor, ...]:
    """Launch the three kernels.

    Args:
        expert_TK: int32 or int64 ids.
        num_experts: E; the counts of a block stay in registers, so some thousands at most.
        block_n: Rows of a tile; no tiles if None.
        blocks: How slots are cut; for tests.

    Returns:
        The fields of ``Groups``, and with ``block_n`` those of ``Tiles``.
    """
    flat_N = expert_TK.reshape(-1)
    N, E, cut = flat_N.shape[0], num_experts, blocks or Blocks()
    steps = max(1, triton.cdiv(N, cut.n * cut.most))
    B = max(1, triton.cdiv(N, cut.n * steps))
    count_BE = scratch(flat_N, B, E, dtype=torch.int32)
    total_E = scratch(flat_N, E, dtype=torch.int32)
    groups = (
        scratch(flat_N, E + 1, dtype=torch.int32),
        scratch(flat_N, N, dtype=torch.int32),
        scratch(flat_N, *expert_TK.shape, dtype=torch.int32),
    )
    tiles = () if block_n is None else _tile_buffers(flat_N, N, E, block_n)
    tile_map, num_tiles = tiles or (total_E, total_E)  # without tiles no program writes there
    block_e = max(16, triton.next_power_of_2(E))
    wide: dict[str, int] = {"num_warps": cut.num_warps}
    scan: dict[str, int] = {"num_warps": cut.scan_warps}
    _count_kernel[(B,)](flat_N, count_BE, N, E, steps, BLOCK_N=cut.n, BLOCK_E=block_e, **wide)
    _scan_kernel[(triton.cdiv(E, 8),)](count_BE, total_E, B, E, BLOCK_B=cut.scan, BLOCK_E=8, **scan)
    _place_kernel[(B + (E + 1 if tiles else 0),)](
        flat_N, count_BE, total_E, *groups, tile_map, num_tiles,
        N, E, B, steps, tile_map.shape[0],
        BLOCK_N=cut.n, BLOCK_E=block_e, TILE_N=block_n or 1, STEP=256, **wide,
    )  # fmt: skip
    return (*groups, *tiles)


def tile_rows_triton(offsets_E1: Tensor, num_rows: int, block_n: int) -> tuple[Tensor, Tensor]:
    """Launch the kernel that maps tiles from offsets alone."""
    E = offsets_E1.shape[0] - 1
    tile_map, num_tiles = _tile_buffers(offsets_E1, num_rows, E, block_n)
    _tiles_kernel[(E + 1,)](
        offsets_E1.contiguous(), tile_map, num_tiles, E, tile_map.shape[0],
        TILE_N=block_n, BLOCK_E=max(16, triton.next_power_of_2(E)), STEP=256,
    )  # fmt: skip
    return tile_map, num_tiles
