"""The protocol on many simulated ranks, faults that it must show, and traces of the real thing."""

from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from moe_dispatch.rowwise import Channel, RowwiseDispatcher
from moe_dispatch.rowwise.protocol import Clock, Op
from moe_dispatch.testing import (
    DispatchCase,
    check_dispatcher,
    dispatch_cases,
    gain_experts,
    plan_for,
    run_on_threads,
    travel_on_threads,
)
from moe_dispatch.testing.faults import FAULTS, Fault, hunt, plant, simulate
from moe_dispatch.testing.model import LawError, Model, Shape, plan_trip
from moe_dispatch.testing.simulator import MOODS, Simulator, interleaved


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    world_size = draw(st.integers(1, 9))
    experts = draw(st.integers(1, 3))
    top_k = draw(st.integers(1, min(4, world_size * experts)))
    tokens = st.one_of(st.just(0), st.integers(0, 5))
    tokens_W = tuple(draw(st.lists(tokens, min_size=world_size, max_size=world_size)))
    capacity = world_size * max(tokens_W) * min(top_k, experts)
    return Shape(world_size, experts, top_k, tokens_W, capacity, draw(st.booleans()))


@given(shape=shapes(), seed=st.integers(0, 2**16), mood=st.sampled_from(MOODS))
def test_any_schedule_keeps_the_laws(shape: Shape, seed: int, mood: Any) -> None:
    outcome = Simulator(shape, interleaved(3), seed, mood).run()
    assert outcome.finished == list(range(shape.world_size))


@pytest.mark.parametrize("mood", MOODS)
def test_sixty_four_ranks_keep_the_laws(mood: Any) -> None:
    tokens_W = tuple((5 * w) % 7 for w in range(64))
    shape = Shape(64, 2, 4, tokens_W, capacity=64 * 6 * 2, push=mood == "late stores")
    outcome = Simulator(shape, interleaved(2), 7, mood).run()
    assert outcome.finished == list(range(64))


def test_all_rows_of_64_ranks_for_one_expert_arrive() -> None:
    shape = Shape(64, 2, 1, (3,) * 64, capacity=64 * 3)
    Simulator(shape, interleaved(2, backward=False), 3, "late reads", hot=1, masked=0.0).run()


@given(
    world_size=st.integers(2, 8),
    seed=st.integers(0, 2**16),
    mood=st.sampled_from(MOODS),
    after=st.integers(0, 60),
)
def test_when_a_rank_dies_every_other_waits_for_it_or_for_one_that_does(
    world_size: int, seed: int, mood: Any, after: int
) -> None:
    shape = Shape(world_size, 2, 2, (2,) * world_size, capacity=world_size * 4)
    outcome = Simulator(shape, interleaved(3), seed, mood).run(dies=0, after=after)
    for step, late in outcome.blocked.values():
        assert step.op is Op.WAIT
        assert late
        assert set(late) <= {0, *outcome.blocked}
    if outcome.blocked:
        assert any(0 in late for _, late in outcome.blocked.values())


def test_the_protocol_without_a_fault_passes_what_faults_must_fail() -> None:
    simulate()


def run_kernels(modules: dict[str, ModuleType], options: dict[str, Any]) -> None:
    case = DispatchCase(2, 3, 4, (3, 2), hot_experts=4, dtype="float32", masked=0.1)
    check_dispatcher(
        lambda case: travel_on_threads(case, deadline=0.5, modules=modules, **options), case
    )


@pytest.mark.parametrize("options", [{}, {"dedup": True}, {"combine": "push"}])
def test_kernels_without_a_fault_pass_what_faults_must_fail(options: dict[str, Any]) -> None:
    case = DispatchCase(2, 3, 4, (3, 2), hot_experts=4, dtype="float32", masked=0.1)
    check_dispatcher(lambda case: travel_on_threads(case, **options), case)


def test_there_are_enough_faults_of_either_sort() -> None:
    names = {fault.name for fault in FAULTS}
    assert len(names) == len(FAULTS) >= 15
    assert sum(fault.where != "steps" for fault in FAULTS) >= 10


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_every_fault_breaks_a_law(fault: Fault) -> None:
    assert plant(fault)
    assert hunt(fault, run_kernels)


