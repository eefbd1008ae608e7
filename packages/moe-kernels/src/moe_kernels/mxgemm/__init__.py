"""Grouped matrix product in MXFP8: float8 values, and a scale for each 32 of them."""

import torch
from torch import Tensor

from moe_kernels.mxfp8 import MXTensor, Recipe
from moe_kernels.mxgemm import op
from moe_kernels.mxgemm.check import check_scaled_grouped_mm

__all__ = ["scaled_grouped_mm"]


def scaled_grouped_mm(
    x: MXTensor,
    w: MXTensor,
    offsets_E1: Tensor,
    *,
    recipe: Recipe = "mx32",
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Multiply each group of rows by its own expert's weight, both in MXFP8: ``y = x @ w[e].T``.

    Rows ``offsets_E1[e]:offsets_E1[e + 1]`` of ``x`` belong to expert ``e``; groups have any number
    of rows. Rows at or past ``offsets_E1[-1]`` are not read and give zeros. Values are used as they
    are, so nothing is rounded but the sum, once, to ``out_dtype``. The gradient of the rows is this
    product again, of the rows' gradient and the weight quantised along its other axis.

    ``recipe`` is what the caller promises of the scales of both: any (``"mx32"``), equal for each
    128 values (``"mx128"``), or for each row (``"mxrow"``). On the CPU the promise is checked.

    =======================  ==================================================================
    Blackwell (10.x)         block-scaled tensor cores, for every recipe alike; float32 sums
    Hopper, Ada, 12.x        float8 tensor cores. Scales are applied after every 32 or 128 values
                             or, with ``"mxrow"``, once. ``"mx32"`` is right there, and slower
                             than bfloat16: for bytes made elsewhere. Hopper's float8 sums keep
                             about 14 bits between two scales.
    CUDA before 8.9          an error that names the recipe and the machine
    CPU                      dequantised, multiplied in float32
    =======================  ==================================================================

    Args:
        x: Rows sorted by expert, scales along D; D is a multiple of 32.
        w: One ``(F, D)`` weight for each expert, scales along D. F is a multiple of 16 on CUDA.
        offsets_E1: int32, starts at 0, does not decrease, ends at or before N.
        recipe: Which values share a scale.
        out_dtype: bfloat16, float16 or float32.

    Returns:
        ``y_NF``.

    Raises:
        ValueError: If shapes or devices do not fit together, or scales are not shared as promised.
        TypeError: If a dtype does not fit.
        RuntimeError: If the GPU has no float8 products.

    Examples:
        >>> from moe_kernels import quantize
        >>> x, w = quantize(torch.ones(3, 32)), quantize(2 * torch.ones(2, 1, 32))
        >>> scaled_grouped_mm(x, w, torch.tensor([0, 1, 2], dtype=torch.int32)).flatten()
        tensor([64., 64.,  0.], dtype=torch.bfloat16)
    """
    check_scaled_grouped_mm(x, w, offsets_E1, recipe, out_dtype)
    return op.scaled_grouped_mm(*x, *w, offsets_E1, recipe, out_dtype)
