"""The laws of every dispatcher, on drawn cases."""

import torch
import torch.distributed as dist
from hypothesis import given
from moe_dispatch import AllToAllDispatcher, LocalDispatcher
from moe_dispatch.testing import DispatchCase, Trip, check_dispatcher, dispatch_cases, travel
from moe_kernels import Routing
from rank_pool import RankPool


def go_all_to_all(group: dist.ProcessGroup, case: DispatchCase) -> Trip:
    return travel(AllToAllDispatcher(case.num_experts, group), case)


def go_alone(case: DispatchCase) -> list[Trip]:
    return [travel(LocalDispatcher(case.num_experts), case)]


def gathered(case: DispatchCase) -> Trip:
    """Take the tokens of all ranks through one rank that holds all experts."""
    ranks = range(case.world_size)
    routings = [case.routing(w) for w in ranks]

    class Gathered(DispatchCase):
        def tokens(self, rank: int) -> torch.Tensor:
            return torch.cat([case.tokens(w) for w in ranks])

        def gradient(self, rank: int) -> torch.Tensor:
            return torch.cat([case.gradient(w) for w in ranks])

        def routing(self, rank: int) -> Routing:
            return routings[0]._replace(
                weight_TK=torch.cat([routing.weight_TK for routing in routings]),
                expert_TK=torch.cat([routing.expert_TK for routing in routings]),
            )

    return travel(LocalDispatcher(case.num_experts), Gathered(*case.alone()))


@given(case=dispatch_cases(max_world_size=4))
def test_all_to_all_obeys_the_laws(pool: RankPool, case: DispatchCase) -> None:
    check_dispatcher(lambda case: pool.run(go_all_to_all, case.world_size, case), case)


@given(case=dispatch_cases(max_world_size=1))
def test_local_obeys_the_laws(case: DispatchCase) -> None:
    check_dispatcher(go_alone, case)


@given(case=dispatch_cases(max_world_size=4))
def test_ranks_give_the_bits_of_one_rank_that_holds_everything(
    pool: RankPool, case: DispatchCase
) -> None:
    trips = pool.run(go_all_to_all, case.world_size, case)
    alone = gathered(case)
    for name in ("y_TD", "dx_TD", "dweight_TK"):
        together = torch.cat([getattr(trip, name) for trip in trips])
        assert torch.equal(together, getattr(alone, name)), name
    for name in ("x_RD", "dy_RD"):
        together = torch.cat([getattr(trip, name) for trip in trips])
        assert torch.equal(together, getattr(alone, name)[: len(together)]), name


@given(case=dispatch_cases(max_world_size=1))
def test_a_group_of_one_gives_the_bits_of_no_group(pool: RankPool, case: DispatchCase) -> None:
    (one,), (other,) = pool.run(go_all_to_all, 1, case), go_alone(case)
    for name in ("offsets_e1", "y_TD", "dx_TD", "dweight_TK"):
        assert torch.equal(getattr(one, name), getattr(other, name)), name
    assert torch.equal(one.x_RD, other.x_RD[: len(one.x_RD)])
