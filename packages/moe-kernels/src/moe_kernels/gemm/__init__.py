"""Grouped matrix product: one weight matrix for each contiguous group of rows."""

import torch
from torch import Tensor

from moe_kernels.gemm import op
from moe_kernels.gemm.check import check_grouped_mm, check_grouped_mm_dw

__all__ = ["grouped_mm", "grouped_mm_dw"]


def grouped_mm(x_ND: Tensor, w_EFD: Tensor, offsets_E1: Tensor) -> Tensor:
    """Multiply each group of rows by its own expert's weight: ``y = x @ w[e].T``.

    Rows ``offsets_E1[e]:offsets_E1[e + 1]`` of ``x_ND`` belong to expert ``e``. A group may be
    empty. Rows at or past ``offsets_E1[-1]`` are not read and give zeros, in ``y_NF`` and in the
    gradient of ``x_ND``; the gradient of the weight of an expert without rows is exactly zero.
    Sums run in float32 (float64 for float64) and are rounded once, to ``x_ND.dtype``.

    On CUDA a Triton kernel runs and the host does not wait; D and F are multiples of 16 there.
    float64 and tensors elsewhere take a loop of ``torch.mm``. Differentiable twice.

    Args:
        x_ND: Rows sorted by expert. bfloat16, float16, float32 or float64. On CUDA, what does not
            lie in rows of stride 1 that begin at multiples of 16 bytes is copied first.
        w_EFD: One ``(F, D)`` weight for each expert, same dtype and device. Either of F and D may
            have stride 1; other layouts are copied first on CUDA.
        offsets_E1: int32, starts at 0, does not decrease, ends at or before N. Where reading it
            makes nobody wait (CPU), it is checked.

    Returns:
        ``y_NF``, in ``x_ND.dtype``.

    Raises:
        ValueError: If shapes or devices do not fit together.
        TypeError: If a dtype does not fit.

    Examples:
        >>> import torch
        >>> x_ND, w_EFD = torch.ones(4, 2), torch.stack([torch.eye(2), 2 * torch.eye(2)])
        >>> grouped_mm(x_ND, w_EFD, torch.tensor([0, 1, 3], dtype=torch.int32))
        tensor([[1., 1.],
                [2., 2.],
                [2., 2.],
                [0., 0.]])
    """
    check_grouped_mm(x_ND, w_EFD, offsets_E1)
    return op.grouped_mm(x_ND, w_EFD, offsets_E1)


def grouped_mm_dw(
    x_ND: Tensor, dy_NF: Tensor, offsets_E1: Tensor, *, out_EFD: Tensor | None = None
) -> Tensor:
    """Return the weight gradient of ``grouped_mm``: ``dw[e] = dy[rows of e].T @ x[rows of e]``.

    Rows at or past ``offsets_E1[-1]`` are not read. An expert without rows gets exact zeros.

    Args:
        x_ND: Rows sorted by expert, as in ``grouped_mm``.
        dy_NF: Gradient of the product, same rows, dtype and device.
        offsets_E1: int32, as in ``grouped_mm``.
        out_EFD: Main gradient to add to, in place and without rounding the sum first: contiguous
            float32 (float64 for float64). Not differentiable.

    Returns:
        ``dw_EFD``, in ``x_ND.dtype``, summed in float32 (float64 for float64); or ``out_EFD``.

    Raises:
        ValueError: If shapes or devices do not fit together.
        TypeError: If a dtype does not fit.

    Examples:
        >>> import torch
        >>> x_ND, dy_NF = torch.ones(3, 1), torch.ones(3, 2)
        >>> grouped_mm_dw(x_ND, dy_NF, torch.tensor([0, 3, 3], dtype=torch.int32)).flatten(1)
        tensor([[3., 3.],
                [0., 0.]])
    """
    check_grouped_mm_dw(x_ND, dy_NF, offsets_E1, out_EFD)
    if out_EFD is None:
        return op.grouped_mm_dw(x_ND, dy_NF, offsets_E1)
    with torch.no_grad():
        op.grouped_mm_dw_add(x_ND, dy_NF, offsets_E1, out_EFD)
    return out_EFD
