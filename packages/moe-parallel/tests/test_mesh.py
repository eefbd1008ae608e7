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
    for view in ("world", "dp", "ep", "edp", "pp"):
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
            for view in ("dp", "ep", "edp", "pp"):
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
    assert {mesh.world_group, mesh.dp_group, mesh.ep_group, mesh.edp_group, mesh.pp_group} == {None}
    with pytest.raises(MeshError, match=re.escape("rank must be in 0..0, got 1")):
        Mesh.create(plan_mesh(1), rank=1)


def test_several_ranks_need_torch_distributed() -> None:
    with pytest.raises(MeshError, match="a mesh of 2 ranks needs"):
        Mesh.create(plan_mesh(2), rank=0)


def sum_in_a_new_mesh(group, whole):
    mesh = Mesh.create(
        plan_mesh(dist.get_world_size(group), ep=dist.get_world_size(group)),
        group=None if whole else group,
    )
    bits = torch.tensor([1 << mesh.rank, 1 << mesh.rank])
    dist.all_reduce(bits[:1], group=mesh.ep_group)
    dist.all_reduce(bits[1:], group=mesh.edp_group)
    return tuple(bits.tolist())


def test_meshes_of_parts_and_of_the_whole_can_be_made_in_any_order(pool) -> None:
    # A rank that sat out a mesh has made fewer groups than the others.
    for world_size, whole in ((2, False), (4, True), (3, False), (2, False), (4, False), (4, True)):
        everyone = (1 << world_size) - 1
        want = [(everyone, 1 << rank) for rank in range(world_size)]
        assert pool.run(sum_in_a_new_mesh, world_size, whole) == want


def sums_in_two_halves(group):
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    half = halves[dist.get_rank() // 2]
    meshes = [
        Mesh.create(plan_mesh(2, pp=pp, ep=ep), group=half) for pp, ep in ((1, 2), (2, 1), (1, 1))
    ]
    totals = []
    for mesh in meshes:
        total = torch.tensor([1 << dist.get_rank()] * 3)
        dist.all_reduce(total[:1], group=mesh.dp_group)
        dist.all_reduce(total[1:2], group=mesh.ep_group)
        dist.all_reduce(total[2:], group=mesh.edp_group)
        totals.append(total.tolist())
    return totals


def test_two_halves_of_the_world_make_their_meshes_at_the_same_time(pool) -> None:
    for rank, totals in enumerate(pool.run(sums_in_two_halves, 4)):
        own, half = 1 << rank, 3 << (rank // 2 * 2)
        assert totals == [[half, half, own], [own, own, own], [half, own, half]]
