"""The dispatcher over symmetric memory: the functions of this package, with gradients."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from moe_kernels import Routing
from torch import Tensor

from moe_dispatch.check import check_combine, check_dispatch
from moe_dispatch.dispatcher import Dispatched
from moe_dispatch.heaps.protocol import SymmetricHeap
from moe_dispatch.plan import RowPlan
from moe_dispatch.rowwise.channel import DEADLINE, Channel
from moe_dispatch.rowwise.functions import (
    bring_gradients,
    bring_results,
    meet,
    release,
    send_gradients,
    send_tokens,
)
from moe_dispatch.rowwise.slots import Arrived, Slots


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RowwisePlan:
    """What ``combine`` needs.

    Attributes:
        slots: Where the rows of this rank went.
        arrived: What came with the rows of the others.
        link: No elements. Ties ``combine`` to ``dispatch`` in the autograd graph, so that a rank
            whose results are connected to nothing still takes part in every exchange of backward.
        layer: Whose exchange it is.
        channel: Which it went through.
    """

    slots: Slots
    arrived: Arrived
    link: Tensor
    layer: str
    channel: Channel


class RowwiseDispatcher:
    """Writes every row straight into the memory of its expert's rank.

    Nothing waits on the host, forward or backward, but for the first compilation of each kernel:
    counts, places and slots stay on the GPU, and ranks wait for each other in kernels, at most
    ``deadline``. Who waited in vain finds out without waiting at its next call, or in ``check``.

    With gradients on, rows are copied out of the receive buffer, since backward needs them.
    Without, they are the receive buffer itself until ``combine``, which must then follow before a
    third dispatch. Backward runs on every rank if gradients are on, whether tokens need them or
    not.

    Call ``warm_up(plan, device)`` on a GPU before the first exchange: a rank that compiles keeps
    the others waiting.

    Several layers share one dispatcher, and its memory; ``named`` gives each a name for errors.
    All calls of one rank go to one stream.

    Args:
        plan: The sizes.
        heap: Of ``plan.heap_bytes``, from ``open_heap``. The dispatcher closes it.
        deadline: Seconds that a rank waits for the others.
        layer: What errors call it.

    Attributes:
        plan: As given.
        channel: The exchange.
        layer: As given.

    Raises:
        ValueError: On every rank, if the plans of ranks differ, or the heap does not fit.
        RuntimeError: On a CPU without Triton's interpreter.

    Examples:
        >>> from moe_dispatch import open_heap
        >>> plan = RowPlan(world_size=1, num_experts=2, max_tokens=2, top_k=1, dim=1,
        ...                dtype=torch.float32)
        >>> heap = open_heap(plan.heap_bytes, device="cpu")
        >>> with RowwiseDispatcher(plan, heap) as dispatcher:
        ...     expert_TK = torch.tensor([[1], [0]], dtype=torch.int32)
        ...     routing = Routing(torch.ones(2, 1), expert_TK, torch.ones(2, 2), torch.tensor(0))
        ...     sent = dispatcher.dispatch(torch.tensor([[10.0], [20.0]]), routing)
        ...     sent.x_RD.detach().flatten(), sent.offsets_e1
        (tensor([20., 10.]), tensor([0, 1, 2], dtype=torch.int32))
    """

    def __init__(
        self,
        plan: RowPlan,
        heap: SymmetricHeap,
        *,
        deadline: float = DEADLINE,
        layer: str = "",
    ):
        self.plan, self.layer = plan, layer
        self.channel = Channel(plan, heap, deadline=deadline, layer=layer)

    @classmethod
    def on(cls, channel: Channel, layer: str = "") -> Self:
        """Return a dispatcher over a channel that exists already."""
        made = cls.__new__(cls)
        made.plan, made.channel, made.layer = channel.plan, channel, layer
        return made

    @property
    def num_experts(self) -> int:
        """E, the experts of all ranks."""
        return self.plan.num_experts

    @property
    def local_experts(self) -> range:
        """The ids of the experts that this rank holds."""
        e, rank = self.plan.e, self.channel.rank
        return range(rank * e, (rank + 1) * e)

    @property
    def overflow(self) -> Tensor:
        """int64 of no axes, on the device: rows that did not fit at the fullest rank, so far.

        Every rank has the same number. It stays until ``clear_overflow``. With ``"retry"`` a
        step in which it is not 0 is worth nothing.
        """
        return self.channel.state[self.channel.agree.OVERFLOWED.value]

    @property
    def num_dropped(self) -> Tensor:
        """int64 of no axes, on the device: routes of this rank that were dropped, so far."""
        return self.channel.state[self.channel.agree.DROPPED.value]

    @property
    def most_rows(self) -> Tensor:
        """int64 of no axes, on the device: the most rows that wanted to come to one rank."""
        return self.channel.state[self.channel.agree.MOST_ROWS.value]

    def clear_overflow(self) -> None:
        """Forget what ``overflow`` and ``most_rows`` say."""
        agree = self.channel.agree
        self.channel.state[agree.OVERFLOWED.value].zero_()
        self.channel.state[agree.MOST_ROWS.value].zero_()

    def named(self, layer: str) -> "RowwiseDispatcher":
        """Return this dispatcher under the name of a layer. Memory and clocks are shared."""
        return RowwiseDispatcher.on(self.channel, layer)

    def dispatch(self, x_TD: Tensor, routing: Routing) -> Dispatched:
        """Send each token to the ranks of its experts.

        Args:
            x_TD: Tokens of this rank, at most ``plan.max_tokens``, possibly none.
            routing: Their experts and weights.

        Raises:
            ValueError: On this rank alone, before anything is sent, if tokens and routing do not
                belong together or to the plan. On every rank, on a GPU from a later call, if an
                id is neither an expert nor -1, or if gradients are on for some ranks only.
            PeerError: If a rank was late; on a GPU, from a later call.
            RuntimeError: If two dispatches without gradients are open already.
        """
        check_dispatch(x_TD, routing, self.num_experts)
        self._check(x_TD, routing)
        channel = self.channel
        channel.name_layer(self.layer)
        channel.note()
        grad = torch.is_grad_enabled()
        slots = meet(channel, routing.expert_TK, grad)
        link = x_TD.new_empty(0).requires_grad_(grad)
        x_TD = x_TD.contiguous()
        if grad:
            x_RD, weight_R, link, *parts = _Dispatch.apply(
                x_TD, routing.weight_TK, link, self, slots
            )
            arrived = Arrived(weight_R.detach(), *parts)
        else:
            x_RD, arrived = send_tokens(channel, x_TD, routing.weight_TK, slots, copy=False)
            weight_R = arrived.weight_R
        plan = RowwisePlan(
            slots=slots, arrived=arrived, link=link, layer=self.layer, channel=channel
        )
        return Dispatched(
            x_RD=x_RD,
            offsets_e1=slots.offsets_e1,
            weight_TK=routing.weight_TK,
            plan=plan,
            weight_R=weight_R,
            kept_TK=slots.kept,
        )

    def combine(self, y_RD: Tensor, dispatched: Dispatched, weighted: bool = False) -> Tensor:
        """Bring the results home and sum those of each token over k.

        Args:
            y_RD: What the experts made of ``dispatched.x_RD``.
            dispatched: The result of ``dispatch``.
            weighted: Whether the experts have multiplied each row by ``dispatched.weight_R``.
                Then nothing is kept for the gradient of the weights, which is theirs to find;
                otherwise ``y_RD`` is kept.

        Raises:
            ValueError: If ``y_RD`` has not the shape, dtype and device of ``dispatched.x_RD``.
            TypeError: If another dispatcher made ``dispatched``.
        """
        plan = dispatched.plan
        if not isinstance(plan, RowwisePlan) or plan.channel is not self.channel:
            raise TypeError(
                f"RowwiseDispatcher cannot combine with a {type(plan).__name__}"
                + (" of another channel" if isinstance(plan, RowwisePlan) else "")
            )
        check_combine(y_RD, dispatched)
        self.channel.name_layer(plan.layer)
        release(self.channel, plan.slots)
        weight_TK = None if weighted else dispatched.weight_TK.detach()
        y_RD = y_RD.contiguous()
        if not plan.link.requires_grad:
            return bring_results(self.channel, y_RD, plan.slots, plan.arrived, weight_TK)
        return _Combine.apply(y_RD, dispatched.weight_R, plan.link, weight_TK, plan, self)

    def check(self) -> None:
        """Wait for the device and raise if a rank was late or a call was refused."""
        self.channel.check()

    def abort(self) -> None:
        """Give up, so that every rank that waits for this one raises at once."""
        self.channel.abort()

    def close(self) -> None:
        """Free the memory. Collective."""
        self.channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self.channel.__exit__(kind, *rest)

    def _check(self, x_TD: Tensor, routing: Routing) -> None:
        plan, local = self.plan, self.channel.heap.local
        if x_TD.device != local.device:
            raise ValueError(
                f"devices differ: x_TD is on {x_TD.device}, the heap on {local.device}"
            )
        for name, got, want in (
            ("D", x_TD.shape[1], plan.dim),
            ("K", routing.expert_TK.shape[1], plan.top_k),
            ("the dtype of x_TD", x_TD.dtype, plan.dtype),
            ("the dtype of weight_TK", routing.weight_TK.dtype, plan.weight_dtype),
        ):
            if got != want:
                raise ValueError(f"{name} differs: got {got}, the plan has {want}")
        if len(x_TD) > plan.max_tokens:
            raise ValueError(
                f"x_TD has {len(x_TD)} tokens, the plan has room for {plan.max_tokens}"
            )
        if len(self.channel.held) > 1:
            raise RuntimeError(
                "two dispatches without gradients are open: combine the first of them before"
            )


class _Dispatch(torch.autograd.Function):
    """Its third result carries no values. Whatever uses it makes backward come here."""

    @staticmethod
    def forward(
        ctx,
        x_TD: Tensor,
        weight_TK: Tensor,
        link: Tensor,
        dispatcher: RowwiseDispatcher,
        slots: Slots,
    ) -> tuple[Tensor, ...]:
        x_RD, arrived = send_tokens(dispatcher.channel, x_TD, weight_TK, slots)
        ctx.dispatcher, ctx.slots, ctx.arrived = dispatcher, slots, arrived
        parts = arrived[1:]
        ctx.mark_non_differentiable(*parts)
        return x_RD, arrived.weight_R, torch.empty_like(link), *parts

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dx_RD: Tensor, dweight_R: Tensor, dlink: Tensor, *_: Tensor):  # pyrefly: ignore[bad-override]
        channel = ctx.dispatcher.channel
        channel.name_layer(ctx.dispatcher.layer)
        dx_TD, dweight_TK = bring_gradients(
            channel, dx_RD.contiguous(), dweight_R.contiguous(), ctx.slots, ctx.arrived
        )
        return dx_TD, dweight_TK, dlink, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        y_RD: Tensor,
        weight_R: Tensor,
        link: Tensor,
        weight_TK: Tensor | None,
        plan: RowwisePlan,
        dispatcher: RowwiseDispatcher,
    ) -> Tensor:
        ctx.dispatcher, ctx.plan = dispatcher, plan
        ctx.save_for_backward(*([] if weight_TK is None else [y_RD]))
        return bring_results(dispatcher.channel, y_RD, plan.slots, plan.arrived, weight_TK)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy_TD: Tensor):  # pyrefly: ignore[bad-override]
        plan, channel = ctx.plan, ctx.dispatcher.channel
        channel.name_layer(plan.layer)
        saved: Sequence[Tensor] = ctx.saved_tensors
        y_RD = saved[0] if saved else None
        dy_RD, dweight_R = send_gradients(
            channel, dy_TD.contiguous(), y_RD, plan.slots, plan.arrived
        )
        return dy_RD, dweight_R, dy_TD.new_zeros(0), None, None, None
