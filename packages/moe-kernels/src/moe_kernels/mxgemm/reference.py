"""What the scaled grouped product computes, written to be read."""

import torch
from torch import Tensor

from moe_kernels.gemm.reference import read_spans
from moe_kernels.mxfp8 import MXTensor, dequantize


def scaled_grouped_mm_reference(
    x: MXTensor,
    w: MXTensor,
    offsets_E1: Tensor,
    out_dtype: torch.dtype,
    wide: torch.dtype = torch.float32,
) -> Tensor:
    """Dequantise, which is exact, multiply group by group in ``wide``, and round once."""
    x_ND, w_EFD = dequantize(x).to(wide), dequantize(w).to(wide)
    y_NF = x_ND.new_zeros(x_ND.shape[0], w_EFD.shape[1])
    for e, start, end in read_spans(offsets_E1, x_ND.shape[0]):
        y_NF[start:end] = x_ND[start:end] @ w_EFD[e].T
    return y_NF.to(out_dtype)
