"""The exchanges as plain functions: rows to experts, results to owners, and both ways back.

    slots = meet(channel, expert_TK)
    x_RD, arrived = send_tokens(channel, x_TD, weight_TK, slots)
    y_RD = your_experts(x_RD, slots.offsets_e1)
    y_TD = bring_results(channel, y_RD, slots, arrived, weight_TK)

and backward, with nothing but what the first pass returned::

    dy_RD, dweight_R = send_gradients(channel, dy_TD, y_RD, slots, arrived)
    dx_RD = your_experts_backward(dy_RD)
    dx_TD, dweight_TK = bring_gradients(channel, dx_RD, dweight_R, slots, arrived)

Every rank makes the same calls in the same order. No call waits for the GPU.
"""

import torch
import triton
from moe_kernels import Groups, group_rows
from torch import Tensor

from moe_dispatch.rowwise import launch
from moe_dispatch.rowwise.channel import Channel
from moe_dispatch.rowwise.protocol import Clock, Op, Step
from moe_dispatch.rowwise.slots import Arrived, Slots, first_of_rank


def meet(channel: Channel, expert_TK: Tensor, gradient: bool = False) -> Slots:
    """Tell every rank how many rows come, and learn where this rank's rows go.

    Begins an exchange: ``send_tokens`` must follow.

    Args:
        channel: The exchange.
        expert_TK: int32, -1 for masked routes. Any other id is masked, and counted: all ranks
            then raise, on a CPU from ``send_tokens`` and on a GPU from a later call.
        gradient: Whether backward will come; all ranks must say the same.

    Returns:
        The places.
    """
    plan, agree = channel.plan, channel.agree
    E, W, e = plan.num_experts, plan.world_size, plan.e
    T, K = expert_TK.shape
    if expert_TK.is_cuda and torch.cuda.is_current_stream_capturing():
        channel.captured = True
    expert_TK, told_M = expert_TK.contiguous(), expert_TK.new_zeros(plan.told)
    clean_TK, block = torch.empty_like(expert_TK), 32 if channel.interpreted else 1024
    # Alone there is nobody to tell: bad ids are noted where ranks note what they were told.
    alone = channel.direct and plan.overflow == "exact"
    bad = channel.state[agree.REFUSED_VALUE.value :] if alone else told_M[E + W :]
    channel.launch(
        agree.clean_ids_kernel, (triton.cdiv(T * K, block),), expert_TK, clean_TK, bad, T * K,
        E=E, BLOCK=block,
    )  # fmt: skip
    expert_TK = clean_TK
    groups = group_rows(expert_TK, E)
    if alone:
        return _meet_alone(channel, groups)
    torch.sub(groups.offsets_E1[1:], groups.offsets_E1[:-1], out=told_M[:E])
    told_M[E + W + 1 :].fill_(2 if gradient else 1)
    ranks_TK = first_TK = before_TW = None
    if plan.dedup:
        ranks_TK = torch.where(expert_TK < 0, -1, expert_TK.div(e, rounding_mode="floor"))
        first_TK, before_TW = first_of_rank(ranks_TK, W)
        told_M[E : E + W] = before_TW[-1]
    first_E, kept_E = expert_TK.new_empty(E), expert_TK.new_empty(E)
    offsets_e1, place_W1 = expert_TK.new_empty(e + 1), expert_TK.new_empty(W + 1)
    bounded = plan.overflow != "exact"

    def tell() -> None:
        channel.launch(
            agree.tell_counts_kernel, (W,), channel.heap.bases_W, channel.state, told_M,
            channel.at("counts"), channel.rank,
            W=W, M=plan.told, BLOCK_M=triton.next_power_of_2(plan.told),
        )  # fmt: skip
        if channel.remote is not None:
            channel.remote.tell_counts(told_M)

    def place() -> None:
        channel.launch(
            agree.plan_kernel, (W,), channel.views["counts"], channel.state, first_E, kept_E,
            offsets_e1, place_W1, channel.rank, plan.capacity,
            W=W, E_OF_RANK=e, M=plan.told, BLOCK_W=triton.next_power_of_2(W),
            BLOCK_E=triton.next_power_of_2(e), BOUNDED=bounded,
            DROPS=plan.overflow == "capacity",
        )  # fmt: skip

    channel.run(channel.steps.MEET, Clock.PUTS, {Op.TELL_COUNTS: tell, Op.PLAN: place})
    rank_TK, row_TK = torch.empty_like(expert_TK), torch.empty_like(expert_TK)
    channel.launch(
        agree.slots_kernel, (triton.cdiv(T * K, block),), expert_TK, groups.row_of_slot_TK,
        groups.offsets_E1, first_E, kept_E, rank_TK, row_TK, T * K, plan.capacity,
        E=E, E_OF_RANK=e, BLOCK=block,
    )  # fmt: skip
    epoch = channel.epochs[Clock.PUTS]
    channel.met[channel.steps.parity(epoch)] = epoch
    if ranks_TK is None or first_TK is None or before_TW is None:
        return Slots(rank_TK, row_TK, rank_TK, row_TK, offsets_e1, offsets_e1[-1:], epoch)
    # A token whose routes to a rank were all dropped still travels, as the others count on it.
    column_TK = ranks_TK.clamp(min=0).long()
    place_TK = (place_W1[:-1] + before_TW[:-1]).gather(1, column_TK)
    inside_TK = (ranks_TK >= 0) & (place_TK >= 0) & (place_TK < plan.num_places)
    inside_TK &= channel.state[agree.FAILED.value] == 0
    return Slots(
        rank_TK,
        row_TK,
        torch.where(first_TK & inside_TK, ranks_TK, -1).to(torch.int32),
        torch.where(inside_TK, place_TK, -1).to(torch.int32),
        offsets_e1,
        place_W1[-1:].clamp(max=plan.num_places),
        epoch,
    )


