import functools
import re

import pytest
import torch
import torch.distributed as dist
from moe_parallel import Mesh, MeshError, plan_mesh

create_mesh = functools.cache(Mesh.create)
LAYOUTS = [
    (world, pp, ep)
    for world in (2, 3, 4)
    for pp in (1, 2, 4)
    for ep in (1, 2, 3, 4)
    if world % (pp * ep) == 0
]


def members(group, world_size, pp, ep, whole):
    """Return this rank's coordinates, and who adds to a sum over each of its groups."""
    plan = plan_mesh(world_size, pp=pp, ep=ep)
    mesh = create_mesh(plan, group=None if whole else group)
    found = {}
    for view in ("world", "dp", "ep", "edp"):
        bits = torch.tensor(1 << mesh.rank)
        dist.all_reduce(bits, group=getattr(mesh, f"{view}_group"))
        found[view] = tuple(r for r in range(8) if int(bits) >> r & 1)
    coordinates = (mesh.pp_rank, mesh.edp_rank, mesh.ep_rank, mesh.dp_rank)
    return mesh.rank, coordinates, found


@pytest.mark.parametrize(("world_size", "pp", "ep"), LAYOUTS)
def test_groups_hold_exactly_the_planned_ranks(pool, world_size, pp, ep) -> None:
    plan = plan_mesh(world_size, pp=pp, ep=ep)
    # Four ranks are the pool's whole world; fewer are a part of it.
    for whole in (False, True) if world_size == 4 else (False,):
        results = pool.run(members, world_size, world_size, pp, ep, whole)
        for rank, (got_rank, coordinates, found) in enumerate(results):
            assert got_rank == rank
            assert coordinates[:3] == plan.coordinates(rank)
            assert coordinates[3] == found["dp"].index(rank)
            assert found["world"] == tuple(range(world_size))
            for view in ("dp", "ep", "edp"):
                (want,) = (g for g in getattr(plan, f"{view}_groups")() if rank in g)
                assert found[view] == want


def refusals(group):
    messages = []
    for plan, rank in ((plan_mesh(8), None), (plan_mesh(4), dist.get_rank() + 1)):
        try:
            Mesh.create(plan, rank)
        except MeshError as error:
            messages.append(str(error))
    return messages


def test_a_world_of_another_size_and_a_wrong_rank_are_refused(pool) -> None:
    for rank, messages in enumerate(pool.run(refusals, 4)):
        assert messages == [
            "the mesh is planned for 8 ranks, torch.distributed has 4",
            f"rank={rank + 1} was given, but this process is rank {rank}",
        ]


def test_one_rank_needs_no_process_group() -> None:
    mesh = Mesh.create(plan_mesh(1, num_experts=8), rank=0)
    assert (mesh.rank, mesh.dp_rank, mesh.ep_rank, mesh.edp_rank, mesh.pp_rank) == (0,) * 5
    assert {mesh.world_group, mesh.dp_group, mesh.ep_group, mesh.edp_group} == {None}
    with pytest.raises(MeshError, match=re.escape("rank must be in 0..0, got 1")):
        Mesh.create(plan_mesh(1), rank=1)


def test_several_ranks_need_torch_distributed() -> None:
    with pytest.raises(MeshError, match="a mesh of 2 ranks needs"):
        Mesh.create(plan_mesh(2), rank=0)
