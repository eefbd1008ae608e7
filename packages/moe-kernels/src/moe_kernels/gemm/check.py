"""Argument checks of the grouped matrix products. They read metadata only, never the device."""

import torch
from torch import Tensor

from moe_kernels.backend import runs_kernel

MULTIPLE = 16  # what tensor cores multiply at once
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def check_shapes(where: str, expected: dict[str, tuple[Tensor, int]]) -> None:
    """Raise ``ValueError`` unless each named tensor has its number of axes."""
    if any(tensor.ndim != axes for tensor, axes in expected.values()):
        wants = ", ".join(f"{name} with {axes} axes" for name, (_, axes) in expected.items())
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor, _ in expected.values())
        raise ValueError(f"{where} takes {wants}; got shapes {shapes}")


def check_same_dtype(tensors: dict[str, Tensor]) -> None:
    """Raise ``TypeError`` unless all tensors share one floating dtype that has a kernel."""
    dtypes = {tensor.dtype for tensor in tensors.values()}
    if len(dtypes) > 1 or not dtypes <= set(DTYPES):
        got = ", ".join(f"{name} {tensor.dtype}" for name, tensor in tensors.items())
        raise TypeError(
            f"{', '.join(tensors)} must share one dtype of bfloat16, float16, float32 or "
            f"float64; got {got}"
        )


def check_same_device(tensors: dict[str, Tensor]) -> None:
    """Raise ``ValueError`` unless all tensors are on one device."""
    if len({tensor.device for tensor in tensors.values()}) > 1:
        got = ", ".join(f"{name} on {tensor.device}" for name, tensor in tensors.items())
        raise ValueError(f"all arguments must be on one device; got {got}")


def check_offsets(offsets_E1: Tensor, num_experts: int, weights: str) -> None:
    """Raise unless the offsets are int32 and one more than the experts that ``weights`` holds."""
    if offsets_E1.dtype != torch.int32:
        raise TypeError(f"offsets_E1 must be int32, got {offsets_E1.dtype}")
    if offsets_E1.shape[0] != num_experts + 1:
        raise ValueError(
            f"E differs: offsets_E1 has {offsets_E1.shape[0]} entries and must have one more than "
            f"the {num_experts} experts of {weights}"
        )


def check_multiples(x: Tensor, sizes: dict[str, int]) -> None:
    """Raise unless each named axis is a multiple of 16, where a kernel will run on ``x``."""
    if runs_kernel(x) and any(size % MULTIPLE for size in sizes.values()):
        got = ", ".join(f"{name}={size}" for name, size in sizes.items())
        raise ValueError(f"the kernels on CUDA take multiples of {MULTIPLE}, got {got}")


def check_grouped_mm(x_ND: Tensor, w_EFD: Tensor, offsets_E1: Tensor) -> None:
    """Raise unless the arguments of ``grouped_mm`` fit together."""
    check_shapes(
        "grouped_mm", {"x_ND": (x_ND, 2), "w_EFD": (w_EFD, 3), "offsets_E1": (offsets_E1, 1)}
    )
    if x_ND.shape[1] != w_EFD.shape[2]:
        raise ValueError(
            f"D differs: x_ND has {x_ND.shape[1]} columns, w_EFD has {w_EFD.shape[2]} columns"
        )
    check_offsets(offsets_E1, w_EFD.shape[0], "w_EFD")
    check_same_dtype({"x_ND": x_ND, "w_EFD": w_EFD})
    check_multiples(x_ND, {"D": w_EFD.shape[2], "F": w_EFD.shape[1]})
    check_same_device({"x_ND": x_ND, "w_EFD": w_EFD, "offsets_E1": offsets_E1})


def check_grouped_mm_dw(
    x_ND: Tensor, dy_NF: Tensor, offsets_E1: Tensor, out_EFD: Tensor | None
) -> None:
    """Raise unless the arguments of ``grouped_mm_dw`` fit together."""
    check_shapes(
        "grouped_mm_dw", {"x_ND": (x_ND, 2), "dy_NF": (dy_NF, 2), "offsets_E1": (offsets_E1, 1)}
    )
    if x_ND.shape[0] != dy_NF.shape[0]:
        raise ValueError(
            f"N differs: x_ND has {x_ND.shape[0]} rows, dy_NF has {dy_NF.shape[0]} rows"
        )
    if offsets_E1.shape[0] < 2:
        raise ValueError(
            f"offsets_E1 must have E + 1 entries for E >= 1 experts, got {offsets_E1.shape[0]}"
        )
    check_offsets(offsets_E1, offsets_E1.shape[0] - 1, "dy_NF")
    check_same_dtype({"x_ND": x_ND, "dy_NF": dy_NF})
    check_multiples(x_ND, {"D": x_ND.shape[1], "F": dy_NF.shape[1]})
    tensors = {"x_ND": x_ND, "dy_NF": dy_NF, "offsets_E1": offsets_E1}
    if out_EFD is not None:
        check_main_gradient(out_EFD, (offsets_E1.shape[0] - 1, dy_NF.shape[1], x_ND.shape[1]), x_ND)
        tensors["out_EFD"] = out_EFD
    check_same_device(tensors)


def check_main_gradient(out_EFD: Tensor, shape: tuple[int, int, int], x_ND: Tensor) -> None:
    """Raise unless ``out_EFD`` can take the sum of a weight gradient of this shape."""
    if tuple(out_EFD.shape) != shape or not out_EFD.is_contiguous():
        kind = "contiguous" if out_EFD.is_contiguous() else f"with strides {out_EFD.stride()}"
        raise ValueError(
            f"out_EFD must be contiguous and have shape {shape}, got {tuple(out_EFD.shape)}, {kind}"
        )
    wide = torch.promote_types(x_ND.dtype, torch.float32)
    if out_EFD.dtype != wide:
        raise TypeError(
            f"out_EFD must be {wide} for x_ND in {x_ND.dtype}, got {out_EFD.dtype}: main gradients "
            "are summed in full"
        )
    if out_EFD.requires_grad:
        raise ValueError("out_EFD must not require a gradient: it is changed in place")
