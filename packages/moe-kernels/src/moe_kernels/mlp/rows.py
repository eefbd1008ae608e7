"""From tokens to routed rows and back.

Buffers of routed rows have one row more than there are routes. It belongs to no expert, so it is
zero, and masked routes read it: no branch, and no 0 * NaN.
"""

import torch
from torch import Tensor
from torch.nn import functional as F


def tokens_of_rows(slot_of_row_N: Tensor, top_k: int) -> Tensor:
    """Return the token of each row, int32; rows of no expert and the spare one read token 0."""
    token_N = slot_of_row_N.clamp(min=0).div(top_k, rounding_mode="floor")
    return F.pad(token_N, (0, 1))


def gather(x_TD: Tensor, token_M: Tensor) -> Tensor:
    """Copy each row's token. Without tokens the spare row has none to read, and is zero."""
    if x_TD.shape[0] == 0:
        return x_TD.new_zeros(token_M.shape[0], x_TD.shape[1])
    return x_TD.index_select(0, token_M)


def weights_of_rows(weight_TK: Tensor, slot_of_row_N: Tensor) -> Tensor:
    """Return the weight of each row, 0 for rows of no expert and the spare one."""
    weight_N = weight_TK.reshape(-1).index_select(0, slot_of_row_N.clamp(min=0))
    return F.pad(weight_N.masked_fill(slot_of_row_N < 0, 0.0), (0, 1))


def rows_of_slots(row_of_slot_TK: Tensor) -> Tensor:
    """Return the row of each slot; masked ones read the spare row."""
    return row_of_slot_TK.masked_fill(row_of_slot_TK < 0, row_of_slot_TK.numel())


def combine(y_MD: Tensor, row_TK: Tensor, weight_TK: Tensor | None, wide: torch.dtype) -> Tensor:
    """Sum the rows of each token in the order of its slots, weighted, in ``wide``."""
    total_TD = None
    for k in range(row_TK.shape[1]):
        y_TD = y_MD.index_select(0, row_TK[:, k]).to(wide)
        if total_TD is None:
            total_TD = y_TD if weight_TK is None else y_TD.mul_(weight_TK[:, k, None])
        elif weight_TK is None:
            total_TD.add_(y_TD)
        else:
            total_TD.addcmul_(y_TD, weight_TK[:, k, None])
    assert total_TD is not None, "the caller checks that K >= 1"
    return total_TD.to(y_MD.dtype)
