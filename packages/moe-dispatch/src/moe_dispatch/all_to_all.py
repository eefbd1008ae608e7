"""The dispatcher on ``torch.distributed``: NCCL on GPUs, gloo on CPUs."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from moe_kernels import Routing, group_rows
from torch import Tensor

from moe_dispatch.check import check_combine, check_dispatch, check_num_experts
from moe_dispatch.dispatcher import Dispatched
from moe_dispatch.rows import sum_rows, take_rows
from moe_dispatch.terms import Gradient, Terms, check_terms


class Way(NamedTuple):
    """The way of the rows between the ranks, the same for every exchange of one dispatch.

    Rows arrive in the order (source rank, expert, token, k) and are handed to the experts in the
    order (expert, source rank, token, k).

    Attributes:
        send_W: Rows sent to each rank.
        recv_W: Rows received from each rank.
        arrival_of_row_R: int64, position at arrival of each row that the experts see.
        row_of_arrival_R: int64, its inverse.
        group: The ranks.
    """

    send_W: list[int]
    recv_W: list[int]
    arrival_of_row_R: Tensor
    row_of_arrival_R: Tensor
    group: dist.ProcessGroup


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AllToAllPlan:
    """What ``combine`` needs.

    Attributes:
        slot_of_row_N: int32, the slot ``t * K + k`` of each row that this rank sends.
        row_of_slot_TK: int32, its inverse, -1 for a masked route.
        way: How the rows travel.
        link: No elements. Ties ``combine`` to ``dispatch`` in the autograd graph, so that a rank
            whose results are connected to nothing still takes part in every exchange of backward.
    """

    slot_of_row_N: Tensor
    row_of_slot_TK: Tensor
    way: Way
    link: Tensor


class AllToAllDispatcher:
    """Exchanges rows with ``torch.distributed.all_to_all_single``.

    ``dispatch`` is two collectives (how many rows, then the rows) and ``combine`` is one. In
    backward each is one, as the numbers are known. Rank w of the group holds the experts
    ``w * e`` up to ``(w + 1) * e``.

    The host waits for the GPU **once per dispatch**, since ``all_to_all_single`` wants the split
    sizes as Python integers: ``2 * W * (e + 4)`` int64 are copied to the host. The wait lasts
    until the GPU has done all that was enqueued before, and after it the GPU has nothing to do
    until the host has enqueued more. Backward never waits.

    If one rank raises or dies, the others wait for it in their next collective. The timeout of
    the process group (``timeout=`` of ``init_process_group`` and ``new_group``) bounds every such
    wait; no other limit is set here. All ranks must give the same ``num_experts``: it decides
    the size of the first message, so it cannot be compared by one.

    Args:
        num_experts: E, the experts of all ranks, a multiple of the group's size.
        group: The expert-parallel group, of which this process is a member.

    Attributes:
        num_experts: E.
        local_experts: The ids of the experts of this rank.
        world_size: W.
        group: The ranks.

    Raises:
        ValueError: If the experts cannot be shared out evenly, or this process is no member.
            Nothing is sent before.
    """

    def __init__(self, num_experts: int, group: dist.ProcessGroup):
        rank = dist.get_rank(group)
        if rank < 0:
            raise ValueError("this process is not a member of the group that it was given")
        self.world_size = dist.get_world_size(group)
        check_num_experts(num_experts, self.world_size)
        e = num_experts // self.world_size
        self.num_experts, self.local_experts = num_experts, range(rank * e, (rank + 1) * e)
        self.group = group

    def dispatch(self, x_TD: Tensor, routing: Routing) -> Dispatched:
        """Send each token to the ranks of its experts, one row for each route.

        Args:
            x_TD: Tokens of this rank, possibly none.
            routing: Their experts and weights.

        Raises:
            ValueError: On this rank alone, before anything is sent, if tokens and routing do not
                belong together. On every rank, and naming the ranks, if an id is neither an
                expert nor -1, or if D, the dtype or the use of gradients differs between ranks.
        """
        check_dispatch(x_TD, routing, self.num_experts)
        bad_TK = (routing.expert_TK < -1) | (routing.expert_TK >= self.num_experts)
        # Bad ids are masked so that no rank stops here alone: all of them raise, below.
        groups = group_rows(routing.expert_TK.masked_fill(bad_TK, -1), self.num_experts)
        sent_We = groups.offsets_E1.diff().view(self.world_size, -1).long()
        got_We, send_W, recv_W, terms_W = self._meet(sent_We, Terms.of(x_TD), bad_TK.sum())
        check_terms(terms_W, self.num_experts)

        way = Way(send_W, recv_W, *_orders(got_We, sum(recv_W)), self.group)
        slot_of_row_N = groups.slot_of_row_N[: sum(send_W)]
        x_ND = take_rows(x_TD, slot_of_row_N, groups.row_of_slot_TK)
        highest = max(terms.gradient for terms in terms_W)
        link = x_TD.new_empty(0).requires_grad_(highest > Gradient.NONE)
        if highest == Gradient.OF_TOKENS:
            x_RD, link = _ToExperts.apply(x_ND, link, way)
        else:
            x_RD = _to_experts(x_ND, way)
        return Dispatched(
            x_RD=x_RD,
            offsets_e1=_offsets(got_We),
            weight_TK=routing.weight_TK,
            plan=AllToAllPlan(
                slot_of_row_N=slot_of_row_N,
                row_of_slot_TK=groups.row_of_slot_TK,
                way=way,
                link=link,
            ),
        )

    def combine(self, y_RD: Tensor, dispatched: Dispatched) -> Tensor:
        """Send the results back and sum those of each token over k, weighted.

        Args:
            y_RD: What the experts made of ``dispatched.x_RD``.
            dispatched: The result of ``dispatch``.

        Raises:
            ValueError: If ``y_RD`` has not the shape, dtype and device of ``dispatched.x_RD``.
            TypeError: If another dispatcher made ``dispatched``.
        """
        plan = dispatched.plan
        if not isinstance(plan, AllToAllPlan):
            raise TypeError(f"AllToAllDispatcher cannot combine with a {type(plan).__name__}")
        check_combine(y_RD, dispatched)
        y_ND = _ToOwners.apply(y_RD, plan.link, plan.way)
        return sum_rows(y_ND, dispatched.weight_TK, plan.slot_of_row_N, plan.row_of_slot_TK)

    def _meet(
        self, sent_We: Tensor, terms: Terms, num_bad: Tensor
    ) -> tuple[Tensor, list[int], list[int], list[Terms]]:
        """Tell every rank its counts and our terms, and hear theirs. Here the host waits."""
        W, e = sent_We.shape
        told = sent_We.new_tensor(terms)
        told[0] = num_bad
        message_WM = torch.cat([sent_We, told.expand(W, -1)], dim=1)
        got_WM = torch.empty_like(message_WM)
        dist.all_to_all_single(got_WM, message_WM, group=self.group)
        sent, got = torch.stack([message_WM, got_WM]).tolist()
        send_W, recv_W = [sum(row[:e]) for row in sent], [sum(row[:e]) for row in got]
        return got_WM[:, :e], send_W, recv_W, [Terms(*row[e:]) for row in got]


def _offsets(got_We: Tensor) -> Tensor:
    ends_e = got_We.sum(0).cumsum(0, dtype=torch.int32)
    return torch.cat([ends_e.new_zeros(1), ends_e])


def _orders(got_We: Tensor, R: int) -> tuple[Tensor, Tensor]:
    """Return the position at arrival of each row, and its inverse.

    All rows of one (source, expert) block move by the same distance, so there is nothing to sort.

    Examples:
        >>> _orders(torch.tensor([[1, 2], [1, 0]]), 4)  # arrival: a0 a1 a1 b0; rows: a0 b0 a1 a1
        (tensor([0, 3, 1, 2]), tensor([0, 2, 3, 1]))
    """
    got_eW = got_We.T
    start_of_arrival_We = (got_We.flatten().cumsum(0) - got_We.flatten()).view_as(got_We)
    start_of_row_eW = (got_eW.flatten().cumsum(0) - got_eW.flatten()).view_as(got_eW)
    move_We = start_of_row_eW.T - start_of_arrival_We
    index_R = torch.arange(R, device=got_We.device)
    # The size is given, because on a GPU the host would wait for it otherwise.
    by_row_R = move_We.T.flatten().repeat_interleave(got_eW.flatten(), output_size=R)
    by_arrival_R = move_We.flatten().repeat_interleave(got_We.flatten(), output_size=R)
    return index_R - by_row_R, index_R + by_arrival_R


def _to_experts(x_ND: Tensor, way: Way) -> Tensor:
    arrived_RD = x_ND.new_empty(sum(way.recv_W), x_ND.shape[1])
    dist.all_to_all_single(arrived_RD, x_ND.contiguous(), way.recv_W, way.send_W, way.group)
    return arrived_RD.index_select(0, way.arrival_of_row_R)


def _to_owners(y_RD: Tensor, way: Way) -> Tensor:
    leaving_RD = y_RD.index_select(0, way.row_of_arrival_R)
    y_ND = y_RD.new_empty(sum(way.send_W), y_RD.shape[1])
    dist.all_to_all_single(y_ND, leaving_RD, way.send_W, way.recv_W, way.group)
    return y_ND


class _ToExperts(torch.autograd.Function):
    """Its second result carries no values. Whatever uses it makes backward come here."""

    @staticmethod
    def forward(ctx, x_ND: Tensor, link: Tensor, way: Way) -> tuple[Tensor, Tensor]:
        ctx.way = way
        return _to_experts(x_ND, way), torch.empty_like(link)

    @staticmethod
    def backward(ctx, dx_RD: Tensor, dlink: Tensor):  # pyrefly: ignore[bad-override]
        return _to_owners(dx_RD, ctx.way), dlink, None


class _ToOwners(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y_RD: Tensor, link: Tensor, way: Way) -> Tensor:
        ctx.way = way
        return _to_owners(y_RD, way)

    @staticmethod
    def backward(ctx, dy_ND: Tensor):  # pyrefly: ignore[bad-override]
        return _to_experts(dy_ND, ctx.way), dy_ND.new_zeros(0), None
