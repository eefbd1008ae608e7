"""The row-wise exchange on a GPU: virtual ranks whose kernels really run at once, and graphs."""

from typing import Any

import pytest
import torch
from moe_dispatch import PeerError, open_heap
from moe_dispatch.rowwise import RowwiseDispatcher, warm_up
from moe_dispatch.testing import (
    DispatchCase,
    check_dispatcher,
    gain_experts,
    plan_for,
    run_on_threads,
    travel_on_threads,
)

pytestmark = pytest.mark.gpu

CASES = [
    DispatchCase(3, 2, 64, (5, 33, 0, 7), hot_experts=12, masked=0.1, dtype="float32"),
    DispatchCase(2, 1, 16, (9, 9), hot_experts=1, dtype="bfloat16"),
    DispatchCase(8, 8, 2048, (257, 64), hot_experts=16, dtype="bfloat16"),
    DispatchCase(2, 2, 3, (5, 0), hot_experts=4, dtype="float64"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.world_size} ranks {case.dtype}")
@pytest.mark.parametrize("options", [{}, {"dedup": True}, {"combine": "push"}])
def test_virtual_ranks_obey_the_laws(case: DispatchCase, options: dict[str, Any]) -> None:
    roundings = 1 + options.get("dedup", False)
    check_dispatcher(
        lambda case: travel_on_threads(case, "cuda", deadline=20.0, **options), case, roundings
    )


@pytest.mark.parametrize("options", [{}, {"dedup": True}, {"combine": "push"}])
def test_a_captured_trip_gives_the_bits_of_eager_and_the_host_never_waits(
    options: dict[str, Any],
) -> None:
    case = DispatchCase(6, 3, 64, (50,), hot_experts=6, masked=0.1, dtype="float32")
    plan = plan_for(case, **options)
    x_TD, routing = case.tokens(0).cuda().requires_grad_(), case.routing(0)
    weight_TK = routing.weight_TK.cuda().requires_grad_()
    routing = routing._replace(weight_TK=weight_TK, expert_TK=routing.expert_TK.cuda())
    dy_TD = case.gradient(0).cuda()
    dispatcher = RowwiseDispatcher(plan, open_heap(plan.heap_bytes, device="cuda"))

    def trip() -> list[torch.Tensor]:
        sent = dispatcher.dispatch(x_TD, routing)
        y_RD = gain_experts(sent.x_RD, sent.offsets_e1, dispatcher.local_experts)
        y_TD = dispatcher.combine(y_RD, sent)
        return [y_TD.detach(), *torch.autograd.grad(y_TD, (x_TD, weight_TK), dy_TD)]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            want = [tensor.clone() for tensor in trip()]
        stream.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            trip()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            got = trip()
        for _ in range(3):
            for tensor in got:
                tensor.fill_(torch.nan)
            graph.replay()
        stream.synchronize()
    dispatcher.check()
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one, other)


def leave_rank_0_alone(heap: Any, plan: Any, case: DispatchCase) -> str:
    dispatcher = RowwiseDispatcher(plan, heap, deadline=1.0, layer="blocks.2")
    if heap.rank == 1:
        return ""
    routing = case.routing(0)
    routing = routing._replace(
        weight_TK=routing.weight_TK.cuda(), expert_TK=routing.expert_TK.cuda()
    )
    try:
        with torch.no_grad():
            sent = dispatcher.dispatch(case.tokens(0).cuda(), routing)
            dispatcher.combine(sent.x_RD, sent)
        dispatcher.check()
    except PeerError as error:
        return str(error)
    return "nobody noticed"


def test_a_wait_on_the_gpu_ends_at_its_deadline_and_names_who_was_late() -> None:
    case = CASES[1]
    plan = plan_for(case)
    said = run_on_threads(
        leave_rank_0_alone, 2, plan.heap_bytes, plan, case, device="cuda",
        prepare=lambda: warm_up(plan, "cuda"),
    )[0]  # fmt: skip
    assert said.startswith(
        "rank 0, COUNTS of layer 'blocks.2', epoch 1: rank 1 did not come within 1 s: "
        "expected signal 1, received 0; 1 of 2 ranks had come"
    )
