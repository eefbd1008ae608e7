"""The row-wise dispatcher on virtual ranks, for the laws to be tried on."""

from functools import partial
from typing import Any

import torch

from moe_dispatch.heaps import SymmetricHeap
from moe_dispatch.rowwise import Channel, RowPlan, RowwiseDispatcher
from moe_dispatch.rowwise.warm import warm_up
from moe_dispatch.testing.case import DispatchCase
from moe_dispatch.testing.threads import run_on_threads
from moe_dispatch.testing.trip import Trip, travel


def plan_for(case: DispatchCase, **options: Any) -> RowPlan:
    """Return the plan of a case; ``options`` are fields of ``RowPlan``.

    Examples:
        >>> case = DispatchCase(experts_per_rank=2, top_k=1, dim=3, tokens_W=(4, 0), hot_experts=4)
        >>> plan_for(case, dedup=True).num_places
        8
    """
    wide = torch.float64 if case.torch_dtype == torch.float64 else torch.float32
    return RowPlan(
        world_size=case.world_size,
        num_experts=case.num_experts,
        max_tokens=max(case.tokens_W),
        top_k=case.top_k,
        dim=case.dim,
        dtype=case.torch_dtype,
        weight_dtype=wide,
        **options,
    )


def travel_on_threads(
    case: DispatchCase,
    device: str | torch.device = "cpu",
    deadline: float = 60.0,
    modules: dict[str, Any] | None = None,
    **options: Any,
) -> list[Trip]:
    """Take a case through ``RowwiseDispatcher`` on virtual ranks, for ``check_dispatcher``.

    Args:
        case: What to dispatch.
        device: Of all ranks.
        deadline: Of each wait, in seconds.
        modules: In place of those of the package, by their name in ``Channel``.
        options: Fields of the plan.
    """
    plan = plan_for(case, **options)
    args = (plan, case, deadline, device, modules or {})
    prepare = None if torch.device(device).type == "cpu" else partial(warm_up, plan, device)
    return run_on_threads(
        _travel, case.world_size, plan.heap_bytes, *args, device=device, prepare=prepare
    )


def _travel(
    heap: SymmetricHeap,
    plan: RowPlan,
    case: DispatchCase,
    deadline: float,
    device: str | torch.device,
    modules: dict[str, Any],
) -> Trip:
    with Channel(plan, heap, deadline=deadline, **modules) as channel:
        poison(channel)
        trip = travel(RowwiseDispatcher.on(channel), case, device=device)
        channel.check()
    return trip


def poison(channel: Channel) -> None:
    """Fill the buffers with NaN and -1, so that whoever uses what nobody stored is found.

    Collective, before the first exchange.
    """
    for name in ("rows", "weight", "row", "origin", "results", "scalars"):
        field = channel.fields[name]
        channel.heap.local[field.at : field.at + field.num_bytes] = 0xFF
    channel.heap.host_barrier()
