"""How the GPU takes MXFP8 tokens to rows of half precision, for the gradient of a weight.

Each token is read once and its K rows are written: ``T*D`` bytes and ``2*T*K*D``. It goes at the
speed of memory.
"""

import triton
import triton.language as tl
from torch import Tensor

from moe_kernels.gemm.tile import aligned
from moe_kernels.mlp.rows_kernel import launch
from moe_kernels.mxfp8 import MXTensor
from moe_kernels.mxgemm.kernel import decode


@triton.jit
def _expand_kernel(
    x_ptr, scale_ptr, row_ptr, out_ptr, D, stride_xt, stride_st,
    K: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Write the value of token ``program_id(0)`` to the rows of its routes; -1 has none.

    row_ptr: rows of the routes, or None: then a token is its own row, and K is 1.

    Example: B = 1, a token of ones with scale code 128. Its rows are (2, ..., 2).
    """
    token = tl.program_id(0).to(tl.int64)
    for d_start in range(0, D, BLOCK_D):
        d = d_start + tl.arange(0, BLOCK_D)
        x = tl.load(x_ptr + token * stride_xt + d, mask=d < D, other=0.0).to(tl.float32)
        code = tl.load(scale_ptr + token * stride_st + d // 32, mask=d < D, other=127)
        value = (x * decode(code)).to(out_ptr.dtype.element_ty)
        for k in range(K):
            row = token
            if row_ptr is not None:
                row = tl.load(row_ptr + token * K + k).to(tl.int64)
            tl.store(out_ptr + row * D + d, value, mask=(d < D) & (row + tl.zeros_like(d) >= 0))


def expand_mx_triton(x: MXTensor, row_of_slot_TK: Tensor | None, out_ND: Tensor) -> Tensor:
    """Write each token's value to the rows of its routes; without routes, to its own row.

    Rows of no route stay as they are. A value of e4m3 times a power of two is exact in bfloat16.
    """
    data, scale = aligned(x.data_ND), x.scale_NB.contiguous()
    (T, D), K = data.shape, 1 if row_of_slot_TK is None else row_of_slot_TK.shape[1]
    if T and D:
        _expand_kernel[(T,)](
            data, scale, row_of_slot_TK, out_ND, D, data.stride(0), scale.stride(0),
            K=K, **launch(D),
        )  # fmt: skip
    return out_ND