def _meet_alone(channel: Channel, groups: Groups) -> Slots:
    """Return the places where there is one rank: the order of the rows itself."""
    channel.run((Step(Op.ADVANCE),), Clock.PUTS)
    row_TK, offsets_e1 = groups.row_of_slot_TK, groups.offsets_E1
    rank_TK = row_TK.clamp(max=0)
    epoch = channel.epochs[Clock.PUTS]
    return Slots(rank_TK, row_TK, rank_TK, row_TK, offsets_e1, offsets_e1[-1:], epoch)


def send_tokens(
    channel: Channel, x_TD: Tensor, weight_TK: Tensor, slots: Slots, copy: bool = True
) -> tuple[Tensor, Arrived]:
    """Store each token once for each of its experts, and take what the others stored.

    Args:
        channel: The exchange.
        x_TD: Tokens, contiguous.
        weight_TK: Their routing weights, which travel along.
        slots: From ``meet``.
        copy: Whether rows are copied out of the receive buffer. If not, ``x_RD`` is the buffer
            itself and stays as it is until ``release``; two dispatches may be so at once. A
            token that arrives for several experts (dedup) or in MXFP8 is always copied, and so
            is every one once a CUDA graph was captured, as then the host has lost count.

    Returns:
        ``x_RD``, the rows of this rank's experts, zeros past the last; and what came with them.
    """
    plan = channel.plan
    weight_TK = weight_TK.detach().to(plan.wide).contiguous()
    sent_TN = launch.pack(channel, x_TD)
    direct = channel.direct
    x_RD = sent_TN.new_empty(plan.capacity, sent_TN.shape[1])
    weight_R = weight_TK.new_zeros(plan.capacity)  # past the last row nobody writes

    def put() -> None:
        launch.put(channel, sent_TN, slots, weight_TK, x_RD, weight_R)

    copy = copy or direct or plan.dedup or plan.wire != "plain" or channel.captured
    channel.run(channel.steps.PUT, Clock.PUTS, {Op.PUT_ROWS: put})
    none = slots.places_1.new_empty(0)
    row_PK = channel.of_epoch("row", Clock.PUTS) if plan.dedup else none
    weight_PK = channel.of_epoch("weight", Clock.PUTS) if plan.dedup else weight_TK.new_empty(0)
    origin_P = channel.of_epoch("origin", Clock.PUTS) if plan.combine == "push" else none
    arrived = Arrived(weight_R, row_PK, weight_PK, origin_P)

    def take() -> None:
        if plan.dedup:
            launch.expand(channel, x_RD, slots, arrived)
        else:
            launch.take(channel, x_RD, weight_R, slots)

    if copy:
        channel.run(channel.steps.TAKE, Clock.PUTS, {Op.TAKE_ROWS: take})
        channel.run(channel.steps.FREE_ROWS, Clock.PUTS)
        channel.note()
        return launch.unpack(channel, x_RD), arrived
    channel.held.append(slots.epoch)
    x_RD = launch.buffer(channel)
    launch.clear_tail(channel, slots)
    arrived = arrived._replace(weight_R=channel.of_epoch("weight", Clock.PUTS)[:, 0])
    channel.note()
    return x_RD, arrived


def release(channel: Channel, slots: Slots) -> None:
    """Let the others have the receive buffer of a dispatch that was not copied.

    Raises:
        RuntimeError: If an earlier dispatch is not released yet: the signal would free both.
    """
    if slots.epoch not in channel.held:
        return
    if channel.held[0] != slots.epoch:
        raise RuntimeError(
            f"dispatches without a copy must be combined in their order: "
            f"epoch {channel.held[0]} comes before {slots.epoch}"
        )
    channel.held.remove(slots.epoch)
    back = channel.epochs[Clock.PUTS] - slots.epoch
    channel.run(channel.steps.FREE_ROWS, Clock.PUTS, back=back)


