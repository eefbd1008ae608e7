"""The expert MLPs in MXFP8, forward and backward, on every device. The host never waits on a GPU.

What is rounded, each once and from float32 or the tensor as it came: the tokens, the activation,
the gradient of the output, that of the pre-activation, and the weights along both axes. Products of
rounded tensors run in float8 (``moe_kernels.mxgemm``): two forward, and the two of backward that
give gradients of rows. Weight gradients run in half precision: from the dequantised tokens, as
those alone are kept, and from the activation, its gradient and that of the output unrounded.

Kept for backward: the tokens in MXFP8, which is half of bfloat16, and the pre-activation. Backward
goes to the tokens first, so that the float8 gradient is gone before rows of D columns are made for
the weights; those rows share one buffer.
"""

import torch
from torch import Tensor

from moe_kernels.backend import runs_kernel
from moe_kernels.gemm.op import grouped_mm_dw
from moe_kernels.mlp.rows import RoutedRows, combine, expand_rows, rows_of_slots
from moe_kernels.mxfp8 import CHUNK, MXTensor, dequantize
from moe_kernels.mxfp8 import op as mx
from moe_kernels.mxfp8.reference import quantize_dswiglu_reference
from moe_kernels.mxgemm.op import gather_rows, multiply, tiles_of
from moe_kernels.scratch import scratch


def mlp_forward(
    x: MXTensor,
    gate_up: MXTensor,
    down: MXTensor,
    offsets_E1: Tensor,
    recipe: str,
    rounding: str,
    dtype: torch.dtype,
    slot_of_row_N: Tensor | None = None,
    top_k: int = 0,
) -> tuple[Tensor, Tensor]:
    """Return the output of each row and its pre-activation."""
    num_rows = len(x.data_ND) if slot_of_row_N is None else len(slot_of_row_N)
    tiles = tiles_of(x, offsets_E1, num_rows, len(down.data_ND), recipe)
    h_NG = multiply(
        x, gate_up, offsets_E1, recipe, dtype,
        tiles=tiles, slot_of_row_N=slot_of_row_N, top_k=top_k,
    )  # fmt: skip
    act = MXTensor(*mx.quantize_swiglu(h_NG, recipe, rounding, offsets_E1))
    return multiply(act, down, offsets_E1, recipe, dtype, tiles=tiles), h_NG


def _value_rows(x: MXTensor, rows: RoutedRows | None, out_ND: Tensor) -> Tensor:
    """Return the value of each row in the dtype of ``out_ND``, in its memory where kernels run."""
    if runs_kernel(out_ND):
        from moe_kernels.mxmlp.rows_kernel import expand_mx_triton  # noqa: PLC0415

        return expand_mx_triton(x, None if rows is None else rows.row_of_slot_TK, out_ND)
    if rows is not None and len(x.data_ND):
        x = gather_rows(x, rows.slot_of_row_N, rows.row_of_slot_TK.shape[1])
    return dequantize(x).to(out_ND.dtype)


def _token_rows(x_TD: Tensor, rows: RoutedRows, out_ND: Tensor) -> Tensor:
    """Return each row's token, in the memory of ``out_ND`` where kernels run."""
    if runs_kernel(x_TD):
        from moe_kernels.mlp.rows_kernel import expand_triton  # noqa: PLC0415

        return expand_triton(x_TD, rows.row_of_slot_TK, out_ND)
    return expand_rows(x_TD, rows.slot_of_row_N, rows.row_of_slot_TK)


