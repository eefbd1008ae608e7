"""What the ranks tell each other between two steps, without waiting for the device."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from moe_parallel import Mesh


class Votes:
    """Yes or no from every rank after every step; yes if any rank says so.

    With several ranks the answers travel through host memory while the next step is on its way,
    so they come one step later, on all ranks after the same step. One rank answers at once.

    Args:
        mesh: The ranks.
    """

    def __init__(self, mesh: Mesh):
        self._group = mesh.world_group
        self._flags = torch.zeros(0)
        self._work: dist.Work | None = None

    def cast(self, mine: Sequence[bool]) -> list[bool]:
        """Give this rank's answers and return what any rank said the time before.

        A collective call, with the same number of answers every time.
        """
        if self._group is None:
            return list(mine)
        before = self.settle() or [False] * len(mine)
        self._flags = torch.tensor([float(answer) for answer in mine])
        self._work = dist.all_reduce(
            self._flags, dist.ReduceOp.MAX, group=self._group, async_op=True
        )
        return before

    def settle(self) -> list[bool]:
        """Wait for the answers that are on their way and return them, if there are any."""
        if self._work is None:
            return []
        self._work.wait()
        self._work = None
        return [bool(flag) for flag in self._flags.tolist()]
