"""Argument checks of MXFP8. They read metadata only, never the device."""

from typing import get_args

import torch
from torch import Tensor

from moe_kernels.mxfp8.format import BLOCK, CHUNK, Recipe, Rounding

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def _check_dtype(name: str, x: Tensor) -> None:
    if x.dtype not in DTYPES:
        raise TypeError(f"{name} must be bfloat16, float16 or float32, got {x.dtype}")


def check_recipe(recipe: str, rounding: str) -> None:
    """Raise unless the recipe and the rounding rule are known."""
    if recipe not in get_args(Recipe):
        raise ValueError(f"recipe must be 'mx32', 'mx128' or 'mxrow', got {recipe!r}")
    if rounding not in get_args(Rounding):
        raise ValueError(f"rounding must be 'rceil' or 'floor', got {rounding!r}")


def check_rows(name: str, x_ND: Tensor, recipe: str, rounding: str) -> None:
    """Raise unless the last axis of ``x_ND`` can be cut into blocks."""
    check_recipe(recipe, rounding)
    _check_dtype(name, x_ND)
    if x_ND.ndim < 1 or x_ND.shape[-1] % BLOCK:
        raise ValueError(
            f"the last axis of {name} must be a multiple of {BLOCK}, got shape {tuple(x_ND.shape)}"
        )


def check_columns(x_ND: Tensor, recipe: str, rounding: str, offsets_E1: Tensor | None) -> None:
    """Raise unless the last axis but one of ``x_ND`` can be cut into blocks, or has groups."""
    check_recipe(recipe, rounding)
    _check_dtype("x_ND", x_ND)
    if x_ND.ndim < 2:
        raise ValueError(f"x_ND must have rows and columns, got shape {tuple(x_ND.shape)}")
    if offsets_E1 is not None:
        if x_ND.ndim != 2:
            raise ValueError(f"with offsets_E1, x_ND has 2 axes; got shape {tuple(x_ND.shape)}")
        check_offsets(offsets_E1, x_ND)
    elif x_ND.shape[-2] % BLOCK:
        raise ValueError(
            f"the last axis but one must be a multiple of {BLOCK} where there are no offsets_E1, "
            f"got shape {tuple(x_ND.shape)}"
        )


def check_offsets(offsets_E1: Tensor, x_ND: Tensor) -> None:
    """Raise unless the offsets name groups of the rows of ``x_ND``; values only on the CPU."""
    if offsets_E1.dtype != torch.int32:
        raise TypeError(f"offsets_E1 must be int32, got {offsets_E1.dtype}")
    if offsets_E1.ndim != 1 or offsets_E1.shape[0] < 2:
        raise ValueError(
            f"offsets_E1 must have one axis of E + 1 >= 2 entries, got {tuple(offsets_E1.shape)}"
        )
    if offsets_E1.device != x_ND.device:
        raise ValueError(
            f"all arguments must be on one device; got rows on {x_ND.device}, offsets_E1 on "
            f"{offsets_E1.device}"
        )


def check_swiglu(h_NG: Tensor, recipe: str, rounding: str, offsets_E1: Tensor | None) -> None:
    """Raise unless both halves of ``h_NG`` can be cut into blocks."""
    check_recipe(recipe, rounding)
    _check_dtype("h_NG", h_NG)
    if h_NG.ndim != 2 or h_NG.shape[1] % (2 * BLOCK):
        raise ValueError(
            f"h_NG must have 2 axes, the last a multiple of {2 * BLOCK} (gate and up), got shape "
            f"{tuple(h_NG.shape)}"
        )
    if offsets_E1 is not None:
        check_offsets(offsets_E1, h_NG)


def check_routed(
    x_TD: Tensor, slot_of_row_N: Tensor, weight_TK: Tensor, recipe: str, rounding: str
) -> None:
    """Raise unless the weights are those of the tokens and the slots a list of int32."""
    check_rows("x_TD", x_TD, recipe, rounding)
    if slot_of_row_N.dtype != torch.int32 or weight_TK.dtype != torch.float32:
        raise TypeError(
            f"slot_of_row_N must be int32 and weight_TK float32, got {slot_of_row_N.dtype} and "
            f"{weight_TK.dtype}"
        )
    shapes = [tuple(x.shape) for x in (x_TD, slot_of_row_N, weight_TK)]
    if [len(shape) for shape in shapes] != [2, 1, 2] or shapes[0][0] != shapes[2][0]:
        raise ValueError(
            "x_TD, slot_of_row_N and weight_TK must have shapes (T, D), (N,) and (T, K), got "
            f"{shapes[0]}, {shapes[1]} and {shapes[2]}"
        )
    if len({x_TD.device, slot_of_row_N.device, weight_TK.device}) > 1:
        raise ValueError(
            f"all arguments must be on one device; got x_TD on {x_TD.device}, slot_of_row_N on "
            f"{slot_of_row_N.device}, weight_TK on {weight_TK.device}"
        )


def check_dswiglu(
    dact_NF: Tensor,
    h_NG: Tensor,
    offsets_E1: Tensor,
    weight_TK: Tensor | None,
    slot_of_row_N: Tensor | None,
    recipe: str,
    rounding: str,
) -> None:
    """Raise unless the gradient belongs to the pre-activation, and weights come with slots."""
    check_swiglu(h_NG, recipe, rounding, offsets_E1)
    if dact_NF.dtype != h_NG.dtype:
        raise TypeError(
            f"dact_NF and h_NG must share a dtype, got {dact_NF.dtype} and {h_NG.dtype}"
        )
    N, G = h_NG.shape
    if dact_NF.shape != (N, G // 2):
        raise ValueError(
            f"dact_NF must have shape {(N, G // 2)} for h_NG of shape {(N, G)}, got "
            f"{tuple(dact_NF.shape)}"
        )
    if recipe == "mx128" and (G // 2) % CHUNK:
        raise ValueError(
            f"under 'mx128' each half of h_NG must be a multiple of {CHUNK} columns, so that gate "
            f"and up share no scale, got shape {(N, G)}"
        )
    if (weight_TK is None) != (slot_of_row_N is None):
        raise ValueError("weight_TK and slot_of_row_N must be given together, got one of them")
    if weight_TK is not None and slot_of_row_N is not None:
        if slot_of_row_N.dtype != torch.int32 or weight_TK.dtype != torch.float32:
            raise TypeError(
                f"slot_of_row_N must be int32 and weight_TK float32, got {slot_of_row_N.dtype} and "
                f"{weight_TK.dtype}"
            )
        if slot_of_row_N.shape != (N,):
            raise ValueError(
                f"slot_of_row_N must have an entry for each of the {N} rows of h_NG, got shape "
                f"{tuple(slot_of_row_N.shape)}"
            )


def check_dequantize(data_ND: Tensor, scale_NB: Tensor, dtype: torch.dtype = torch.float32) -> None:
    """Raise unless data and scale are one MXFP8 tensor, and the dtype one of the results."""
    if dtype not in DTYPES:
        raise TypeError(f"dtype must be bfloat16, float16 or float32, got {dtype}")
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
