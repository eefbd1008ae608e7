"""How the GPU quantises columns, alone or along with rows, and transposes them.

A program takes 128 rows: four blocks of each column. It loads row ``4*i + j`` of them as row ``i``
of a tile ``j``, so the bytes of four neighbouring rows of a column end up in one thread, which
packs them into a word. Words, not bytes, are then exchanged between threads and stored: a quarter
of the traffic through shared memory.

Reads a value and writes a byte, two for rows and columns, and one more for each 32 of them. Under
``"mxrow"`` a first pass finds the largest value of each column (and row), so it reads twice. That
pass ends in atomic maxima of integers, whose result depends on no order.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_kernels.mxfp8.encode import (
    SHARES,
    amax_bits,
    as_rows,
    bytes_like,
    e4m3_words,
    encode_rows,
    encode_tile,
    has_e4m3,
    inverse_scale,
    magnitude,
    scale_code,
    store_rows,
)
from moe_kernels.mxfp8.format import CHUNK
from moe_kernels.routing.tiles import tile_rows


@triton.jit
def _find_tile(tile, tiles_n, tile_map_ptr, offsets_ptr, N):
    """Return group, first row, row after the last, first row's place in its group's tiles.

    Without offsets groups are the matrices of a batch, and rows count through all of them. An entry
    of -1 in the map is a tile of no row.
    """
    if tile_map_ptr is None:
        group = tile // tiles_n
        start = group.to(tl.int64) * N
        first, end = start + tile % tiles_n * 128, start + N
    else:
        code = tl.load(tile_map_ptr + tile)
        group, row = tl.maximum(code, 0) & 0xFFF, tl.maximum(code >> 12, 0) * 128
        first = (tl.load(offsets_ptr + group) + row).to(tl.int64)
        end = tl.minimum(tl.load(offsets_ptr + group + 1), N)
        end = tl.where(code < 0, 0, end).to(tl.int64)
    return group, first, end


@triton.jit
def _load_quarter(x_ptr, first, end, d, D, stride_xn, J: tl.constexpr):
    """Return rows ``first + 4*i + J``, float32 ``[32, BLOCK_D]``; zeros from ``end`` on."""
    n = (first + 4 * tl.arange(0, 32) + J).to(tl.int64)
    mask = (n < end)[:, None] & (d < D)[None, :]
    return tl.load(x_ptr + n[:, None] * stride_xn + d[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _largest(x0, x1, x2, x3):
    """Return the largest magnitudes of four tiles, place by place."""
    return tl.maximum(
        tl.maximum(magnitude(x0), magnitude(x1)), tl.maximum(magnitude(x2), magnitude(x3))
    )


@triton.jit
def _amax_kernel(
    x_ptr, tile_map_ptr, offsets_ptr, column_amax_ptr, row_amax_ptr,
    N, D, tiles_n, stride_xn,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Find the largest value of each column of a group, and of each row if there is a pointer.

    Both hold the bits of float32 as int32, which are in the same order, and begin as 0.
    """
    tiles_d = tl.cdiv(D, BLOCK_D)
    tile, d_start = tl.program_id(0) // tiles_d, tl.program_id(0) % tiles_d * BLOCK_D
    d = d_start + tl.arange(0, BLOCK_D)
    group, first, end = _find_tile(tile, tiles_n, tile_map_ptr, offsets_ptr, N)
    n = (first + tl.arange(0, 128)).to(tl.int64)
    mask = (n < end)[:, None] & (d < D)[None, :]
    x = tl.load(x_ptr + n[:, None] * stride_xn + d[None, :], mask=mask, other=0.0).to(tl.float32)
    size = magnitude(x)
    amax = amax_bits(tl.max(size, axis=0))
    wide_group = group.to(tl.int64)
    at = column_amax_ptr + wide_group * D + d
    tl.atomic_max(at, amax, mask=d < D, sem="relaxed")
    if row_amax_ptr is not None:
        amax = amax_bits(tl.max(size, axis=1))
        tl.atomic_max(row_amax_ptr + n, amax, mask=n < end, sem="relaxed")


