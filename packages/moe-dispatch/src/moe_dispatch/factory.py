"""Pick the dispatcher for a process group."""

import importlib

import torch
import torch.distributed as dist

from moe_dispatch.all_to_all import AllToAllDispatcher
from moe_dispatch.dispatcher import Dispatcher
from moe_dispatch.heaps import open_heap
from moe_dispatch.local import LocalDispatcher
from moe_dispatch.plan import RowPlan


def make_dispatcher(
    num_experts: int,
    group: dist.ProcessGroup | None = None,
    *,
    plan: RowPlan | None = None,
    device: str | torch.device | None = None,
) -> Dispatcher:
    """Return the dispatcher for the ranks of ``group``.

    Args:
        num_experts: E, the experts of all ranks together.
        group: The expert-parallel group. Without one, or in a group of one, nothing travels.
        plan: Sizes of a row-wise exchange. With it rows are written straight into the memory of
            their experts' ranks; without it ``torch.distributed`` carries them, which knows no
            sizes beforehand, but makes the host wait.
        device: Of the row-wise exchange, see ``open_heap``.

    Raises:
        ValueError: If ``num_experts`` is not a multiple of the group's size, this process is
            not in the group, or the plan is for other sizes.
        RuntimeError: With a plan, if no memory reaches all ranks.

    Examples:
        >>> make_dispatcher(num_experts=8).local_experts
        range(0, 8)
    """
    if group is None:
        return LocalDispatcher(num_experts)
    dispatcher = AllToAllDispatcher(num_experts, group)
    if plan is not None:
        for name, got, want in (
            ("num_experts", num_experts, plan.num_experts),
            ("world_size", dispatcher.world_size, plan.world_size),
        ):
            if got != want:
                raise ValueError(f"{name} differs: got {got}, the plan is for {want}")
    if dispatcher.world_size == 1:
        return LocalDispatcher(num_experts)
    if plan is None:
        return dispatcher
    # Row-wise kernels need Triton, and decide at their import whether they are interpreted.
    rowwise = importlib.import_module("moe_dispatch.rowwise")
    return rowwise.RowwiseDispatcher(plan, open_heap(plan.heap_bytes, group, device=device))
