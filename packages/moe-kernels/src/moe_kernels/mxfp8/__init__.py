"""MXFP8: float8 values in blocks of 32 that share a power-of-two scale."""

import torch
from torch import Tensor

from moe_kernels.mxfp8 import op
from moe_kernels.mxfp8.check import (
    check_columns,
    check_dequantize,
    check_dswiglu,
    check_offsets,
    check_routed,
    check_rows,
    check_swiglu,
)
from moe_kernels.mxfp8.format import BLOCK, CHUNK, MXTensor, Recipe, Rounding, SwigluGradMX
from moe_kernels.mxfp8.reference import (
    column_offsets_reference,
    decode_scale,
)

__all__ = [
    "BLOCK",
    "CHUNK",
    "MXTensor",
    "Recipe",
    "Rounding",
    "SwigluGradMX",
    "column_offsets",
    "decode_scale",
    "dequantize",
    "quantize",
    "quantize_both",
    "quantize_columns",
    "quantize_dswiglu",
    "quantize_routed",
    "quantize_swiglu",
]


def quantize(x_ND: Tensor, *, recipe: Recipe = "mx32", rounding: Rounding = "rceil") -> MXTensor:
    """Round to MXFP8, in blocks along the last axis.

    ``"rceil"`` takes the smallest scale for which no value passes 448, the largest e4m3 value.
    ``"floor"`` is the rule of the specification, ``2**(floor(log2(amax)) - 8)``; values between
    448 and 512 times the scale then saturate. Scales end at 2**-127, so blocks below 2**-118 lose
    bits and the smallest become zero.

    A NaN stays NaN and does not touch its block. So does an infinity: e4m3 has none, and to
    saturate would hide an overflow. A block of zeros has scale 1, and zeros keep their sign.

    The recipe says which blocks take one scale together, from the largest value of them all:
    ``"mx32"`` each its own, ``"mx128"`` four neighbours (the last ones of a row may be fewer),
    ``"mxrow"`` the whole row. All three give bytes that any reader of MXFP8 takes.

    Args:
        x_ND: bfloat16, float16 or float32, with any number of axes; D is a multiple of 32.
        recipe: Which blocks share a scale.
        rounding: How a scale is rounded.

    Returns:
        The quantized tensor. With ``"rceil"`` a value's error is at most 1/16 of itself, or
        2**-10 of the scale where that is more; with ``"floor"`` a saturated one's is below 1/8.

    Raises:
        TypeError: If the dtype is another.
        ValueError: If D is not a multiple of 32, or the recipe or the rounding is unknown.

    Examples:
        >>> x = quantize(torch.full((1, 32), 3.0))
        >>> x.scale_NB.item(), dequantize(x)[0, 0].item()
        (120, 3.0)
    """
    check_rows("x_ND", x_ND, recipe, rounding)
    return MXTensor(*op.quantize(x_ND, recipe, rounding))


def quantize_columns(
    x_ND: Tensor,
    *,
    recipe: Recipe = "mx32",
    rounding: Rounding = "rceil",
    offsets_E1: Tensor | None = None,
) -> MXTensor:
    """Round to MXFP8, in blocks that run down the rows; the result is transposed.

    This is ``quantize(x_ND.mT)``: what a product needs that sums over the rows, contiguous along
    the axis that is summed. Leading axes, as the experts of a weight, are kept.

    With offsets the blocks start anew at the first row of each group, and groups need no multiple
    of anything. Each takes a whole number of chunks of 128 columns, filled up by zeros: columns
    ``column_offsets(offsets_E1)[e]`` and on are ``quantize(pad(x_ND[rows of e]).mT)``, and ``pad``
    adds rows of zeros up to a multiple of 128. A scale is never shared by two groups, under
    ``"mxrow"`` too. What follows the last group is zero, with scale 1; rows past the last offset
    are not read.

    Args:
        x_ND: bfloat16, float16 or float32. Without offsets N is a multiple of 32.
        recipe: Which blocks of a column share a scale.
        rounding: How a scale is rounded.
        offsets_E1: int32, starts at 0, does not decrease, ends at or before N; on the CPU that is
            checked. Then ``x_ND`` has two axes.

    Returns:
        ``data`` of shape ``[..., D, N]``, or ``[D, P]`` with offsets, where
        ``P = 128 * (N // 128 + E)``: the most that N rows of E groups can take.

    Raises:
        TypeError: If a dtype does not fit.
        ValueError: If a shape does not fit, or the recipe or the rounding is unknown.

    Examples:
        >>> offsets_E1 = torch.tensor([0, 1, 3], dtype=torch.int32)
        >>> x = quantize_columns(torch.ones(3, 2), offsets_E1=offsets_E1)
        >>> x.data_ND.shape, x.scale_NB.shape, column_offsets(offsets_E1).tolist()
        (torch.Size([2, 256]), torch.Size([2, 8]), [0, 128, 256])
        >>> dequantize(x)[0, :3].tolist(), dequantize(x)[0, 128:131].tolist()
        ([1.0, 0.0, 0.0], [1.0, 1.0, 0.0])
    """
    check_columns(x_ND, recipe, rounding, offsets_E1)
    return MXTensor(*op.quantize_columns(x_ND, recipe, rounding, offsets_E1))