def _combine(
    y_ND: Tensor, rows: RoutedRows, weight_TK: Tensor | None, dweight_N: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Sum the rows of each token in float32; bring gradients of rows' weights to their routes."""
    if runs_kernel(y_ND):
        from moe_kernels.mlp.rows_kernel import combine_triton  # noqa: PLC0415

        if weight_TK is not None:
            weight_TK = weight_TK.contiguous()
        return combine_triton(y_ND, rows.row_of_slot_TK, weight_TK, dweight_N)
    spare = torch.nn.functional.pad
    row_TK = rows_of_slots(rows.row_of_slot_TK)
    y_TD = combine(spare(y_ND, (0, 0, 0, 1)), row_TK, weight_TK, torch.float32)
    if dweight_N is None:
        return y_TD, None
    dweight_TK = spare(dweight_N, (0, 1)).index_select(0, row_TK.view(-1)).view(row_TK.shape)
    return y_TD, dweight_TK


def _dswiglu(
    dact_NF: Tensor,
    h_NG: Tensor,
    offsets_E1: Tensor,
    weight_TK: Tensor | None,
    slot_of_row_N: Tensor | None,
    recipe: str,
    rounding: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradient in MXFP8 (data and scales) and plain, the activation, that of weights.

    Where a run of 128 values spans gate and up, plain torch: the kernel would begin another there.
    """
    args = (dact_NF, h_NG, offsets_E1, weight_TK, slot_of_row_N, recipe, rounding)
    if recipe != "mx128" or dact_NF.shape[1] % CHUNK == 0:
        return mx.quantize_dswiglu(*args)
    dh, dh_NG, act_NF, dweight_N = quantize_dswiglu_reference(*args)
    if dweight_N is None:
        dweight_N = h_NG.new_empty(0, dtype=torch.float32)
    return dh.data_ND, dh.scale_NB, dh_NG, act_NF, dweight_N


def grouped_backward(
    dy_RD: Tensor,
    x: MXTensor,
    gate_up_t: MXTensor,
    down_t: MXTensor,
    offsets_E1: Tensor,
    h_RG: Tensor,
    recipe: str,
    rounding: str,
    weights: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the rows and of both weights; empty ones if those are frozen."""
    tiles = tiles_of(x, offsets_E1, len(x.data_ND), len(down_t.data_ND), recipe)
    dy = MXTensor(*mx.quantize(dy_RD, recipe, rounding))
    dact_RF = multiply(dy, down_t, offsets_E1, recipe, h_RG.dtype, tiles=tiles)
    dh_data, dh_scale, dh_RG, act_RF, _ = _dswiglu(
        dact_RF, h_RG, offsets_E1, None, None, recipe, rounding
    )
    del dy, dact_RF
    dh = MXTensor(dh_data, dh_scale)
    dx_RD = multiply(dh, gate_up_t, offsets_E1, recipe, h_RG.dtype, tiles=tiles)
    del dh, dh_data, dh_scale
    if not weights:
        return dx_RD, h_RG.new_empty(0), h_RG.new_empty(0)
    dw_down = grouped_mm_dw(act_RF, dy_RD, offsets_E1)
    del act_RF
    x_RD = _value_rows(x, None, scratch(h_RG, *x.data_ND.shape))
    return dx_RD, grouped_mm_dw(x_RD, dh_RG, offsets_E1), dw_down


def expert_forward(
    x: MXTensor,
    gate_up: MXTensor,
    down: MXTensor,
    weight_TK: Tensor,
    rows: RoutedRows,
    recipe: str,
    rounding: str,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Return the output of each token and the pre-activation of each row."""
    y_ND, h_NG = mlp_forward(
        x, gate_up, down, rows.offsets_E1, recipe, rounding, dtype,
        rows.slot_of_row_N, weight_TK.shape[1],
    )  # fmt: skip
    return _combine(y_ND, rows, weight_TK, None)[0], h_NG


def expert_backward(
    dy_TD: Tensor,
    x: MXTensor,
    gate_up_t: MXTensor,
    down_t: MXTensor,
    weight_TK: Tensor,
    rows: RoutedRows,
    h_NG: Tensor,
    recipe: str,
    rounding: str,
    weights: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of tokens, both weights (empty if frozen) and routing weights."""
    offsets_E1, slot_of_row_N = rows.offsets_E1, rows.slot_of_row_N
    N, K = weight_TK.numel(), weight_TK.shape[1]
    tiles = tiles_of(x, offsets_E1, N, len(down_t.data_ND), recipe)
    dy = MXTensor(*mx.quantize(dy_TD, recipe, rounding))
    dact_NF = multiply(
        dy, down_t, offsets_E1, recipe, h_NG.dtype,
        tiles=tiles, slot_of_row_N=slot_of_row_N, top_k=K,
    )  # fmt: skip
    dh_data, dh_scale, dh_NG, act_NF, dweight_N = _dswiglu(
        dact_NF, h_NG, offsets_E1, weight_TK.contiguous(), slot_of_row_N, recipe, rounding
    )
    del dy, dact_NF
    dh = MXTensor(dh_data, dh_scale)
    rows_ND = multiply(dh, gate_up_t, offsets_E1, recipe, h_NG.dtype, tiles=tiles)
    del dh, dh_data, dh_scale
    dx_TD, dweight_TK = _combine(rows_ND, rows, None, dweight_N)
    assert dweight_TK is not None, "rows had weights"
    if not weights:
        return dx_TD, h_NG.new_empty(0), h_NG.new_empty(0), dweight_TK
    if len(down_t.data_ND) * x.data_ND.shape[1] > N:  # weights are larger than what they need
        rows_ND = _value_rows(x, rows, rows_ND)
        dw_gate_up = grouped_mm_dw(rows_ND, dh_NG, offsets_E1)
        del dh_NG
        rows_ND = _token_rows(dy_TD, rows, rows_ND)
        return dx_TD, dw_gate_up, grouped_mm_dw(act_NF, rows_ND, offsets_E1), dweight_TK
    rows_ND = _token_rows(dy_TD, rows, rows_ND)
    dw_down = grouped_mm_dw(act_NF, rows_ND, offsets_E1)
    del act_NF
    rows_ND = _value_rows(x, rows, rows_ND)
    return dx_TD, grouped_mm_dw(rows_ND, dh_NG, offsets_E1), dw_down, dweight_TK
