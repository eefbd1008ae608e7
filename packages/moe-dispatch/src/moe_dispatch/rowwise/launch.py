"""Launch the kernels of ``carry/kernel.py`` with what a channel knows: a function for each step."""

import torch
import triton
import triton.language as tl
from moe_kernels import dequantize, quantize
from moe_kernels.mxfp8 import MXTensor
from torch import Tensor

from moe_dispatch.plan import MX_BLOCK
from moe_dispatch.rowwise.channel import Channel
from moe_dispatch.rowwise.protocol import Clock
from moe_dispatch.rowwise.slots import Arrived, Slots

_TRITON = {torch.float64: tl.float64, torch.float32: tl.float32}
MAX_BLOCK = 2048
"""Columns that a program moves at once."""
PUT_TUNING, PULL_WARPS = ("", 4), 4
"""How stores go through the cache, and warps of a program."""


def put(
    channel: Channel,
    x_TN: Tensor,
    slots: Slots,
    weight_TK: Tensor | None,
    direct_RN: Tensor,
    direct_weight_R: Tensor,
) -> None:
    plan = channel.plan
    T, N = x_TN.shape
    K = plan.top_k
    block = block_of(N)
    meta = direct_weight_R if weight_TK is None else weight_TK
    args = (
        channel.heap.bases_W, channel.state, x_TN, meta, slots.to_TK, slots.place_TK,
        slots.rank_TK, slots.row_TK, direct_RN, direct_weight_R, int(Clock.PUTS),
        channel.at("rows"), channel.size("rows"), channel.at("weight"), channel.size("weight"),
        channel.at("row"), channel.size("row"), channel.at("origin"), channel.size("origin"),
        channel.rank * plan.max_tokens * K,
    )  # fmt: skip
    channel.launch(
        channel.carry.put_rows_kernel, (T, triton.cdiv(N, block)), *args,
        N=N, ROW_BYTES=plan.row_bytes, K=K, BLOCK=block, BLOCK_K=triton.next_power_of_2(K),
        META=weight_TK is not None, DEDUP=plan.dedup, PUSHED=plan.combine == "push",
        DIRECT=channel.direct, CACHE=PUT_TUNING[0], num_warps=PUT_TUNING[1],
    )  # fmt: skip
    if channel.remote is not None:
        channel.remote.put_rows(x_TN, slots, weight_TK)


def scatter(
    channel: Channel,
    dy_TD: Tensor,
    y_RD: Tensor,
    slots: Slots,
    weight_R: Tensor,
    dy_RD: Tensor,
    dweight_R: Tensor,
) -> None:
    """Put gradients, weighted, where there is one rank."""
    T, N = dy_TD.shape
    channel.launch(
        channel.carry.scatter_gradients_kernel, (T,), dy_TD, y_RD, weight_R, slots.place_TK, dy_RD,
        dweight_R, N=N, K=channel.plan.top_k, BLOCK=block_of(N), ACC=_TRITON[channel.plan.wide],
        enable_fp_fusion=False,
    )  # fmt: skip


def take(
    channel: Channel,
    out_RN: Tensor,
    weight_R: Tensor,
    slots: Slots,
    y_RD: Tensor | None = None,
    dweight_R: Tensor | None = None,
) -> None:
    """Copy rows out of the buffer; forward with their weights, backward maybe scaled by them."""
    plan = channel.plan
    C, N = out_RN.shape
    if channel.direct:  # the rows are where they belong; those past the last are not
        channel.launch(
            channel.carry.clear_tail_kernel, (C,), out_RN, channel.state, slots.count_1,
            0, int(Clock.PUTS), N=N, ROW_STRIDE=N, BLOCK=block_of(N), num_warps=1,
        )  # fmt: skip
        return
    rows_PB = typed_rows(channel, "rows", out_RN.dtype)
    backward = dweight_R is not None
    weights = weight_R if backward else channel.views["weight"]
    channel.launch(
        channel.carry.take_rows_kernel, (C,), rows_PB, weights, channel.state, slots.count_1,
        out_RN if y_RD is None else y_RD, out_RN, weight_R,
        weight_R if dweight_R is None else dweight_R,
        rows_PB.stride(0), plan.num_places * plan.meta_slots, int(Clock.PUTS),
        N=N, ROW_STRIDE=rows_PB.stride(1), BLOCK=block_of(N), META=not backward,
        SCALED=y_RD is not None, ACC=_TRITON[plan.wide], enable_fp_fusion=False,
    )  # fmt: skip


