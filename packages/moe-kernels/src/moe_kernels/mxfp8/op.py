"""Quantising as torch operators. None of them has a derivative."""

import torch
from torch import Tensor

from moe_kernels.backend import runs_kernel
from moe_kernels.gemm.reference import read_spans
from moe_kernels.mxfp8 import reference
from moe_kernels.mxfp8.format import BLOCK, CHUNK
from moe_kernels.operator import not_differentiable, operator

Pair = tuple[Tensor, Tensor]


def _check_values(offsets_E1: Tensor | None, num_rows: int) -> None:
    """Raise for offsets that are none, where reading them makes nobody wait."""
    if offsets_E1 is not None and offsets_E1.device.type == "cpu":
        read_spans(offsets_E1, num_rows)


def _floats(data: Tensor, scale: Tensor) -> Pair:
    """Let the bytes that a kernel wrote be float8."""
    return data.view(torch.float8_e4m3fn), scale


@operator("mx_quantize")
def quantize(x_ND: Tensor, recipe: str, rounding: str) -> Pair:
    """Return data and scales along the last axis."""
    if runs_kernel(x_ND):
        from moe_kernels.mxfp8 import rows_kernel  # noqa: PLC0415 - triton is optional

        return _floats(*rows_kernel.quantize_triton(x_ND, recipe, rounding))
    return reference.quantize_reference(x_ND, recipe, rounding)


@operator("mx_quantize_columns")
def quantize_columns(x_ND: Tensor, recipe: str, rounding: str, offsets_E1: Tensor | None) -> Pair:
    """Return data and scales of the transpose, group by group."""
    _check_values(offsets_E1, x_ND.shape[-2])
    if runs_kernel(x_ND):
        from moe_kernels.mxfp8.columns_kernel import quantize_columns_triton  # noqa: PLC0415

        return _floats(*quantize_columns_triton(x_ND, recipe, rounding, offsets_E1))
    return reference.quantize_columns_reference(x_ND, recipe, rounding, offsets_E1)


