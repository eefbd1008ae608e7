"""MXFP8 tensors: what is stored, and what the names of the recipes mean."""

from typing import Literal, NamedTuple

from torch import Tensor

BLOCK = 32
"""Values along the last axis that have one scale in memory."""

CHUNK = 128
"""Values that share a scale under ``"mx128"``, and what groups of columns are padded to."""

Recipe = Literal["mx32", "mx128", "mxrow"]
"""Which blocks of a row get the same scale: none, four neighbours, or all."""

Rounding = Literal["rceil", "floor"]
"""How a scale is rounded to a power of two."""


class MXTensor(NamedTuple):
    """A tensor in MXFP8. The value is ``data * 2**(scale - 127)``, block by block.

    Blocks are 32 neighbours along the last axis and each has its own byte of scale, whatever the
    recipe: a recipe only makes some of them equal.

    Attributes:
        data_ND: float8_e4m3fn.
        scale_NB: uint8, the biased exponent of each block's scale, with B = D / 32; 255 is NaN.
    """

    data_ND: Tensor
    scale_NB: Tensor


class SwigluGradMX(NamedTuple):
    """What the backward of a weighted SwiGLU gives, its gradient both rounded and quantized.

    Attributes:
        dh: Gradient of the pre-activation in MXFP8, from float32: not from ``dh_NG``.
        dh_NG: The same in the dtype of the pre-activation.
        act_NF: The activation times the row's weight, if it has one.
        dweight_N: float32 gradient of the row's weight; None if it has none.
    """

    dh: MXTensor
    dh_NG: Tensor
    act_NF: Tensor
    dweight_N: Tensor | None
