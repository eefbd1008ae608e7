"""Argument checks of MXFP8."""

import torch
from torch import Tensor

BLOCK = 32
"""Values along the last axis that share one scale."""

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ROUNDINGS = ("rceil", "floor")


def check_quantize(x_ND: Tensor, rounding: str) -> None:
    """Raise unless ``x_ND`` can be cut into blocks and the rounding rule is known."""
    if rounding not in ROUNDINGS:
        raise ValueError(f"rounding must be 'rceil' or 'floor', got {rounding!r}")
    if x_ND.dtype not in DTYPES:
        raise TypeError(f"x_ND must be bfloat16, float16 or float32, got {x_ND.dtype}")
    if x_ND.ndim < 1 or x_ND.shape[-1] % BLOCK:
        raise ValueError(
            f"the last axis must be a multiple of {BLOCK}, got shape {tuple(x_ND.shape)}"
        )


def check_dequantize(data_ND: Tensor, scale_NB: Tensor) -> None:
    """Raise unless data and scale are one MXFP8 tensor."""
    if data_ND.dtype != torch.float8_e4m3fn or scale_NB.dtype != torch.uint8:
        raise TypeError(
            f"data_ND must be float8_e4m3fn and scale_NB uint8, "
            f"got {data_ND.dtype} and {scale_NB.dtype}"
        )
    want = (*data_ND.shape[:-1], data_ND.shape[-1] // BLOCK)
    if data_ND.shape[-1] % BLOCK or scale_NB.shape != want:
        raise ValueError(
            f"scale_NB must have one entry for each {BLOCK} values of data_ND: "
            f"got shapes {tuple(scale_NB.shape)} and {tuple(data_ND.shape)}"
        )
