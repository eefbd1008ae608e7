"""How the GPU computes the grouped matrix products.

Persistent kernels: as many programs as fit on the chip walk over a list of tiles that the device
wrote (``moe_kernels.routing.tiles``), so nothing waits for the host and the launch is the same for
every routing. A tile never spans two experts. Tiles come through the copy engine (TMA; plain loads
on GPUs that have none), and the loads of a program's next tile start while it stores this one.

Cost of ``grouped_mm``: ``2*N*D*F`` FLOPs; at least ``N*D + E*D*F + N*F`` elements moved. The same
for ``grouped_mm_dw``.
"""

import triton
import triton.language as tl
from torch import Tensor

from moe_kernels.config import Config, choose, num_programs
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
from moe_kernels.routing.tiles import Tiles, tile_rows
from moe_kernels.scratch import scratch


@triton.jit
def zero_tail(y_ptr, offsets_ptr, N, E, F, BLOCK_F: tl.constexpr, PROGRAMS: tl.constexpr):
    """Write zeros to the rows past the last offset, each program its share of them."""
    zeros = tl.zeros((BLOCK_F,), y_ptr.dtype.element_ty)
    for row in range(tl.load(offsets_ptr + E) + tl.program_id(0), N, PROGRAMS):
        for f_start in range(0, F, BLOCK_F):
            n = tl.full((BLOCK_F,), row, tl.int32).to(tl.int64)
            f = f_start + tl.arange(0, BLOCK_F)
            tl.store(y_ptr + n * F + f, zeros, mask=f < F)


