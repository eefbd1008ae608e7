"""The expert MLPs in MXFP8 as torch operators, with their gradients.

Autograd sees the weights and, in place of the rows, a carrier: a tensor that receives their
gradient and whose values nobody reads. What is multiplied comes beside them, already in MXFP8. Kept
for backward are those rows, the pre-activation, the routing and the weights along their other axis.
"""

import torch
from torch import Tensor

from moe_kernels.mlp.rows import RoutedRows
from moe_kernels.mxfp8 import MXTensor
from moe_kernels.mxmlp import layer
from moe_kernels.operator import not_differentiable, operator


@operator("grouped_mlp_mx")
def grouped_mlp_mx(
    carrier_RD: Tensor,
    w_gate_up_EGD: Tensor,
    w_down_EDF: Tensor,
    x_RD: Tensor,
    x_scale: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    down: Tensor,
    down_scale: Tensor,
    gate_up_t: Tensor,
    gate_up_t_scale: Tensor,
    down_t: Tensor,
    down_t_scale: Tensor,
    offsets_E1: Tensor,
    recipe: str,
    rounding: str,
    keep: bool,
) -> tuple[Tensor, Tensor]:
    """Return the output and the pre-activation."""
    del w_gate_up_EGD, w_down_EDF, gate_up_t, gate_up_t_scale, down_t, down_t_scale
    y_RD, h_RG = layer.mlp_forward(
        MXTensor(x_RD, x_scale), MXTensor(gate_up, gate_up_scale), MXTensor(down, down_scale),
        offsets_E1.contiguous(), recipe, rounding, carrier_RD.dtype,
    )  # fmt: skip
    return y_RD, h_RG if keep else h_RG.new_empty(0, h_RG.shape[1])


