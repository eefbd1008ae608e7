"""A linear layer in MXFP8, for attention and shared experts: one group of the grouped product."""

import torch
from torch import Tensor

from moe_kernels.gemm.check import check_same_device, check_same_dtype
from moe_kernels.mxfp8 import MXTensor, Recipe, dequantize, quantize
from moe_kernels.mxfp8 import op as mx
from moe_kernels.mxgemm.op import multiply
from moe_kernels.mxmlp.check import check_mx, check_quantized
from moe_kernels.mxmlp.weights import MXWeight, quantize_weight
from moe_kernels.operator import not_differentiable, operator, wants_gradient


def mx_linear(
    x: Tensor, w_FD: Tensor, *, recipe: Recipe, quantized: MXWeight | None = None
) -> Tensor:
    """Return ``x @ w.T`` with both rounded to MXFP8 once and multiplied in float8.

    The gradient of ``x`` is a product in float8 too, of the rounded gradient and the weight rounded
    along its other axis. That of the weight runs in the dtype of ``x``, from the rounded ``x``,
    which is all that is kept, and the gradient as it came.

    Args:
        x: ``[..., D]``: bfloat16, float16 or float32. D and F are multiples of 32.
        w_FD: Weight, as ``torch.nn.functional.linear`` takes it, in the dtype of ``x``.
        recipe: Which values share a scale.
        quantized: The weight as ``quantize_weight`` or ``WeightCache`` gives it; made here if not
            given. Whether it is of this weight, the owner knows.

    Returns:
        ``[..., F]`` in the dtype of ``x``.

    Raises:
        ValueError: If a shape or the snapshot does not fit, or the recipe is unknown.
        TypeError: If a dtype does not fit.

    Examples:
        >>> mx_linear(torch.ones(2, 3, 32), torch.ones(64, 32), recipe="mxrow").shape
        torch.Size([2, 3, 64])
    """
    if w_FD.ndim != 2 or x.ndim < 1 or x.shape[-1] != w_FD.shape[1]:
        raise ValueError(
            f"D differs: x has shape {tuple(x.shape)}, w_FD {tuple(w_FD.shape)}, whose last axes "
            "must be equal"
        )
    check_same_dtype({"x": x, "w_FD": w_FD})
    check_same_device({"x": x, "w_FD": w_FD})
    check_mx(recipe, x.dtype, {"D": w_FD.shape[1], "F": w_FD.shape[0]})
    keep = wants_gradient(x, w_FD)
    if quantized is None:
        quantized = quantize_weight(w_FD, recipe=recipe, columns=keep)
    check_quantized("quantized", quantized, w_FD, recipe, keep)
    x_ND = x.reshape(-1, x.shape[-1])
    rows = quantize(x_ND.detach(), recipe=recipe, rounding=quantized.rounding)
    columns = quantized.columns or MXTensor(*(t.new_empty(0) for t in rows))
    y_NF = _linear(x_ND, w_FD, *rows, *quantized.rows, *columns, recipe, quantized.rounding, keep)
    return y_NF.view(*x.shape[:-1], w_FD.shape[0])


def _product(x: MXTensor, w: MXTensor, recipe: str, dtype: torch.dtype) -> Tensor:
    """Multiply as one group."""
    N = x.data_ND.shape[0]
    offsets_2 = torch.arange(2, dtype=torch.int32, device=x.data_ND.device) * N
    return multiply(x, MXTensor(w.data_ND[None], w.scale_NB[None]), offsets_2, recipe, dtype)


@operator("mx_linear")
def _linear(
    x_ND: Tensor,
    w_FD: Tensor,
    data_ND: Tensor,
    scale_NB: Tensor,
    rows_FD: Tensor,
    rows_scale: Tensor,
    columns_DF: Tensor,
    columns_scale: Tensor,
    recipe: str,
    rounding: str,
    keep: bool,
) -> Tensor:
    """Return the product; ``x_ND`` and ``w_FD`` are there for their gradients."""
    del w_FD, columns_DF, columns_scale, rounding, keep
    x, w = MXTensor(data_ND, scale_NB), MXTensor(rows_FD, rows_scale)
    return _product(x, w, recipe, x_ND.dtype)


@operator("mx_linear_backward")
def _linear_backward(
    dy_NF: Tensor,
    data_ND: Tensor,
    scale_NB: Tensor,
    columns_DF: Tensor,
    columns_scale: Tensor,
    recipe: str,
    rounding: str,
    rows: bool,
    weights: bool,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the rows and of the weight; an empty one for what is frozen."""
    dx_ND, dw_FD = dy_NF.new_empty(0), dy_NF.new_empty(0)
    if rows:
        dy = MXTensor(*mx.quantize(dy_NF, recipe, rounding))
        dx_ND = _product(dy, MXTensor(columns_DF, columns_scale), recipe, dy_NF.dtype)
    if weights:
        dw_FD = dy_NF.mT @ dequantize(MXTensor(data_ND, scale_NB), dtype=dy_NF.dtype)
    return dx_ND, dw_FD


@torch.library.register_fake("moe_kernels::mx_linear")
def _(x_ND, w_FD, *rest):
    del rest
    return x_ND.new_empty(x_ND.shape[0], w_FD.shape[0])


@torch.library.register_fake("moe_kernels::mx_linear_backward")
def _(dy_NF, data_ND, scale_NB, columns_DF, columns_scale, recipe, rounding, rows, weights):
    del scale_NB, columns_DF, columns_scale, recipe, rounding
    dx_ND = dy_NF.new_empty(data_ND.shape if rows else 0)
    return dx_ND, dy_NF.new_empty((dy_NF.shape[1], data_ND.shape[1]) if weights else 0)


def _save(ctx, inputs: tuple, output: Tensor) -> None:
    del output
    _, _, data_ND, scale_NB, _, _, columns_DF, columns_scale, ctx.recipe, ctx.rounding, keep = (
        inputs
    )
    if keep:
        ctx.save_for_backward(data_ND, scale_NB, columns_DF, columns_scale)


def _autograd(ctx, dy_NF: Tensor) -> tuple[Tensor | None, ...]:
    rows, weights = ctx.needs_input_grad[:2]
    dx_ND, dw_FD = _linear_backward(
        dy_NF, *ctx.saved_tensors, ctx.recipe, ctx.rounding, rows, weights
    )
    return dx_ND if rows else None, dw_FD if weights else None, *(None,) * 9


torch.library.register_autograd("moe_kernels::mx_linear", _autograd, setup_context=_save)
not_differentiable(
    "mx_linear_backward", "a product of rounded tensors has one gradient, and no second"
)