def clear_tail(channel: Channel, slots: Slots) -> None:
    """Make rows of the receive buffer zeros that nobody sent, where it is lent out."""
    plan = channel.plan
    rows_PB = typed_rows(channel, "rows", plan.dtype)
    channel.launch(
        channel.carry.clear_tail_kernel, (plan.capacity,), rows_PB, channel.state, slots.count_1,
        rows_PB.stride(0), int(Clock.PUTS), N=plan.dim, ROW_STRIDE=rows_PB.stride(1),
        BLOCK=block_of(plan.dim),
    )  # fmt: skip


def expand(
    channel: Channel,
    out_RN: Tensor,
    slots: Slots,
    arrived: Arrived,
    y_RD: Tensor | None = None,
    dweight_R: Tensor | None = None,
) -> None:
    """Copy each arrived token to the rows that it stands for."""
    plan = channel.plan
    C, N = out_RN.shape
    rows_PB = typed_rows(channel, "rows", out_RN.dtype)
    backward = dweight_R is not None
    channel.launch(
        channel.carry.expand_rows_kernel, (max(plan.num_places, C),), rows_PB, arrived.row_PK,
        arrived.weight_PK, channel.state, slots.places_1, slots.count_1,
        out_RN if y_RD is None else y_RD, out_RN, arrived.weight_R,
        arrived.weight_R if dweight_R is None else dweight_R,
        rows_PB.stride(0), int(Clock.PUTS), C,
        N=N, ROW_STRIDE=rows_PB.stride(1), K=plan.top_k, BLOCK=block_of(N), META=not backward,
        SCALED=y_RD is not None, ACC=_TRITON[plan.wide], enable_fp_fusion=False,
    )  # fmt: skip


def give(channel: Channel, y_RD: Tensor, scalar_R: Tensor | None, slots: Slots) -> None:
    plan = channel.plan
    results = typed_rows(channel, "results", y_RD.dtype)
    scalars = channel.views["scalars"]
    channel.launch(
        channel.carry.give_rows_kernel, (plan.capacity,), y_RD,
        scalars if scalar_R is None else scalar_R, channel.state, slots.count_1, results, scalars,
        results.stride(0), scalars.stride(0), int(Clock.RETURNS),
        N=plan.dim, ROW_STRIDE=results.stride(1), BLOCK=block_of(plan.dim),
        SCALARS=scalar_R is not None,
    )  # fmt: skip


def push(
    channel: Channel, y_PD: Tensor, scalar_P: Tensor | None, slots: Slots, arrived: Arrived
) -> None:
    plan = channel.plan
    channel.launch(
        channel.carry.push_rows_kernel, (plan.num_places,), channel.heap.bases_W, channel.state,
        y_PD, y_PD if scalar_P is None else scalar_P, arrived.origin_P, arrived.row_PK,
        slots.places_1, channel.at("results"), channel.size("results"), channel.at("scalars"),
        channel.size("scalars"), plan.max_tokens * plan.top_k, int(Clock.RETURNS),
        N=plan.dim, ROW_BYTES=plan.row_bytes, K=plan.top_k, BLOCK=block_of(plan.dim),
        SCALARS=scalar_P is not None, DEDUP=plan.dedup,
    )  # fmt: skip


def reduce(
    channel: Channel,
    y_RD: Tensor,
    scalar_R: Tensor | None,
    slots: Slots,
    arrived: Arrived,
    weighted: bool,
    into: tuple[Tensor, Tensor | None] | None,
) -> None:
    """Sum the results of each arrived token, into its place of the buffer or into a tensor."""
    plan = channel.plan
    results = typed_rows(channel, "results", y_RD.dtype)
    scalars = channel.views["scalars"]
    size, stride, scalars_size = results.stride(0), results.stride(1), scalars.stride(0)
    if into is not None:
        results, scalars = into[0], scalars if into[1] is None else into[1]
        size, stride, scalars_size = 0, plan.dim, 0
    channel.launch(
        channel.carry.reduce_rows_kernel, (plan.num_places,), y_RD,
        arrived.weight_R if scalar_R is None else scalar_R, arrived.row_PK, arrived.weight_PK,
        channel.state, slots.places_1, results, scalars, size, scalars_size, int(Clock.RETURNS),
        plan.capacity,
        N=plan.dim, OUT_STRIDE=stride, K=plan.top_k, BLOCK=block_of(plan.dim), WEIGHTED=weighted,
        SCALARS=scalar_R is not None, ACC=_TRITON[plan.wide], enable_fp_fusion=False,
    )  # fmt: skip