@operator("grouped_mlp_mx_backward")
def grouped_mlp_mx_backward(
    dy_RD: Tensor,
    x_RD: Tensor,
    x_scale: Tensor,
    gate_up_t: Tensor,
    gate_up_t_scale: Tensor,
    down_t: Tensor,
    down_t_scale: Tensor,
    offsets_E1: Tensor,
    h_RG: Tensor,
    recipe: str,
    rounding: str,
    weights: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the rows and of both weights; empty ones if those are frozen."""
    return layer.grouped_backward(
        dy_RD, MXTensor(x_RD, x_scale), MXTensor(gate_up_t, gate_up_t_scale),
        MXTensor(down_t, down_t_scale), offsets_E1.contiguous(), h_RG, recipe, rounding, weights,
    )  # fmt: skip


@operator("expert_mlp_mx")
def expert_mlp_mx(
    carrier_TD: Tensor,
    w_gate_up_EGD: Tensor,
    w_down_EDF: Tensor,
    weight_TK: Tensor,
    x_TD: Tensor,
    x_scale: Tensor,
    gate_up: Tensor,
    gate_up_scale: Tensor,
    down: Tensor,
    down_scale: Tensor,
    gate_up_t: Tensor,
    gate_up_t_scale: Tensor,
    down_t: Tensor,
    down_t_scale: Tensor,
    offsets_E1: Tensor,
    slot_of_row_N: Tensor,
    row_of_slot_TK: Tensor,
    recipe: str,
    rounding: str,
    keep: bool,
) -> tuple[Tensor, Tensor]:
    """Return the output and the pre-activation of N rows."""
    del w_gate_up_EGD, w_down_EDF, gate_up_t, gate_up_t_scale, down_t, down_t_scale
    y_TD, h_NG = layer.expert_forward(
        MXTensor(x_TD, x_scale), MXTensor(gate_up, gate_up_scale), MXTensor(down, down_scale),
        weight_TK, _rows(offsets_E1, slot_of_row_N, row_of_slot_TK), recipe, rounding,
        carrier_TD.dtype,
    )  # fmt: skip
    return y_TD, h_NG if keep else h_NG.new_empty(0, h_NG.shape[1])


@operator("expert_mlp_mx_backward")
def expert_mlp_mx_backward(
    dy_TD: Tensor,
    weight_TK: Tensor,
    x_TD: Tensor,
    x_scale: Tensor,
    gate_up_t: Tensor,
    gate_up_t_scale: Tensor,
    down_t: Tensor,
    down_t_scale: Tensor,
    offsets_E1: Tensor,
    slot_of_row_N: Tensor,
    row_of_slot_TK: Tensor,
    h_NG: Tensor,
    recipe: str,
    rounding: str,
    weights: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of tokens, both weights (empty if frozen) and routing weights."""
    return layer.expert_backward(
        dy_TD, MXTensor(x_TD, x_scale), MXTensor(gate_up_t, gate_up_t_scale),
        MXTensor(down_t, down_t_scale), weight_TK,
        _rows(offsets_E1, slot_of_row_N, row_of_slot_TK), h_NG, recipe, rounding, weights,
    )  # fmt: skip


def _rows(offsets_E1: Tensor, slot_of_row_N: Tensor, row_of_slot_TK: Tensor) -> RoutedRows:
    """Put the routing together, without tiles: those of half precision are of other heights."""
    none = offsets_E1.new_empty(0)
    return RoutedRows(offsets_E1, slot_of_row_N, row_of_slot_TK, none, none)


@torch.library.register_fake("moe_kernels::grouped_mlp_mx")
def _(carrier_RD, w_gate_up_EGD, *rest):
    *_, keep = rest
    rows, G = carrier_RD.shape[0], w_gate_up_EGD.shape[1]
    return carrier_RD.new_empty(carrier_RD.shape), carrier_RD.new_empty(rows if keep else 0, G)


@torch.library.register_fake("moe_kernels::expert_mlp_mx")
def _(carrier_TD, w_gate_up_EGD, w_down_EDF, weight_TK, *rest):
    del w_down_EDF
    *_, keep = rest
    rows, G = weight_TK.numel(), w_gate_up_EGD.shape[1]
    return carrier_TD.new_empty(carrier_TD.shape), carrier_TD.new_empty(rows if keep else 0, G)


def _fake_weights(h_NG: Tensor, gate_up_t: Tensor, down_t: Tensor, weights: bool) -> list[Tensor]:
    """Return gradients: the quantised weights at hand are the transposes of theirs."""
    shapes = [(E, second, first) for E, first, second in (gate_up_t.shape, down_t.shape)]
    return [h_NG.new_empty(shape if weights else 0) for shape in shapes]


@torch.library.register_fake("moe_kernels::grouped_mlp_mx_backward")
def _(dy_RD, x_RD, x_scale, gate_up_t, gate_up_t_scale, down_t, down_t_scale, offsets_E1, h_RG, *r):
    del x_RD, x_scale, gate_up_t_scale, down_t_scale, offsets_E1
    dw = _fake_weights(h_RG, gate_up_t, down_t, r[-1])
    return h_RG.new_empty(dy_RD.shape), *dw


@torch.library.register_fake("moe_kernels::expert_mlp_mx_backward")
def _(dy_TD, weight_TK, x_TD, x_scale, gate_up_t, gate_up_t_scale, down_t, *rest):
    del x_TD, x_scale, gate_up_t_scale
    h_NG, weights = rest[4], rest[-1]
    dw = _fake_weights(h_NG, gate_up_t, down_t, weights)
    return h_NG.new_empty(dy_TD.shape), *dw, weight_TK.new_empty(weight_TK.shape)


def _save_grouped(ctx, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    *tensors, ctx.recipe, ctx.rounding, keep = inputs
    if keep:
        _, _, _, x, x_scale, _, _, _, _, *transposed, offsets_E1 = tensors
        ctx.save_for_backward(x, x_scale, *transposed, offsets_E1, output[1])


def _save_expert(ctx, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    *tensors, ctx.recipe, ctx.rounding, keep = inputs
    if keep:
        _, _, _, weight_TK, x, x_scale, _, _, _, _, *rest = tensors
        ctx.save_for_backward(weight_TK, x, x_scale, *rest, output[1])


def _grouped_autograd(ctx, dy_RD: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if dy_RD is None:
        return (None,) * 17
    weights = any(ctx.needs_input_grad[1:3])
    dx_RD, *dw = grouped_mlp_mx_backward(
        dy_RD, *ctx.saved_tensors, ctx.recipe, ctx.rounding, weights
    )
    return dx_RD, *(dw if weights else (None, None)), *(None,) * 14


def _expert_autograd(ctx, dy_TD: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if dy_TD is None:
        return (None,) * 20
    weights = any(ctx.needs_input_grad[1:3])
    dx_TD, *dw, dweight_TK = expert_mlp_mx_backward(
        dy_TD, *ctx.saved_tensors, ctx.recipe, ctx.rounding, weights
    )
    return dx_TD, *(dw if weights else (None, None)), dweight_TK, *(None,) * 16


torch.library.register_autograd(
    "moe_kernels::grouped_mlp_mx", _grouped_autograd, setup_context=_save_grouped
)
torch.library.register_autograd(
    "moe_kernels::expert_mlp_mx", _expert_autograd, setup_context=_save_expert
)
for _name in ("grouped_mlp_mx_backward", "expert_mlp_mx_backward"):
    not_differentiable(_name, "a product of rounded tensors has one gradient, and no second")
