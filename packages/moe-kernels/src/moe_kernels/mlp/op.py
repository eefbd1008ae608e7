"""The expert MLPs as torch operators: dispatch by device, and their gradients.

An operator also returns what its backward needs and cannot recompute from the arguments: the
pre-activation. Nothing else is kept; the activation is recomputed and the output not needed.
"""

import torch
from torch import Tensor

from moe_kernels.mlp.grouped import (
    expert_mlp_grouped,
    expert_mlp_grouped_backward,
    grouped_mlp_grouped,
    grouped_mlp_grouped_backward,
)
from moe_kernels.mlp.loop import (
    expert_mlp_loop,
    expert_mlp_loop_backward,
    grouped_mlp_loop,
    grouped_mlp_loop_backward,
)
from moe_kernels.operator import operator


def _loops(x: Tensor) -> bool:
    """Tell whether the loop of ``torch.mm`` takes ``x``; half precision needs wider sums."""
    return x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64)


@operator("grouped_mlp")
def grouped_mlp(
    x_RD: Tensor, w_gate_up_EGD: Tensor, w_down_EDF: Tensor, offsets_E1: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the output and the pre-activation."""
    run = grouped_mlp_loop if _loops(x_RD) else grouped_mlp_grouped
    return run(x_RD, w_gate_up_EGD, w_down_EDF, offsets_E1)


@operator("grouped_mlp_backward")
def grouped_mlp_backward(
    dy_RD: Tensor,
    x_RD: Tensor,
    w_gate_up_EGD: Tensor,
    w_down_EDF: Tensor,
    offsets_E1: Tensor,
    h_RG: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the rows and of both weights."""
    run = grouped_mlp_loop_backward if _loops(x_RD) else grouped_mlp_grouped_backward
    return run(dy_RD, x_RD, w_gate_up_EGD, w_down_EDF, offsets_E1, h_RG)[:3]


@operator("expert_mlp")
def expert_mlp(
    x_TD: Tensor,
    w_gate_up_EGD: Tensor,
    w_down_EDF: Tensor,
    weight_TK: Tensor,
    offsets_E1: Tensor,
    slot_of_row_N: Tensor,
    row_of_slot_TK: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the output and the pre-activation of N rows and a spare one."""
    run = expert_mlp_loop if _loops(x_TD) else expert_mlp_grouped
    return run(
        x_TD, w_gate_up_EGD, w_down_EDF, weight_TK, offsets_E1, slot_of_row_N, row_of_slot_TK
    )


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
    h_MG: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of the tokens, of both weights and of the routing weights."""
    run = expert_mlp_loop_backward if _loops(x_TD) else expert_mlp_grouped_backward
    return run(
        dy_TD,
        x_TD,
        w_gate_up_EGD,
        w_down_EDF,
        weight_TK,
        offsets_E1,
        slot_of_row_N,
        row_of_slot_TK,
        h_MG,
    )


@torch.library.register_fake("moe_kernels::grouped_mlp")
def _(x_RD, w_gate_up_EGD, w_down_EDF, offsets_E1):
    del w_down_EDF, offsets_E1
    h_RG = x_RD.new_empty(x_RD.shape[0], w_gate_up_EGD.shape[1])
    return x_RD.new_empty(x_RD.shape), h_RG


@torch.library.register_fake("moe_kernels::grouped_mlp_backward")
def _(dy_RD, x_RD, w_gate_up_EGD, w_down_EDF, offsets_E1, h_RG):
    del dy_RD, offsets_E1, h_RG
    return tuple(t.new_empty(t.shape) for t in (x_RD, w_gate_up_EGD, w_down_EDF))


@torch.library.register_fake("moe_kernels::expert_mlp")
def _(x_TD, w_gate_up_EGD, w_down_EDF, weight_TK, offsets_E1, slot_of_row_N, row_of_slot_TK):
    del w_down_EDF, weight_TK, offsets_E1, row_of_slot_TK
    h_MG = x_TD.new_empty(slot_of_row_N.shape[0] + 1, w_gate_up_EGD.shape[1])
    return x_TD.new_empty(x_TD.shape), h_MG


@torch.library.register_fake("moe_kernels::expert_mlp_backward")
def _(
    dy_TD,
    x_TD,
    w_gate_up_EGD,
    w_down_EDF,
    weight_TK,
    offsets_E1,
    slot_of_row_N,
    row_of_slot_TK,
    h_MG,
):
    del dy_TD, offsets_E1, slot_of_row_N, row_of_slot_TK, h_MG
    return tuple(t.new_empty(t.shape) for t in (x_TD, w_gate_up_EGD, w_down_EDF, weight_TK))


def _save(ctx, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    _, h = output
    ctx.mark_non_differentiable(h)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs, h)


def _grouped_mlp_autograd(ctx, dy_RD: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if dy_RD is None:
        return (None,) * 4
    return *grouped_mlp_backward(dy_RD, *ctx.saved_tensors), None


def _expert_mlp_autograd(ctx, dy_TD: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if dy_TD is None:
        return (None,) * 7
    return *expert_mlp_backward(dy_TD, *ctx.saved_tensors), None, None, None


torch.library.register_autograd(
    "moe_kernels::grouped_mlp", _grouped_mlp_autograd, setup_context=_save
)
torch.library.register_autograd(
    "moe_kernels::expert_mlp", _expert_mlp_autograd, setup_context=_save
)
