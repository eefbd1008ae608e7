"""The expert MLPs on the CPU: a loop over the experts that have rows, one ``torch.mm`` at a time.

Everything between two products of one expert fits in cache if its rows do, and products write
straight into the result. The offsets come to the host once a call.

FLOPs of N routed rows: ``6*N*D*F`` forward, ``12*N*D*F`` backward.
"""

import torch
from torch import Tensor

from moe_kernels.gemm.reference import read_spans
from moe_kernels.mlp.rows import RoutedRows, combine, rows_of_slots, tokens_of_rows, weights_of_rows
from moe_kernels.mlp.swiglu import swiglu, swiglu_grad


def grouped_mlp(
    x_RD: Tensor, w_gate_up_EGD: Tensor, w_down_EDF: Tensor, offsets_E1: Tensor, keep: bool
) -> tuple[Tensor, Tensor]:
    """Return the output and the pre-activation."""
    y_RD = x_RD.new_empty(x_RD.shape)
    h_RG = x_RD.new_empty(x_RD.shape[0] if keep else 0, w_gate_up_EGD.shape[1])
    spans = read_spans(offsets_E1, x_RD.shape[0])
    for e, start, end in spans:
        if start == end:
            continue
        out = h_RG[start:end] if keep else None
        h_NG = torch.mm(x_RD[start:end], w_gate_up_EGD[e].T, out=out)
        torch.mm(swiglu(h_NG), w_down_EDF[e].T, out=y_RD[start:end])
    y_RD[spans[-1].end :].zero_()
    h_RG[spans[-1].end :].zero_()
    return y_RD, h_RG


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
    dx_RD = x_RD.new_empty(x_RD.shape)
    dw_gate_up_EGD, dw_down_EDF = (
        w.new_empty(w.shape if weights else 0) for w in (w_gate_up_EGD, w_down_EDF)
    )
    spans = read_spans(offsets_E1, x_RD.shape[0])
    for e, start, end in spans:
        if start == end:
            if weights:
                dw_gate_up_EGD[e].zero_()
                dw_down_EDF[e].zero_()
            continue
        dy_ND, x_ND = dy_RD[start:end], x_RD[start:end]
        dh_NG, act_NF, _ = swiglu_grad(h_RG[start:end], dy_ND @ w_down_EDF[e], None)
        if weights:
            torch.mm(dy_ND.T, act_NF, out=dw_down_EDF[e])
            torch.mm(dh_NG.T, x_ND, out=dw_gate_up_EGD[e])
        torch.mm(dh_NG, w_gate_up_EGD[e], out=dx_RD[start:end])
    dx_RD[spans[-1].end :].zero_()
    return dx_RD, dw_gate_up_EGD, dw_down_EDF


def expert_mlp(
    x_TD: Tensor,
    w_gate_up_EGD: Tensor,
    w_down_EDF: Tensor,
    weight_TK: Tensor,
    rows: RoutedRows,
    keep: bool,
) -> tuple[Tensor, Tensor]:
    """Return the output and the pre-activation, gathering each expert's tokens as it comes."""
    N = weight_TK.numel()
    token_M = tokens_of_rows(rows.slot_of_row_N, weight_TK.shape[1])
    y_MD = x_TD.new_empty(N + 1, x_TD.shape[1])
    h_NG = x_TD.new_empty(N if keep else 0, w_gate_up_EGD.shape[1])
    spans = read_spans(rows.offsets_E1, N)
    for e, start, end in spans:
        if start == end:
            continue
        x_ND = x_TD.index_select(0, token_M[start:end])
        h_nG = torch.mm(x_ND, w_gate_up_EGD[e].T, out=h_NG[start:end] if keep else None)
        torch.mm(swiglu(h_nG), w_down_EDF[e].T, out=y_MD[start:end])
    y_MD[spans[-1].end :].zero_()
    h_NG[spans[-1].end :].zero_()
    return combine(y_MD, rows_of_slots(rows.row_of_slot_TK), weight_TK, weight_TK.dtype), h_NG


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
    N = weight_TK.numel()
    token_M = tokens_of_rows(rows.slot_of_row_N, weight_TK.shape[1])
    weight_M = weights_of_rows(weight_TK, rows.slot_of_row_N)
    dx_MD = x_TD.new_empty(N + 1, x_TD.shape[1])
    dweight_M = torch.zeros_like(weight_M)
    dw_gate_up_EGD, dw_down_EDF = (
        w.new_empty(w.shape if weights else 0) for w in (w_gate_up_EGD, w_down_EDF)
    )
    spans = read_spans(rows.offsets_E1, N)
    for e, start, end in spans:
        if start == end:
            if weights:
                dw_gate_up_EGD[e].zero_()
                dw_down_EDF[e].zero_()
            continue
        token_N = token_M[start:end]
        dy_ND, x_ND = dy_TD.index_select(0, token_N), x_TD.index_select(0, token_N)
        dact_NF = dy_ND @ w_down_EDF[e]
        dh_NG, act_NF, dweight_N = swiglu_grad(h_NG[start:end], dact_NF, weight_M[start:end])
        if dweight_N is not None:
            dweight_M[start:end] = dweight_N
        if weights:
            torch.mm(dy_ND.T, act_NF, out=dw_down_EDF[e])
            torch.mm(dh_NG.T, x_ND, out=dw_gate_up_EGD[e])
        torch.mm(dh_NG, w_gate_up_EGD[e], out=dx_MD[start:end])
    dx_MD[spans[-1].end :].zero_()
    row_TK = rows_of_slots(rows.row_of_slot_TK)
    dweight_TK = dweight_M.index_select(0, row_TK.view(-1)).view(row_TK.shape)
    return combine(dx_MD, row_TK, None, dx_MD.dtype), dw_gate_up_EGD, dw_down_EDF, dweight_TK
