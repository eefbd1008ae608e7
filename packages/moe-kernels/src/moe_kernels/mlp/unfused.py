"""The expert MLP with other activations and with biases: one operation after the other.

Every product and every sum over rows is a grouped one, so results repeat bit for bit. Autograd
keeps the gathered rows, the pre-activation, the activation and the output.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from moe_kernels.gemm import op as gemm
from moe_kernels.mlp.rows import RoutedRows, combine_rows, expand_rows

LIMIT, ALPHA = 7.0, 1.702  # of gpt-oss


def _swiglu(h_NG: Tensor) -> Tensor:
    gate_NF, up_NF = h_NG.chunk(2, dim=1)
    return F.silu(gate_NF) * up_NF


def _clamped_swiglu(h_NG: Tensor) -> Tensor:
    gate_NF, up_NF = h_NG.chunk(2, dim=1)
    gate_NF, up_NF = gate_NF.clamp(max=LIMIT), up_NF.clamp(-LIMIT, LIMIT)
    return gate_NF * torch.sigmoid(ALPHA * gate_NF) * (up_NF + 1)


def _relu2(h_NF: Tensor) -> Tensor:
    return F.relu(h_NF).square()


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "swiglu": _swiglu,  # Shazeer 2020
    "clamped_swiglu": _clamped_swiglu,  # gpt-oss 2025
    "relu2": _relu2,  # So et al. 2021
}
GATED = ("swiglu", "clamped_swiglu")  # G = 2*F, gate first; otherwise G = F


def _bias_of_rows(bias_EG: Tensor, like_ND: Tensor, offsets_E1: Tensor) -> Tensor:
    """Return each row's bias, as a product: its gradient is then a sum in a fixed order."""
    one_N16 = F.pad(like_ND.new_ones(like_ND.shape[0], 1), (0, 15))
    return gemm.grouped_mm(one_N16, F.pad(bias_EG[:, :, None], (0, 15)), offsets_E1)


def expert_mlp_unfused(
    x_TD: Tensor,
    w_gate_up_EGD: Tensor,
    w_down_EDF: Tensor,
    weight_TK: Tensor,
    rows: RoutedRows,
    activation: str,
    bias_gate_up_EG: Tensor | None,
    bias_down_ED: Tensor | None,
) -> Tensor:
    """Return the output. The activation is computed in float32 (float64 for float64)."""
    offsets_E1 = rows.offsets_E1
    x_ND = expand_rows(x_TD, rows.slot_of_row_N, rows.row_of_slot_TK)
    h_NG = gemm.grouped_mm(x_ND, w_gate_up_EGD, offsets_E1)
    if bias_gate_up_EG is not None:
        h_NG = h_NG + _bias_of_rows(bias_gate_up_EG, x_ND, offsets_E1)
    act_NF = ACTIVATIONS[activation](h_NG.to(weight_TK.dtype)).to(x_TD.dtype)
    y_ND = gemm.grouped_mm(act_NF, w_down_EDF, offsets_E1)
    if bias_down_ED is not None:
        y_ND = y_ND + _bias_of_rows(bias_down_ED, x_ND, offsets_E1)
    return combine_rows(y_ND, weight_TK, rows.slot_of_row_N, rows.row_of_slot_TK)