def column_offsets(offsets_E1: Tensor) -> Tensor:
    """Return where each group begins in the result of ``quantize_columns``.

    Args:
        offsets_E1: int32, where each group's rows begin and the last one's end.

    Returns:
        int32, multiples of 128; the last entry is where the last group ends, padding included.

    Examples:
        >>> column_offsets(torch.tensor([0, 1, 1, 130], dtype=torch.int32)).tolist()
        [0, 128, 128, 384]
    """
    check_offsets(offsets_E1, offsets_E1)
    return column_offsets_reference(offsets_E1)


def quantize_both(
    x_ND: Tensor,
    *,
    recipe: Recipe = "mx32",
    rounding: Rounding = "rceil",
    offsets_E1: Tensor | None = None,
) -> tuple[MXTensor, MXTensor]:
    """Return what ``quantize`` and ``quantize_columns`` return, from one read of ``x_ND``.

    Under ``"mxrow"`` it takes a second read: the scales must be known before the first value is
    written.

    Args:
        x_ND: bfloat16, float16 or float32; D is a multiple of 32, and N without offsets.
        recipe: Which blocks share a scale.
        rounding: How a scale is rounded.
        offsets_E1: Groups of rows, as in ``quantize_columns``. Rows past the last offset are not
            read and give zeros, with scale 1.

    Returns:
        The rows and the columns.

    Raises:
        TypeError: If a dtype does not fit.
        ValueError: If a shape does not fit, or the recipe or the rounding is unknown.

    Examples:
        >>> rows, columns = quantize_both(torch.eye(32))
        >>> rows.data_ND.shape, columns.scale_NB.shape
        (torch.Size([32, 32]), torch.Size([32, 1]))
    """
    check_rows("x_ND", x_ND, recipe, rounding)
    check_columns(x_ND, recipe, rounding, offsets_E1)
    row, row_scale, column, column_scale = op.quantize_both(x_ND, recipe, rounding, offsets_E1)
    return MXTensor(row, row_scale), MXTensor(column, column_scale)


def quantize_swiglu(
    h_NG: Tensor,
    *,
    recipe: Recipe = "mx32",
    rounding: Rounding = "rceil",
    offsets_E1: Tensor | None = None,
) -> MXTensor:
    """Round ``silu(gate) * up`` to MXFP8, along the rows, in one pass.

    The activation is float32 until it is rounded, once: it is not rounded to ``h_NG.dtype`` first.

    Args:
        h_NG: Pre-activation, gate first: bfloat16, float16 or float32; G is a multiple of 64.
        recipe: Which blocks share a scale.
        rounding: How a scale is rounded.
        offsets_E1: int32. Rows past the last offset are not read and give zeros, with scale 1.

    Returns:
        The activation, of G / 2 columns.

    Raises:
        TypeError: If a dtype does not fit.
        ValueError: If a shape does not fit, or the recipe or the rounding is unknown.

    Examples:
        >>> act = quantize_swiglu(torch.tensor([[100.0] * 32 + [2.0] * 32]))
        >>> dequantize(act)[0, 0].item()  # between 192 and 208, to even
        192.0
    """
    check_swiglu(h_NG, recipe, rounding, offsets_E1)
    return MXTensor(*op.quantize_swiglu(h_NG, recipe, rounding, offsets_E1))


