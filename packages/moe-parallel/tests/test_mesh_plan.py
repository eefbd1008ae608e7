import re
from contextlib import nullcontext
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from moe_parallel import MeshError, MeshPlan, plan_mesh

SIZES = st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16, 24, 36, 64, 72, 96, 512])


def is_legal(world_size, pp, ep, num_experts, num_layers, nvlink_domain):
    """Say whether a layout is legal, by building the groups that the rules are about."""
    if world_size % pp or (world_size // pp) % ep or num_experts % ep or pp > num_layers:
        return False
    groups = [range(first, first + ep) for first in range(0, world_size, ep)]
    return all(group[0] // nvlink_domain == group[-1] // nvlink_domain for group in groups)


@given(
    SIZES,
    st.integers(1, 16),
    st.integers(1, 80),
    st.sampled_from([6, 8, 64, 72, 128]),
    st.integers(1, 61),
    st.sampled_from([1, 4, 8, 72]),
)
def test_exactly_the_legal_layouts_are_accepted(world, pp, ep, experts, layers, domain) -> None:
    arguments = {"pp": pp, "ep": ep, "num_experts": experts, "num_layers": layers}
    if is_legal(world, pp, ep, experts, layers, domain):
        plan = plan_mesh(world, **arguments, nvlink_domain=domain)
        assert plan.dp * pp == world
        assert plan.edp * ep == plan.dp
        return
    with pytest.raises(MeshError) as caught:
        plan_mesh(world, **arguments, nvlink_domain=domain)
    # What the message calls usable passes the rules of that axis.
    for axis, listed in re.findall(r"usable (pp|ep): \[([\d, ]*)\]", str(caught.value)):
        for value in map(int, filter(None, listed.split(", "))):
            if axis == "pp":
                assert is_legal(world, value, 1, experts, layers, domain)
            elif world % pp == 0:
                assert is_legal(world, pp, value, experts, max(layers, pp), domain)


@pytest.mark.parametrize("domain", [1, 4, 8, 72])
@pytest.mark.parametrize("experts", [6, 8, 72])
@pytest.mark.parametrize("world", [4, 12, 16, 24, 144])
def test_of_ep_that_divides_the_ranks_exactly_the_legal_are_accepted(world, experts, domain):
    # Numbers drawn freely break several rules at once, so one that is missing would not show.
    for ep in (d for d in range(1, world + 1) if world % d == 0):
        legal = is_legal(world, 1, ep, experts, 1, domain)
        context = nullcontext() if legal else pytest.raises(MeshError, match=f"ep={ep}")
        with context:
            plan_mesh(world, ep=ep, num_experts=experts, nvlink_domain=domain)


@st.composite
def plans(draw):
    ep = draw(st.sampled_from([1, 2, 4, 8]))
    edp, pp = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    return MeshPlan(world_size=pp * edp * ep, pp=pp, ep=ep)


@given(plans())
def test_each_view_partitions_the_world(plan: MeshPlan) -> None:
    sizes = {"dp": plan.dp, "ep": plan.ep, "edp": plan.edp, "pp": plan.pp}
    for view, size in sizes.items():
        groups = getattr(plan, f"{view}_groups")()
        assert sorted(rank for group in groups for rank in group) == list(range(plan.world_size))
        assert {len(group) for group in groups} == {size}
        assert all(list(group) == sorted(group) for group in groups)


@given(plans())
def test_a_rank_meets_a_neighbour_in_exactly_the_groups_of_the_axis_that_differs(plan) -> None:
    for rank in range(plan.world_size):
        pp, edp, ep = plan.coordinates(rank)
        assert rank == (pp * plan.edp + edp) * plan.ep + ep
        (dp_group,) = (group for group in plan.dp_groups() if rank in group)
        (ep_group,) = (group for group in plan.ep_groups() if rank in group)
        (edp_group,) = (group for group in plan.edp_groups() if rank in group)
        # The dense group is the product of the expert ones: folding loses and adds nobody.
        assert set(ep_group) | set(edp_group) <= set(dp_group)
        assert set(ep_group) & set(edp_group) == {rank}
        assert dp_group.index(rank) == edp * plan.ep + ep
        assert ep_group.index(rank) == ep
        assert edp_group.index(rank) == edp


@given(plans())
def test_an_ep_group_stays_in_one_nvlink_domain(plan: MeshPlan) -> None:
    for group in plan.ep_groups():
        assert len({rank // plan.nvlink_domain for rank in group}) == 1


@pytest.mark.parametrize(
    ("arguments", "lines"),
    [
        (
            {"world_size": 24, "pp": 5},
            ["pp=5 does not divide world_size=24; usable pp: [1, 2, 3, 4, 6, 8, 12, 24]"],
        ),
        (
            {"world_size": 16, "ep": 3, "num_experts": 8},
            [
                "ep=3 does not divide the 16 ranks of a stage (world_size/pp); "
                "usable ep: [1, 2, 4, 8]",
                "num_experts=8 cannot be split over ep=3; usable ep: [1, 2, 4, 8]",
                "ep=3 does not divide nvlink_domain=8, so a group would straddle two domains; "
                "usable ep: [1, 2, 4, 8]",
            ],
        ),
        (
            {"world_size": 16, "ep": 16, "num_experts": 8},
            [
                "num_experts=8 cannot be split over ep=16; usable ep: [1, 2, 4, 8]",
                "ep=16 does not divide nvlink_domain=8, so a group would straddle two domains; "
                "usable ep: [1, 2, 4, 8]",
            ],
        ),
        (
            {"world_size": 4, "ep": 4, "num_experts": 6},
            ["num_experts=6 cannot be split over ep=4; usable ep: [1, 2]"],
        ),
        (
            {"world_size": 8, "pp": 8, "num_layers": 3},
            [
                "pp=8 stages need at least as many layers, got num_layers=3; usable pp: [1, 2]",
            ],
        ),
        (
            {"world_size": 8, "pp": 3, "ep": 5, "num_experts": 4, "num_layers": 2},
            [
                "pp=3 does not divide world_size=8; usable pp: [1, 2]",
                "pp=3 stages need at least as many layers, got num_layers=2; usable pp: [1, 2]",
                "ep=5 does not divide the 8 ranks of the world; usable ep: [1, 2, 4]",
                "num_experts=4 cannot be split over ep=5; usable ep: [1, 2, 4]",
            ],
        ),
        (
            {"world_size": 8.0, "pp": 0, "ep": True, "num_experts": -1, "nvlink_domain": "8"},
            [
                "world_size must be a positive integer, got 8.0",
                "pp must be a positive integer, got 0",
                "ep must be a positive integer, got True",
                "num_experts must be a positive integer, got -1",
                "nvlink_domain must be a positive integer, got '8'",
            ],
        ),
    ],
)
def test_everything_that_is_wrong_is_named_at_once(arguments, lines) -> None:
    with pytest.raises(MeshError) as caught:
        plan_mesh(**arguments)
    assert str(caught.value).split("\n  - ") == ["impossible mesh:", *lines]


def test_a_changed_plan_is_checked_again() -> None:
    with pytest.raises(MeshError, match="num_experts=6 cannot be split over ep=4"):
        replace(plan_mesh(4, num_experts=6), ep=4)


def test_a_rank_outside_of_the_world_has_no_place() -> None:
    with pytest.raises(MeshError, match=re.escape("rank must be in 0..3, got 4")):
        plan_mesh(4).coordinates(4)


def test_the_description_says_who_shares_what() -> None:
    assert plan_mesh(64, pp=4, ep=8, num_experts=64).describe() == (
        "64 ranks = pp 4 x edp 2 x ep 8; dp = edp x ep = 2 x 8 = 16\n"
        "stage 0 of 4: ranks 0-15\n"
        "  dense parameters: on ranks 0-15 (16 replicas, gradients summed over them)\n"
        "  experts 0-7: on ranks 0,8 (2 replicas, gradients summed over them)\n"
        "  experts 8-15: on ranks 1,9 (2 replicas, gradients summed over them)\n"
        "  experts 16-23: on ranks 2,10 (2 replicas, gradients summed over them)\n"
        "  experts 24-31: on ranks 3,11 (2 replicas, gradients summed over them)\n"
        "  experts 32-39: on ranks 4,12 (2 replicas, gradients summed over them)\n"
        "  experts 40-47: on ranks 5,13 (2 replicas, gradients summed over them)\n"
        "  experts 48-55: on ranks 6,14 (2 replicas, gradients summed over them)\n"
        "  experts 56-63: on ranks 7,15 (2 replicas, gradients summed over them)\n"
        "  tokens travel among ranks 0-7 | 8-15\n"
        "stage 1 of 4: ranks 16-31\n"
        "  as stage 0, with 16 added to each rank\n"
        "stage 2 of 4: ranks 32-47\n"
        "  as stage 0, with 32 added to each rank\n"
        "stage 3 of 4: ranks 48-63\n"
        "  as stage 0, with 48 added to each rank"
    )
    assert plan_mesh(1).describe() == (
        "1 ranks = pp 1 x edp 1 x ep 1; dp = edp x ep = 1 x 1 = 1\n"
        "stage 0 of 1: ranks 0\n"
        "  dense parameters: on ranks 0 (1 replica)\n"
        "  experts of ep rank 0: on ranks 0 (1 replica)\n"
        "  no token travels"
    )
