"""The grouped matrix products as torch operators: dispatch by device, and their gradients."""

import torch
from torch import Tensor

from moe_kernels.backend import runs_kernel
from moe_kernels.gemm.reference import (
    add_dw_reference,
    grouped_mm_dw_reference,
    grouped_mm_reference,
)
from moe_kernels.operator import operator


@operator("grouped_mm")
def grouped_mm(x_ND: Tensor, w_EFD: Tensor, offsets_E1: Tensor) -> Tensor:
    """Run the Triton kernel on CUDA and the reference elsewhere."""
    if runs_kernel(x_ND):
        from moe_kernels.gemm.kernel import grouped_mm_triton  # noqa: PLC0415 - triton is optional

        return grouped_mm_triton(x_ND, w_EFD, offsets_E1)
    return grouped_mm_reference(x_ND, w_EFD, offsets_E1)


@operator("grouped_mm_dw")
def grouped_mm_dw(x_ND: Tensor, dy_NF: Tensor, offsets_E1: Tensor) -> Tensor:
    """Run the Triton kernel on CUDA and the reference elsewhere."""
    if runs_kernel(x_ND):
        from moe_kernels.gemm.kernel import grouped_mm_dw_triton  # noqa: PLC0415

        return grouped_mm_dw_triton(x_ND, dy_NF, offsets_E1)
    return grouped_mm_dw_reference(x_ND, dy_NF, offsets_E1)


@operator("grouped_mm_dw_add", mutates=("out_EFD",))
def grouped_mm_dw_add(x_ND: Tensor, dy_NF: Tensor, offsets_E1: Tensor, out_EFD: Tensor) -> None:
    """Add to ``out_EFD`` in place."""
    if runs_kernel(x_ND):
        from moe_kernels.gemm.kernel import grouped_mm_dw_triton  # noqa: PLC0415

        grouped_mm_dw_triton(x_ND, dy_NF, offsets_E1, out_EFD=out_EFD)
    else:
        add_dw_reference(x_ND, dy_NF, offsets_E1, out_EFD)


@torch.library.register_fake("moe_kernels::grouped_mm_dw_add")
def _(x_ND: Tensor, dy_NF: Tensor, offsets_E1: Tensor, out_EFD: Tensor) -> None:
    del x_ND, dy_NF, offsets_E1, out_EFD


@torch.library.register_fake("moe_kernels::grouped_mm")
def _(x_ND: Tensor, w_EFD: Tensor, offsets_E1: Tensor) -> Tensor:
    del offsets_E1
    return x_ND.new_empty(x_ND.shape[0], w_EFD.shape[1])


@torch.library.register_fake("moe_kernels::grouped_mm_dw")
def _(x_ND: Tensor, dy_NF: Tensor, offsets_E1: Tensor) -> Tensor:
    return x_ND.new_empty(offsets_E1.shape[0] - 1, dy_NF.shape[1], x_ND.shape[1])


def _save_inputs(ctx, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    del output
    ctx.save_for_backward(*inputs)


def _backward(ctx, dy_NF: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x_ND, w_EFD, offsets_E1 = ctx.saved_tensors
    dx_ND = grouped_mm(dy_NF, w_EFD.mT, offsets_E1) if ctx.needs_input_grad[0] else None
    dw_EFD = grouped_mm_dw(x_ND, dy_NF, offsets_E1) if ctx.needs_input_grad[1] else None
    return dx_ND, dw_EFD, None


def _backward_of_dw(ctx, ddw_EFD: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x_ND, dy_NF, offsets_E1 = ctx.saved_tensors
    dx_ND = grouped_mm(dy_NF, ddw_EFD.mT, offsets_E1) if ctx.needs_input_grad[0] else None
    ddy_NF = grouped_mm(x_ND, ddw_EFD, offsets_E1) if ctx.needs_input_grad[1] else None
    return dx_ND, ddy_NF, None


torch.library.register_autograd("moe_kernels::grouped_mm", _backward, setup_context=_save_inputs)
torch.library.register_autograd(
    "moe_kernels::grouped_mm_dw", _backward_of_dw, setup_context=_save_inputs
)
