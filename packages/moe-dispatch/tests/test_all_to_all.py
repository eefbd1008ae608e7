"""Several ranks: sizes that break dispatchers, backward on idle ranks, ranks that disagree."""

import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from moe_dispatch import AllToAllDispatcher, LocalDispatcher, make_dispatcher
from moe_dispatch.testing import DispatchCase, Trip, check_dispatcher, gain_experts, travel
from rank_pool import RankPool
from torch import Tensor
from torch.utils.checkpoint import checkpoint

SIZES = {
    "a rank without tokens": DispatchCase(2, 2, 3, (5, 0, 3), hot_experts=6),
    "tokens on one rank only": DispatchCase(2, 2, 3, (0, 0, 7, 0), hot_experts=8),
    "no tokens anywhere": DispatchCase(2, 2, 3, (0, 0, 0), hot_experts=6),
    "a rank whose experts get no rows": DispatchCase(2, 2, 3, (5, 4), hot_experts=2),
    "no tokens and no rows on the same rank": DispatchCase(2, 2, 3, (5, 0), hot_experts=2),
    "all tokens to one expert": DispatchCase(2, 1, 3, (6, 5, 4, 3), hot_experts=1),
    "every route masked": DispatchCase(2, 2, 3, (5, 4), hot_experts=4, masked=1.0),
    "odd and unequal tokens": DispatchCase(1, 2, 3, (3, 5), hot_experts=2),
    "primes": DispatchCase(3, 4, 5, (2, 13, 31, 7), hot_experts=12, masked=0.1),
    "one expert a rank": DispatchCase(1, 3, 2, (4, 9, 1, 2), hot_experts=4),
    "many experts a rank": DispatchCase(17, 3, 2, (20, 30), hot_experts=34, masked=0.1),
    "rows of one column": DispatchCase(2, 2, 1, (5, 4, 1), hot_experts=6),
}


def go(group: dist.ProcessGroup, case: DispatchCase) -> Trip:
    return travel(AllToAllDispatcher(case.num_experts, group), case)


def check_on(pool: RankPool, case: DispatchCase) -> None:
    check_dispatcher(lambda case: pool.run(go, case.world_size, case), case)


@pytest.mark.parametrize("name", SIZES)
def test_awkward_sizes_finish_with_the_right_values(pool: RankPool, name: str) -> None:
    check_on(pool, SIZES[name])


@pytest.mark.parametrize("top_k", range(1, 9))
def test_any_k_on_ranks_with_0_1_7_and_513_tokens(pool: RankPool, top_k: int) -> None:
    check_on(pool, DispatchCase(2, top_k, 4, (0, 1, 7, 513), hot_experts=8, masked=0.2))


def backward_of_one_step(
    group: dist.ProcessGroup, case: DispatchCase, tokens_learn: list[bool]
) -> tuple[Tensor | None, Tensor, bool]:
    """Go back on a rank that keeps its autograd graph as small as it can.

    Routing weights are constants, tokens learn on some ranks only, and experts without rows
    return zeros that are connected to nothing.

    Returns:
        The gradients of the tokens and of the experts' gain, and whether ``y_TD`` has one.
    """
    dispatcher = AllToAllDispatcher(case.num_experts, group)
    rank = dist.get_rank(group)
    x_TD = case.tokens(rank).requires_grad_(tokens_learn[rank])
    gain = torch.ones((), dtype=x_TD.dtype, requires_grad=True)
    sent = dispatcher.dispatch(x_TD, case.routing(rank))
    y_RD = gain_experts(sent.x_RD, sent.offsets_e1, dispatcher.local_experts) * gain
    if not len(sent.x_RD):
        y_RD = torch.zeros_like(sent.x_RD).detach()
    y_TD = dispatcher.combine(y_RD, sent)
    y_TD.backward(case.gradient(rank))
    dgain = torch.zeros(()) if gain.grad is None else gain.grad
    return x_TD.grad, dgain, y_TD.requires_grad


