"""Checks of a mesh and of what its ranks hold, made once at the start."""

import math
from collections.abc import Iterable

import torch.distributed as dist

from moe_parallel.mesh import Mesh
from moe_parallel.mesh_plan import MeshError
from moe_parallel.self_check import check_same
from moe_parallel.shard import Shard


class OwnershipError(RuntimeError):
    """Some part of the state belongs to nobody, or to two ranks."""


def check_mesh(mesh: Mesh, digest: str) -> None:
    """Check that ranks were started alike and that every group has the members it should.

    A sum over the wrong ranks raises no error. So every rank tells who it is over each of its
    groups, and compares what it hears with the plan. A collective call of the whole mesh.

    Args:
        mesh: The mesh.
        digest: Of the configuration: a hash, say.

    Raises:
        MismatchError: If ranks hold different digests or plans.
        MeshError: If a group has other members than planned, on every rank of the group.

    Examples:
        >>> from moe_parallel import Mesh, plan_mesh
        >>> check_mesh(Mesh.create(plan_mesh(1)), "a1b2")
    """
    check_same(digest, "the configuration", mesh)
    check_same(repr(mesh.plan), "the plan of the mesh", mesh)
    if mesh.world_group is None:
        return
    plan = mesh.plan
    views = {
        "world": (mesh.world_group, [tuple(range(plan.world_size))]),
        "dp": (mesh.dp_group, plan.dp_groups()),
        "ep": (mesh.ep_group, plan.ep_groups()),
        "edp": (mesh.edp_group, plan.edp_groups()),
        "pp": (mesh.pp_group, plan.pp_groups()),
    }
    for name, (group, partition) in views.items():
        planned = next(ranks for ranks in partition if mesh.rank in ranks)
        heard: list[int] = [-1] * dist.get_world_size(group)
        dist.all_gather_object(heard, mesh.rank, group=group)
        if tuple(heard) != planned:
            raise MeshError(
                f"the {name} group of rank {mesh.rank} has ranks {heard}, planned were "
                f"{list(planned)}"
            )


def check_ownership(shards: Iterable[Shard], mesh: Mesh) -> None:
    """Check that over all ranks the shards tile every global tensor exactly once.

    A parameter of one name on two stages, or experts that two ranks both take for theirs, would
    train and save without an error. A collective call of the whole mesh.

    Args:
        shards: Of this rank: ``ShardedAdamW.shards()``, with whatever the caller adds.
        mesh: The mesh.

    Raises:
        OwnershipError: On every rank alike, with the name, the elements and the ranks.
    """
    mine = [(s.name, s.kind, s.global_shape, s.flat_start, s.flat_stop) for s in shards]
    told: list[list[tuple[str, str, tuple[int, ...], int, int]]] = [mine]
    if mesh.world_group is not None:
        told = [[] for _ in range(mesh.plan.world_size)]
        dist.all_gather_object(told, mine, group=mesh.world_group)
    pieces: dict[tuple[str, str], list[tuple[int, int, int]]] = {}
    shapes: dict[tuple[str, str], dict[tuple[int, ...], int]] = {}
    for rank, held in enumerate(told):
        for name, kind, shape, start, stop in held:
            pieces.setdefault((name, kind), []).append((start, stop, rank))
            shapes.setdefault((name, kind), {}).setdefault(shape, rank)
    errors = []
    for key, found in pieces.items():
        errors += _errors_of(" ".join(key), sorted(found), shapes[key])
    if errors:
        raise OwnershipError(
            "state is not owned exactly once:" + "".join(f"\n  - {error}" for error in errors)
        )


def _errors_of(
    what: str, found: list[tuple[int, int, int]], shapes: dict[tuple[int, ...], int]
) -> list[str]:
    if len(shapes) > 1:
        listed = ", ".join(f"{shape} on rank {rank}" for shape, rank in shapes.items())
        return [f"{what} has different shapes: {listed}"]
    size = math.prod(next(iter(shapes)))
    errors, position, owner = [], 0, None
    for start, stop, rank in found:
        if start < position:
            errors.append(
                f"{what}: elements {start} to {min(stop, position) - 1} are owned by ranks "
                f"{owner} and {rank}"
            )
        if start > position:
            errors.append(f"{what}: elements {position} to {start - 1} are owned by nobody")
        if stop > position:
            position, owner = stop, rank
    if position < size:
        errors.append(f"{what}: elements {position} to {size - 1} are owned by nobody")
    return errors
