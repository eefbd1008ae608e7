"""From tokens to routed rows and back.

Buffers of routed rows have one row more than there are routes. It belongs to no expert, so it is
zero, and masked routes read it: no branch, and no 0 * NaN.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from moe_kernels.backend import runs_kernel
from moe_kernels.operator import operator
from moe_kernels.routing.groups import group_rows
from moe_kernels.routing.tiles import group_rows_and_tiles


class RoutedRows(NamedTuple):
    """Where the rows of a layer's experts come from and go to.

    Attributes:
        offsets_E1: int32; where each expert's rows begin, and where the last one's end.
        slot_of_row_N: int32; the route ``t*K + k`` of each row, -1 past the last offset.
        row_of_slot_TK: int32; the row of each route, -1 for masked ones.
        tile_map: int32; the tiles of rows, as in ``moe_kernels.routing.tiles``. Empty where no
            kernel runs.
        num_tiles: int32; how many there are. Empty where no kernel runs.
    """

    offsets_E1: Tensor
    slot_of_row_N: Tensor
    row_of_slot_TK: Tensor
    tile_map: Tensor
    num_tiles: Tensor


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
    if weight_TK is not None:  # a masked route's may be anything, NaN too
        weight_TK = weight_TK.masked_fill(row_TK == y_MD.shape[0] - 1, 0.0)
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


@operator("route_rows")
def route_rows(
    x_TD: Tensor, expert_TK: Tensor, num_experts: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the fields of ``RoutedRows``; ``x_TD`` says what will run, and so if tiles matter."""
    if not runs_kernel(x_TD):
        none, zero = (x_TD.new_empty(0, dtype=torch.int32) for _ in range(2))
        return RoutedRows(*group_rows(expert_TK, num_experts), none, zero)
    block_n = _block_n(x_TD, expert_TK, num_experts)
    groups, tiles = group_rows_and_tiles(expert_TK, num_experts, block_n)
    return RoutedRows(*groups, *tiles)


def _block_n(x_TD: Tensor, expert_TK: Tensor, num_experts: int) -> int:
    from moe_kernels.config import choose  # noqa: PLC0415 - of interest to kernels alone

    return choose("gate_up", x_TD, expert_TK.numel(), num_experts).block_n


@torch.library.register_fake("moe_kernels::route_rows")
def _(x_TD, expert_TK, num_experts):
    length, count = 0, 0
    if runs_kernel(x_TD):
        length = expert_TK.numel() // _block_n(x_TD, expert_TK, num_experts) + num_experts
        count = 1
    sizes = ((num_experts + 1,), (expert_TK.numel(),), expert_TK.shape, (length,), (count,))
    return tuple(x_TD.new_empty(size, dtype=torch.int32) for size in sizes)


@operator("expand_rows")
def expand_rows(x_TD: Tensor, slot_of_row_N: Tensor, row_of_slot_TK: Tensor) -> Tensor:
    """Return each row's token, zeros for rows of no route."""
    if runs_kernel(x_TD):
        from moe_kernels.mlp.rows_kernel import expand_triton  # noqa: PLC0415 - triton is optional

        return expand_triton(
            x_TD, row_of_slot_TK, x_TD.new_zeros(len(slot_of_row_N), x_TD.shape[1])
        )
    token_M = tokens_of_rows(slot_of_row_N, row_of_slot_TK.shape[1])
    return gather(x_TD, token_M)[:-1].masked_fill(slot_of_row_N[:, None] < 0, 0)


@operator("combine_rows")
def combine_rows(
    y_ND: Tensor, weight_TK: Tensor, slot_of_row_N: Tensor, row_of_slot_TK: Tensor
) -> Tensor:
    """Sum the rows of each token, weighted, in the order of its routes."""
    del slot_of_row_N  # the gradient needs it
    if runs_kernel(y_ND):
        from moe_kernels.mlp.rows_kernel import combine_triton  # noqa: PLC0415

        return combine_triton(y_ND.contiguous(), row_of_slot_TK, weight_TK.contiguous())[0]
    spared_MD = F.pad(y_ND, (0, 0, 0, 1))
    return combine(spared_MD, rows_of_slots(row_of_slot_TK), weight_TK, weight_TK.dtype)


@torch.library.register_fake("moe_kernels::expand_rows")
def _(x_TD, slot_of_row_N, row_of_slot_TK):
    del row_of_slot_TK
    return x_TD.new_empty(slot_of_row_N.shape[0], x_TD.shape[1])


@torch.library.register_fake("moe_kernels::combine_rows")
def _(y_ND, weight_TK, slot_of_row_N, row_of_slot_TK):
    del slot_of_row_N, row_of_slot_TK
    return y_ND.new_empty(weight_TK.shape[0], y_ND.shape[1])


def _save(ctx, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    del output
    ctx.save_for_backward(*inputs)


def _expand_autograd(ctx, dx_ND: Tensor) -> tuple[Tensor | None, ...]:
    _, slot_of_row_N, row_of_slot_TK = ctx.saved_tensors
    wide = torch.promote_types(dx_ND.dtype, torch.float32)
    one_TK = torch.ones_like(row_of_slot_TK, dtype=wide)
    return combine_rows(dx_ND, one_TK, slot_of_row_N, row_of_slot_TK), None, None


def _combine_autograd(ctx, dy_TD: Tensor) -> tuple[Tensor | None, ...]:
    y_ND, weight_TK, slot_of_row_N, row_of_slot_TK = ctx.saved_tensors
    dy_ND = expand_rows(dy_TD, slot_of_row_N, row_of_slot_TK).to(weight_TK.dtype)
    weight_N = weights_of_rows(weight_TK, slot_of_row_N)[:-1]
    dweight_M = F.pad((dy_ND * y_ND).sum(dim=1), (0, 1))
    dweight_TK = dweight_M.index_select(0, rows_of_slots(row_of_slot_TK).view(-1))
    dy_ND = (dy_ND * weight_N[:, None]).to(y_ND.dtype)
    return dy_ND, dweight_TK.view(weight_TK.shape), None, None


torch.library.register_autograd("moe_kernels::expand_rows", _expand_autograd, setup_context=_save)
torch.library.register_autograd("moe_kernels::combine_rows", _combine_autograd, setup_context=_save)