@pytest.mark.parametrize("tokens_learn", [[True, True], [True, False], [False, True], [False] * 2])
@pytest.mark.parametrize("tokens_W", [(5, 4), (5, 0), (0, 4)])
def test_idle_ranks_join_backward(
    pool: RankPool, tokens_W: tuple[int, ...], tokens_learn: list[bool]
) -> None:
    case = DispatchCase(2, 2, 3, tokens_W, hot_experts=2)  # nothing for rank 1's experts
    found = pool.run(backward_of_one_step, 2, case, tokens_learn)
    dgain = 0.0
    for rank, (dx_TD, _, connected) in enumerate(found):
        assert connected
        routing, dy_TD = case.routing(rank), case.gradient(rank)
        gain_T1 = (routing.weight_TK * (routing.expert_TK + 1)).sum(1, keepdim=True)
        dgain += float((gain_T1 * case.tokens(rank) * dy_TD).sum())
        if tokens_learn[rank]:
            torch.testing.assert_close(dx_TD, gain_T1 * dy_TD)
        else:
            assert dx_TD is None
    assert float(found[0][1]) == pytest.approx(dgain)
    assert float(found[1][1]) == 0.0


def two_layers(
    group: dist.ProcessGroup | None, case: DispatchCase, rank: int | None, recompute: bool
) -> tuple[Tensor, Tensor]:
    dispatcher = make_dispatcher(case.num_experts, group)
    rank = dist.get_rank(group) if rank is None else rank

    def layer(x_TD: Tensor) -> Tensor:
        sent = dispatcher.dispatch(x_TD, case.routing(rank))
        y_RD = gain_experts(sent.x_RD.tanh(), sent.offsets_e1, dispatcher.local_experts)
        return x_TD + dispatcher.combine(y_RD, sent)

    x_TD = case.tokens(rank).requires_grad_()
    y_TD = x_TD
    for _ in range(2):
        y_TD = checkpoint(layer, y_TD, use_reentrant=False) if recompute else layer(y_TD)
    y_TD.backward(case.gradient(rank))
    assert x_TD.grad is not None
    return y_TD.detach(), x_TD.grad


def test_recomputed_layers_give_the_same_bits(pool: RankPool) -> None:
    case = DispatchCase(2, 2, 3, (5, 0, 3), hot_experts=6, masked=0.2, dtype="float32")
    kept, again = (pool.run(two_layers, 3, case, None, recompute) for recompute in (False, True))
    for rank, (one, other) in enumerate(zip(kept, again, strict=True)):
        alone = two_layers(None, case, rank, False)  # a rank's tokens do not see the others
        for tensors in zip(one, other, alone, strict=True):
            assert torch.equal(tensors[0], tensors[1])
            assert torch.equal(tensors[0], tensors[2])


def without_gradients(group: dist.ProcessGroup, case: DispatchCase) -> tuple[bool, Tensor]:
    dispatcher = AllToAllDispatcher(case.num_experts, group)
    rank = dist.get_rank(group)
    with torch.no_grad():
        sent = dispatcher.dispatch(case.tokens(rank), case.routing(rank))
        y_TD = dispatcher.combine(sent.x_RD, sent)
    return y_TD.requires_grad, y_TD


def test_without_gradients_the_values_are_the_same_and_need_none(pool: RankPool) -> None:
    case = DispatchCase(2, 2, 3, (5, 0, 3), hot_experts=6, masked=0.2)
    for rank, (connected, y_TD) in enumerate(pool.run(without_gradients, 3, case)):
        assert not connected
        weight_T1 = case.routing(rank).weight_TK.sum(1, keepdim=True)
        torch.testing.assert_close(y_TD, weight_T1 * case.tokens(rank))


def message_of(call: Callable[[], object]) -> str:
    try:
        call()
    except ValueError as error:
        return str(error)
    return "no error"


def disagree(group: dist.ProcessGroup, about: str) -> tuple[str, Trip]:
    """Differ on rank 1, then run a good case, which only ranks in step can finish."""
    case = DispatchCase(2, 2, 3, (5, 4, 3), hot_experts=6)
    dispatcher = AllToAllDispatcher(case.num_experts, group)
    rank = dist.get_rank(group)
    x_TD, routing = case.tokens(rank), case.routing(rank)
    odd = rank == 1
    if odd and about == "D":
        x_TD = x_TD[:, :2]
    if odd and about == "dtype":
        x_TD = x_TD.float()
    if odd and about == "ids":
        routing.expert_TK[0] = torch.tensor([6, -2])
    with torch.no_grad() if odd and about == "gradients" else nullcontext():
        message = message_of(lambda: dispatcher.dispatch(x_TD, routing))
    return message, travel(dispatcher, case)


