"""Pick the dispatcher for a process group."""

import torch.distributed as dist

from moe_dispatch.all_to_all import AllToAllDispatcher
from moe_dispatch.dispatcher import Dispatcher
from moe_dispatch.local import LocalDispatcher


def make_dispatcher(num_experts: int, group: dist.ProcessGroup | None = None) -> Dispatcher:
    """Return the dispatcher for the ranks of ``group``.

    Args:
        num_experts: E, the experts of all ranks together.
        group: The expert-parallel group. Without one, or in a group of one, nothing travels.

    Raises:
        ValueError: If ``num_experts`` is not a multiple of the group's size, or this process is
            not in the group.

    Examples:
        >>> make_dispatcher(num_experts=8).local_experts
        range(0, 8)
    """
    if group is None:
        return LocalDispatcher(num_experts)
    dispatcher = AllToAllDispatcher(num_experts, group)
    return dispatcher if dispatcher.world_size > 1 else LocalDispatcher(num_experts)
