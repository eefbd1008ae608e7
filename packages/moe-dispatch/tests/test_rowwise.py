"""The row-wise exchange with the shipped kernels, on virtual ranks: it obeys the laws."""

from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from moe_dispatch import LocalDispatcher
from moe_dispatch.rowwise import Channel, RowwiseDispatcher, warm_up
from moe_dispatch.rowwise import channel as channel_module
from moe_dispatch.testing import (
    DispatchCase,
    Trip,
    check_dispatcher,
    dispatch_cases,
    gain_experts,
    plan_for,
    run_on_threads,
    travel,
    travel_on_threads,
)
from torch import Tensor

SIZES = {
    "a rank without tokens": DispatchCase(2, 2, 3, (5, 0, 3), hot_experts=6),
    "tokens on one rank only": DispatchCase(2, 2, 3, (0, 0, 4, 0), hot_experts=8),
    "no tokens anywhere": DispatchCase(2, 2, 3, (0, 0, 0), hot_experts=6),
    "a rank whose experts get no rows": DispatchCase(2, 2, 3, (5, 4), hot_experts=2),
    "all tokens to one expert": DispatchCase(2, 1, 3, (4, 3, 2, 1), hot_experts=1),
    "every route masked": DispatchCase(2, 2, 3, (5, 4), hot_experts=4, masked=1.0),
    "every expert for every token": DispatchCase(2, 6, 3, (3, 2, 1), hot_experts=6),
    "primes": DispatchCase(3, 3, 5, (2, 5, 3, 1), hot_experts=12, masked=0.1),
    "many experts a rank": DispatchCase(17, 3, 2, (6, 7), hot_experts=34, masked=0.1),
    "wide rows": DispatchCase(1, 2, 2100, (2, 1), hot_experts=2, dtype="bfloat16"),
}
VARIANTS: list[dict[str, Any]] = [
    {},
    {"combine": "push"},
    {"dedup": True},
    {"dedup": True, "combine": "push"},
    {"overflow": "capacity", "capacity_factor": 64.0},
]


@pytest.mark.parametrize("name", SIZES)
def test_awkward_sizes_finish_with_the_right_values(name: str) -> None:
    check_dispatcher(travel_on_threads, SIZES[name])


@given(case=dispatch_cases(max_world_size=4, max_tokens=2), options=st.sampled_from(VARIANTS))
def test_row_wise_ranks_obey_the_laws(case: DispatchCase, options: dict[str, Any]) -> None:
    # With dedup the sum of one rank's results for a token is rounded before it travels.
    roundings = 1 + options.get("dedup", False)
    check_dispatcher(lambda case: travel_on_threads(case, **options), case, roundings)


class Gathered(DispatchCase):
    """One rank with the tokens of all ranks."""

    parts: DispatchCase

    def tokens(self, rank: int) -> Tensor:
        return torch.cat([self.parts.tokens(w) for w in range(self.parts.world_size)])

    def gradient(self, rank: int) -> Tensor:
        return torch.cat([self.parts.gradient(w) for w in range(self.parts.world_size)])

    def routing(self, rank: int) -> Any:
        routings = [self.parts.routing(w) for w in range(self.parts.world_size)]
        return routings[0]._replace(
            weight_TK=torch.cat([routing.weight_TK for routing in routings]),
            expert_TK=torch.cat([routing.expert_TK for routing in routings]),
        )


def gathered(case: DispatchCase) -> Trip:
    """Take the tokens of all ranks through one rank that holds all experts."""
    one = type("One", (Gathered,), {"parts": case})(*case.alone())
    return travel(LocalDispatcher(case.num_experts), one)


@example(DispatchCase(2, 2, 4, (3, 2), hot_experts=4, dtype="bfloat16"), "pull")
@given(
    case=dispatch_cases(max_world_size=3, max_tokens=2), combine=st.sampled_from(["pull", "push"])
)
def test_rows_and_results_have_the_bits_of_one_rank_that_holds_everything(
    case: DispatchCase, combine: str
) -> None:
    trips, alone = travel_on_threads(case, combine=combine), gathered(case)
    for name in ("y_TD", "dx_TD"):
        together = torch.cat([getattr(trip, name) for trip in trips])
        assert torch.equal(together, getattr(alone, name)), name
    for name in ("x_RD", "dy_RD"):
        start = 0
        for trip in trips:
            count = int(trip.offsets_e1[-1])
            want = getattr(alone, name)[start : start + count]
            assert torch.equal(getattr(trip, name)[:count], want), name
            start += count


