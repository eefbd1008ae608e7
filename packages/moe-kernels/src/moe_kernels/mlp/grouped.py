"""The expert MLPs where neither kernels nor the loop run: grouped products, plain torch between.

That is float64 on the GPU, half precision on the CPU, and a GPU without Triton. The host does not
wait. Sums run in float32; what goes into a product is rounded to the dtype of ``x``.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from moe_kernels.gemm.op import grouped_mm, grouped_mm_dw
from moe_kernels.mlp.rows import (
    RoutedRows,
    combine,
    gather,
    rows_of_slots,
    tokens_of_rows,
    weights_of_rows,
)
from moe_kernels.mlp.swiglu import swiglu, swiglu_grad


def grouped_mlp(
    x_RD: Tensor, w_gate_up_EGD: Tensor, w_down_EDF: Tensor, offsets_E1: Tensor, keep: bool
) -> tuple[Tensor, Tensor]:
    """Return the output and the pre-activation."""
    h_RG = grouped_mm(x_RD, w_gate_up_EGD, offsets_E1)
    y_RD = grouped_mm(swiglu(h_RG).to(x_RD.dtype), w_down_EDF, offsets_E1)
    return y_RD, h_RG if keep else h_RG.new_empty(0, h_RG.shape[1])


def grouped_mlp_backward(
    dy_RD: Tensor,
    x_RD: Tensor,
    w_gate_up_EGD: Tensor,
    w_down_EDF: Tensor,
    offsets_E1: Tensor,
    h_RG: Tensor,
    weights: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the rows and of both weights."""
    return _backward(dy_RD, x_RD, w_gate_up_EGD, w_down_EDF, offsets_E1, h_RG, None, weights)[:3]


def _backward(
    dy_RD: Tensor,
    x_RD: Tensor,
    w_gate_up_EGD: Tensor,
    w_down_EDF: Tensor,
    offsets_E1: Tensor,
    h_RG: Tensor,
    weight_R: Tensor | None,
    weights: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gradients of the rows, of both weights, and of the rows' weights if given."""
    dact_RF = grouped_mm(dy_RD, w_down_EDF.mT, offsets_E1)
    dh_RG, act_RF, dweight_R = swiglu_grad(h_RG, dact_RF, weight_R)
    dh_RG, act_RF = dh_RG.to(x_RD.dtype), act_RF.to(x_RD.dtype)
    dx_RD = grouped_mm(dh_RG, w_gate_up_EGD.mT, offsets_E1)
    if not weights:
        return dx_RD, w_gate_up_EGD.new_empty(0), w_down_EDF.new_empty(0), dweight_R
    dw_gate_up_EGD = grouped_mm_dw(x_RD, dh_RG, offsets_E1)
    return dx_RD, dw_gate_up_EGD, grouped_mm_dw(act_RF, dy_RD, offsets_E1), dweight_R


def expert_mlp(
    x_TD: Tensor,
    w_gate_up_EGD: Tensor,
    w_down_EDF: Tensor,
    weight_TK: Tensor,
    rows: RoutedRows,
    keep: bool,
) -> tuple[Tensor, Tensor]:
    """Return the output and the pre-activation."""
    x_MD = gather(x_TD, tokens_of_rows(rows.slot_of_row_N, weight_TK.shape[1]))
    y_MD, h_MG = grouped_mlp(x_MD, w_gate_up_EGD, w_down_EDF, rows.offsets_E1, keep)
    row_TK = rows_of_slots(rows.row_of_slot_TK)
    return combine(y_MD, row_TK, weight_TK, weight_TK.dtype), h_MG[:-1].clone()


def expert_mlp_backward(
    dy_TD: Tensor,
    x_TD: Tensor,
    w_gate_up_EGD: Tensor,
    w_down_EDF: Tensor,
    weight_TK: Tensor,
    rows: RoutedRows,
    h_NG: Tensor,
    weights: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of the tokens, of both weights and of the routing weights."""
    token_M = tokens_of_rows(rows.slot_of_row_N, weight_TK.shape[1])
    dx_MD, dw_gate_up_EGD, dw_down_EDF, dweight_M = _backward(
        gather(dy_TD, token_M),
        gather(x_TD, token_M),
        w_gate_up_EGD,
        w_down_EDF,
        rows.offsets_E1,
        F.pad(h_NG, (0, 0, 0, 1)),  # the spare row
        weights_of_rows(weight_TK, rows.slot_of_row_N),
        weights,
    )
    assert dweight_M is not None, "rows had weights"
    row_TK = rows_of_slots(rows.row_of_slot_TK)
    dweight_TK = dweight_M.index_select(0, row_TK.view(-1)).view(row_TK.shape)
    wide = torch.promote_types(x_TD.dtype, torch.float32)
    return combine(dx_MD, row_TK, None, wide), dw_gate_up_EGD, dw_down_EDF, dweight_TK
