"""How Blackwell multiplies MXFP8: the tensor cores take a scale for each 32 values themselves.

One persistent kernel for every recipe, as all are MXFP8: ``tl.dot_scaled``, which compiles to
``tcgen05.mma`` with ``block_scale``. Sums are float32. Scales come through the copy engine in the
order that the tensor cores want (``moe_kernels.mxgemm.swizzle_kernel``).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_kernels.config import Config, choose_scaled, num_programs
from moe_kernels.gemm.kernel import zero_tail
from moe_kernels.gemm.tile import (
    aligned,
    blocks,
    find_rows,
    halve,
    load_window,
    store_window,
    swizzle,
    windows,
)
from moe_kernels.mxfp8 import MXTensor
from moe_kernels.mxgemm.swizzle_kernel import (
    BLOCKS,
    ROWS,
    as_copied,
    swizzle_rows,
    swizzle_weights,
    unswizzle_block,
)
from moe_kernels.routing.tiles import Tiles, tile_rows
from moe_kernels.scratch import scratch

DEPTH = 128  # values of D whose scales lie in one square


@triton.jit
def _native_mm_kernel(
    x_desc, x_scale_desc, w_desc, w_scale_desc, y_desc, y_ptr,
    offsets_ptr, tile_map_ptr, num_tiles_ptr,
    N, E, D, F,
    BLOCK_N: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_D: tl.constexpr,
    ZERO_TAIL: tl.constexpr, HALVES: tl.constexpr, SUPER: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Compute ``y_NF``: each row times its expert's weight, both in MXFP8.

    Invariant: as in ``moe_kernels.gemm.kernel``; every row below the last offset is written once.
    BLOCK_N is 128, so that a tile of rows is a square of scales.

    Example: F = 130, BLOCK_F = 128. Expert 1's second tile of columns has square 1 * 2 + 1 = 3.
    """
    dtype = y_ptr.dtype.element_ty
    if ZERO_TAIL:
        zero_tail(y_ptr, offsets_ptr, N, E, F, BLOCK_F, PROGRAMS)
    rows = tl.load(num_tiles_ptr)
    columns = tl.cdiv(F, BLOCK_F)
    for index in tl.range(
        tl.program_id(0), rows * columns, PROGRAMS, flatten=True,
        disallow_acc_multi_buffer=BLOCK_F > 128,  # of the 512 columns of tensor memory
    ):  # fmt: skip
        tile, f_block = swizzle(index, rows, columns, SUPER)
        expert, start, size, row = find_rows(tile, tile_map_ptr, offsets_ptr, N, BLOCK_N)
        f = f_block * BLOCK_F
        w_square = expert * tl.cdiv(F, 128) + f_block * (BLOCK_F // 128)
        acc = tl.zeros((BLOCK_N, BLOCK_F), dtype=tl.float32)
        for d in range(0, D, BLOCK_D):
            x = load_window(x_desc, start, size, row, d, BLOCK_N, BLOCK_D)
            w = tl.reshape(w_desc.load([expert, f, d]), (BLOCK_F, BLOCK_D))
            x_scale = x_scale_desc.load([0, tile, d // 128, 0, 0])
            w_scale = w_scale_desc.load([0, w_square, d // 128, 0, 0])
            x_scale = unswizzle_block(x_scale, BLOCK_N, BLOCK_D // 32)
            w_scale = unswizzle_block(w_scale, BLOCK_F, BLOCK_D // 32)
            acc = tl.dot_scaled(x, x_scale, "e4m3", w.T, w_scale, "e4m3", acc)
        if HALVES:
            left, right = halve(acc)
            store_window(y_desc, start, size, row, f, left.to(dtype))
            store_window(y_desc, start, size, row, f + BLOCK_F // 2, right.to(dtype))
        else:
            store_window(y_desc, start, size, row, f, acc.to(dtype))


def native_mm_triton(
    x: MXTensor,
    w: MXTensor,
    offsets_E1: Tensor,
    recipe: str,
    out_dtype: torch.dtype,
    *,
    tiles: Tiles | None = None,
    config: Config | None = None,
) -> Tensor:
    """Launch the kernel. The caller has checked the arguments.

    Args:
        x: Rows sorted by expert.
        w: Weights [E, F, D], with scales along D.
        offsets_E1: Where each expert's rows begin.
        recipe: Which sizes to take from the table; the product is the same.
        out_dtype: Of the result.
        tiles: The list of tiles of 128 rows; made here if not given.
        config: Sizes of the tiles; the table's choice if not given.

    Returns:
        ``y_NF``; rows past the last offset are zeros.
    """
    data, w_data = aligned(x.data_ND), aligned(w.data_ND)
    (N, _), (E, F, D) = data.shape, w_data.shape
    y_NF = scratch(data, N, F, dtype=out_dtype)
    if y_NF.numel() == 0:
        return y_NF
    config = config or choose_scaled(recipe, data, N, E)
    n, f, d = config.block_n, config.block_f, config.block_d
    if n != ROWS or f % ROWS or d % DEPTH:
        raise ValueError(
            f"scales come in squares of {ROWS} rows and {BLOCKS} blocks of 32, so block_n must be "
            f"{ROWS} and block_f and block_d multiples of {ROWS} and {DEPTH}; got {n}, {f}, {d}"
        )
    tiles = tiles or tile_rows(offsets_E1, N, n)
    x_scale = swizzle_rows(x.scale_NB.contiguous(), offsets_E1, tiles)
    w_scale = swizzle_weights(w.scale_NB)
    programs = num_programs(data.device, config)
    halves = config.halves or out_dtype.itemsize == 4  # a whole tile of float32 leaves no room
    _native_mm_kernel[(programs,)](
        windows(data, n, d), blocks(as_copied(x_scale), 1, 1, d // DEPTH, 2, 256),
        blocks(w_data, 1, f, d), blocks(as_copied(w_scale), 1, f // ROWS, d // DEPTH, 2, 256),
        windows(y_NF, n, f // 2 if halves else f), y_NF,
        offsets_E1.contiguous(), *tiles, N, E, D, F,
        BLOCK_N=n, BLOCK_F=f, BLOCK_D=d, ZERO_TAIL=True, HALVES=halves,
        SUPER=config.super_n, PROGRAMS=programs, **config.launch,
    )  # fmt: skip
    return y_NF
