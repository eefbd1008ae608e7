"""How the GPU multiplies float8 by its scales: reads 1.03 bytes a value and writes the value."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_kernels.mxfp8.format import BLOCK
from moe_kernels.scratch import scratch


@triton.jit
def _decoded(byte):
    """Return the float32 of e4m3 bytes, by integer arithmetic: exact, and the same everywhere.

    The bits of a byte, shifted to where float32 has its exponent, are 2**-120 times its value,
    subnormals too: both formats end in a linear step. Multiplying by 2**120 is exact.
    """
    bits = byte.to(tl.int32)
    size = ((bits & 0x7F) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36
    size = tl.where((bits & 0x7F) == 0x7F, float("nan"), size)
    return tl.where(bits >= 0x80, -size, size)


@triton.jit
def _dequantize_kernel(data_ptr, scale_ptr, out_ptr, num_blocks, BLOCKS: tl.constexpr):
    """Multiply BLOCKS blocks of 32 by their scales; code 255 gives NaN, code 0 is 2**-127.

    Example: byte 0x38 is 1.0; with code 128 it becomes 2.0.
    """
    b = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    live = b < num_blocks
    code = tl.load(scale_ptr + b, mask=live, other=127).to(tl.int32)
    bits = tl.where(code == 0, 1 << 22, code << 23)
    scale = tl.where(code == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)
    at = b[:, None] * 32 + tl.arange(0, 32)[None, :]
    byte = tl.load(data_ptr + at, mask=live[:, None], other=0)
    value = _decoded(byte) * scale[:, None]
    tl.store(out_ptr + at, value.to(out_ptr.dtype.element_ty), mask=live[:, None])


def launch() -> dict[str, int]:
    """Return the sizes: 32 values a thread."""
    return {"BLOCKS": 4096 // BLOCK, "num_warps": 4}


def dequantize_triton(data_ND: Tensor, scale_NB: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values in ``dtype``, rounded once from float32."""
    out_ND = scratch(data_ND, *data_ND.shape, dtype=dtype)
    num_blocks, sizes = scale_NB.numel(), launch()
    if num_blocks:
        _dequantize_kernel[(triton.cdiv(num_blocks, sizes["BLOCKS"]),)](
            data_ND.contiguous().view(torch.uint8), scale_NB.contiguous(), out_ND, num_blocks,
            **sizes,
        )  # fmt: skip
    return out_ND
