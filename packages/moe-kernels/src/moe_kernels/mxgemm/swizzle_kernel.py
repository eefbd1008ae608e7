"""The order in which Blackwell's tensor cores want scales: 128 rows by 4 blocks at a time.

The 512 bytes of such a square lie together; the scale of row r and block b of it is byte
``(r % 32) * 16 + (r // 32) * 4 + b``, so that one copy of 32 x 16 bytes fills the scale registers.
A square holds rows of one expert alone: where an expert's rows end within it, or its blocks, the
rest is 127, which is 1. So experts may have any number of rows.
"""

import triton
import triton.language as tl
from torch import Tensor

from moe_kernels.routing.tiles import Tiles
from moe_kernels.scratch import scratch

ROWS, BLOCKS = 128, 4
ONE = 127


def swizzle_reference(scale_NB: Tensor) -> Tensor:
    """Return ``[N / 128, B / 4, 512]``, both rounded up, in the order of the tensor cores."""
    N, B = scale_NB.shape
    padded = scale_NB.new_full((-(-N // ROWS) * ROWS, -(-B // BLOCKS) * BLOCKS), ONE)
    padded[:N, :B] = scale_NB
    rows, columns = padded.shape[0] // ROWS, padded.shape[1] // BLOCKS
    squares = padded.view(rows, 4, 32, columns, BLOCKS)
    return squares.permute(0, 3, 2, 1, 4).reshape(rows, columns, ROWS * BLOCKS)


def unswizzle(swizzled: Tensor, num_rows: int, num_blocks: int) -> Tensor:
    """Return the scales ``[num_rows, num_blocks]`` of which ``swizzled`` holds the squares."""
    squares = swizzled.view(*swizzled.shape[:2], 32, 4, BLOCKS).permute(0, 3, 2, 1, 4)
    return squares.reshape(swizzled.shape[0] * ROWS, -1)[:num_rows, :num_blocks]


@triton.jit
def _swizzle_kernel(
    scale_ptr, out_ptr, offsets_ptr, tile_map_ptr, num_tiles_ptr,
    N, B, F, stride_s,
    GROUPED: tl.constexpr,
):  # fmt: skip
    """Write square ``program_id(1)`` of the blocks of tile ``program_id(0)``.

    GROUPED: tiles are those of the map, of 128 rows; else each expert has F rows in N.

    Example: F = 130, not GROUPED. Tile 1 is rows 128:130 of expert 0, tile 2 rows 130:258.
    """
    tile = tl.program_id(0)
    within = tl.arange(0, 128)
    if GROUPED:
        if tile >= tl.load(num_tiles_ptr):
            return
        code = tl.load(tile_map_ptr + tile)
        expert = code & 0xFFF
        start = tl.load(offsets_ptr + expert)
        end = tl.minimum(tl.load(offsets_ptr + expert + 1), N)
        n = start + (code >> 12) * 128 + within
    else:
        per_expert = tl.cdiv(F, 128)
        start = (tile // per_expert) * F
        end = start + F
        n = start + (tile % per_expert) * 128 + within
    b = tl.program_id(1) * 4 + tl.arange(0, 4)
    mask = (n < end)[:, None] & (b < B)[None, :]
    n = n.to(tl.int64)
    scale = tl.load(scale_ptr + n[:, None] * stride_s + b[None, :], mask=mask, other=127)
    square = (tile * tl.num_programs(1) + tl.program_id(1)).to(tl.int64) * 512
    place = (within % 32 * 16 + within // 32 * 4)[:, None] + tl.arange(0, 4)[None, :]
    tl.store(out_ptr + square + place, scale)


def swizzle_rows(scale_NB: Tensor, offsets_E1: Tensor, tiles: Tiles) -> Tensor:
    """Return the squares of each tile of 128 rows, ``[tiles, B / 4, 512]``; those of none are left.

    Args:
        scale_NB: Scales of rows sorted by expert, unit stride last.
        offsets_E1: Where each expert's rows begin.
        tiles: The list of tiles for 128 rows.
    """
    N, B = scale_NB.shape
    count, columns = tiles.tile_map.shape[0], -(-B // BLOCKS)
    out = scratch(scale_NB, count, columns, ROWS * BLOCKS)
    _swizzle_kernel[(count, columns)](
        scale_NB, out, offsets_E1.contiguous(), *tiles, N, B, 0, scale_NB.stride(0), GROUPED=True
    )
    return out


def swizzle_weights(scale_EFB: Tensor) -> Tensor:
    """Return the squares of each expert, ``[E * (F / 128), B / 4, 512]``, rounded up."""
    E, F, B = scale_EFB.shape
    count, columns = E * -(-F // ROWS), -(-B // BLOCKS)
    scale = scale_EFB.contiguous()
    out = scratch(scale, count, columns, ROWS * BLOCKS)
    _swizzle_kernel[(count, columns)](scale, out, None, None, None, E * F, B, F, B, GROUPED=False)
    return out


@triton.jit
def unswizzle_block(square, ROWS_OF: tl.constexpr, BLOCKS_OF: tl.constexpr):
    """Return the scales [ROWS_OF, BLOCKS_OF] of squares that a kernel loaded."""
    parts = tl.reshape(square, (ROWS_OF // 128, BLOCKS_OF // 4, 32, 4, 4))
    return tl.reshape(tl.permute(parts, (0, 3, 2, 1, 4)), (ROWS_OF, BLOCKS_OF))


def as_copied(swizzled: Tensor) -> Tensor:
    """View squares in the five axes that the copy engine takes, 256 bytes being its widest."""
    return swizzled.view(1, *swizzled.shape[:2], 2, 256)
