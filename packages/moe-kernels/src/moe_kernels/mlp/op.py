"""The expert MLPs as torch operators: choice of implementation, and their gradients.

An operator also returns what its backward needs and cannot recompute from the arguments: the
pre-activation. Nothing else is kept; the activation is recomputed and the output not needed. With
``keep`` false, when nothing asks for a gradient, not even that: it has no rows then.
"""

from types import ModuleType

import torch
from torch import Tensor

from moe_kernels.backend import runs_kernel
from moe_kernels.mlp import grouped, loop
from moe_kernels.mlp.rows import RoutedRows
from moe_kernels.operator import not_differentiable, operator


def _implementation(x: Tensor) -> ModuleType:
    """Return the module that computes on ``x``; each has the four functions below."""
    if runs_kernel(x):
        from moe_kernels.mlp import fused  # noqa: PLC0415 - triton is optional

        return fused
    # Half precision needs sums wider than torch.mm's results, and CUDA must not read the offsets.
    cpu = x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64)
    return loop if cpu else grouped


@operator("grouped_mlp")
def grouped_mlp(
    x_RD: Tensor, w_gate_up_EGD: Tensor, w_down_EDF: Tensor, offsets_E1: Tensor, keep: bool
) -> tuple[Tensor, Tensor]:
    """Return the output and the pre-activation."""
    run = _implementation(x_RD).grouped_mlp
    return run(x_RD, w_gate_up_EGD, w_down_EDF, offsets_E1, keep)


@operator("grouped_mlp_backward")
def grouped_mlp_backward(
    dy_RD: Tensor,
    x_RD: Tensor,
    w_gate_up_EGD: Tensor,
    w_down_EDF: Tensor,
    offsets_E1: Tensor,
    h_RG: Tensor,
    weights: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the rows and of both weights; empty ones if those are frozen."""
    run = _implementation(x_RD).grouped_mlp_backward
    return run(dy_RD, x_RD, w_gate_up_EGD, w_down_EDF, offsets_E1, h_RG, weights)


@operator("expert_mlp")
def expert_mlp(
    x_TD: Tensor,
    w_gate_up_EGD: Tensor,
    w_down_EDF: Tensor,
    weight_TK: Tensor,
    offsets_E1: Tensor,
    slot_of_row_N: Tensor,
    row_of_slot_TK: Tensor,
    tile_map: Tensor,
    num_tiles: Tensor,
    keep: bool,
) -> tuple[Tensor, Tensor]:
    """Return the output and the pre-activation of N rows."""
    rows = RoutedRows(offsets_E1, slot_of_row_N, row_of_slot_TK, tile_map, num_tiles)
    run = _implementation(x_TD).expert_mlp
    return run(x_TD, w_gate_up_EGD, w_down_EDF, weight_TK, rows, keep)


@operator("expert_mlp_backward")
def expert_mlp_backward(
    dy_TD: Tensor,
    x_TD: Tensor,
    w_gate_up_EGD: Tensor,
    w_down_EDF: Tensor,
    weight_TK: Tensor,
    offsets_E1: Tensor,
    slot_of_row_N: Tensor,
    row_of_slot_TK: Tensor,
    tile_map: Tensor,
    num_tiles: Tensor,
    h_NG: Tensor,
    weights: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of tokens, both weights (empty if frozen) and routing weights."""
    rows = RoutedRows(offsets_E1, slot_of_row_N, row_of_slot_TK, tile_map, num_tiles)
    run = _implementation(x_TD).expert_mlp_backward
    return run(dy_TD, x_TD, w_gate_up_EGD, w_down_EDF, weight_TK, rows, h_NG, weights)


@torch.library.register_fake("moe_kernels::grouped_mlp")
def _(x_RD, w_gate_up_EGD, w_down_EDF, offsets_E1, keep):
    del w_down_EDF, offsets_E1
    h_RG = x_RD.new_empty(x_RD.shape[0] if keep else 0, w_gate_up_EGD.shape[1])
    return x_RD.new_empty(x_RD.shape), h_RG


@torch.library.register_fake("moe_kernels::grouped_mlp_backward")
def _(dy_RD, x_RD, w_gate_up_EGD, w_down_EDF, *rest):
    del dy_RD
    *_, weights = rest
    dw = [w.new_empty(w.shape if weights else 0) for w in (w_gate_up_EGD, w_down_EDF)]
    return x_RD.new_empty(x_RD.shape), *dw


@torch.library.register_fake("moe_kernels::expert_mlp")
def _(x_TD, w_gate_up_EGD, w_down_EDF, weight_TK, *rest):
    del w_down_EDF
    *_, keep = rest
    h_NG = x_TD.new_empty(weight_TK.numel() if keep else 0, w_gate_up_EGD.shape[1])
    return x_TD.new_empty(x_TD.shape), h_NG


@torch.library.register_fake("moe_kernels::expert_mlp_backward")
def _(dy_TD, x_TD, w_gate_up_EGD, w_down_EDF, weight_TK, *rest):
    del dy_TD
    *_, weights = rest
    dw = [w.new_empty(w.shape if weights else 0) for w in (w_gate_up_EGD, w_down_EDF)]
    return x_TD.new_empty(x_TD.shape), *dw, weight_TK.new_empty(weight_TK.shape)


def _save(ctx, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    *tensors, keep = inputs
    _, h = output
    ctx.mark_non_differentiable(h)
    ctx.set_materialize_grads(False)
    if keep:
        ctx.save_for_backward(*tensors, h)


def _grouped_mlp_autograd(ctx, dy_RD: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if dy_RD is None:
        return (None,) * 5
    weights = any(ctx.needs_input_grad[1:3])
    dx_RD, *dw = grouped_mlp_backward(dy_RD, *ctx.saved_tensors, weights)
    return dx_RD, *(dw if weights else (None, None)), None, None


def _expert_mlp_autograd(ctx, dy_TD: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if dy_TD is None:
        return (None,) * 10
    weights = any(ctx.needs_input_grad[1:3])
    dx_TD, *dw, dweight_TK = expert_mlp_backward(dy_TD, *ctx.saved_tensors, weights)
    return dx_TD, *(dw if weights else (None, None)), dweight_TK, *(None,) * 6


torch.library.register_autograd(
    "moe_kernels::grouped_mlp", _grouped_mlp_autograd, setup_context=_save
)
torch.library.register_autograd(
    "moe_kernels::expert_mlp", _expert_mlp_autograd, setup_context=_save
)


for _name in ("grouped_mlp_backward", "expert_mlp_backward"):
    not_differentiable(
        _name, "gradients of gradients of the experts come from activation='clamped_swiglu' or "
        "'relu2', which run one operation after the other, and from grouped_mm",
    )  # fmt: skip
