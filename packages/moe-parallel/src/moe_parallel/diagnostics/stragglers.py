"""Which ranks are slower than the others, time after time."""

import statistics
from dataclasses import dataclass

import torch
import torch.distributed as dist

from moe_parallel.mesh import Mesh


@dataclass(frozen=True, slots=True, kw_only=True)
class StragglerReport:
    """Times of a window of steps, alike on all ranks.

    Attributes:
        median: Of the ranks' own mean times a step, seconds.
        seconds: Mean time of a step by rank, without waiting for others.
        slow: How many times the median each straggler took, by rank.
    """

    median: float
    seconds: tuple[float, ...]
    slow: dict[int, float]

    def __str__(self) -> str:
        if not self.slow:
            return f"no straggler; median {self.median:.3g} s a step"
        listed = ", ".join(f"rank {rank} {ratio:.2f} times" for rank, ratio in self.slow.items())
        return f"stragglers: {listed} the median of {self.median:.3g} s a step"


class StragglerMonitor:
    """Compares the ranks' own times every so many steps.

    What counts is the time that a rank computes: the time of a step is the same for all, as the
    fast wait for the slow. Ranks of different stages do different work, so each is compared with
    those of its own stage.

    Args:
        mesh: This rank's place.
        every: Steps of a window.
        ratio: A rank is slow in a window if it takes this many times the median of its stage.
        windows: Slow windows in a row that make a straggler.

    Examples:
        >>> from moe_parallel import Mesh, plan_mesh
        >>> monitor = StragglerMonitor(Mesh.create(plan_mesh(1)), every=2)
        >>> monitor.record(0.5) is None
        True
        >>> print(monitor.record(1.5))
        no straggler; median 1 s a step
    """

    def __init__(self, mesh: Mesh, *, every: int = 100, ratio: float = 1.1, windows: int = 3):
        if every < 1 or windows < 1 or ratio <= 1:
            raise ValueError(
                "every and windows must be 1 or more and ratio above 1, "
                f"got every={every}, windows={windows}, ratio={ratio}"
            )
        self._mesh, self._every, self._ratio, self._windows = mesh, every, ratio, windows
        self._total, self._count = 0.0, 0
        self._slow_windows = [0] * mesh.plan.world_size

    def record(self, seconds: float) -> StragglerReport | None:
        """Take the time that this rank computed in a step; at the end of a window, compare.

        A collective call at the end of each window: every rank records every step.
        """
        self._total += seconds
        self._count += 1
        if self._count < self._every:
            return None
        times = self._gather(self._total / self._count)
        self._total, self._count = 0.0, 0
        slow = {}
        for ranks in self._mesh.plan.dp_groups():
            median = statistics.median(times[rank] for rank in ranks)
            for rank in ranks:
                is_slow = times[rank] > self._ratio * median
                self._slow_windows[rank] = (self._slow_windows[rank] + 1) * is_slow
                if self._slow_windows[rank] >= self._windows:
                    slow[rank] = times[rank] / median
        return StragglerReport(median=statistics.median(times), seconds=tuple(times), slow=slow)

    def _gather(self, seconds: float) -> list[float]:
        group = self._mesh.world_group
        if group is None:
            return [seconds]
        device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
        mine = torch.tensor([seconds], dtype=torch.float64, device=device)
        times = mine.new_empty(self._mesh.plan.world_size)
        dist.all_gather_into_tensor(times, mine, group=group)
        return times.tolist()
