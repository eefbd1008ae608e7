"""Argument checks of what runs in MXFP8. On CUDA they read metadata only."""

import torch
from torch import Tensor

from moe_kernels.gemm.check import check_same_device
from moe_kernels.mxfp8 import BLOCK, MXTensor
from moe_kernels.mxfp8.check import check_dequantize
from moe_kernels.mxgemm.check import check_recipe
from moe_kernels.mxmlp.weights import MXWeight

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def check_named(x: Tensor | MXTensor, recipe: str | None, given: dict[str, object]) -> None:
    """Raise if something that only a recipe gives a meaning came without one."""
    names = [name for name, value in given.items() if value is not None]
    if isinstance(x, MXTensor):
        names = ["an MXTensor for x", *names]
    if recipe is None and names:
        raise ValueError(f"recipe must be named where there is {' and '.join(names)}, got None")


def check_fused(recipe: str, activation: str, biases: dict[str, Tensor | None]) -> None:
    """Raise unless the layer is one that runs in MXFP8."""
    given = [name for name, bias in biases.items() if bias is not None]
    if activation != "swiglu" or given:
        raise ValueError(
            f"recipe {recipe!r} goes with activation 'swiglu' and no biases, got {activation!r}"
            + (f" and {', '.join(given)}" if given else "")
        )


def check_mx(recipe: str, dtype: torch.dtype, sizes: dict[str, int]) -> None:
    """Raise unless the recipe is known and fits dtype and sizes."""
    check_recipe(recipe)
    if dtype not in DTYPES:
        raise TypeError(f"recipe {recipe!r} takes bfloat16, float16 or float32, got {dtype}")
    if any(size % BLOCK for size in sizes.values()):
        got = ", ".join(f"{name}={size}" for name, size in sizes.items())
        raise ValueError(f"recipe {recipe!r} takes multiples of {BLOCK}, got {got}")


def check_carrier(x: Tensor | MXTensor, carrier: Tensor | None, w: Tensor) -> Tensor:
    """Return the tensor that receives the gradient of ``x``: itself, the carrier, or a stand-in."""
    if isinstance(x, Tensor):
        if carrier is not None:
            raise ValueError("carrier goes with an MXTensor; a tensor carries its own gradient")
        return x
    check_dequantize(*x)
    if x.data_ND.ndim != 2:
        raise ValueError(f"x must have 2 axes, got data of shape {tuple(x.data_ND.shape)}")
    if carrier is None:
        return w.detach().new_empty(()).expand(x.data_ND.shape)
    if carrier.shape != x.data_ND.shape:
        raise ValueError(
            f"carrier must have the shape of the rows, {tuple(x.data_ND.shape)}, "
            f"got {tuple(carrier.shape)}"
        )
    check_same_device({"x.data_ND": x.data_ND, "x.scale_NB": x.scale_NB, "carrier": carrier})
    return carrier


def check_quantized(name: str, have: MXWeight, w: Tensor, recipe: str, gradient: bool) -> None:
    """Raise unless a snapshot can stand for ``w``. Whether its bytes do, the owner knows."""
    if have.recipe != recipe:
        raise ValueError(f"recipe differs: {name} was quantised by {have.recipe!r}, not {recipe!r}")
    if have.rows.data_ND.shape != w.shape:
        raise ValueError(
            f"shape differs: {name} was quantised from {tuple(have.rows.data_ND.shape)}, the "
            f"weight is {tuple(w.shape)}"
        )
    if gradient and have.columns is None:
        raise ValueError(f"{name} was quantised with columns=False, and a gradient is asked for")
    check_same_device({"the weight": w, f"{name}.rows": have.rows.data_ND})
