"""The same laws on GPUs: one rank on one, and two ranks on NCCL."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from moe_dispatch import AllToAllDispatcher, LocalDispatcher
from moe_dispatch.testing import DispatchCase, Trip, check_dispatcher, dispatch_cases, travel
from rank_pool import RankPool

pytestmark = pytest.mark.gpu

SIZES = [
    DispatchCase(3, 2, 4, (5, 6), hot_experts=6),
    DispatchCase(2, 2, 3, (5, 0), hot_experts=4),
    DispatchCase(2, 2, 3, (5, 4), hot_experts=2),
    DispatchCase(2, 2, 3, (5, 0), hot_experts=2),
    DispatchCase(2, 2, 3, (0, 0), hot_experts=4),
    DispatchCase(2, 1, 3, (6, 5), hot_experts=1),
    DispatchCase(2, 2, 3, (5, 4), hot_experts=4, masked=1.0),
    DispatchCase(1, 2, 8, (7, 513), hot_experts=2, masked=0.2),
    DispatchCase(32, 8, 256, (1021, 2003), hot_experts=40, masked=0.1),
]
CASES = [case._replace(dtype=dtype) for case in SIZES for dtype in ("float64", "bfloat16")]


def go_nccl(group: dist.ProcessGroup, cases: list[DispatchCase]) -> list[Trip]:
    """Every rank of the pool takes part in making the group, and two have a GPU in it."""
    nccl = dist.new_group([0, 1], backend="nccl")
    rank = dist.get_rank(group)
    if rank > 1:
        return []
    torch.cuda.set_device(rank)
    return [
        travel(AllToAllDispatcher(case.num_experts, nccl), case, device="cuda") for case in cases
    ]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_ranks_on_nccl_obey_the_laws(pool: RankPool) -> None:
    # Twice in one program, since a process group of NCCL takes seconds to make.
    trips = pool.run(go_nccl, 4, CASES + CASES)[:2]
    for i, case in enumerate(CASES):
        runs = iter([[trip[i] for trip in trips], [trip[i + len(CASES)] for trip in trips]])
        check_dispatcher(lambda case, runs=runs: next(runs), case)


@given(case=dispatch_cases(max_world_size=1))
def test_one_rank_obeys_the_laws_on_a_gpu(case: DispatchCase) -> None:
    def run(case: DispatchCase) -> list[Trip]:
        return [travel(LocalDispatcher(case.num_experts), case, device="cuda")]

    check_dispatcher(run, case)


def test_the_host_never_waits_for_one_rank() -> None:
    case = DispatchCase(8, 2, 16, (64,), hot_experts=8, masked=0.2, dtype="float32")
    dispatcher = LocalDispatcher(case.num_experts)
    x_TD, routing = case.tokens(0).cuda().requires_grad_(), case.routing(0)
    routing = routing._replace(
        weight_TK=routing.weight_TK.cuda().requires_grad_(), expert_TK=routing.expert_TK.cuda()
    )
    dy_TD = case.gradient(0).cuda()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        sent = dispatcher.dispatch(x_TD, routing)
        dispatcher.combine(sent.x_RD, sent).backward(dy_TD)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert x_TD.grad is not None
