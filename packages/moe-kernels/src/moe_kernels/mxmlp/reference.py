"""What the expert MLP in MXFP8 computes, written to be read: every expert sees every token."""

import torch
from torch import Tensor

from moe_kernels.mlp.swiglu import swiglu, swiglu_grad
from moe_kernels.mxfp8 import Recipe, dequantize, quantize


def rounded(x: Tensor, recipe: Recipe) -> Tensor:
    """Round to MXFP8, once, and return the value in float64."""
    return dequantize(quantize(x.float(), recipe=recipe)).double()


def expert_mlp_mx_reference(
    x_TD: Tensor,
    w_gate_up_EGD: Tensor,
    w_down_EDF: Tensor,
    weight_TK: Tensor,
    expert_TK: Tensor,
    dy_TD: Tensor,
    recipe: Recipe,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Round what the layer rounds and do the rest in float64.

    Returns:
        The output and the gradients of tokens, both weights and routing weights.
    """
    x_TD, weight_TK, exact_dy_TD = x_TD.double(), weight_TK.double(), dy_TD.double()
    xq_TD, dyq_TD = rounded(x_TD, recipe), rounded(dy_TD, recipe)
    y_TD, dx_TD = torch.zeros_like(x_TD), torch.zeros_like(x_TD)
    dw_gate_up, dw_down, dweight_TK = [], [], torch.zeros_like(weight_TK)
    for e, (w_gate_up_GD, w_down_DF) in enumerate(zip(w_gate_up_EGD, w_down_EDF, strict=True)):
        chosen_TK = expert_TK == e
        weight_T = (weight_TK * chosen_TK).sum(dim=1)
        h_TG = xq_TD @ rounded(w_gate_up_GD, recipe).T
        act_TF = swiglu(h_TG)
        y_TD += weight_T[:, None] * (rounded(act_TF, recipe) @ rounded(w_down_DF, recipe).T)
        dact_TF = dyq_TD @ rounded(w_down_DF.T, recipe).T
        dweight_TK += chosen_TK * (dact_TF * act_TF).sum(dim=1, keepdim=True)
        dh_TG, weighted_TF, _ = swiglu_grad(h_TG, dact_TF, weight_T)
        dx_TD += rounded(dh_TG, recipe) @ rounded(w_gate_up_GD.T, recipe).T
        dw_gate_up.append(dh_TG.T @ xq_TD)
        dw_down.append(exact_dy_TD.T @ weighted_TF)
    return y_TD, dx_TD, torch.stack(dw_gate_up), torch.stack(dw_down), dweight_TK
