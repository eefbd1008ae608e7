"""The expert MLPs on the GPU, from the fused kernels. The host never waits.

``expert_mlp``, forward, three launches: gate and up projection with the gather before and SwiGLU
behind, down projection, weighted combine. Backward, eight: gradients of tokens to rows, gradient
of the activation, that of SwiGLU, gradient of ``w_down``, tokens to rows, gradient of
``w_gate_up``, gradient of the rows, combine.

Rows of D columns are needed three times in backward and never twice at once, so they share one
buffer; so do the gradient of the activation and the activation. Sums run in float32; what goes
into a product is rounded to the dtype of ``x``.
"""

from torch import Tensor

from moe_kernels.config import choose
from moe_kernels.gemm.kernel import grouped_mm_dw_triton, grouped_mm_triton
from moe_kernels.mlp.kernel import gate_up_triton
from moe_kernels.mlp.rows import RoutedRows
from moe_kernels.mlp.rows_kernel import combine_triton, expand_triton
from moe_kernels.mlp.swiglu_kernel import dswiglu_triton
from moe_kernels.routing.tiles import Tiles, tile_rows
from moe_kernels.scratch import scratch


def grouped_mlp(
    x_RD: Tensor, w_gate_up_EGD: Tensor, w_down_EDF: Tensor, offsets_E1: Tensor, keep: bool
) -> tuple[Tensor, Tensor]:
    """Return the output and the pre-activation."""
    R, E, offsets_E1 = x_RD.shape[0], w_down_EDF.shape[0], offsets_E1.contiguous()
    config = choose("gate_up", x_RD, R, E)
    tiles = tile_rows(offsets_E1, R, config.block_n)
    h_RG, act_RF = gate_up_triton(x_RD, w_gate_up_EGD, offsets_E1, tiles, config, keep=keep)
    return grouped_mm_triton(act_RF, w_down_EDF, offsets_E1, tiles=tiles), h_RG


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
    R, E, offsets_E1 = x_RD.shape[0], w_down_EDF.shape[0], offsets_E1.contiguous()
    tiles = tile_rows(offsets_E1, R, choose("dgrad", x_RD, R, E).block_n)
    act_RF = scratch(x_RD, R, w_down_EDF.shape[2])
    grouped_mm_triton(dy_RD, w_down_EDF.mT, offsets_E1, tiles=tiles, out_NF=act_RF)
    dh_RG, act_RF, _ = dswiglu_triton(act_RF, h_RG, offsets_E1)
    dx_RD = grouped_mm_triton(dh_RG, w_gate_up_EGD.mT, offsets_E1, tiles=tiles)
    if not weights:
        return dx_RD, w_gate_up_EGD.new_empty(0), w_down_EDF.new_empty(0)
    dw_gate_up_EGD = grouped_mm_dw_triton(x_RD, dh_RG, offsets_E1)
    return dx_RD, dw_gate_up_EGD, grouped_mm_dw_triton(act_RF, dy_RD, offsets_E1)


def expert_mlp(
    x_TD: Tensor,
    w_gate_up_EGD: Tensor,
    w_down_EDF: Tensor,
    weight_TK: Tensor,
    rows: RoutedRows,
    keep: bool,
) -> tuple[Tensor, Tensor]:
    """Return the output and the pre-activation."""
    offsets_E1, slot_of_row_N, row_of_slot_TK, *tiles = rows
    N, K = weight_TK.numel(), weight_TK.shape[1]
    tiles, config = Tiles(*tiles), choose("gate_up", x_TD, N, w_down_EDF.shape[0])
    h_NG, act_NF = gate_up_triton(
        x_TD, w_gate_up_EGD, offsets_E1, tiles, config, slot_of_row_N, K, keep
    )
    rows_ND = scratch(x_TD, N, x_TD.shape[1])
    grouped_mm_triton(act_NF, w_down_EDF, offsets_E1, tiles=tiles, out_NF=rows_ND)
    return combine_triton(rows_ND, row_of_slot_TK, weight_TK.contiguous())[0], h_NG


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
    offsets_E1, slot_of_row_N, row_of_slot_TK, *tiles = rows
    N = weight_TK.numel()
    tiles = Tiles(*tiles)
    rows_ND = expand_triton(dy_TD, row_of_slot_TK, scratch(x_TD, N, x_TD.shape[1]))
    act_NF = scratch(x_TD, N, w_down_EDF.shape[2])
    grouped_mm_triton(rows_ND, w_down_EDF.mT, offsets_E1, tiles=tiles, out_NF=act_NF)
    dh_NG, act_NF, dweight_N = dswiglu_triton(
        act_NF, h_NG, offsets_E1, weight_TK.contiguous(), slot_of_row_N
    )
    dw_gate_up_EGD, dw_down_EDF = w_gate_up_EGD.new_empty(0), w_down_EDF.new_empty(0)
    if weights:
        dw_down_EDF = grouped_mm_dw_triton(act_NF, rows_ND, offsets_E1)
        expand_triton(x_TD, row_of_slot_TK, rows_ND)
        dw_gate_up_EGD = grouped_mm_dw_triton(rows_ND, dh_NG, offsets_E1)
    grouped_mm_triton(dh_NG, w_gate_up_EGD.mT, offsets_E1, tiles=tiles, out_NF=rows_ND)
    dx_TD, dweight_TK = combine_triton(rows_ND, row_of_slot_TK, None, dweight_N)
    assert dweight_TK is not None, "rows had weights"
    return dx_TD, dw_gate_up_EGD, dw_down_EDF, dweight_TK