def pull(
    channel: Channel,
    y_RD: Tensor,
    scalar_R: Tensor | None,
    slots: Slots,
    weight_TK: Tensor | None,
    out_TD: Tensor,
    out_scalar_TK: Tensor | None,
) -> None:
    plan = channel.plan
    T, block = out_TD.shape[0], block_of(plan.dim)
    weighted = weight_TK is not None and not plan.dedup
    # Gradients are summed in float64 for float64 rows alone, results also for such weights.
    rows_wide = torch.float64 if plan.dtype == torch.float64 else torch.float32
    acc = plan.wide if weight_TK is not None else rows_wide
    if channel.remote is not None and plan.combine == "pull":
        channel.remote.fetch_rows(slots, scalar_R is not None)
    names = ("stage_results", "stage_scalars")
    staged = tuple(channel.at(name) if plan.staged else 0 for name in names)
    channel.launch(
        channel.carry.pull_rows_kernel, (T, triton.cdiv(plan.dim, block)), channel.heap.bases_W,
        channel.state, slots.rank_TK if weight_TK is None else weight_TK.contiguous(),
        slots.to_TK, slots.place_TK, slots.rank_TK, out_TD,
        out_TD if out_scalar_TK is None else out_scalar_TK,
        y_RD, y_RD if scalar_R is None else scalar_R,
        channel.at("results"), channel.size("results"), channel.at("scalars"),
        channel.size("scalars"), staged[0], staged[1], int(Clock.RETURNS), channel.rank,
        N=plan.dim, ROW_BYTES=plan.row_bytes, K=plan.top_k, BLOCK=block, WEIGHTED=weighted,
        SCALARS=out_scalar_TK is not None, DEDUP=plan.dedup, PUSHED=plan.combine == "push",
        STAGED=plan.staged, DIRECT=channel.direct, ACC=_TRITON[acc], WIDE=_TRITON[plan.wide],
        num_warps=PULL_WARPS, enable_fp_fusion=False,
    )  # fmt: skip


def pack(channel: Channel, x_TD: Tensor) -> Tensor:
    """Return the tokens as they travel: as they are, or float8 and scales side by side."""
    plan = channel.plan
    if plan.wire == "plain":
        return x_TD
    x = quantize(x_TD)
    parts = [x.data_ND.view(torch.uint8), x.scale_NB]
    spare = plan.wire_bytes - plan.dim - plan.dim // MX_BLOCK
    parts.append(x.scale_NB.new_zeros(len(x_TD), spare))
    return torch.cat(parts, dim=1).view(torch.int32)


def unpack(channel: Channel, sent_RN: Tensor) -> Tensor:
    """Return rows in the dtype of the plan."""
    plan = channel.plan
    if plan.wire == "plain":
        return sent_RN
    bytes_RN = sent_RN.view(torch.uint8)
    data_RD = bytes_RN[:, : plan.dim].contiguous().view(torch.float8_e4m3fn)
    scale_RB = bytes_RN[:, plan.dim : plan.dim + plan.dim // MX_BLOCK].contiguous()
    return dequantize(MXTensor(data_RD, scale_RB), dtype=plan.dtype)


def typed_rows(channel: Channel, name: str, dtype: torch.dtype) -> Tensor:
    """Return ``[2, P, row_bytes / itemsize]`` over the rows of a buffer."""
    return channel.views[name].view(dtype)


def buffer(channel: Channel) -> Tensor:
    """Return the rows of the receive buffer of the present epoch, as the host counts."""
    plan = channel.plan
    half = channel.steps.parity(channel.epochs[Clock.PUTS])
    return typed_rows(channel, "rows", plan.dtype)[half, : plan.capacity, : plan.dim]


def block_of(columns: int) -> int:
    return min(MAX_BLOCK, max(16, triton.next_power_of_2(columns)))