@pytest.mark.parametrize(
    ("about", "message"),
    [
        ("D", "D differs between ranks: rank 0 has 3, rank 1 has 2, rank 2 has 3"),
        (
            "dtype",
            "the dtype of x_TD differs between ranks: "
            "rank 0 has torch.float64, rank 1 has torch.float32, rank 2 has torch.float64",
        ),
        (
            "ids",
            "expert_TK must hold -1 (masked) or 0..5: rank 1 has 2 others",
        ),
        (
            "gradients",
            "gradients must be on or off (torch.no_grad) on all ranks: "
            "rank 0 has on, rank 1 has off, rank 2 has on",
        ),
    ],
)
def test_ranks_that_disagree_all_raise_the_same_and_stay_in_step(
    pool: RankPool, about: str, message: str
) -> None:
    assert [found for found, _ in pool.run(disagree, 3, about)] == [message] * 3


def refuse_experts(group: dist.ProcessGroup, num_experts: int) -> str | None:
    """Only rank 0 makes the dispatcher: if that sent anything, it would wait for the others."""
    if dist.get_rank(group) > 0:
        return None
    return message_of(lambda: make_dispatcher(num_experts, group))


@pytest.mark.parametrize(
    ("num_experts", "message"),
    [
        (
            6,
            "num_experts (6) must be a multiple of the group's size (4): "
            "use a group of 1, 2, 3, 6 ranks, or 4 or 8 experts",
        ),
        (
            3,
            "num_experts (3) must be a multiple of the group's size (4): "
            "use a group of 1, 3 ranks, or 4 experts",
        ),
        (0, "num_experts must be at least 1, got 0"),
    ],
)
def test_experts_that_do_not_divide_are_refused_before_anything_is_sent(
    pool: RankPool, num_experts: int, message: str
) -> None:
    assert pool.run(refuse_experts, 4, num_experts)[0] == message


def choose(group: dist.ProcessGroup, num_experts: int) -> tuple[str, range]:
    dispatcher = make_dispatcher(num_experts, group)
    return type(dispatcher).__name__, dispatcher.local_experts


def test_the_group_decides_which_dispatcher_is_made(pool: RankPool) -> None:
    assert pool.run(choose, 1, 6) == [("LocalDispatcher", range(6))]
    assert pool.run(choose, 3, 6) == [
        ("AllToAllDispatcher", range(0, 2)),
        ("AllToAllDispatcher", range(2, 4)),
        ("AllToAllDispatcher", range(4, 6)),
    ]


def from_outside(group: dist.ProcessGroup) -> str:
    first_only = dist.new_group([0])
    return message_of(lambda: make_dispatcher(4, first_only))


def test_a_process_outside_the_group_is_refused(pool: RankPool) -> None:
    refusal = "this process is not a member of the group that it was given"
    assert pool.run(from_outside, 4) == ["no error", refusal, refusal, refusal]


def wrong_combines(group: dist.ProcessGroup, case: DispatchCase) -> tuple[str, str]:
    """Only rank 0 makes the mistakes: they are found before anything is sent."""
    dispatcher, local = AllToAllDispatcher(case.num_experts, group), LocalDispatcher(4)
    rank = dist.get_rank(group)
    sent = dispatcher.dispatch(case.tokens(rank), case.routing(rank))
    if rank > 0:
        return "", ""
    foreign = local.dispatch(case.tokens(rank), case.routing(rank))
    with pytest.raises(TypeError) as error:
        dispatcher.combine(foreign.x_RD, foreign)
    return message_of(lambda: dispatcher.combine(sent.x_RD[1:], sent)), str(error.value)


def test_combine_refuses_other_rows_than_dispatch_gave(pool: RankPool) -> None:
    case = DispatchCase(2, 2, 3, (5, 4), hot_experts=2)
    rows, plan = pool.run(wrong_combines, 2, case)[0]
    assert rows == (
        "R differs: y_RD has 17 rows, dispatch gave 18; "
        "combine needs one result for each row of x_RD, in its order"
    )
    assert plan == "AllToAllDispatcher cannot combine with a LocalPlan"


def wait_for_nobody(group: dist.ProcessGroup) -> float:
    impatient = dist.new_group([0, 1], timeout=timedelta(seconds=2))
    if dist.get_rank(group) > 0:
        return 0.0
    case = DispatchCase(2, 2, 3, (5, 4), hot_experts=4)
    start = time.monotonic()
    with pytest.raises(RuntimeError):
        travel(AllToAllDispatcher(case.num_experts, impatient), case)
    return time.monotonic() - start


def test_the_timeout_of_the_group_bounds_the_wait_for_a_rank_that_never_comes(
    pool: RankPool,
) -> None:
    assert 1 < pool.run(wait_for_nobody, 4)[0] < 60
