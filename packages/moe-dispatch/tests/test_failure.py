"""A rank that sleeps, raises or dies: every other one raises in time and says who it was."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from moe_dispatch import PeerError, open_heap
from moe_dispatch.rowwise import RowwiseDispatcher
from moe_dispatch.rowwise.protocol import Op, Step
from moe_dispatch.testing import DispatchCase, gain_experts, plan_for, run_on_threads
from rank_pool import RankPool

CASE = DispatchCase(2, 2, 4, (3, 2, 4), hot_experts=6, dtype="float32")
DEADLINE = 1.0


def trip(dispatcher: RowwiseDispatcher, case: DispatchCase, rank: int) -> None:
    """Go forward and backward."""
    x_TD = case.tokens(rank).requires_grad_()
    sent = dispatcher.dispatch(x_TD, case.routing(rank))
    y_RD = gain_experts(sent.x_RD, sent.offsets_e1, dispatcher.local_experts)
    y_TD = dispatcher.combine(y_RD, sent)
    y_TD.backward(case.gradient(rank))
    dispatcher.check()


def sleep_on_rank_1(group: dist.ProcessGroup, op: Op, nth: int) -> tuple[float, Any]:
    """Rank 1 sleeps too long before a step that it comes to for the nth time."""
    rank = dist.get_rank(group)
    plan = plan_for(CASE)
    dispatcher = RowwiseDispatcher(
        plan, open_heap(plan.heap_bytes, group, device="cpu"), deadline=60.0
    )
    trip(dispatcher.named("warm"), CASE, rank)  # the interpreter is slow to begin
    dispatcher.channel.deadline = DEADLINE
    dist.barrier(group)
    left = [nth]

    def pace(_: int, step: Step) -> None:
        if step.op is op:
            left[0] -= 1
            if not left[0]:
                time.sleep(2.5 * DEADLINE)

    if rank == 1:
        dispatcher.channel.pace = pace
    start = time.monotonic()
    try:
        trip(dispatcher.named("blocks.3"), CASE, rank)
    except PeerError as error:
        found = (error.rank, error.source, error.phase, error.layer, error.epoch, error.seen)
        return time.monotonic() - start, (str(error), found)
    return 0.0, None


@pytest.mark.parametrize(
    ("op", "nth", "phase", "epoch", "seen"),
    [
        (Op.TELL_COUNTS, 1, "COUNTS", 3, 1),
        (Op.PUT_ROWS, 1, "ROWS", 3, 2),
        (Op.GIVE_RESULTS, 1, "RESULTS", 3, 2),
        (Op.PUT_ROWS, 2, "ROWS", 4, 3),
        (Op.GIVE_RESULTS, 2, "RESULTS", 4, 3),
    ],
)
def test_a_rank_that_sleeps_is_named_by_all_others_in_time(
    pool: RankPool, op: Op, nth: int, phase: str, epoch: int, seen: int
) -> None:
    found = pool.run(sleep_on_rank_1, 3, op, nth)
    for rank in (0, 2):
        seconds, (text, fields) = found[rank]
        assert fields[:5] == (rank, 1, phase, "blocks.3", epoch)
        assert 0.5 * DEADLINE <= seconds < DEADLINE + 8
        where = f"rank {rank}, {phase} of layer 'blocks.3', epoch {epoch}: "
        if fields[5] == -1:  # the other one was a little earlier, and said so
            assert text.startswith(f"{where}rank {2 - rank} gave up waiting for rank 1")
            continue
        assert fields[5] == seen
        assert text.startswith(
            f"{where}rank 1 did not come within 1 s: "
            f"expected signal {epoch}, received {seen}; 2 of 3 ranks had come"
        )
        if phase == "ROWS" and nth == 1:
            mine = range(2 * rank, 2 * rank + 2)
            rows = sum(int((CASE.routing(1).expert_TK == i).sum()) for i in mine)
            assert text.endswith(f"; it has {rows} rows for this rank")
    assert any(found[rank][1][1][5] == seen for rank in (0, 2))  # one was first
    # Who slept finds that the others have given up, and why.
    _, (text, fields) = found[1]
    assert fields[:2] == (1, 1)
    assert "gave up waiting for rank 1" in text


def raise_on_rank_1(group: dist.ProcessGroup) -> tuple[float, str]:
    rank = dist.get_rank(group)
    plan = plan_for(CASE)
    start = time.monotonic()
    try:
        heap = open_heap(plan.heap_bytes, group, device="cpu")
        with RowwiseDispatcher(plan, heap, deadline=60.0, layer="blocks.0") as dispatcher:
            sent = dispatcher.dispatch(CASE.tokens(rank), CASE.routing(rank))
            if rank == 1:
                raise ArithmeticError("expert 3 is not finite")
            dispatcher.combine(sent.x_RD, sent)
    except (PeerError, ArithmeticError) as error:
        return time.monotonic() - start, f"{type(error).__name__}: {error}"
    return 0.0, "no error"


def test_a_rank_that_raises_ends_every_wait_for_it_at_once(pool: RankPool) -> None:
    found = pool.run(raise_on_rank_1, 3)
    assert found[1][1] == "ArithmeticError: expert 3 is not finite"
    for rank in (0, 2):
        seconds, text = found[rank]
        assert seconds < 20  # of 60 that it would have waited
        assert "of layer 'blocks.0', epoch 1: rank " in text
        assert told_of_1(text)


def told_of_1(text: str) -> bool:
    """Tell whether an error blames rank 1, which gave up; one of the others may say so first."""
    return "rank 1 gave up; see its own error" in text or "gave up waiting for rank 1" in text


def test_a_killed_rank_is_named_by_all_others_in_time() -> None:
    program = Path(__file__).with_name("dying_rank.py")
    run = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, check=False, timeout=100,
        env={**os.environ, "TRITON_INTERPRET": "1"},
    )  # fmt: skip
    found = {one["rank"]: one for one in map(json.loads, run.stdout.splitlines())}
    assert sorted(found) == [0, 1], run.stderr[-2000:]
    for rank, one in found.items():
        assert (one["source"], one["phase"], one["layer"]) == (2, "RESULTS", "blocks.7"), one
        assert one["seconds"] < 2.0 + 8.0
        assert one["rank"] == rank


def give_up(heap: Any, plan: Any) -> str:
    dispatcher = RowwiseDispatcher(plan, heap, deadline=60.0)
    if heap.rank == 1:
        dispatcher.abort()
    try:
        dispatcher.dispatch(CASE.tokens(heap.rank), CASE.routing(heap.rank))
    except PeerError as error:
        return f"{error.source} {error.phase}: {error}"
    return "no error"


def test_a_channel_that_gave_up_stays_given_up() -> None:
    plan = plan_for(CASE)
    said = run_on_threads(give_up, 3, plan.heap_bytes, plan)
    assert said[1] == "-1 ABORTED: rank 1 gave up"
    assert all(said[rank].startswith("1 ") and told_of_1(said[rank]) for rank in (0, 2))


def different_plans(group: dist.ProcessGroup) -> str:
    case = CASE._replace(dim=4 + dist.get_rank(group))
    plan = plan_for(case)
    heap = open_heap(plan_for(CASE._replace(dim=8)).heap_bytes, group, device="cpu")
    try:
        RowwiseDispatcher(plan, heap)
    except ValueError as error:
        return str(error)
    finally:
        heap.close()
    return "no error"


def test_ranks_with_different_plans_are_all_refused(pool: RankPool) -> None:
    for said in pool.run(different_plans, 3):
        assert said.startswith("plans differ: rank 0 has RowPlan(world_size=3, num_experts=6")
        assert "dim=4" in said
        assert "dim=5" in said


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dim": 5}, "D differs: got 5, the plan has 4"),
        ({"top_k": 3}, "K differs: got 3, the plan has 2"),
        ({"dtype": "bfloat16"}, "the dtype of x_TD differs: got torch.bfloat16, the plan has"),
        ({"tokens_W": (9,)}, "x_TD has 9 tokens, the plan has room for 4"),
    ],
)
def test_tokens_that_are_not_those_of_the_plan_are_refused(
    change: dict[str, Any], message: str
) -> None:
    case = DispatchCase(4, 2, 4, (4,), hot_experts=4, dtype="float32")
    plan = plan_for(case)
    other = case._replace(**change)
    dispatcher = RowwiseDispatcher(plan, open_heap(plan.heap_bytes, device="cpu"))
    with pytest.raises(ValueError, match=message):
        dispatcher.dispatch(other.tokens(0), other.routing(0))


def test_a_heap_that_does_not_fit_is_refused() -> None:
    plan = plan_for(DispatchCase(4, 2, 4, (4,), hot_experts=4))
    with pytest.raises(ValueError, match=f"the plan needs {plan.heap_bytes} bytes .* has 64"):
        RowwiseDispatcher(plan, open_heap(64, device="cpu"))
    other = plan_for(CASE)
    with pytest.raises(ValueError, match="W differs: the plan is for 3 ranks, the heap has 1"):
        RowwiseDispatcher(other, open_heap(other.heap_bytes, device="cpu"))
