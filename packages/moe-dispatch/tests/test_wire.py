"""MXFP8 on the wire, bad ids where there is one rank, and kernels for ranks that are not mapped."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from moe_dispatch import open_heap
from moe_dispatch.doctor import device_part
from moe_dispatch.rowwise import Channel, RowwiseDispatcher
from moe_dispatch.testing import DispatchCase, gain_experts, plan_for, poison, run_on_threads
from moe_kernels import dequantize, quantize
from torch import Tensor


def travel_in_mxfp8(heap: Any, plan: Any, case: DispatchCase) -> list[Tensor]:
    with Channel(plan, heap, deadline=60) as channel:
        poison(channel)
        dispatcher = RowwiseDispatcher.on(channel)
        x_TD, routing = case.tokens(heap.rank).requires_grad_(), case.routing(heap.rank)
        sent = dispatcher.dispatch(x_TD, routing)
        y_RD = gain_experts(sent.x_RD, sent.offsets_e1, dispatcher.local_experts)
        y_TD = dispatcher.combine(y_RD, sent)
        y_TD.backward(case.gradient(heap.rank))
        channel.check()
    assert x_TD.grad is not None
    return [sent.x_RD.detach(), y_TD.detach(), x_TD.grad]


@pytest.mark.parametrize("options", [{}, {"dedup": True}, {"combine": "push"}])
@pytest.mark.parametrize("dim", [32, 96])
def test_rows_in_mxfp8_are_the_rounded_tokens_and_gradients_are_not_rounded(
    options: dict[str, Any], dim: int
) -> None:
    case = DispatchCase(2, 2, dim, (3, 2), hot_experts=4, masked=0.2, dtype="float32")
    plan = plan_for(case, wire="mxfp8", **options)
    found = run_on_threads(travel_in_mxfp8, 2, plan.heap_bytes, plan, case)
    rounded = [dequantize(quantize(case.tokens(w))) for w in range(2)]
    expert_MK = torch.cat([case.routing(w).expert_TK for w in range(2)])
    for rank, (x_RD, y_TD, dx_TD) in enumerate(found):
        mine = range(2 * rank, 2 * rank + 2)
        token_R = torch.cat([(expert_MK == i).nonzero()[:, 0] for i in mine])
        assert torch.equal(x_RD[: len(token_R)], torch.cat(rounded)[token_R])
        assert not x_RD[len(token_R) :].any()
        routing = case.routing(rank)
        gain_T1 = (routing.weight_TK * (routing.expert_TK + 1)).sum(1, keepdim=True)
        torch.testing.assert_close(y_TD, gain_T1 * rounded[rank])
        torch.testing.assert_close(dx_TD, gain_T1 * case.gradient(rank))


def test_mxfp8_takes_about_half_the_bytes() -> None:
    case = DispatchCase(2, 2, 2048, (3, 2), hot_experts=4, dtype="bfloat16")
    assert plan_for(case).wire_bytes == 4096
    assert plan_for(case, wire="mxfp8").wire_bytes == 2048 + 64


@pytest.mark.parametrize("ids", [[4, 0], [-2, 1]])
def test_a_rank_alone_refuses_ids_of_no_expert_and_goes_on(ids: list[int]) -> None:
    case = DispatchCase(4, 2, 4, (2,), hot_experts=4, dtype="float32")
    plan = plan_for(case)
    dispatcher = RowwiseDispatcher(plan, open_heap(plan.heap_bytes, device="cpu"))
    bad = case.routing(0)
    bad.expert_TK[0] = torch.tensor(ids)
    with pytest.raises(ValueError, match=r"hold -1 \(masked\) or 0..3: rank 0 has 1 others"):
        dispatcher.dispatch(case.tokens(0), bad)
    with torch.no_grad():
        sent = dispatcher.dispatch(case.tokens(0), case.routing(0))
        dispatcher.combine(sent.x_RD, sent)
    dispatcher.check()


def test_ranks_that_cannot_be_mapped_need_a_staged_plan() -> None:
    case = DispatchCase(2, 2, 4, (2, 2), hot_experts=4, dtype="float32")
    plan = plan_for(case)
    assert run_on_threads(unmap, 2, plan.heap_bytes, plan) == [
        "the memory of rank 1 cannot be mapped here: make the plan with staged=True",
        "the memory of rank 0 cannot be mapped here: make the plan with staged=True",
    ]


def unmap(heap: Any, plan: Any) -> str:
    heap.bases_W = heap.bases_W.clone()
    heap.bases_W[1 - heap.rank] = 0
    try:
        Channel(plan, heap)
    except ValueError as error:
        return str(error)
    return "no error"


@pytest.mark.skipif(device_part((9, 0)) is None, reason="no NVSHMEM bitcode is installed")
@pytest.mark.skipif(
    os.environ.get("HYPOTHESIS_PROFILE") != "nightly",
    reason="reading the bitcode takes half a minute a kernel: for a night",
)
@pytest.mark.parametrize("name", ["signal", "tell_counts", "put_rows", "get_rows"])
def test_kernels_with_nvshmem_calls_compile(name: str) -> None:
    program = Path(__file__).with_name("aot_remote.py")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, str(program), "90", name], env=environment, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    found = json.loads(run.stdout)
    assert found["knows_nvshmem"]
    assert found["cubin"] > 10_000
