"""This rank's place in a mesh, and the process groups it belongs to."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
import torch.distributed as dist

from moe_parallel.mesh_plan import MeshError, MeshPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """This rank's coordinates and groups.

    In a world of one rank every group is None and torch.distributed is not needed. In a larger
    world no group is None, not even one with a single member: torch.distributed takes None for
    the whole world, and a sum over the wrong ranks raises no error.

    Attributes:
        plan: The layout that all ranks share.
        rank: This rank, in ``0..plan.world_size - 1``.
        pp_rank: Its pipeline stage.
        dp_rank: Its place among the ranks that hold the same dense parameters.
        ep_rank: Its place among the ranks that share one set of experts. It holds experts
            ``[ep_rank * num_experts / ep, (ep_rank + 1) * num_experts / ep)``.
        edp_rank: Its place among the ranks that hold the same experts.
        world_group: All ranks.
        dp_group: Ranks with the same dense parameters: the stage.
        ep_group: Ranks that exchange tokens.
        edp_group: Ranks with the same experts.
    """

    plan: MeshPlan
    rank: int
    pp_rank: int
    dp_rank: int
    ep_rank: int
    edp_rank: int
    world_group: dist.ProcessGroup | None
    dp_group: dist.ProcessGroup | None
    ep_group: dist.ProcessGroup | None
    edp_group: dist.ProcessGroup | None

    @classmethod
    def create(
        cls, plan: MeshPlan, rank: int | None = None, *, group: dist.ProcessGroup | None = None
    ) -> Self:
        """Make the process groups. A collective call: every rank of the mesh makes it.

        Args:
            plan: The layout.
            rank: This rank; None asks torch.distributed (or is 0 in a world of one).
            group: The ranks that the mesh is made of; None means all of torch.distributed's.

        Raises:
            MeshError: If the world is not of the planned size, or ``rank`` is not this rank.

        Examples:
            >>> from moe_parallel import plan_mesh
            >>> mesh = Mesh.create(plan_mesh(1))
            >>> mesh.rank, mesh.dp_group
            (0, None)
        """
        if plan.world_size == 1:
            rank = 0 if rank is None else rank
            world, dp, ep, edp = None, None, None, None
        else:
            rank = _checked_rank(plan, rank, group)
            world = dist.group.WORLD if group is None else group
            dp, ep, edp = (
                _own_group(partition, rank, group)
                for partition in (plan.dp_groups(), plan.ep_groups(), plan.edp_groups())
            )
        pp_rank, edp_rank, ep_rank = plan.coordinates(rank)
        return cls(
            plan=plan,
            rank=rank,
            pp_rank=pp_rank,
            dp_rank=edp_rank * plan.ep + ep_rank,
            ep_rank=ep_rank,
            edp_rank=edp_rank,
            world_group=world,
            dp_group=dp,
            ep_group=ep,
            edp_group=edp,
        )


def _checked_rank(plan: MeshPlan, rank: int | None, group: dist.ProcessGroup | None) -> int:
    if not dist.is_initialized():
        raise MeshError(
            f"a mesh of {plan.world_size} ranks needs torch.distributed.init_process_group first"
        )
    if dist.get_world_size(group) != plan.world_size:
        raise MeshError(
            f"the mesh is planned for {plan.world_size} ranks, "
            f"torch.distributed has {dist.get_world_size(group)}"
        )
    if rank is not None and rank != dist.get_rank(group):
        raise MeshError(f"rank={rank} was given, but this process is rank {dist.get_rank(group)}")
    return dist.get_rank(group)


def _own_group(
    partition: Sequence[tuple[int, ...]], rank: int, group: dist.ProcessGroup | None
) -> dist.ProcessGroup | None:
    """Return this rank's group of a partition of the mesh, making it where none exists."""
    if len(partition) == 1:
        return dist.group.WORLD if group is None else group
    if group is None:
        # torch.distributed wants every rank to take part in making every group.
        made = [dist.new_group(list(ranks)) for ranks in partition]
        return next(new for new in made if isinstance(new, dist.ProcessGroup))
    # Ranks outside of the mesh do not come here, so only members can take part.
    _align_group_counts(group)
    mine = next(ranks for ranks in partition if rank in ranks)
    return _new_local_group([dist.get_global_rank(group, r) for r in mine])


def _align_group_counts(group: dist.ProcessGroup) -> None:
    """Make the ranks of ``group`` agree on how many groups they have made.

    torch.distributed derives a locally made group's name from that count, and ranks that know
    a group by different names never meet. Counts differ when ranks have been in different
    meshes before; groups of one fill the gap.
    """
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    mine = torch.tensor(dist.get_pg_count(), device=device)
    most = mine.clone()
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
    for _ in range(int(most) - int(mine)):
        _new_local_group([dist.get_rank()])


def _new_local_group(global_ranks: list[int]) -> dist.ProcessGroup:
    group = dist.new_group(global_ranks, use_local_synchronization=True)
    if not isinstance(group, dist.ProcessGroup):
        raise MeshError(f"rank {dist.get_rank()} is not among the ranks {global_ranks}")
    return group
