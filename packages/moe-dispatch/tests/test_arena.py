"""The arena keeps rows that came and no others, and gives them back bit for bit."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from moe_dispatch.arena import RowArena
from moe_dispatch.rowwise import RowwiseDispatcher
from moe_dispatch.testing import DispatchCase, plan_for, run_on_threads
from torch import Tensor


def layers(x_RD: Tensor, counts: list[int], arena: RowArena | None) -> Tensor:
    """Square rows again and again; each layer has its own number of rows that came."""
    for count in counts:
        came_R1 = torch.arange(len(x_RD))[:, None] < count
        if arena is None:
            x_RD = (x_RD * x_RD.sigmoid()).where(came_R1, 0)
            continue
        with arena.saving(len(x_RD), torch.tensor([count], dtype=torch.int32)):
            x_RD = x_RD * x_RD.sigmoid()
        x_RD = x_RD.where(came_R1, 0)
    return x_RD


@given(
    counts=st.lists(st.integers(0, 5), min_size=1, max_size=4),
    columns=st.integers(1, 9),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
)
def test_gradients_are_those_of_tensors_that_were_kept_whole(
    counts: list[int], columns: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(columns)
    x_RD = torch.randn(5, columns, generator=generator, dtype=torch.float64).to(dtype)
    arena = RowArena(1 << 16, "cpu")
    grads = []
    for use in (None, arena):
        leaf = x_RD.clone().requires_grad_()
        layers(leaf, counts, use).sum().backward()
        grads.append(leaf.grad)
    # Past the rows that came, whole tensors give gradients of zero times something; so do ours.
    assert torch.equal(*grads)
    assert int(arena.used) == 0
    assert int(arena.overflow) == 0


def test_only_rows_that_came_take_room() -> None:
    arena = RowArena(1 << 12, "cpu")
    x_RD = torch.randn(100, 8, requires_grad=True)  # 32 bytes a row, two units
    y_RD = layers(x_RD, [3], arena)
    assert int(arena.used) == 3 * 2 * 3  # three tensors of three rows of two units
    y_RD.sum().backward()
    assert int(arena.used) == 0


def test_a_graph_that_is_thrown_away_gives_its_room_back() -> None:
    arena = RowArena(1 << 12, "cpu")
    y_RD = layers(torch.randn(4, 8, requires_grad=True), [4, 2], arena)
    assert int(arena.used) > 0
    del y_RD
    assert int(arena.used) == 0


def test_an_overflow_is_flagged_and_spoils_nobody_else() -> None:
    arena = RowArena(16 * 14, "cpu")
    first = torch.randn(4, 4, requires_grad=True)  # one unit a row
    kept = layers(first, [4], arena)  # 12 of 14 units
    second = torch.randn(4, 4, requires_grad=True)
    layers(second, [4], arena).sum().backward()
    missing = int(arena.overflow)
    assert missing > 0
    kept.sum().backward()
    whole = first.detach().clone().requires_grad_()
    layers(whole, [4], None).sum().backward()
    assert first.grad is not None
    assert whole.grad is not None
    assert torch.equal(first.grad, whole.grad)
    assert int(arena.overflow) == missing  # it stays until somebody clears it


def go_through(heap, plan, case: DispatchCase, packed: bool) -> tuple[Tensor, Tensor, int]:
    with RowwiseDispatcher(plan, heap, deadline=60) as dispatcher:
        arena = RowArena(1 << 16, "cpu")
        x_TD, routing = case.tokens(heap.rank).requires_grad_(), case.routing(heap.rank)
        sent = dispatcher.dispatch(x_TD, routing)
        count_1 = sent.offsets_e1[-1:] if packed else sent.offsets_e1[:1] + len(sent.x_RD)
        with arena.saving(len(sent.x_RD), count_1):
            y_TD = dispatcher.combine(sent.x_RD * sent.x_RD.sigmoid(), sent)
        used = int(arena.used)
        y_TD.backward(case.gradient(heap.rank))
        dispatcher.check()
    assert x_TD.grad is not None
    return y_TD.detach(), x_TD.grad, used


@pytest.mark.parametrize("options", [{}, {"dedup": True}])
def test_experts_behind_a_dispatcher_keep_only_their_rows(options: dict) -> None:
    case = DispatchCase(2, 2, 8, (3, 0), hot_experts=2, dtype="float32")
    plan = plan_for(case, **options)
    args = (2, plan.heap_bytes, plan, case)
    packed, whole = (run_on_threads(go_through, *args, flag) for flag in (True, False))
    for one, other in zip(packed, whole, strict=True):
        assert torch.equal(one[0], other[0])
        assert torch.equal(one[1], other[1])
    assert packed[1][2] == 0  # nothing came to rank 1
    assert 0 < packed[0][2] < whole[0][2]