@operator("mx_quantize_both")
def quantize_both(
    x_ND: Tensor, recipe: str, rounding: str, offsets_E1: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return data and scales of the rows, then those of the columns."""
    _check_values(offsets_E1, x_ND.shape[-2])
    if runs_kernel(x_ND):
        from moe_kernels.mxfp8.columns_kernel import quantize_both_triton  # noqa: PLC0415

        row, row_scale, column, column_scale = quantize_both_triton(
            x_ND, recipe, rounding, offsets_E1
        )
        row, column = row.view(torch.float8_e4m3fn), column.view(torch.float8_e4m3fn)
        return row, row_scale, column, column_scale
    rows_ND = reference.live_rows(x_ND, offsets_E1)
    row, row_scale = reference.quantize_reference(rows_ND, recipe, rounding)
    column, column_scale = reference.quantize_columns_reference(x_ND, recipe, rounding, offsets_E1)
    return row, row_scale, column, column_scale


@operator("mx_quantize_swiglu")
def quantize_swiglu(h_NG: Tensor, recipe: str, rounding: str, offsets_E1: Tensor | None) -> Pair:
    """Return data and scales of the activation."""
    _check_values(offsets_E1, h_NG.shape[0])
    if runs_kernel(h_NG):
        from moe_kernels.mxfp8 import rows_kernel  # noqa: PLC0415

        return _floats(*rows_kernel.quantize_swiglu_triton(h_NG, recipe, rounding, offsets_E1))
    return reference.quantize_swiglu_reference(h_NG, recipe, rounding, offsets_E1)


@operator("mx_quantize_routed")
def quantize_routed(
    x_TD: Tensor, slot_of_row_N: Tensor, weight_TK: Tensor, recipe: str, rounding: str
) -> Pair:
    """Return data and scales of each row's weighted token."""
    if runs_kernel(x_TD):
        from moe_kernels.mxfp8.rows_kernel import quantize_routed_triton  # noqa: PLC0415

        return _floats(*quantize_routed_triton(x_TD, slot_of_row_N, weight_TK, recipe, rounding))
    return reference.quantize_routed_reference(x_TD, slot_of_row_N, weight_TK, recipe, rounding)


@operator("mx_quantize_dswiglu")
def quantize_dswiglu(
    dact_NF: Tensor,
    h_NG: Tensor,
    offsets_E1: Tensor,
    weight_TK: Tensor | None,
    slot_of_row_N: Tensor | None,
    recipe: str,
    rounding: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return data, scales, ``dh_NG``, ``act_NF`` and ``dweight_N``, empty without weights."""
    _check_values(offsets_E1, h_NG.shape[0])
    args = (dact_NF, h_NG, offsets_E1, weight_TK, slot_of_row_N, recipe, rounding)
    if runs_kernel(h_NG):
        from moe_kernels.mxfp8.dswiglu_kernel import quantize_dswiglu_triton  # noqa: PLC0415

        data, scale, dh_NG, act_NF, dweight_N = quantize_dswiglu_triton(*args)
        data, scale = _floats(data, scale)
    else:
        (data, scale), dh_NG, act_NF, dweight_N = reference.quantize_dswiglu_reference(*args)
    if dweight_N is None:
        dweight_N = h_NG.new_empty(0, dtype=torch.float32)
    return data, scale, dh_NG, act_NF, dweight_N


@operator("mx_dequantize")
def dequantize(data_ND: Tensor, scale_NB: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values, exact in float32 and rounded once from there."""
    if runs_kernel(data_ND.new_empty(0, dtype=dtype)):
        from moe_kernels.mxfp8.dequantize_kernel import dequantize_triton  # noqa: PLC0415

        return dequantize_triton(data_ND, scale_NB, dtype)
    return reference.dequantize_reference(data_ND, scale_NB).to(dtype)


def _empty(like: Tensor, *shape: int) -> Pair:
    """Return MXFP8 memory of a shape."""
    data = like.new_empty(shape, dtype=torch.float8_e4m3fn)
    return data, like.new_empty((*shape[:-1], shape[-1] // BLOCK), dtype=torch.uint8)


def _empty_columns(x_ND: Tensor, offsets_E1: Tensor | None) -> Pair:
    *leading, N, D = x_ND.shape
    if offsets_E1 is not None:
        N = CHUNK * (N // CHUNK + offsets_E1.shape[0] - 1)
    return _empty(x_ND, *leading, D, N)


@torch.library.register_fake("moe_kernels::mx_quantize")
def _(x_ND, recipe, rounding):
    del recipe, rounding
    return _empty(x_ND, *x_ND.shape)


@torch.library.register_fake("moe_kernels::mx_dequantize")
def _(data_ND, scale_NB, dtype):
    del scale_NB
    return data_ND.new_empty(data_ND.shape, dtype=dtype)


@torch.library.register_fake("moe_kernels::mx_quantize_columns")
def _(x_ND, recipe, rounding, offsets_E1):
    del recipe, rounding
    return _empty_columns(x_ND, offsets_E1)


@torch.library.register_fake("moe_kernels::mx_quantize_both")
def _(x_ND, recipe, rounding, offsets_E1):
    del recipe, rounding
    return *_empty(x_ND, *x_ND.shape), *_empty_columns(x_ND, offsets_E1)


@torch.library.register_fake("moe_kernels::mx_quantize_swiglu")
def _(h_NG, recipe, rounding, offsets_E1):
    del recipe, rounding, offsets_E1
    return _empty(h_NG, h_NG.shape[0], h_NG.shape[1] // 2)


@torch.library.register_fake("moe_kernels::mx_quantize_routed")
def _(x_TD, slot_of_row_N, weight_TK, recipe, rounding):
    del weight_TK, recipe, rounding
    return _empty(x_TD, slot_of_row_N.shape[0], x_TD.shape[1])


@torch.library.register_fake("moe_kernels::mx_quantize_dswiglu")
def _(dact_NF, h_NG, offsets_E1, weight_TK, slot_of_row_N, recipe, rounding):
    del offsets_E1, slot_of_row_N, recipe, rounding
    N = 0 if weight_TK is None else h_NG.shape[0]
    dweight_N = h_NG.new_empty(N, dtype=torch.float32)
    dh = _empty(h_NG, *h_NG.shape)
    return *dh, h_NG.new_empty(h_NG.shape), h_NG.new_empty(dact_NF.shape), dweight_N


for _name in (
    "quantize", "quantize_columns", "quantize_both", "quantize_swiglu", "quantize_routed",
    "quantize_dswiglu", "dequantize",
):  # fmt: skip
    not_differentiable(
        f"mx_{_name}", "what is rounded to steps is flat between them; a layer that "
        "quantizes has a backward of its own",
    )  # fmt: skip
