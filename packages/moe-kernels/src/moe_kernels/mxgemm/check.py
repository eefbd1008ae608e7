"""Argument checks of the scaled grouped product. On CUDA they read metadata only."""

import torch
from torch import Tensor

from moe_kernels.backend import runs_kernel
from moe_kernels.config import SCALED
from moe_kernels.gemm.check import MULTIPLE, check_offsets, check_same_device, check_shapes
from moe_kernels.mxfp8 import MXTensor
from moe_kernels.mxfp8.check import check_dequantize

OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def check_recipe(recipe: str) -> None:
    """Raise unless the recipe is known."""
    if recipe not in SCALED:
        raise ValueError(f"recipe must be one of {', '.join(SCALED)}, got {recipe!r}")


def check_out_multiple(x: MXTensor, F: int) -> None:
    """Raise unless a kernel can store F columns."""
    if runs_kernel(x.data_ND, (torch.float8_e4m3fn,)) and F % MULTIPLE:
        raise ValueError(f"the kernels on CUDA take multiples of {MULTIPLE}, got F={F}")


def check_scaled_grouped_mm(
    x: MXTensor, w: MXTensor, offsets_E1: Tensor, recipe: str, out_dtype: torch.dtype
) -> None:
    """Raise unless the arguments of ``scaled_grouped_mm`` fit together."""
    check_recipe(recipe)
    check_shapes(
        "scaled_grouped_mm",
        {"x.data_ND": (x.data_ND, 2), "w.data_ND": (w.data_ND, 3), "offsets_E1": (offsets_E1, 1)},
    )
    check_dequantize(*x)
    check_dequantize(*w)
    (_, D), (E, F, D_w) = x.data_ND.shape, w.data_ND.shape
    if D_w != D:
        raise ValueError(f"D differs: x has {D} columns, w has {D_w} columns")
    if E < 1:
        raise ValueError(f"E must be at least 1, got w of shape {tuple(w.data_ND.shape)}")
    if out_dtype not in OUT_DTYPES:
        raise TypeError(f"out_dtype must be bfloat16, float16 or float32, got {out_dtype}")
    check_offsets(offsets_E1, E, "w")
    check_out_multiple(x, F)
    check_same_device(
        {
            "x.data_ND": x.data_ND,
            "x.scale_NB": x.scale_NB,
            "w.data_ND": w.data_ND,
            "w.scale_NB": w.scale_NB,
            "offsets_E1": offsets_E1,
        }
    )


def check_shared(name: str, x: MXTensor, recipe: str) -> None:
    """Raise unless blocks have equal scales where the recipe says so. Reads the scales."""
    if recipe == "mx32" or not x.scale_NB.numel():
        return
    B = x.scale_NB.shape[-1]
    run = 4 if recipe == "mx128" else B
    first = x.scale_NB[..., ::run].repeat_interleave(run, dim=-1)[..., :B]
    differs = (first != x.scale_NB).nonzero()
    if len(differs):
        *where, block = differs[0].tolist()
        place = tuple(where)
        raise ValueError(
            f"{name} is no {recipe!r} tensor: blocks {block // run * run} and {block} of row "
            f"{place} have the scales {int(first[(*place, block)])} and "
            f"{int(x.scale_NB[(*place, block)])}; 'mx32' takes any"
        )