def quantize_routed(
    x_TD: Tensor,
    slot_of_row_N: Tensor,
    weight_TK: Tensor,
    *,
    recipe: Recipe = "mx32",
    rounding: Rounding = "rceil",
) -> MXTensor:
    """Gather each row's token, multiply it by the weight of its route, and round to MXFP8.

    The product is float32 until it is rounded, once.

    Args:
        x_TD: Tokens, or the gradient of the tokens: bfloat16, float16 or float32; D is a multiple
            of 32.
        slot_of_row_N: int32; the route ``t*K + k`` of each row, as in ``Groups``. -1 gives zeros,
            with scale 1, and reads nothing.
        weight_TK: float32 weights of the routes.
        recipe: Which blocks share a scale.
        rounding: How a scale is rounded.

    Returns:
        N rows of D columns.

    Raises:
        TypeError: If a dtype does not fit.
        ValueError: If a shape does not fit, or the recipe or the rounding is unknown.

    Examples:
        >>> slots_N, weight_TK = torch.tensor([1, 0, -1]).int(), torch.tensor([[0.5, 2.0]])
        >>> dequantize(quantize_routed(torch.ones(1, 32), slots_N, weight_TK))[:, 0].tolist()
        [2.0, 0.5, 0.0]
    """
    check_routed(x_TD, slot_of_row_N, weight_TK, recipe, rounding)
    return MXTensor(*op.quantize_routed(x_TD, slot_of_row_N, weight_TK, recipe, rounding))


def quantize_dswiglu(
    dact_NF: Tensor,
    h_NG: Tensor,
    offsets_E1: Tensor,
    *,
    weight_TK: Tensor | None = None,
    slot_of_row_N: Tensor | None = None,
    recipe: Recipe = "mx32",
    rounding: Rounding = "rceil",
) -> SwigluGradMX:
    """Differentiate ``weight * silu(gate) * up`` and round the gradient to MXFP8, in one pass.

    The gradient is float32 inside; it comes out in MXFP8, for the gradient of the rows, and in the
    dtype of ``h_NG``, for that of the weight. Neither is made from the other.

    Args:
        dact_NF: Gradient of the weighted activation, in the dtype of ``h_NG``.
        h_NG: Pre-activation, gate first: bfloat16, float16 or float32; G is a multiple of 64.
        offsets_E1: int32. Rows past the last offset are not read and give zeros.
        weight_TK: float32 weights of the routes; None for 1.
        slot_of_row_N: int32 route of each row, where there are weights.
        recipe: Which blocks of a row of the gradient share a scale.
        rounding: How a scale is rounded.

    Returns:
        The gradient twice, the weighted activation, and the gradient of the weights by row.

    Raises:
        TypeError: If a dtype does not fit.
        ValueError: If a shape does not fit, or the recipe or the rounding is unknown.

    Examples:
        >>> offsets_E1 = torch.tensor([0, 1], dtype=torch.int32)
        >>> grad = quantize_dswiglu(torch.ones(1, 32), torch.zeros(1, 64), offsets_E1)
        >>> grad.dh_NG.shape, grad.act_NF.shape, grad.dweight_N is None
        (torch.Size([1, 64]), torch.Size([1, 32]), True)
    """
    check_dswiglu(dact_NF, h_NG, offsets_E1, weight_TK, slot_of_row_N, recipe, rounding)
    data_NG, scale, dh_NG, act_NF, dweight_N = op.quantize_dswiglu(
        dact_NF, h_NG, offsets_E1, weight_TK, slot_of_row_N, recipe, rounding
    )
    dh = MXTensor(data_NG, scale)
    return SwigluGradMX(dh, dh_NG, act_NF, None if weight_TK is None else dweight_N)


def dequantize(x: MXTensor, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the tensor that ``x`` stands for: exact in float32, or rounded once from there.

    bfloat16 is exact as well, but for values below its smallest normal number, 2**-126.

    Args:
        x: Any MXFP8 tensor, from whichever recipe and rounding rule.
        dtype: Of the result: float32, bfloat16 or float16.

    Returns:
        A contiguous tensor of the shape of ``x.data_ND``. Blocks of scale 255 are NaN.

    Raises:
        TypeError: If data or scale have another dtype, or another is asked for.
        ValueError: If their shapes do not fit together.

    Examples:
        >>> data_ND = torch.ones(1, 32).to(torch.float8_e4m3fn)
        >>> scale_NB = torch.tensor([[128]], dtype=torch.uint8)
        >>> dequantize(MXTensor(data_ND, scale_NB))[0, 0].item()
        2.0
    """
    check_dequantize(*x, dtype)
    return op.dequantize(*x, dtype)