def layers(heap: Any, plan: Any, case: DispatchCase, grad: bool) -> list[Tensor]:
    """Go through three layers, so that a buffer is used again."""
    outputs = []
    with RowwiseDispatcher(plan, heap, deadline=60) as dispatcher:
        for turn in range(3):
            later = case._replace(seed=case.seed + turn)
            rank = heap.rank
            with torch.set_grad_enabled(grad):
                sent = dispatcher.named(f"layer {turn}").dispatch(
                    later.tokens(rank), later.routing(rank)
                )
                y_RD = gain_experts(sent.x_RD, sent.offsets_e1, dispatcher.local_experts)
                outputs.append(dispatcher.combine(y_RD, sent).detach())
        dispatcher.check()
    return outputs


@pytest.mark.parametrize("combine", ["pull", "push"])
def test_without_gradients_rows_are_not_copied_and_values_are_the_same(combine: str) -> None:
    case = DispatchCase(2, 2, 8, (4, 0, 3), hot_experts=6, masked=0.2, dtype="float32")
    plan = plan_for(case, combine=combine)
    args = (3, plan.heap_bytes, plan, case)
    for kept, lent in zip(
        run_on_threads(layers, *args, True), run_on_threads(layers, *args, False), strict=True
    ):
        for one, other in zip(kept, lent, strict=True):
            assert torch.equal(one, other)


def lend(heap: Any, plan: Any, case: DispatchCase) -> tuple[bool, str, str]:
    with RowwiseDispatcher(plan, heap, deadline=60) as dispatcher, torch.no_grad():
        x_TD, routing = case.tokens(heap.rank), case.routing(heap.rank)
        one = dispatcher.dispatch(x_TD, routing)
        inside = heap.local.data_ptr() <= one.x_RD.data_ptr()
        inside &= one.x_RD.data_ptr() < heap.local.data_ptr() + heap.local.numel()
        two = dispatcher.dispatch(x_TD, routing)
        with pytest.raises(RuntimeError) as third:
            dispatcher.dispatch(x_TD, routing)
        with pytest.raises(RuntimeError) as swapped:
            dispatcher.combine(two.x_RD, two)
        for sent in (one, two):
            dispatcher.combine(sent.x_RD, sent)
        dispatcher.check()
    return inside, str(third.value), str(swapped.value)


def test_the_receive_buffer_is_lent_to_two_dispatches_and_given_back_in_order() -> None:
    case = DispatchCase(2, 2, 8, (4, 3), hot_experts=4, dtype="float32")
    plan = plan_for(case)
    for inside, third, swapped in run_on_threads(lend, 2, plan.heap_bytes, plan, case):
        assert inside
        assert third == (
            "two dispatches without gradients are open: combine the first of them before"
        )
        assert swapped == (
            "dispatches without a copy must be combined in their order: epoch 1 comes before 2"
        )


def weigh_at_the_experts(heap: Any, plan: Any, case: DispatchCase, weighted: bool) -> list[Tensor]:
    with RowwiseDispatcher(plan, heap, deadline=60) as dispatcher:
        x_TD = case.tokens(heap.rank).requires_grad_()
        routing = case.routing(heap.rank)
        weight_TK = routing.weight_TK.requires_grad_()
        sent = dispatcher.dispatch(x_TD, routing)
        y_RD = gain_experts(sent.x_RD, sent.offsets_e1, dispatcher.local_experts)
        if weighted:
            assert sent.weight_R is not None
            y_RD = y_RD.nan_to_num(0.0) * sent.weight_R[:, None]
        y_TD = dispatcher.combine(y_RD, sent, weighted=weighted)
        y_TD.backward(case.gradient(heap.rank))
        dispatcher.check()
    assert x_TD.grad is not None
    assert weight_TK.grad is not None
    return [y_TD.detach(), x_TD.grad, weight_TK.grad]


@pytest.mark.parametrize("options", VARIANTS)
def test_experts_may_apply_the_weights_themselves(options: dict[str, Any]) -> None:
    case = DispatchCase(2, 3, 4, (4, 3), hot_experts=4, masked=0.2)
    plan = plan_for(case, **options)
    args = (2, plan.heap_bytes, plan, case)
    owners, experts = (run_on_threads(weigh_at_the_experts, *args, at) for at in (False, True))
    for one, other in zip(owners, experts, strict=True):
        for got, want in zip(other, one, strict=True):
            torch.testing.assert_close(got, want)


