"""Tokens to rows and rows to tokens: the part of the journey that stays on one rank.

Both are gathers in both directions, so nothing is added up in an order that could change: no
atomics, and the same bits on every run. Multiplication and addition stay two operations, because
a fused one may round differently in a vectorised loop and in its remainder, and then a row's
value would depend on its position.
"""

import torch
from torch import Tensor


def accumulator(*tensors: Tensor) -> torch.dtype:
    """Return the dtype to sum in: float32, or float64 if any of ``tensors`` is that."""
    wide = any(tensor.dtype == torch.float64 for tensor in tensors)
    return torch.float64 if wide else torch.float32


def rows_or_zero(x_MD: Tensor, index_N: Tensor) -> Tensor:
    """Return row ``index_N[n]`` of ``x_MD`` for each n, and zeros where the index is negative.

    Zeros are written, not multiplied in, so that a NaN of some other row cannot come through.

    Examples:
        >>> rows_or_zero(torch.tensor([[1.0], [torch.nan]]), torch.tensor([0, -1, 0]))
        tensor([[1.],
                [0.],
                [1.]])
    """
    if not len(x_MD):  # then every index is negative, and there is no row to stand in
        return x_MD.new_zeros(len(index_N), x_MD.shape[1])
    rows_ND = x_MD.index_select(0, index_N.clamp(min=0))
    return rows_ND.masked_fill_(index_N.lt(0)[:, None], 0)


def take_rows(x_TD: Tensor, slot_of_row_N: Tensor, row_of_slot_TK: Tensor) -> Tensor:
    """Copy each token once for each of its routes, in the order of the rows.

    Args:
        x_TD: Tokens.
        slot_of_row_N: The slot ``t * K + k`` of each row, -1 for a row that no route fills.
        row_of_slot_TK: Its inverse, -1 for a masked route.

    Returns:
        ``x_ND``, with zeros in rows that no route fills. The gradient of a token is summed over
        its rows in the order of k, in float32 or float64.
    """
    return _TakeRows.apply(x_TD, slot_of_row_N, row_of_slot_TK)


def sum_rows(
    y_ND: Tensor, weight_TK: Tensor, slot_of_row_N: Tensor, row_of_slot_TK: Tensor
) -> Tensor:
    """Sum the weighted rows of each token in the order of k, in float32 or float64.

    Args:
        y_ND: Rows, in the order of ``slot_of_row_N``.
        weight_TK: float32 or float64.
        slot_of_row_N: As in ``take_rows``.
        row_of_slot_TK: As in ``take_rows``.

    Returns:
        ``y_TD`` in the dtype of ``y_ND``. Differentiable with respect to rows and weights; for
        that ``y_ND`` is saved.
    """
    return _SumRows.apply(y_ND, weight_TK, slot_of_row_N, row_of_slot_TK)


class _TakeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TD: Tensor, slot_of_row_N: Tensor, row_of_slot_TK: Tensor) -> Tensor:
        ctx.save_for_backward(row_of_slot_TK)
        K = row_of_slot_TK.shape[1]
        return rows_or_zero(x_TD, slot_of_row_N.div(K, rounding_mode="floor"))

    @staticmethod
    def backward(ctx, dx_ND: Tensor):  # pyrefly: ignore[bad-override]
        (row_of_slot_TK,) = ctx.saved_tensors
        T, K = row_of_slot_TK.shape
        dx_TD = dx_ND.new_zeros(T, dx_ND.shape[1], dtype=accumulator(dx_ND))
        for k in range(K):
            dx_TD += rows_or_zero(dx_ND, row_of_slot_TK[:, k])
        return dx_TD.to(dx_ND.dtype), None, None


class _SumRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, y_ND: Tensor, weight_TK: Tensor, slot_of_row_N: Tensor, row_of_slot_TK: Tensor
    ) -> Tensor:
        ctx.save_for_backward(y_ND, weight_TK, slot_of_row_N, row_of_slot_TK)
        T, K = row_of_slot_TK.shape
        wide = accumulator(y_ND, weight_TK)
        y_TD = y_ND.new_zeros(T, y_ND.shape[1], dtype=wide)
        for k in range(K):
            row_T = row_of_slot_TK[:, k]
            weighted_TD = rows_or_zero(y_ND, row_T).to(wide) * weight_TK[:, k, None]
            # Once more, for a masked route whose weight is not finite.
            y_TD += weighted_TD.masked_fill_(row_T.lt(0)[:, None], 0)
        return y_TD.to(y_ND.dtype)

    @staticmethod
    def backward(ctx, dy_TD: Tensor):  # pyrefly: ignore[bad-override]
        y_ND, weight_TK, slot_of_row_N, row_of_slot_TK = ctx.saved_tensors
        K = row_of_slot_TK.shape[1]
        wide = accumulator(y_ND, weight_TK)
        dy_ND = dweight_TK = None
        if ctx.needs_input_grad[0]:
            token_N = slot_of_row_N.div(K, rounding_mode="floor")
            weight_N1 = rows_or_zero(weight_TK.reshape(-1, 1), slot_of_row_N)
            dy_ND = (rows_or_zero(dy_TD, token_N).to(wide) * weight_N1).to(y_ND.dtype)
        if ctx.needs_input_grad[1]:
            dweight_TK = torch.empty_like(weight_TK)
            for k in range(K):
                row_TD = rows_or_zero(y_ND, row_of_slot_TK[:, k]).to(wide)
                dweight_TK[:, k] = (row_TD * dy_TD).sum(1)
            dweight_TK.masked_fill_(row_of_slot_TK.lt(0), 0)
        return dy_ND, dweight_TK, None, None