@triton.jit
def _store_quarter(
    x, row_amax_ptr, row_data_ptr, row_scale_ptr, first, end, d_start, D,
    SHARE: tl.constexpr, RCEIL: tl.constexpr, HARDWARE: tl.constexpr, J: tl.constexpr,
):  # fmt: skip
    """Quantise the rows that ``_load_quarter`` returned, and store them."""
    n = (first + 4 * tl.arange(0, 32) + J).to(tl.int64)
    if SHARE > 0:
        data, codes = encode_tile(x, SHARE, RCEIL, HARDWARE)
    else:
        amax = tl.load(row_amax_ptr + n, mask=n < end, other=0)
        data, codes = encode_rows(x, scale_code(amax, RCEIL), HARDWARE)
    store_rows(row_data_ptr, row_scale_ptr, data, codes, n, n < end, d_start, D, D)


@triton.jit
def _store_columns(word_ptr, scale_ptr, words, code, n_tile, d, d_out, D, P):
    """Store 128 columns of a transpose from words ``[32, BLOCK_D]`` and codes ``[runs, BLOCK_D]``.

    They are tile ``n_tile`` of P columns. d_out: row of the transpose for each ``d``, 64 bits.
    """
    BLOCK_D: tl.constexpr = words.shape[1]
    RUNS: tl.constexpr = code.shape[0]
    w = n_tile * 32 + tl.arange(0, 32)
    at = (d < D)[:, None] & (w < P // 4)[None, :]
    wide = d_out.to(tl.int64)
    tl.store(word_ptr + wide[:, None] * (P // 4) + w[None, :], tl.trans(words), mask=at)
    b = n_tile * 4 + tl.arange(0, 4)
    codes = tl.broadcast_to(code[:, None, :], (RUNS, 4 // RUNS, BLOCK_D))
    codes = tl.trans(tl.reshape(codes, (4, BLOCK_D))).to(tl.uint8)
    at = (d < D)[:, None] & (b < P // 32)[None, :]
    tl.store(scale_ptr + wide[:, None] * (P // 32) + b[None, :], codes, mask=at)


@triton.jit
def _clear_rows(row_data_ptr, row_scale_ptr, first, N, step, d_start, D, BLOCK_D: tl.constexpr):
    """Store zeros with scale 1 to 128 rows from ``first``, then ``step`` rows further, to N."""
    data = tl.zeros((128, BLOCK_D), dtype=tl.uint8)
    codes = tl.full((128, BLOCK_D // 32), 127, dtype=tl.int32)
    for start in range(first, N, step):
        row = start + tl.arange(0, 128)
        store_rows(
            row_data_ptr, row_scale_ptr, data, codes, row.to(tl.int64), row < N, d_start, D, D
        )


@triton.jit
def _quantize_columns_kernel(
    x_ptr, tile_map_ptr, offsets_ptr, column_amax_ptr, row_amax_ptr,
    word_ptr, scale_ptr, row_data_ptr, row_scale_ptr,
    N, D, P, E, tiles, tiles_n, stride_xn,
    SHARE: tl.constexpr, RCEIL: tl.constexpr, HARDWARE: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Quantise 128 rows of one group along its columns, and along the rows if there is a pointer.

    word_ptr: ``data_DP`` as int32, four values each. The tile of the map that this is says where in
    P its columns begin: the map lists the tiles of 128 rows of all groups in order, without gaps.

    Example: offsets (0, 5, 5, 133). The map holds (group 0, block 0) and (group 2, block 0): rows
    0..4 become columns 0..4, columns 5..127 are zero, and row 5 becomes column 128.
    """
    tiles_d = tl.cdiv(D, BLOCK_D)
    tile, d_start = tl.program_id(0) // tiles_d, tl.program_id(0) % tiles_d * BLOCK_D
    d = d_start + tl.arange(0, BLOCK_D)
    group, first, end = _find_tile(tile, tiles_n, tile_map_ptr, offsets_ptr, N)
    wide_group = group.to(tl.int64)
    x0 = _load_quarter(x_ptr, first, end, d, D, stride_xn, 0)
    x1 = _load_quarter(x_ptr, first, end, d, D, stride_xn, 1)
    x2 = _load_quarter(x_ptr, first, end, d, D, stride_xn, 2)
    x3 = _load_quarter(x_ptr, first, end, d, D, stride_xn, 3)
    if SHARE > 0:
        runs: tl.constexpr = 128 // SHARE
        most = tl.reshape(_largest(x0, x1, x2, x3), (runs, 32 // runs, BLOCK_D))
        amax = amax_bits(tl.max(most, axis=1))
    else:
        runs: tl.constexpr = 1
        amax = tl.load(column_amax_ptr + wide_group * D + d, mask=d < D, other=0)
        amax = tl.where(first < end, amax, 0)[None, :]  # no tile, no group
    code = scale_code(amax, RCEIL)
    inverse = tl.broadcast_to(inverse_scale(code)[:, None, :], (runs, 32 // runs, BLOCK_D))
    inverse = tl.reshape(inverse, (32, BLOCK_D))
    words = e4m3_words(x0, x1, x2, x3, inverse, HARDWARE)
    if row_data_ptr is not None:
        at = (row_amax_ptr, row_data_ptr, row_scale_ptr, first, end, d_start, D)
        _store_quarter(x0, *at, SHARE, RCEIL, HARDWARE, 0)
        _store_quarter(x1, *at, SHARE, RCEIL, HARDWARE, 1)
        _store_quarter(x2, *at, SHARE, RCEIL, HARDWARE, 2)
        _store_quarter(x3, *at, SHARE, RCEIL, HARDWARE, 3)
    if tile_map_ptr is None:
        _store_columns(
            word_ptr, scale_ptr, words, code, tile % tiles_n, d, wide_group * D + d, D, P
        )
    else:
        _store_columns(word_ptr, scale_ptr, words, code, tile, d, d, D, P)
    if row_data_ptr is not None and tile_map_ptr is not None:
        tail = tile * 128
        tail += tl.load(offsets_ptr + E)
        _clear_rows(row_data_ptr, row_scale_ptr, tail, N, tiles * 128, d_start, D, BLOCK_D)


def launch(recipe: str, rows: bool, hardware: bool) -> dict[str, int]:
    """Return the sizes: 64 values a thread, and 128 bytes of bfloat16 a row, a line of the cache.

    Rows under ``"mx128"`` share a scale among 128 columns, which one program has to hold. Rounding
    without an instruction for it takes registers: 32 values a thread then.
    """
    block = CHUNK if rows and recipe == "mx128" else 64
    return {"BLOCK_D": block, "num_warps": block // (16 if hardware else 8)}


def quantize_columns_triton(
    x_ND: Tensor, recipe: str, rounding: str, offsets_E1: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return bytes and scales of the columns."""
    return _run(x_ND, recipe, rounding, offsets_E1, None)


def quantize_both_triton(
    x_ND: Tensor, recipe: str, rounding: str, offsets_E1: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return bytes and scales of the rows, then those of the columns."""
    row_data, row_scale = bytes_like(x_ND, *x_ND.shape)
    data, scale = _run(x_ND, recipe, rounding, offsets_E1, (row_data, row_scale))
    return row_data, row_scale, data, scale


def _run(
    x_ND: Tensor,
    recipe: str,
    rounding: str,
    offsets_E1: Tensor | None,
    rows: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor]:
    """Launch, fill ``rows`` if they are given, and return bytes and scales of the columns."""
    *leading, N, D = x_ND.shape
    x = as_rows(x_ND)
    if offsets_E1 is None:
        P, tiles_n, groups, E, tile_map = N, triton.cdiv(N, CHUNK), math.prod(leading), 0, None
        tiles = tiles_n * groups
    else:
        groups = E = offsets_E1.shape[0] - 1
        offsets_E1 = offsets_E1.contiguous()
        tile_map = tile_rows(offsets_E1, N, CHUNK).tile_map
        tiles, tiles_n = len(tile_map), 0
        P = CHUNK * tiles
    data, scale = bytes_like(x, *leading, D, P)
    if not (tiles and D):
        return data, scale
    hardware = has_e4m3(x)
    sizes = launch(recipe, rows is not None, hardware)
    grid = (tiles * triton.cdiv(D, sizes["BLOCK_D"]),)
    column_amax = row_amax = None
    if recipe == "mxrow":
        column_amax = x.new_zeros(groups, D, dtype=torch.int32)
        row_amax = x.new_zeros(len(x), dtype=torch.int32) if rows else None
        _amax_kernel[grid](
            x, tile_map, offsets_E1, column_amax, row_amax, N, D, tiles_n, x.stride(0), **sizes
        )
    row_data, row_scale = rows or (None, None)
    _quantize_columns_kernel[grid](
        x, tile_map, offsets_E1, column_amax, row_amax,
        data.view(torch.int32), scale, row_data, row_scale,
        N, D, P, E, tiles, tiles_n, x.stride(0),
        SHARE=SHARES[recipe], RCEIL=rounding == "rceil", HARDWARE=hardware, **sizes,
    )  # fmt: skip
    return data, scale