def refuse(heap: Any, plan: Any, case: DispatchCase, about: str) -> str:
    with RowwiseDispatcher(plan, heap, deadline=60) as dispatcher:
        rank = heap.rank
        routing = case.routing(rank)
        odd = rank == 1
        if odd and about == "ids":
            routing.expert_TK[0] = torch.tensor([4, -2])
        message = ""
        with torch.set_grad_enabled(not (odd and about == "gradients")):
            try:
                dispatcher.dispatch(case.tokens(rank), routing)
            except ValueError as error:
                message = str(error)
        if about == "ids":  # they are still in step
            travel(dispatcher, case)
        return message


@pytest.mark.parametrize(
    ("about", "messages"),
    [
        ("ids", ["expert_TK must hold -1 (masked) or 0..3: rank 1 has 2 others"] * 3),
        (
            "gradients",
            [
                "gradients must be on or off (torch.no_grad) on all ranks: "
                f"they are {here} on rank {rank} and {there} on rank {other}"
                for rank, here, there, other in (
                    (0, "on", "off", 1),
                    (1, "off", "on", 0),
                    (2, "on", "off", 1),
                )
            ],
        ),
    ],
)
def test_ranks_that_disagree_all_raise(about: str, messages: list[str]) -> None:
    case = DispatchCase(2, 2, 3, (5, 4, 3), hot_experts=4)._replace(experts_per_rank=2)
    if about == "ids":
        case = DispatchCase(2, 2, 3, (5, 4), hot_experts=4)
        messages = messages[:2]
    plan = plan_for(case)
    world_size = case.world_size
    assert run_on_threads(refuse, world_size, plan.heap_bytes, plan, case, about) == messages


def count_launches(heap: Any, plan: Any, case: DispatchCase) -> dict[str, int]:
    """Count the kernels of this package; torch adds its own for the order of rows."""
    with Channel(plan, heap, deadline=60) as channel:
        dispatcher, counts, launch = RowwiseDispatcher.on(channel), [0], channel.launch

        def counting(*args: Any, **options: Any) -> None:
            counts[0] += 1
            launch(*args, **options)

        channel.launch = counting  # type: ignore[method-assign]
        found = {}

        def since(name: str) -> None:
            found[name], counts[0] = counts[0], 0

        x_TD = case.tokens(heap.rank).requires_grad_()
        sent = dispatcher.dispatch(x_TD, case.routing(heap.rank))
        since("dispatch")
        y_TD = dispatcher.combine(sent.x_RD, sent)
        since("combine")
        y_TD.backward(case.gradient(heap.rank))
        since("backward")
        return found


@pytest.mark.parametrize(
    ("world_size", "launches"),
    [
        (1, {"dispatch": 3, "combine": 1, "backward": 3}),
        (2, {"dispatch": 13, "combine": 7, "backward": 14}),
    ],
)
def test_a_layer_takes_the_launches_that_the_docs_state(
    world_size: int, launches: dict[str, int]
) -> None:
    # On a GPU one more each time that news is asked for: 2 in dispatch, 1 in combine, 1 backward.
    case = DispatchCase(2, 2, 4, (3,) * world_size, hot_experts=2, dtype="float32")
    plan = plan_for(case)
    args = (world_size, plan.heap_bytes, plan, case)
    assert run_on_threads(count_launches, *args) == [launches] * world_size


def launched(monkeypatch: pytest.MonkeyPatch, run: Any) -> set[tuple[str, str]]:
    """Return the kernels that a call launches, with their compile-time arguments."""
    found, launch = set(), channel_module.interpreted_in_turn

    def noting(kernel: Any, grid: Any, *args: Any, **options: Any) -> None:
        found.add((kernel.fn.__name__, str(sorted(options.items()))))
        launch(kernel, grid, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(channel_module, "interpreted_in_turn", noting)
        run()
    return found


@pytest.mark.parametrize("options", [*VARIANTS, {"wire": "mxfp8"}])
@pytest.mark.parametrize("tokens_W", [(2,), (2, 0)])
def test_warming_up_compiles_every_kernel_of_an_exchange(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], tokens_W: tuple[int, ...]
) -> None:
    case = DispatchCase(2, 2, 32, tokens_W, hot_experts=2, dtype="float32")
    plan = plan_for(case, **options)
    warm = launched(monkeypatch, lambda: warm_up(plan, "cpu"))
    real = launched(monkeypatch, lambda: travel_on_threads(case, **options))
    assert real <= warm, real - warm
