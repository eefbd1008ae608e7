"""What the grouped matrix products compute, written to be read."""

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor


class Span(NamedTuple):
    """The rows ``start:end`` of one expert."""

    expert: int
    start: int
    end: int


def read_spans(offsets_E1: Tensor, num_rows: int) -> list[Span]:
    """Bring the offsets to the host, once, and return the rows of every expert.

    Raises:
        ValueError: If the offsets do not start at 0, decrease, or pass the last row.
    """
    offsets = offsets_E1.tolist()
    if offsets[0] != 0:
        raise ValueError(f"offsets_E1 must start at 0, got {offsets[0]}")
    if offsets[-1] > num_rows:
        raise ValueError(f"offsets_E1 ends at {offsets[-1]}, but there are {num_rows} rows")
    spans = [Span(expert, start, end) for expert, (start, end) in enumerate(pairwise(offsets))]
    for _, start, end in spans:
        if end < start:
            raise ValueError(f"offsets_E1 must not decrease, got {start} before {end}")
    return spans


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which products of ``dtype`` are summed."""
    return torch.promote_types(dtype, torch.float32)


def grouped_mm_reference(x_ND: Tensor, w_EFD: Tensor, offsets_E1: Tensor) -> Tensor:
    """Multiply group by group, accumulating in float32 (float64 for float64)."""
    wide = accumulator(x_ND.dtype)
    y_NF = x_ND.new_zeros(x_ND.shape[0], w_EFD.shape[1])
    for e, start, end in read_spans(offsets_E1, x_ND.shape[0]):
        y_NF[start:end] = x_ND[start:end].to(wide) @ w_EFD[e].T.to(wide)
    return y_NF


def grouped_mm_dw_reference(x_ND: Tensor, dy_NF: Tensor, offsets_E1: Tensor) -> Tensor:
    """Sum the outer products of each expert's rows; an expert without rows gets zeros."""
    E, F, D = offsets_E1.shape[0] - 1, dy_NF.shape[1], x_ND.shape[1]
    dw_EFD = x_ND.new_zeros(E, F, D, dtype=accumulator(x_ND.dtype))
    add_dw_reference(x_ND, dy_NF, offsets_E1, dw_EFD)
    return dw_EFD.to(x_ND.dtype)


def add_dw_reference(x_ND: Tensor, dy_NF: Tensor, offsets_E1: Tensor, out_EFD: Tensor) -> None:
    """Add each expert's sum of outer products, in float32 (float64 for float64), in place."""
    wide = accumulator(x_ND.dtype)
    for e, start, end in read_spans(offsets_E1, x_ND.shape[0]):
        out_EFD[e] += dy_NF[start:end].T.to(wide) @ x_ND[start:end].to(wide)
