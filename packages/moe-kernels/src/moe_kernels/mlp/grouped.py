"""The expert MLPs on the GPU: grouped products, and plain torch between them.

The host does not wait. Sums run in float32; what goes into a product is rounded to the dtype of
``x``. Bytes moved beside the products: the gathered rows and the activation, written and read.
"""

import torch
from torch import Tensor

from moe_kernels.gemm.op import grouped_mm, grouped_mm_dw
from moe_kernels.mlp.rows import combine, gather, rows_of_slots, tokens_of_rows, weights_of_rows
from moe_kernels.mlp.swiglu import swiglu, swiglu_grad


def grouped_mlp_grouped(
    x_RD: Tensor, w_gate_up_EGD: Tensor, w_down_EDF: Tensor, offsets_E1: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the output and the pre-activation."""
    h_RG = grouped_mm(x_RD, w_gate_up_EGD, offsets_E1)
    y_RD = grouped_mm(swiglu(h_RG).to(x_RD.dtype), w_down_EDF, offsets_E1)
    return y_RD, h_RG


def grouped_mlp_grouped_backward(
    dy_RD: Tensor,
    x_RD: Tensor,
    w_gate_up_EGD: Tensor,
    w_down_EDF: Tensor,
    offsets_E1: Tensor,
    h_RG: Tensor,
    weight_R: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gradients of the rows, of both weights, and of the rows' weights if given."""
    dact_RF = grouped_mm(dy_RD, w_down_EDF.mT, offsets_E1)
    dh_RG, act_RF, dweight_R = swiglu_grad(h_RG, dact_RF, weight_R)
    dh_RG, act_RF = dh_RG.to(x_RD.dtype), act_RF.to(x_RD.dtype)
    return (
        grouped_mm(dh_RG, w_gate_up_EGD.mT, offsets_E1),
        grouped_mm_dw(x_RD, dh_RG, offsets_E1),
        grouped_mm_dw(act_RF, dy_RD, offsets_E1),
        dweight_R,
    )


def expert_mlp_grouped(
    x_TD: Tensor,
    w_gate_up_EGD: Tensor,
    w_down_EDF: Tensor,
    weight_TK: Tensor,
    offsets_E1: Tensor,
    slot_of_row_N: Tensor,
    row_of_slot_TK: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the output and the pre-activation."""
    token_M = tokens_of_rows(slot_of_row_N, weight_TK.shape[1])
    y_MD, h_MG = grouped_mlp_grouped(gather(x_TD, token_M), w_gate_up_EGD, w_down_EDF, offsets_E1)
    return combine(y_MD, rows_of_slots(row_of_slot_TK), weight_TK, weight_TK.dtype), h_MG


def expert_mlp_grouped_backward(
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
    token_M = tokens_of_rows(slot_of_row_N, weight_TK.shape[1])
    dx_MD, dw_gate_up_EGD, dw_down_EDF, dweight_M = grouped_mlp_grouped_backward(
        gather(dy_TD, token_M),
        gather(x_TD, token_M),
        w_gate_up_EGD,
        w_down_EDF,
        offsets_E1,
        h_MG,
        weights_of_rows(weight_TK, slot_of_row_N),
    )
    assert dweight_M is not None, "rows had weights"
    row_TK = rows_of_slots(row_of_slot_TK)
    dweight_TK = dweight_M.index_select(0, row_TK.view(-1)).view(row_TK.shape)
    wide = torch.promote_types(x_TD.dtype, torch.float32)
    return combine(dx_MD, row_TK, None, wide), dw_gate_up_EGD, dw_down_EDF, dweight_TK