@triton.jit
def _grouped_mm_kernel(
    x_desc, w_desc, y_desc, y_ptr, offsets_ptr, tile_map_ptr, num_tiles_ptr,
    N, E, D, F,
    BLOCK_N: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_D: tl.constexpr,
    D_MAJOR: tl.constexpr, ZERO_TAIL: tl.constexpr, HALVES: tl.constexpr,
    SUPER: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Compute ``y_NF``: each row times its expert's weight.

    Invariant: a tile holds rows of one expert, and its store is clipped to that expert, so every
    row below the last offset is written once. The rows past it become zeros and are never used.

    D_MAJOR: the weight lies as [E, F, D] (else as [E, D, F]). HALVES: store the tile in two halves,
    which takes half the shared memory.

    Example: offsets (0, 5, 5, 8), N = 9, BLOCK_N = 4, F = BLOCK_F. There are three tiles: rows
    0:4 and 4:5 of expert 0, and 5:8 of expert 2. Row 8 is the tail.
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
        acc = tl.zeros((BLOCK_N, BLOCK_F), dtype=tl.float32)
        for d in range(0, D, BLOCK_D):
            x = load_window(x_desc, start, size, row, d, BLOCK_N, BLOCK_D)
            if D_MAJOR:
                w = tl.reshape(w_desc.load([expert, f, d]), (BLOCK_F, BLOCK_D)).T
            else:
                w = tl.reshape(w_desc.load([expert, d, f]), (BLOCK_D, BLOCK_F))
            acc = tl.dot(x, w, acc, input_precision="ieee")
        if HALVES:
            left, right = halve(acc)
            store_window(y_desc, start, size, row, f, left.to(dtype))
            store_window(y_desc, start, size, row, f + BLOCK_F // 2, right.to(dtype))
        else:
            store_window(y_desc, start, size, row, f, acc.to(dtype))


@triton.jit
def _grouped_mm_dw_kernel(
    x_desc, dy_desc, dw_desc, dw_ptr, offsets_ptr,
    N, E, D, F,
    BLOCK_N: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_D: tl.constexpr,
    ACCUMULATE: tl.constexpr, SUPER: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Compute ``dw_EFD``: for each expert the sum over its rows, however many, of ``dy * x``.

    Invariant: every tile of every expert is written once, so an expert without rows gets zeros
    (with ACCUMULATE: keeps what is there). Rows past an expert's last are read as zeros on both
    sides, so whatever they hold, NaN too, adds nothing.

    Example: offsets (0, 3, 3), BLOCK_N = 2. Expert 0 sums rows 0:2, then row 2 and a row of zeros;
    expert 1 sums nothing.
    """
    rows = tl.cdiv(F, BLOCK_F)
    columns = tl.cdiv(D, BLOCK_D)
    for index in tl.range(tl.program_id(0), E * rows * columns, PROGRAMS, flatten=True):
        expert = index // (rows * columns)
        f_block, d_block = swizzle(index % (rows * columns), rows, columns, SUPER)
        start = tl.load(offsets_ptr + expert)
        size = tl.minimum(tl.load(offsets_ptr + expert + 1), N) - start
        f = f_block * BLOCK_F
        d = d_block * BLOCK_D
        if ACCUMULATE:  # start from what is there, so that it needs no registers of its own
            # 64 bits: E x F x D may pass 2**31 elements.
            dw_f = (expert * F).to(tl.int64) + f + tl.arange(0, BLOCK_F)[:, None]
            dw_d = d + tl.arange(0, BLOCK_D)[None, :]
            dw_ptrs = dw_ptr + dw_f * D + dw_d  # [BLOCK_F, BLOCK_D]
            mask = (f + tl.arange(0, BLOCK_F) < F)[:, None] & (dw_d < D)
            acc = tl.load(dw_ptrs, mask=mask, other=0.0)
        else:
            acc = tl.zeros((BLOCK_F, BLOCK_D), dtype=tl.float32)
        for row in range(0, size, BLOCK_N):
            dy = load_window(dy_desc, start, size, row, f, BLOCK_N, BLOCK_F)
            x = load_window(x_desc, start, size, row, d, BLOCK_N, BLOCK_D)
            acc = tl.dot(dy.T, x, acc, input_precision="ieee")
        if ACCUMULATE:
            tl.store(dw_ptrs, acc, mask=mask)
        else:
            block = tl.reshape(acc.to(dw_ptr.dtype.element_ty), (1, BLOCK_F, BLOCK_D))
            dw_desc.store([expert, f, d], block)


def grouped_mm_triton(
    x_ND: Tensor,
    w_EFD: Tensor,
    offsets_E1: Tensor,
    *,
    tiles: Tiles | None = None,
    config: Config | None = None,
    out_NF: Tensor | None = None,
) -> Tensor:
    """Launch the kernel. The caller has checked the arguments.

    Args:
        x_ND: Rows sorted by expert. A layout that the copy engine cannot read is copied first.
        w_EFD: Weights of each expert; either of the last two axes may be the one with stride 1.
        offsets_E1: Where each expert's rows begin.
        tiles: The list of tiles for the configuration's ``block_n``; made here if not given.
        config: Sizes of the tiles; the table's choice if not given.
        out_NF: Write here. Rows past the last offset stay as they are then; without it they are
            zeros.

    Returns:
        ``y_NF``.
    """
    N, D = x_ND.shape
    E, F, _ = w_EFD.shape
    y_NF = scratch(x_ND, N, F) if out_NF is None else out_NF
    if y_NF.numel() == 0:
        return y_NF
    d_major = w_EFD.stride(1) != 1
    w = aligned(w_EFD if d_major else w_EFD.mT)
    config = config or choose("forward" if d_major else "dgrad", x_ND, N, E)
    n, f, d = config.block_n, config.block_f, config.block_d
    tiles = tiles or tile_rows(offsets_E1, N, n)
    programs = num_programs(x_ND.device, config)
    _grouped_mm_kernel[(programs,)](
        windows(aligned(x_ND), n, d),
        blocks(w, 1, f, d) if d_major else blocks(w, 1, d, f),
        windows(y_NF, n, f // 2 if config.halves else f), y_NF,
        offsets_E1.contiguous(), *tiles, N, E, D, F,
        BLOCK_N=n, BLOCK_F=f, BLOCK_D=d,
        D_MAJOR=d_major, ZERO_TAIL=out_NF is None, HALVES=config.halves,
        SUPER=config.super_n, PROGRAMS=programs, **config.launch,
    )  # fmt: skip
    return y_NF


def grouped_mm_dw_triton(
    x_ND: Tensor,
    dy_NF: Tensor,
    offsets_E1: Tensor,
    *,
    config: Config | None = None,
    out_EFD: Tensor | None = None,
) -> Tensor:
    """Launch the weight-gradient kernel. The caller has checked the arguments.

    Args:
        x_ND: Rows sorted by expert.
        dy_NF: Gradients of the rows' products.
        offsets_E1: Where each expert's rows begin.
        config: Sizes of the tiles; the table's choice if not given.
        out_EFD: Contiguous float32. The sums are added to it in float32, without rounding first.

    Returns:
        ``dw_EFD`` in ``x_ND.dtype``, or ``out_EFD``.
    """
    N, D = x_ND.shape
    E, F = offsets_E1.shape[0] - 1, dy_NF.shape[1]
    dw_EFD = scratch(x_ND, E, F, D) if out_EFD is None else out_EFD
    if N == 0 or dw_EFD.numel() == 0:
        return dw_EFD.zero_() if out_EFD is None else dw_EFD
    config = config or choose("wgrad", x_ND, N, E)
    n, f, d = config.block_n, config.block_f, config.block_d
    programs = num_programs(x_ND.device, config)
    offsets_E1 = offsets_E1.contiguous()
    _grouped_mm_dw_kernel[(programs,)](
        windows(aligned(x_ND), n, d), windows(aligned(dy_NF), n, f),
        None if out_EFD is not None else blocks(dw_EFD, 1, f, d), dw_EFD,
        offsets_E1, N, E, D, F,
        BLOCK_N=n, BLOCK_F=f, BLOCK_D=d, ACCUMULATE=out_EFD is not None,
        SUPER=config.super_n, PROGRAMS=programs, **config.launch,
    )  # fmt: skip
    return dw_EFD
