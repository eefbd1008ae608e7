"""The dispatcher of a single rank: rows are put in order, nothing travels."""

from dataclasses import dataclass

from moe_kernels import Routing, group_rows
from torch import Tensor

from moe_dispatch.check import check_combine, check_dispatch, check_num_experts
from moe_dispatch.dispatcher import Dispatched
from moe_dispatch.rows import sum_rows, take_rows


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LocalPlan:
    """Where each row came from.

    Attributes:
        slot_of_row_N: int32, the slot ``t * K + k`` of each row, -1 past the last.
        row_of_slot_TK: int32, its inverse, -1 for a masked route.
    """

    slot_of_row_N: Tensor
    row_of_slot_TK: Tensor


@dataclass(frozen=True, slots=True)
class LocalDispatcher:
    """Sorts the rows of one rank by expert.

    The host never waits for the GPU: ``x_RD`` always has T * K rows, and those past
    ``offsets_e1[-1]``, of which there are as many as masked routes, are zeros.

    Attributes:
        num_experts: E, all of them on this rank.

    Examples:
        >>> import torch
        >>> from moe_kernels import Routing
        >>> expert_TK = torch.tensor([[1, 0], [1, -1]], dtype=torch.int32)
        >>> weight_TK = torch.tensor([[0.5, 0.5], [1.0, 0.0]])
        >>> routing = Routing(weight_TK, expert_TK, torch.ones(2, 2), torch.tensor(0))
        >>> dispatcher = LocalDispatcher(num_experts=2)
        >>> sent = dispatcher.dispatch(torch.tensor([[10.0], [20.0]]), routing)
        >>> sent.x_RD.flatten(), sent.offsets_e1
        (tensor([10., 10., 20.,  0.]), tensor([0, 1, 3], dtype=torch.int32))
        >>> dispatcher.combine(sent.x_RD, sent).flatten()
        tensor([10., 20.])
    """

    num_experts: int

    def __post_init__(self) -> None:
        check_num_experts(self.num_experts, world_size=1)

    @property
    def local_experts(self) -> range:
        """All experts."""
        return range(self.num_experts)

    def dispatch(self, x_TD: Tensor, routing: Routing) -> Dispatched:
        """Copy each token once for each of its routes, in the order (expert, token, k).

        Args:
            x_TD: Tokens.
            routing: Their experts and weights.

        Raises:
            ValueError: If tokens and routing do not belong together; on a CPU also if an id is
                neither an expert nor -1. On a GPU looking at ids would make the host wait:
                there ``moe_kernels.group_rows`` gives no row to such an id.
        """
        check_dispatch(x_TD, routing, self.num_experts)
        groups = group_rows(routing.expert_TK, self.num_experts)
        plan = LocalPlan(slot_of_row_N=groups.slot_of_row_N, row_of_slot_TK=groups.row_of_slot_TK)
        return Dispatched(
            x_RD=take_rows(x_TD, plan.slot_of_row_N, plan.row_of_slot_TK),
            offsets_e1=groups.offsets_E1,
            weight_TK=routing.weight_TK,
            plan=plan,
        )

    def combine(self, y_RD: Tensor, dispatched: Dispatched) -> Tensor:
        """Sum the results of each token over k, weighted.

        Args:
            y_RD: What the experts made of ``dispatched.x_RD``.
            dispatched: The result of ``dispatch``.

        Raises:
            ValueError: If ``y_RD`` has not the shape, dtype and device of ``dispatched.x_RD``.
            TypeError: If another dispatcher made ``dispatched``.
        """
        plan = dispatched.plan
        if not isinstance(plan, LocalPlan):
            raise TypeError(f"LocalDispatcher cannot combine with a {type(plan).__name__}")
        check_combine(y_RD, dispatched)
        return sum_rows(y_RD, dispatched.weight_TK, plan.slot_of_row_N, plan.row_of_slot_TK)
