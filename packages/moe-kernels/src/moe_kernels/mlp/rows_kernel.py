"""How the GPU takes tokens to routed rows and back.

``expand`` reads each token once and writes its K rows: ``T*D + T*K*D`` elements. ``combine`` reads
the K rows and writes the token: the same. Both go at the speed of memory.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_kernels.gemm.tile import aligned
from moe_kernels.scratch import scratch

MAX_BLOCK = 2048  # columns of a token that one program holds at a time
UNROLL = 8  # routes in flight


@triton.jit
def _expand_kernel(x_ptr, row_ptr, out_ptr, D, stride_xt, K: tl.constexpr, BLOCK_D: tl.constexpr):
    """Copy token ``program_id(0)`` to the rows of its routes; a masked route (-1) has none."""
    token = tl.program_id(0).to(tl.int64)
    for d_start in range(0, D, BLOCK_D):
        d = d_start + tl.arange(0, BLOCK_D)
        x = tl.load(x_ptr + token * stride_xt + d, mask=d < D)
        for k in range(K):
            row = tl.load(row_ptr + token * K + k).to(tl.int64)
            tl.store(out_ptr + row * D + d, x, mask=(d < D) & (row + tl.zeros_like(d) >= 0))


@triton.jit
def _combine_kernel(
    y_ptr, row_ptr, weight_ptr, dweight_of_row_ptr, out_ptr, dweight_ptr,
    D,
    K: tl.constexpr, BLOCK_D: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Sum the rows of token ``program_id(0)`` in float32, in the order of its K routes.

    weight_ptr: factors of the routes, or None. dweight_of_row_ptr: gradients of the rows' weights,
    brought into the order of routes in ``dweight_ptr``, or None. A masked route reads nothing and
    gets a gradient of 0.
    """
    token = tl.program_id(0).to(tl.int64)
    for d_start in range(0, D, BLOCK_D):
        d = d_start + tl.arange(0, BLOCK_D)
        total = tl.zeros((BLOCK_D,), dtype=tl.float32)
        for k in tl.range(0, K, loop_unroll_factor=UNROLL):
            row = tl.load(row_ptr + token * K + k).to(tl.int64)
            mask = (d < D) & (row + tl.zeros_like(d) >= 0)
            y = tl.load(y_ptr + row * D + d, mask=mask, other=0.0).to(tl.float32)
            if weight_ptr is not None:
                # A masked route's weight may be anything, NaN too.
                y *= tl.load(weight_ptr + token * K + k, mask=row >= 0, other=0.0)
            total += y
        tl.store(out_ptr + token * D + d, total.to(out_ptr.dtype.element_ty), mask=d < D)
    if dweight_of_row_ptr is not None:
        for k in range(K):
            row = tl.load(row_ptr + token * K + k)
            dweight = tl.load(dweight_of_row_ptr + row, mask=row >= 0, other=0.0)
            tl.store(dweight_ptr + token * K + k, dweight)


def launch(D: int) -> dict[str, int]:
    """Return the sizes for D columns: 8 values a thread, 16 bytes of half precision."""
    block = min(triton.next_power_of_2(D), MAX_BLOCK)
    return {"BLOCK_D": block, "num_warps": max(1, min(8, block // 256))}


def expand_triton(x_TD: Tensor, row_of_slot_TK: Tensor, out_ND: Tensor) -> Tensor:
    """Write each token to the rows of its routes. Rows of no route stay as they are."""
    x, K = aligned(x_TD), row_of_slot_TK.shape[1]  # a gradient may be an expanded number
    T, D = x.shape
    if T and D:
        _expand_kernel[(T,)](x, row_of_slot_TK, out_ND, D, x.stride(0), K=K, **launch(D))
    return out_ND


def combine_triton(
    y_ND: Tensor,
    row_of_slot_TK: Tensor,
    weight_TK: Tensor | None,
    dweight_N: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Sum the rows of each token, weighted if there are weights.

    Args:
        y_ND: Rows, contiguous.
        row_of_slot_TK: int32 row of each route, -1 for a masked one; contiguous.
        weight_TK: float32 factors, contiguous, or None.
        dweight_N: float32 gradient of each row's weight, or None.

    Returns:
        The tokens in the dtype of the rows, and ``dweight_TK`` if there is a ``dweight_N``.
    """
    (T, K), D = row_of_slot_TK.shape, y_ND.shape[1]
    out_TD, dweight_TK = scratch(y_ND, T, D), None
    if dweight_N is not None:
        dweight_TK = scratch(y_ND, T, K, dtype=torch.float32)
    if T and D:
        _combine_kernel[(T,)](
            y_ND, row_of_slot_TK, weight_TK, dweight_N, out_TD, dweight_TK, D,
            K=K, UNROLL=UNROLL, **launch(D),
        )  # fmt: skip
    return out_TD, dweight_TK
