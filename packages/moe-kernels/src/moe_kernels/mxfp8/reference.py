"""MXFP8 in plain torch, after the OCP Microscaling Formats specification 1.0.

A block of 32 values along the last axis has one scale, a power of two stored as its biased
exponent (``e8m0``), and each value is its float8 (``e4m3``) quotient by the scale.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from moe_kernels.mxfp8.check import BLOCK, check_dequantize, check_quantize

E4M3_MAX = 448.0  # 1.75 * 2**8
E4M3_MAX_EXPONENT = 8
E8M0_BIAS = 127
E8M0_NAN = 255


class MXTensor(NamedTuple):
    """A tensor in MXFP8. The value is ``data * 2**(scale - 127)``, block by block.

    Attributes:
        data_ND: float8_e4m3fn.
        scale_NB: uint8, the biased exponent of each block's scale, with B = D / 32; 255 is NaN.
    """

    data_ND: Tensor
    scale_NB: Tensor


def quantize(x_ND: Tensor, *, rounding: Literal["rceil", "floor"] = "rceil") -> MXTensor:
    """Round to MXFP8.

    ``"rceil"`` takes the smallest scale for which no value of the block passes 448, the largest
    e4m3 value. ``"floor"`` is the rule of the specification, ``2**(floor(log2(amax)) - 8)``; values
    between 448 and 512 times the scale then saturate. Scales end at 2**-127, so blocks below
    2**-118 lose bits and the smallest become zero.

    A NaN stays NaN and does not touch its block. So does an infinity: e4m3 has none, and to
    saturate would hide an overflow. A block of zeros has scale 1, and zeros keep their sign.

    Args:
        x_ND: bfloat16, float16 or float32, with any number of axes; D is a multiple of 32.
        rounding: How the scale is rounded.

    Returns:
        The quantized tensor. With ``"rceil"`` a value's error is at most 1/16 of itself, or
        2**-10 of the scale where that is more; with ``"floor"`` a saturated one's is below 1/8.

    Raises:
        TypeError: If the dtype is another.
        ValueError: If D is not a multiple of 32 or the rounding is unknown.

    Examples:
        >>> x = quantize(torch.full((1, 32), 3.0))
        >>> x.scale_NB.item(), dequantize(x)[0, 0].item()
        (120, 3.0)
    """
    check_quantize(x_ND, rounding)
    x_NB32 = x_ND.float().unflatten(-1, (-1, BLOCK))
    finite_NB32 = x_NB32.isfinite()
    amax_NB = x_NB32.abs().masked_fill(~finite_NB32, 0.0).amax(-1)
    mantissa_NB, exponent_NB = torch.frexp(amax_NB)  # amax = mantissa * 2**exponent, in [1/2, 1)
    exponent_NB = exponent_NB - 1 - E4M3_MAX_EXPONENT
    if rounding == "rceil":
        exponent_NB = exponent_NB + (mantissa_NB * 2 > E4M3_MAX / 2**E4M3_MAX_EXPONENT)
    code_NB = (exponent_NB + E8M0_BIAS).clamp(0, E8M0_NAN - 1)
    code_NB = code_NB.masked_fill(amax_NB == 0, E8M0_BIAS).to(torch.uint8)
    # Dividing by a power of two is exact; multiplying by its inverse is not, near the ends.
    data_NB32 = (x_NB32 / decode_scale(code_NB)[..., None]).clamp(-E4M3_MAX, E4M3_MAX)
    data_NB32 = data_NB32.masked_fill(~finite_NB32, torch.nan)
    return MXTensor(data_NB32.flatten(-2).to(torch.float8_e4m3fn), code_NB)


def dequantize(x: MXTensor) -> Tensor:
    """Return the float32 tensor that ``x`` stands for, exactly.

    Args:
        x: Any MXFP8 tensor, from whichever rounding rule.

    Returns:
        float32, of the shape of ``x.data_ND``. Blocks of scale 255 are NaN.

    Raises:
        TypeError: If data or scale have another dtype.
        ValueError: If their shapes do not fit together.
    """
    check_dequantize(*x)
    x_NB32 = x.data_ND.float().unflatten(-1, (-1, BLOCK))
    return (x_NB32 * decode_scale(x.scale_NB)[..., None]).flatten(-2)


def decode_scale(code: Tensor) -> Tensor:
    """Return ``2**(code - 127)`` as float32, built from its bits; 255 gives NaN.

    Code 0 is 2**-127, which float32 holds only as a subnormal: an exponent shift makes 0 of it.
    """
    bits = code.to(torch.int32) << 23
    bits = bits.masked_fill(code == 0, 1 << 22).masked_fill(code == E8M0_NAN, 0x7FC00000)
    return bits.view(torch.float32)