def trace_trip(heap: Any, plan: Any, case: DispatchCase, trace: list[Any]) -> list[Any]:
    """Go through two layers, forward and backward; note steps, and places of the first layer."""
    found = []
    with Channel(plan, heap, deadline=60) as channel:
        channel.trace = trace
        dispatcher = RowwiseDispatcher.on(channel)
        x_TD = case.tokens(heap.rank).requires_grad_()
        y_TD = x_TD
        for layer in range(2):
            routing = case._replace(seed=case.seed + layer).routing(heap.rank)
            sent = dispatcher.dispatch(y_TD, routing)
            slots = sent.plan.slots  # type: ignore[attr-defined]
            found.append((slots.rank_TK.numpy(), slots.row_TK.numpy()))
            y_RD = gain_experts(sent.x_RD, sent.offsets_e1, dispatcher.local_experts)
            y_TD = dispatcher.combine(y_RD, sent)
        y_TD.sum().backward()
        channel.check()
    return found


@given(
    case=dispatch_cases(max_world_size=4, max_tokens=1, dtypes=("float32",)),
    combine=st.sampled_from(["pull", "push"]),
)
def test_the_model_replays_what_the_kernels_did(case: DispatchCase, combine: str) -> None:
    """Each step that a kernel took must be the model's next one, and allowed at that time."""
    if case.world_size == 1:  # a rank alone neither signals nor waits
        return
    plan, trace = plan_for(case, combine=combine), []
    places = run_on_threads(trace_trip, case.world_size, plan.heap_bytes, plan, case, trace)
    W, e = case.world_size, case.experts_per_rank
    shape = Shape(W, e, case.top_k, case.tokens_W, max(1, plan.capacity), combine == "push")
    trips = {
        layer + 1: plan_trip(
            shape,
            [case._replace(seed=case.seed + layer).routing(w).expert_TK.numpy() for w in range(W)],
        )
        for layer in range(2)
    }
    model = Model(shape, trips)
    for event in trace:
        epoch = model.ranks[event.rank].epochs[event.clock]
        epoch += event.step.op is Op.ADVANCE
        assert event.epoch == epoch - event.step.lag
        # Forward the dispatches are epochs 1 and 2; backward sends 2 and then 1 as 3 and 4.
        trip = {1: 1, 2: 2, 3: 2, 4: 1}[max(1, epoch)]
        model.take_step(event.rank, event.step, event.clock, trip)
        for box in model.boxes:
            box.deliver_all()
    assert all(rank.epochs == {Clock.PUTS: 4, Clock.RETURNS: 4} for rank in model.ranks)
    for w, layers in enumerate(places):
        for layer, (rank_TK, row_TK) in enumerate(layers):
            known = trips[layer + 1].places_W[w]
            kept = rank_TK.reshape(-1) >= 0
            assert np.array_equal(rank_TK.reshape(-1)[kept], known.rank_N)
            assert np.array_equal(row_TK.reshape(-1)[kept], known.row_N)


def test_the_model_refuses_a_trace_with_a_step_too_early() -> None:
    case = DispatchCase(2, 2, 4, (2, 2), hot_experts=4, dtype="float32")
    plan, trace = plan_for(case), []
    run_on_threads(trace_trip, 2, plan.heap_bytes, plan, case, trace)
    early = next(i for i, event in enumerate(trace) if event.step.op is Op.SIGNAL)
    del trace[early]
    shape = Shape(2, 2, 2, (2, 2), plan.capacity)
    trips = {
        layer + 1: plan_trip(
            shape,
            [case._replace(seed=case.seed + layer).routing(w).expert_TK.numpy() for w in range(2)],
        )
        for layer in range(2)
    }
    model = Model(shape, trips)

    def replay() -> None:
        for event in trace:
            model.take_step(event.rank, event.step, event.clock, 1)
            for box in model.boxes:
                box.deliver_all()

    with pytest.raises(LawError, match="goes on without"):
        replay()
