"""How GPUs without block-scaled tensor cores multiply MXFP8: float8 products, scales beside them.

A persistent kernel over the tiles that the device listed, like that of ``moe_kernels.gemm.kernel``.
The tensor cores multiply the float8 values as they are; a scale is a power of two, so applying it
to a float32 sum is exact. Where it is applied depends on how many values of D share it:

- ``mxrow``: one scale a row, applied once, to the finished sum.
- ``mx128``: after every 128 values of D (promotion), two operations an element of the tile.
- ``mx32``: after every 32. Right, but with four times the promotions: on Hopper for bytes that were
  made elsewhere, not for speed.

Hopper adds float8 products in registers of fewer bits than float32 (about 14 of mantissa).
Promotion ends that after 128 or 32 values. ``mxrow`` leaves it on for the whole of D, which costs
about 2**-14 of the sum each 32 values, far below the rounding to float8 itself (2**-4 of a value).

Cost: ``2*N*D*F`` FLOPs in float8; at least ``N*D + E*D*F`` bytes read and ``2*N*F`` written, and a
byte of scale for each 32 values.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_kernels.config import SCALED, Config, choose_scaled, num_programs
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
from moe_kernels.routing.tiles import Tiles, tile_rows
from moe_kernels.scratch import scratch

STEPS = {"mx32": 1, "mx128": 4}  # blocks of 32 that share a scale; in mxrow all of a row do


@triton.jit
def decode(code):
    """Return ``2**(code - 127)``, from its bits; 255 gives NaN.

    Code 0 is 2**-127, a subnormal of float32, which a shifted exponent cannot express.
    """
    bits = code.to(tl.int32) << 23
    bits = tl.where(code == 0, 1 << 22, bits)
    bits = tl.where(code == 255, 0x7FC00000, bits)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _scaled_mm_kernel(
    x_ptr, x_desc, x_scale_ptr, w_desc, w_scale_ptr, y_desc, y_ptr,
    slot_of_row_ptr, offsets_ptr, tile_map_ptr, num_tiles_ptr,
    N, E, D, F, stride_xt, stride_sx, G,
    K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_D: tl.constexpr,
    PROMOTE: tl.constexpr, EVEN_D: tl.constexpr, ZERO_TAIL: tl.constexpr, HALVES: tl.constexpr,
    SUPER: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Compute ``y_NF``: each row times its expert's weight, both in MXFP8.

    Invariant: as in ``moe_kernels.gemm.kernel``; every row below the last offset is written once.

    x_scale_ptr: [G, rows of x] with rows ``stride_sx`` apart. w_scale_ptr: [E, G, F]. G is the
    number of scales along D. PROMOTE: there is one scale for each BLOCK_D values, and a product is
    scaled before it is added; else there is one for all of D. K: routes of a token, whose rows are
    then gathered from ``x_ptr``; 0 if the rows lie sorted by expert and come from ``x_desc``.

    Example: D = 64, BLOCK_D = 32, PROMOTE, one row (1, ..., 1) with scales (2, 4) and a weight of
    ones with scales (1, 1/2). The sum is 32 * 2 * 1 + 32 * 4 / 2 = 128.
    """
    dtype = y_ptr.dtype.element_ty
    if ZERO_TAIL:
        zero_tail(y_ptr, offsets_ptr, N, E, F, BLOCK_F, PROGRAMS)
    rows = tl.load(num_tiles_ptr)
    columns = tl.cdiv(F, BLOCK_F)
    for index in tl.range(tl.program_id(0), rows * columns, PROGRAMS, flatten=True):
        tile, f_block = swizzle(index, rows, columns, SUPER)
        expert, start, size, row = find_rows(tile, tile_map_ptr, offsets_ptr, N, BLOCK_N)
        f = f_block * BLOCK_F
        within = row + tl.arange(0, BLOCK_N) < size
        x_scale_ptrs = x_scale_ptr + start + row + tl.arange(0, BLOCK_N)
        if K > 0:
            # Past the expert's last row: its last one again, read and not stored.
            n = start + tl.minimum(row + tl.arange(0, BLOCK_N), size - 1)
            n = (tl.load(slot_of_row_ptr + n) // K).to(tl.int64)
            x_scale_ptrs = x_scale_ptr + n
            d_step = tl.arange(0, BLOCK_D)
            x_ptrs = x_ptr + n[:, None] * stride_xt + d_step[None, :]  # [BLOCK_N, BLOCK_D]
        first_group = (expert * G).to(tl.int64)
        w_scale_ptrs = w_scale_ptr + first_group * F + f + tl.arange(0, BLOCK_F)
        w_within = f + tl.arange(0, BLOCK_F) < F
        acc = tl.zeros((BLOCK_N, BLOCK_F), dtype=tl.float32)
        for d in range(0, D, BLOCK_D):
            if K == 0:
                x = load_window(x_desc, start, size, row, d, BLOCK_N, BLOCK_D)
            elif EVEN_D:
                x = tl.load(x_ptrs + d)
            else:
                x = tl.load(x_ptrs + d, mask=(d + d_step < D)[None, :], other=0.0)
            w = tl.reshape(w_desc.load([expert, f, d]), (BLOCK_F, BLOCK_D))
            if PROMOTE:
                x_scale = decode(tl.load(x_scale_ptrs, mask=within, other=127))
                w_scale = decode(tl.load(w_scale_ptrs, mask=w_within, other=127))
                acc += tl.dot(x, w.T) * (x_scale[:, None] * w_scale[None, :])
                x_scale_ptrs += stride_sx
                w_scale_ptrs += F
            else:
                acc = tl.dot(x, w.T, acc)
        if not PROMOTE:
            acc *= decode(tl.load(x_scale_ptrs, mask=within, other=127))[:, None]
            acc *= decode(tl.load(w_scale_ptrs, mask=w_within, other=127))[None, :]
        if HALVES:
            left, right = halve(acc)
            store_window(y_desc, start, size, row, f, left.to(dtype))
            store_window(y_desc, start, size, row, f + BLOCK_F // 2, right.to(dtype))
        else:
            store_window(y_desc, start, size, row, f, acc.to(dtype))


def shared_scales(scale: Tensor, recipe: str) -> Tensor:
    """Return one scale for all that share it, neighbouring rows side by side: ``[..., G, N]``."""
    return scale[..., :: STEPS.get(recipe, scale.shape[-1])].mT.contiguous()


def scaled_mm_triton(
    x: MXTensor,
    w: MXTensor,
    offsets_E1: Tensor,
    recipe: str,
    out_dtype: torch.dtype,
    *,
    tiles: Tiles | None = None,
    config: Config | None = None,
    slot_of_row_N: Tensor | None = None,
    top_k: int = 0,
) -> Tensor:
    """Launch the kernel. The caller has checked the arguments.

    Args:
        x: Rows sorted by expert; or tokens, whose rows the kernel gathers, if ``top_k`` is not 0.
        w: Weights [E, F, D], with scales along D.
        offsets_E1: Where each expert's rows begin.
        recipe: How many values share a scale.
        out_dtype: Of the result.
        tiles: The list of tiles for the configuration's ``block_n``; made here if not given.
        config: Sizes of the tiles; the table's choice if not given.
        slot_of_row_N: Route of each row, with ``top_k`` routes a token.
        top_k: K; 0 without a gather.

    Returns:
        ``y_NF``; rows past the last offset are zeros.
    """
    data, w_data = aligned(x.data_ND), aligned(w.data_ND)
    E, F, D = w_data.shape
    N = data.shape[0] if slot_of_row_N is None else slot_of_row_N.shape[0]
    y_NF = scratch(data, N, F, dtype=out_dtype)
    if y_NF.numel() == 0:
        return y_NF
    config = config or choose_scaled(recipe, data, N, E)
    n, f, d = config.block_n, config.block_f, config.block_d
    if d != (SCALED[recipe] or d):
        raise ValueError(
            f"a product of {recipe!r} rows is scaled after each {SCALED[recipe]} values of D, so "
            f"block_d must be {SCALED[recipe]}, got {d}"
        )
    tiles = tiles or tile_rows(offsets_E1, N, n)
    x_scale, w_scale = shared_scales(x.scale_NB, recipe), shared_scales(w.scale_NB, recipe)
    programs = num_programs(data.device, config)
    _scaled_mm_kernel[(programs,)](
        data, None if top_k else windows(data, n, d), x_scale,
        blocks(w_data, 1, f, d), w_scale,
        windows(y_NF, n, f // 2 if config.halves else f), y_NF,
        slot_of_row_N, offsets_E1.contiguous(), *tiles,
        N, E, D, F, data.stride(0), x_scale.stride(0), w_scale.shape[1],
        K=top_k, BLOCK_N=n, BLOCK_F=f, BLOCK_D=d, PROMOTE=recipe != "mxrow",
        EVEN_D=D % d == 0, ZERO_TAIL=True, HALVES=config.halves,
        SUPER=config.super_n, PROGRAMS=programs, **config.launch,
    )  # fmt: skip
    return y_NF
