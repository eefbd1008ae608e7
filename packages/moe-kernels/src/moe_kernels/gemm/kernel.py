"""How the GPU computes the grouped matrix products.

The rows of an expert are cut into tiles of ``BLOCK_N``, and a tile never spans two experts. How
many tiles there are depends on the routing, which only the device knows. So the grid is the upper
bound ``N // BLOCK_N + E + 1``, each program finds its expert in the offsets, and surplus programs
leave at once. Nothing waits for the host.

Cost of ``grouped_mm``: ``2*N*D*F`` FLOPs; at least ``N*D + E*D*F + N*F`` elements moved. The same
for ``grouped_mm_dw``.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class Tile(NamedTuple):
    """What one program computes.

    Attributes:
        n: Rows.
        f: Columns of the output.
        d: Columns of ``x``.
        num_warps: Warps of 32 threads.
        num_stages: Loads in flight.
    """

    n: int
    f: int
    d: int
    num_warps: int
    num_stages: int


def choose_tile(dtype: torch.dtype, num_rows: int, num_experts: int) -> Tile:
    """Return the tile of ``grouped_mm``: low if experts have few rows on average."""
    if dtype == torch.float32:  # exact float32 products run on the FMA units, from registers
        return Tile(64, 64, 32, num_warps=4, num_stages=2)
    if num_rows < 96 * num_experts:
        return Tile(64, 128, 64, num_warps=4, num_stages=3)
    return Tile(128, 256, 64, num_warps=8, num_stages=3)


def choose_dw_tile(dtype: torch.dtype) -> Tile:
    """Return the tile of ``grouped_mm_dw``, where ``n`` is the depth of the sum."""
    if dtype == torch.float32:
        return Tile(32, 64, 64, num_warps=4, num_stages=2)
    return Tile(64, 128, 128, num_warps=8, num_stages=3)


@triton.jit
def _grouped_mm_kernel(
    x_ptr, w_ptr, y_ptr, offsets_ptr,
    N, E, D, F, num_tiles,
    stride_xn, stride_xd, stride_we, stride_wf, stride_wd,
    BLOCK_E: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_D: tl.constexpr,
    EVEN_D: tl.constexpr, SUPER: tl.constexpr,
):  # fmt: skip
    """Compute one tile of ``y_NF``.

    Invariant: tiles are numbered expert by expert, and the rows past the last offset are the tiles
    of one more, E-th group, whose sum over D is empty. So they become zeros and are never read.

    Example: offsets (0, 5, 5, 8), N = 9, BLOCK_N = 4. Tiles per group are 2, 0, 1, 1, and up to
    and including each group 2, 2, 3, 4. Tile 2 has passed two groups, so it belongs to group 2
    and starts at row 5 + (2 - 2) * 4. Tile 3 is row 8, past the last offset: zeros.
    """
    # SUPER neighbouring tiles share a block of the weight while it is in L2.
    blocks_f = tl.cdiv(F, BLOCK_F)
    pid = tl.program_id(0)
    first = pid // (SUPER * blocks_f) * SUPER
    size = tl.minimum(num_tiles - first, SUPER)
    tile = first + pid % (SUPER * blocks_f) % size
    f_block = pid % (SUPER * blocks_f) // size

    e = tl.arange(0, BLOCK_E)
    starts = tl.load(offsets_ptr + e, mask=e <= E, other=N)  # [BLOCK_E]
    ends = tl.load(offsets_ptr + e + 1, mask=e < E, other=N)
    passed = tl.cumsum((ends - starts + BLOCK_N - 1) // BLOCK_N, 0)
    group = tl.sum((passed <= tile).to(tl.int32))
    if group > E:
        return
    first_tile = tl.max(tl.where(e < group, passed, 0))
    end = tl.minimum(tl.sum(tl.where(e == group, ends, 0)), N)
    row = tl.sum(tl.where(e == group, starts, 0)) + (tile - first_tile) * BLOCK_N
    depth = tl.where(group < E, D, 0)

    # 64 bits: rows x columns, experts x F x D and F x D may each pass 2**31 elements.
    expert = group.to(tl.int64)
    n = (row + tl.arange(0, BLOCK_N)).to(tl.int64)
    f = (f_block * BLOCK_F + tl.arange(0, BLOCK_F)).to(tl.int64)
    d = tl.arange(0, BLOCK_D).to(tl.int64)
    n_mask = (n < end)[:, None]
    f_mask = (f < F)[None, :]
    x_ptrs = x_ptr + n[:, None] * stride_xn + d[None, :] * stride_xd  # [BLOCK_N, BLOCK_D]
    w_ptrs = w_ptr + expert * stride_we + f[None, :] * stride_wf + d[:, None] * stride_wd
    acc = tl.zeros((BLOCK_N, BLOCK_F), dtype=tl.float32)
    for d_start in range(0, depth, BLOCK_D):
        if EVEN_D:
            x = tl.load(x_ptrs, mask=n_mask, other=0.0)
            w = tl.load(w_ptrs, mask=f_mask, other=0.0)  # [BLOCK_D, BLOCK_F]
        else:
            rest = D - d_start
            x = tl.load(x_ptrs, mask=n_mask & (d < rest)[None, :], other=0.0)
            w = tl.load(w_ptrs, mask=f_mask & (d < rest)[:, None], other=0.0)
        acc = tl.dot(x, w, acc, input_precision="ieee")
        x_ptrs += BLOCK_D * stride_xd
        w_ptrs += BLOCK_D * stride_wd
    y_ptrs = y_ptr + n[:, None] * F + f[None, :]
    tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), mask=n_mask & f_mask)


@triton.jit
def _grouped_mm_dw_kernel(
    x_ptr, dy_ptr, dw_ptr, offsets_ptr,
    N, D, F,
    stride_xn, stride_xd, stride_dyn, stride_dyf,
    BLOCK_N: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Compute one tile of ``dw_EFD``: the sum over an expert's rows, however many.

    Invariant: every tile of every expert is written once, so an expert without rows gets zeros.

    Example: offsets (0, 3, 3), BLOCK_N = 2. Expert 0 sums rows 0:2, then row 2 with row 3 masked;
    expert 1 sums nothing and stores zeros.
    """
    blocks_f = tl.cdiv(F, BLOCK_F)
    blocks_d = tl.cdiv(D, BLOCK_D)
    pid = tl.program_id(0)
    expert = (pid // (blocks_f * blocks_d)).to(tl.int64)
    f_block = pid % (blocks_f * blocks_d) // blocks_d
    d_block = pid % blocks_d

    start = tl.load(offsets_ptr + expert)
    end = tl.minimum(tl.load(offsets_ptr + expert + 1), N)
    f = (f_block * BLOCK_F + tl.arange(0, BLOCK_F)).to(tl.int64)
    d = (d_block * BLOCK_D + tl.arange(0, BLOCK_D)).to(tl.int64)
    f_mask = (f < F)[:, None]
    d_mask = (d < D)[None, :]
    acc = tl.zeros((BLOCK_F, BLOCK_D), dtype=tl.float32)
    for row in range(start, end, BLOCK_N):
        n = (row + tl.arange(0, BLOCK_N)).to(tl.int64)
        dy_ptrs = dy_ptr + n[None, :] * stride_dyn + f[:, None] * stride_dyf  # [BLOCK_F, BLOCK_N]
        x_ptrs = x_ptr + n[:, None] * stride_xn + d[None, :] * stride_xd  # [BLOCK_N, BLOCK_D]
        dy = tl.load(dy_ptrs, mask=f_mask & (n < end)[None, :], other=0.0)
        x = tl.load(x_ptrs, mask=(n < end)[:, None] & d_mask, other=0.0)
        acc = tl.dot(dy, x, acc, input_precision="ieee")
    dw_ptrs = dw_ptr + (expert * F + f[:, None]) * D + d[None, :]
    tl.store(dw_ptrs, acc.to(dw_ptr.dtype.element_ty), mask=f_mask & d_mask)


def grouped_mm_triton(
    x_ND: Tensor, w_EFD: Tensor, offsets_E1: Tensor, tile: Tile | None = None
) -> Tensor:
    """Launch the forward kernel. Any strides do; the arguments have been checked by the caller."""
    N, D = x_ND.shape
    E, F, _ = w_EFD.shape
    n, f, d, num_warps, num_stages = tile or choose_tile(x_ND.dtype, N, E)
    launch: dict[str, int] = {
        "num_warps": num_warps,
        "num_stages": num_stages,
        "enable_fp_fusion": True,
    }
    y_NF = x_ND.new_empty(N, F)
    num_tiles = N // n + E + 1
    if y_NF.numel():
        _grouped_mm_kernel[(num_tiles * triton.cdiv(F, f),)](
            x_ND, w_EFD, y_NF, offsets_E1.contiguous(),
            N, E, D, F, num_tiles,
            *x_ND.stride(), *w_EFD.stride(),
            BLOCK_E=triton.next_power_of_2(E + 1), BLOCK_N=n, BLOCK_F=f, BLOCK_D=d,
            EVEN_D=D % d == 0, SUPER=8, **launch,
        )  # fmt: skip
    return y_NF


def grouped_mm_dw_triton(
    x_ND: Tensor, dy_NF: Tensor, offsets_E1: Tensor, tile: Tile | None = None
) -> Tensor:
    """Launch the weight-gradient kernel. Any strides do."""
    N, D = x_ND.shape
    E, F = offsets_E1.shape[0] - 1, dy_NF.shape[1]
    n, f, d, num_warps, num_stages = tile or choose_dw_tile(x_ND.dtype)
    launch: dict[str, int] = {
        "num_warps": num_warps,
        "num_stages": num_stages,
        "enable_fp_fusion": True,
    }
    dw_EFD = x_ND.new_empty(E, F, D)
    if dw_EFD.numel():
        _grouped_mm_dw_kernel[(E * triton.cdiv(F, f) * triton.cdiv(D, d),)](
            x_ND, dy_NF, dw_EFD, offsets_E1.contiguous(),
            N, D, F,
            *x_ND.stride(), *dy_NF.stride(),
            BLOCK_N=n, BLOCK_F=f, BLOCK_D=d, **launch,
        )  # fmt: skip
    return dw_EFD