def bring_results(
    channel: Channel,
    y_RD: Tensor,
    slots: Slots,
    arrived: Arrived,
    weight_TK: Tensor | None,
) -> Tensor:
    """Bring results to their owners, who sum those of each token in the order of k.

    Args:
        channel: The exchange.
        y_RD: One result for each row, contiguous.
        slots: From ``meet``.
        arrived: From ``send_tokens``.
        weight_TK: Routing weights, or None if the experts have applied ``arrived.weight_R``.

    Returns:
        ``y_TD``. With dedup a rank's results for a token are summed there first, weighted, and
        rounded to the dtype of the rows once more.
    """
    y_TD, _ = _bring(channel, y_RD, None, slots, arrived, weight_TK)
    return y_TD


def send_gradients(
    channel: Channel, dy_TD: Tensor, y_RD: Tensor | None, slots: Slots, arrived: Arrived
) -> tuple[Tensor, Tensor]:
    """Send the gradient of each token to its experts, at the places of the tokens.

    Args:
        channel: The exchange.
        dy_TD: Gradient of the result of ``bring_results``, contiguous.
        y_RD: What ``bring_results`` was given; None if the experts apply the weights.
        slots: From ``meet``.
        arrived: From ``send_tokens``.

    Returns:
        The gradients of ``y_RD`` and of ``arrived.weight_R`` (zeros without ``y_RD``).
    """
    plan = channel.plan
    dy_RD = dy_TD.new_empty(plan.capacity, plan.dim)
    dweight_R = torch.zeros_like(arrived.weight_R)

    scaled_at_once = channel.direct and y_RD is not None

    def put() -> None:
        if scaled_at_once and y_RD is not None:
            launch.scatter(channel, dy_TD, y_RD, slots, arrived.weight_R, dy_RD, dweight_R)
        else:
            launch.put(channel, dy_TD, slots, None, dy_RD, arrived.weight_R)

    def take() -> None:
        if plan.dedup:
            launch.expand(channel, dy_RD, slots, arrived, y_RD, dweight_R)
        else:
            scaling = None if scaled_at_once else y_RD
            launch.take(channel, dy_RD, arrived.weight_R, slots, scaling, dweight_R)

    steps = channel.steps
    channel.run(
        (*steps.MEET_AGAIN, *steps.PUT, *steps.TAKE, *steps.FREE_ROWS),
        Clock.PUTS,
        {Op.PUT_ROWS: put, Op.TAKE_ROWS: take},
    )
    return dy_RD, dweight_R


def bring_gradients(
    channel: Channel, dx_RD: Tensor, dweight_R: Tensor, slots: Slots, arrived: Arrived
) -> tuple[Tensor, Tensor]:
    """Bring the gradients of the rows home, summed over k, and one scalar for each route.

    Args:
        channel: The exchange.
        dx_RD: Gradient of the rows, contiguous.
        dweight_R: Gradient of ``arrived.weight_R``.
        slots: From ``meet``.
        arrived: From ``send_tokens``.

    Returns:
        ``dx_TD`` and ``dweight_TK``, zero for routes that went nowhere.
    """
    dx_TD, dweight_TK = _bring(channel, dx_RD, dweight_R, slots, arrived, None)
    assert dweight_TK is not None, "scalars were given"
    return dx_TD, dweight_TK


def _bring(
    channel: Channel,
    y_RD: Tensor,
    scalar_R: Tensor | None,
    slots: Slots,
    arrived: Arrived,
    weight_TK: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Run one exchange of results, with a scalar for each route if there are scalars."""
    plan, steps = channel.plan, channel.steps
    T = slots.rank_TK.shape[0]
    out_TD = y_RD.new_empty(T, plan.dim)
    out_scalar_TK = None
    if scalar_R is not None:
        out_scalar_TK = scalar_R.new_empty(T, plan.top_k, dtype=plan.weight_dtype)
    weighted = weight_TK is not None

    def give() -> None:
        if plan.dedup:
            launch.reduce(channel, y_RD, scalar_R, slots, arrived, weighted, None)
        elif not channel.direct:
            launch.give(channel, y_RD, scalar_R, slots)

    def push() -> None:
        if not plan.dedup:
            launch.push(channel, y_RD, scalar_R, slots, arrived)
            return
        sums_PD = y_RD.new_empty(plan.num_places, plan.dim)
        scalar_PK = None if scalar_R is None else scalar_R.new_empty(plan.num_places, plan.top_k)
        launch.reduce(channel, y_RD, scalar_R, slots, arrived, weighted, (sums_PD, scalar_PK))
        launch.push(channel, sums_PD, scalar_PK, slots, arrived)

    def fetch() -> None:
        launch.pull(channel, y_RD, scalar_R, slots, weight_TK, out_TD, out_scalar_TK)

    exchange = steps.PUSH if plan.combine == "push" else steps.PULL
    channel.run(
        exchange,
        Clock.RETURNS,
        {
            Op.GIVE_RESULTS: give,
            Op.PUSH_RESULTS: push,
            Op.PULL_RESULTS: fetch,
            Op.SUM_RESULTS: fetch,
        },
    )
    channel.note()
    return out_TD, out_scalar_TK


__all__ = [
    "bring_gradients",
    "bring_results",
    "meet",
    "release",
    "send_gradients",
    "send_tokens",
]
