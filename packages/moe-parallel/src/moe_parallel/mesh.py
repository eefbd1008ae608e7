"""This rank's place in a mesh, and the process groups it belongs to."""

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
import torch.distributed as dist

from moe_parallel.agreement import MismatchError, raise_together, require_same, tell_all
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
        pp_group: Ranks that pass activations to each other, in the order of the stages.
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
    pp_group: dist.ProcessGroup | None

    @classmethod
    def create(
        cls, plan: MeshPlan, rank: int | None = None, *, group: dist.ProcessGroup | None = None
    ) -> Self:
        """Make the process groups. A collective call: every rank of the mesh makes it.

        Args:
            plan: The layout.
            rank: This rank; None asks torch.distributed (or is 0 in a world of one).
            group: The ranks that the mesh is made of; None means all of torch.distributed's.
                A part of them works on gloo, and on NCCL unless that is bound to a device.

        Raises:
            MismatchError: If ranks were given different plans, on every rank.
            MeshError: If the world is not of the planned size, or ``rank`` is not this rank; the
                latter on every rank.

        Examples:
            >>> from moe_parallel import plan_mesh
            >>> mesh = Mesh.create(plan_mesh(1))
            >>> mesh.rank, mesh.dp_group
            (0, None)
        """
        if plan.world_size == 1:
            rank = 0 if rank is None else rank
            world, dp, ep, edp, pp = None, None, None, None, None
        else:
            rank = _checked_rank(plan, rank, group)
            world = dist.group.WORLD if group is None else group
            dp, ep, edp, pp = _own_groups(
                [plan.dp_groups(), plan.ep_groups(), plan.edp_groups(), plan.pp_groups()],
                rank,
                group,
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
            pp_group=pp,
        )


def stages_groups(
    mesh: Mesh, wanted: Sequence[tuple[int, ...]]
) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """Make groups of all ranks of some stages. A collective call of the whole mesh.

    Args:
        mesh: The mesh.
        wanted: The stages of each group that this rank wants to be in.

    Returns:
        This rank's groups, by stages.

    Raises:
        MismatchError: On every rank, if some rank of these stages did not ask for its group.
    """
    if mesh.world_group is None or mesh.plan.pp == 1:
        return {}
    told = tell_all(list(wanted), mesh.world_group)
    everyones = sorted({stages for held in told for stages in held})
    stage_ranks = mesh.plan.dp_groups()
    for stages in everyones:
        silent = [r for stage in stages for r in stage_ranks[stage] if stages not in told[r]]
        if silent:
            raise MismatchError(
                f"parameters are shared by stages {stages}, but ranks {silent} of these name none: "
                "each of the stages names its copy"
            )
    members = [[r for stage in stages for r in stage_ranks[stage]] for stages in everyones]
    made = zip(everyones, make_groups(members, mesh.rank, mesh.world_group), strict=True)
    return {stages: group for stages, group in made if group is not None}


def make_groups(
    members: Sequence[Sequence[int]],
    rank: int,
    group: dist.ProcessGroup | None,
    backend: str | None = None,
) -> list[dist.ProcessGroup | None]:
    """Make process groups; None stands for those that this rank is not in.

    Every rank of ``group`` takes part in making every one, as torch.distributed asks. (Making
    them among their members alone hangs where ranks have made different numbers of groups.)

    Args:
        members: Ranks of each, as numbered in ``group``.
        rank: This rank in ``group``.
        group: The ranks that make them; None means all.
        backend: Of the groups; None means that of torch.distributed.
    """
    made: list[dist.ProcessGroup | None] = []
    for ranks in members:
        _agree_on_a_name(group)
        global_ranks = [r if group is None else dist.get_global_rank(group, r) for r in ranks]
        new = dist.new_group(global_ranks, backend=backend)
        made.append(new if rank in ranks and isinstance(new, dist.ProcessGroup) else None)
    return made


def leave() -> None:
    """Leave all process groups, as the last thing that a program does with them.

    What hooks tie into cycles, such as an optimizer, its model and their mesh, is collected first:
    a group that somebody still holds keeps its threads through ``destroy_process_group``, and one
    of gloo's that runs into the interpreter's end aborts the process ("terminate called without an
    active exception": 2 of 8 ends of four ranks on two busy cores with torch 2.11, 0 of 12 since).
    Without process groups this does nothing.
    """
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()


def _checked_rank(plan: MeshPlan, rank: int | None, group: dist.ProcessGroup | None) -> int:
    if not dist.is_initialized():
        raise MeshError(
            f"a mesh of {plan.world_size} ranks needs torch.distributed.init_process_group first"
        )
    require_same(dict(enumerate(tell_all(repr(plan), group))), "the plan of the mesh")
    if dist.get_world_size(group) != plan.world_size:
        raise MeshError(
            f"the mesh is planned for {plan.world_size} ranks, "
            f"torch.distributed has {dist.get_world_size(group)}"
        )
    own, error = dist.get_rank(group), None
    if rank not in (None, own):
        error = MeshError(f"rank={rank} was given, but this process is rank {own}")
    raise_together(error, group, MeshError)
    return own


def _own_groups(
    partitions: Sequence[Sequence[tuple[int, ...]]], rank: int, group: dist.ProcessGroup | None
) -> list[dist.ProcessGroup | None]:
    """Return this rank's group of each partition of the mesh; equal partitions share theirs."""
    made: dict[tuple[tuple[int, ...], ...], dist.ProcessGroup | None] = {}
    for partition in partitions:
        key = tuple(partition)
        if key not in made:
            made[key] = _own_group(partition, rank, group)
    return [made[tuple(partition)] for partition in partitions]


def _own_group(
    partition: Sequence[tuple[int, ...]], rank: int, group: dist.ProcessGroup | None
) -> dist.ProcessGroup | None:
    """Return this rank's group of a partition of the mesh, making it where none exists."""
    if len(partition) == 1:
        return dist.group.WORLD if group is None else group
    return next(own for own in make_groups(partition, rank, group) if own is not None)


def _agree_on_a_name(group: dist.ProcessGroup | None) -> None:
    """Make the ranks of ``group`` call the next process group by the same name.

    torch.distributed names groups by counting them, and ranks that know a group by different
    names wait for each other forever. The counts differ when some ranks have been in a mesh of
    a part of the world. Asking for a group of somebody else's raises the count and no more. A
    part of the world takes names that are its own, as another part may be choosing one now.
    """
    first, world_size = dist.get_global_rank(group, 0) if group else 0, dist.get_world_size()
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    agreed = torch.tensor(dist.get_pg_count(), device=device)
    dist.all_reduce(agreed, op=dist.ReduceOp.MAX, group=group)
    name = int(agreed)
    if dist.get_world_size(group) < world_size:
        name += (first - name) % world_size
    somebody_else = (dist.get_rank() + 1) % world_size
    while dist.get_pg_count() < name:
        dist.new_group([somebody_else])
