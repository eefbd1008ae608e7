"""What the expert MLPs compute, written to be read: every expert sees every row."""

from torch import Tensor
from torch.nn import functional as F


def ffn_reference(x_ND: Tensor, w_gate_up_GD: Tensor, w_down_DF: Tensor) -> Tensor:
    """Apply one SwiGLU feed-forward network (Shazeer 2020), gate first."""
    gate_NF, up_NF = (x_ND @ w_gate_up_GD.T).chunk(2, dim=1)
    return (F.silu(gate_NF) * up_NF) @ w_down_DF.T


def grouped_mlp_reference(
    x_RD: Tensor, w_gate_up_EGD: Tensor, w_down_EDF: Tensor, offsets_E1: Tensor
) -> Tensor:
    """Apply to each group of rows its own expert. Rows past the last offset give zeros."""
    y_RD = x_RD.new_zeros(x_RD.shape)
    for e in range(w_down_EDF.shape[0]):
        rows = slice(int(offsets_E1[e]), int(offsets_E1[e + 1]))
        y_RD[rows] = ffn_reference(x_RD[rows], w_gate_up_EGD[e], w_down_EDF[e])
    return y_RD


def expert_mlp_reference(
    x_TD: Tensor, w_gate_up_EGD: Tensor, w_down_EDF: Tensor, weight_TK: Tensor, expert_TK: Tensor
) -> Tensor:
    """Sum over experts what they say of each token, times the token's weight for them."""
    y_TD = x_TD.new_zeros(x_TD.shape)
    for e, (w_gate_up_GD, w_down_DF) in enumerate(zip(w_gate_up_EGD, w_down_EDF, strict=True)):
        weight_T = (weight_TK * (expert_TK == e)).sum(dim=1).to(x_TD.dtype)
        y_TD = y_TD + weight_T[:, None] * ffn_reference(x_TD, w_gate_up_GD, w_down_DF)
    return y_TD
