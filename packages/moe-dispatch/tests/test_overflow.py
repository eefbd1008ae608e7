"""More rows than fit: fair shares, counted drops, retry; and what was planned is enough."""

import math
import random
import time
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from moe_dispatch import LocalDispatcher, RowPlan
from moe_dispatch.rowwise import Channel, RowwiseDispatcher, meet, send_tokens
from moe_dispatch.testing import (
    DispatchCase,
    Trip,
    dispatch_cases,
    gain_experts,
    plan_for,
    poison,
    run_on_threads,
    travel,
    travel_on_threads,
)
from torch import Tensor


class Seen:
    """What one rank saw of an exchange that may overflow."""

    def __init__(self, dispatcher: RowwiseDispatcher, trip: Trip, kept_TK: Tensor):
        self.trip, self.kept_TK = trip, kept_TK
        self.overflow = int(dispatcher.overflow)
        self.most_rows = int(dispatcher.most_rows)
        self.num_dropped = int(dispatcher.num_dropped)


def overflowing(heap: Any, plan: RowPlan, case: DispatchCase) -> Seen:
    with Channel(plan, heap, deadline=60) as channel:
        poison(channel)
        dispatcher = RowwiseDispatcher.on(channel)
        with torch.no_grad():
            sent = dispatcher.dispatch(case.tokens(heap.rank), case.routing(heap.rank))
            assert sent.kept_TK is not None
            kept_TK = sent.kept_TK.clone()
            dispatcher.combine(sent.x_RD, sent)
        dropped = int(dispatcher.num_dropped)
        trip = travel(dispatcher, case)
        channel.check()
        assert int(dispatcher.num_dropped) == 2 * dropped  # the same again, and backward none
        channel.state[channel.agree.DROPPED.value] = dropped
        return Seen(dispatcher, trip, kept_TK)


def run(case: DispatchCase, **options: Any) -> list[Seen]:
    plan = plan_for(case, **options)
    return run_on_threads(overflowing, case.world_size, plan.heap_bytes, plan, case)


def fair(count_WE: np.ndarray, capacity: int, e: int) -> np.ndarray:
    """Hand out places one at a time, round by round: what fair means, done slowly."""
    kept_WE = np.zeros_like(count_WE)
    for first in range(0, count_WE.shape[1], e):
        left, kept_We = capacity, kept_WE[:, first : first + e]
        want_We = count_WE[:, first : first + e]
        while left and (kept_We < want_We).any():
            for place in zip(*np.nonzero(kept_We < want_We), strict=True):
                if left:
                    kept_We[place] += 1
                    left -= 1
    return kept_WE


def masked_where_dropped(case: DispatchCase, seen: list[Seen]) -> DispatchCase:
    """Return the case with dropped routes masked from the start."""

    class Dropped(DispatchCase):
        def routing(self, rank: int) -> Any:
            routing = super().routing(rank)
            expert_TK = routing.expert_TK.masked_fill(~seen[rank].kept_TK, -1)
            return routing._replace(expert_TK=expert_TK)

    return Dropped(*case)


@example(case=DispatchCase(1, 1, 2, (9, 3), hot_experts=1, dtype="float32"), factor=0.9)
@given(
    case=dispatch_cases(max_world_size=2, max_tokens=2, dtypes=("float32",)),
    factor=st.sampled_from([0.1, 0.5, 0.9]),
)
def test_what_does_not_fit_is_dropped_fairly_and_counted(case: DispatchCase, factor: float) -> None:
    seen = run(case, overflow="capacity", capacity_factor=factor)
    W, E, e = case.world_size, case.num_experts, case.experts_per_rank
    capacity = plan_for(case, overflow="capacity", capacity_factor=factor).capacity
    ids = [case.routing(w).expert_TK for w in range(W)]
    count_WE = np.stack([np.bincount(x[x >= 0], minlength=E) for x in ids])
    kept_WE = np.stack(
        [np.bincount(x[one.kept_TK], minlength=E) for x, one in zip(ids, seen, strict=True)]
    )
    assert np.array_equal(kept_WE, fair(count_WE, capacity, e))
    for w, one in enumerate(seen):
        assert one.num_dropped == count_WE[w].sum() - kept_WE[w].sum()
        # Of a source's rows for an expert the first ones stay.
        for i in range(E):
            kept = one.kept_TK[ids[w] == i].tolist()
            assert kept == sorted(kept, reverse=True)
    totals = count_WE.reshape(W, -1, e).sum((0, 2))
    assert {one.overflow for one in seen} == {max(0, totals.max() - capacity)}
    assert {one.most_rows for one in seen} == {totals.max()}
    # And the values are those of routes that were masked from the start.
    masked = masked_where_dropped(case, seen)
    for w, one in enumerate(seen):
        alone = travel(LocalDispatcher(E), _Alone(masked, w))
        for name in ("y_TD", "dx_TD", "dweight_TK"):
            torch.testing.assert_close(getattr(one.trip, name), getattr(alone, name))


class _Alone(DispatchCase):
    """One rank's tokens, for a dispatcher that holds all experts."""

    def __new__(cls, case: DispatchCase, rank: int) -> "_Alone":
        made = super().__new__(cls, *case)
        made.case, made.at = case, rank  # type: ignore[attr-defined]
        return made

    def tokens(self, rank: int) -> Tensor:
        return self.case.tokens(self.at)  # type: ignore[attr-defined]

    def gradient(self, rank: int) -> Tensor:
        return self.case.gradient(self.at)  # type: ignore[attr-defined]

    def routing(self, rank: int) -> Any:
        return self.case.routing(self.at)  # type: ignore[attr-defined]


def test_a_repeated_step_has_the_bits_of_one_whose_buffer_was_large_enough() -> None:
    case = DispatchCase(2, 2, 4, (5, 0, 4), hot_experts=2, dtype="float32")
    small = plan_for(case, overflow="retry", capacity_factor=0.2)
    seen = run_on_threads(overflowing_once, 3, small.heap_bytes, small, case)
    assert {(over, most) for over, most, _ in seen} == {(18 - small.capacity, 18)}
    grown = small.grown(18)
    again = run_on_threads(overflowing_once, 3, grown.heap_bytes, grown, case)
    large = travel_on_threads(case, overflow="retry", capacity_factor=100.0)
    for (over, _, trip), want in zip(again, large, strict=True):
        assert over == 0
        for name in ("y_TD", "dx_TD", "dweight_TK"):
            assert torch.equal(getattr(trip, name), getattr(want, name)), name


def overflowing_once(heap: Any, plan: RowPlan, case: DispatchCase) -> tuple[int, int, Trip]:
    with RowwiseDispatcher(plan, heap, deadline=60) as dispatcher:
        trip = travel(dispatcher, case)
        over, most = int(dispatcher.overflow), int(dispatcher.most_rows)
        travel(dispatcher, case._replace(masked=1.0))
        assert int(dispatcher.overflow) == over  # sticky: a later step that fits says nothing
        dispatcher.clear_overflow()
        assert int(dispatcher.overflow) == int(dispatcher.most_rows) == 0
    return over, most, trip


@given(case=dispatch_cases(max_world_size=3, max_tokens=3, dtypes=("float32",)))
def test_an_exact_buffer_never_overflows(case: DispatchCase) -> None:
    plan = plan_for(case)
    counts = sum(
        (torch.bincount(case.routing(w).expert_TK.flatten().add(1), minlength=case.num_experts + 1)
         for w in range(case.world_size)),
        start=torch.zeros(case.num_experts + 1, dtype=torch.long),
    )[1:]  # fmt: skip
    assert counts.view(case.world_size, -1).sum(1).max() <= plan.capacity
    tightest = case._replace(hot_experts=case.top_k, masked=0.0, tokens_W=(3,) * case.world_size)
    rows = case.world_size * 3 * min(case.top_k, case.experts_per_rank)
    assert plan_for(tightest).capacity == rows


@pytest.mark.parametrize("dedup", [False, True])
@pytest.mark.parametrize("combine", ["pull", "push"])
def test_fields_fill_the_heap_without_overlap(dedup: bool, combine: Any) -> None:
    plan = RowPlan(
        world_size=4, num_experts=12, max_tokens=7, top_k=3, dim=5, dedup=dedup, combine=combine
    )
    end = 0
    for field in plan.fields().values():
        assert field.at >= end
        assert field.at % 256 == 0
        end = field.at + field.num_bytes
    assert end <= plan.heap_bytes < end + 256


def measure(heap: Any, plan: RowPlan, case: DispatchCase) -> dict[str, int]:
    with RowwiseDispatcher(plan, heap, deadline=60) as dispatcher:
        x_TD = case.tokens(heap.rank).requires_grad_()
        sent = dispatcher.dispatch(x_TD, case.routing(heap.rank))
        y_RD = gain_experts(sent.x_RD, sent.offsets_e1, dispatcher.local_experts)
        y_TD = dispatcher.combine(y_RD, sent)
        y_TD.sum().backward()
        parts = sent.plan  # type: ignore[attr-defined]
        saved = {
            id(tensor): tensor.untyped_storage().nbytes()
            for tensor in (*parts.slots[:4], *parts.arrived)  # type: ignore[attr-defined]
        }
        return {
            "heap": heap.local.numel(), "rows": sent.x_RD.nbytes, "results": y_RD.nbytes,
            "saved": sum(saved.values()), "tokens": y_TD.nbytes,
        }  # fmt: skip


@pytest.mark.parametrize(
    "options", [{}, {"dedup": True}, {"overflow": "retry", "capacity_factor": 1.0}]
)
def test_no_more_memory_is_used_than_was_planned(options: dict[str, Any]) -> None:
    case = DispatchCase(2, 2, 8, (6, 6, 6), hot_experts=2, dtype="float32")  # all to rank 0
    plan = plan_for(case, **options)
    planned = plan.memory()._asdict()
    for used in run_on_threads(measure, 3, plan.heap_bytes, plan, case):
        for name, count in used.items():
            assert count <= planned[name], name


@pytest.mark.parametrize("max_tokens", [0, 1, 65_535, 10**6, 10**7])
def test_any_number_of_tokens_is_planned_or_refused_in_words(max_tokens: int) -> None:
    sizes: dict[str, Any] = {"world_size": 64, "num_experts": 256, "top_k": 8, "dim": 7168}
    if 64 * max_tokens * 8 >= 2**31:
        with pytest.raises(ValueError, match=r"must fit in 32 bits .* got \d+: use fewer tokens"):
            RowPlan(max_tokens=max_tokens, **sizes)
    else:
        assert RowPlan(max_tokens=max_tokens, **sizes).heap_bytes >= 4 * max_tokens * 64 * 7168


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts": 6}, r"num_experts \(6\) must be a multiple of the group's size \(4\)"),
        ({"top_k": 0}, r"top_k must be in 1..num_experts \(8\), got 0"),
        ({"top_k": 9}, r"top_k must be in 1..num_experts \(8\), got 9"),
        ({"dim": 0}, "dim at least 1, got 5 and 0"),
        ({"overflow": "drop"}, "overflow must be one of .* got 'drop'"),
        ({"overflow": "retry"}, "capacity_factor belongs to overflow 'capacity' and 'retry'"),
        ({"capacity_factor": 2.0}, "overflow is 'exact', capacity_factor is 2.0"),
        ({"overflow": "retry", "capacity_factor": math.nan}, "must be above 0, got nan"),
        ({"wire": "mxfp8", "dim": 40}, "needs dim to be a multiple of 32 .* got 40"),
        ({"dtype": torch.int8}, "dtype must be one of"),
        ({"staged": True, "dedup": True}, "staged goes with neither dedup nor combine 'push'"),
    ],
)
def test_plans_that_cannot_be_are_refused(change: dict[str, Any], message: str) -> None:
    sizes: dict[str, Any] = {
        "world_size": 4, "num_experts": 8, "max_tokens": 5, "top_k": 2, "dim": 32, **change,
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        RowPlan(**sizes)


def count_stored(heap: Any, plan: RowPlan, case: DispatchCase) -> tuple[int, int, int]:
    """Return rows that this rank meant to send elsewhere, and those that came into its buffer."""
    with Channel(plan, heap, deadline=60) as channel:
        poison(channel)
        slots = meet(channel, case.routing(heap.rank).expert_TK)
        weight_TK = case.routing(heap.rank).weight_TK
        send_tokens(channel, case.tokens(heap.rank), weight_TK, slots)
        row = case.dim * 4
        came_P = (channel.views["rows"][1][:, :row] != 0xFF).any(1)
        channel.check()
        heap.host_barrier()
        away = int(((slots.to_TK >= 0) & (slots.to_TK != heap.rank)).sum())
        return away, int((slots.to_TK >= 0).sum()), int(came_P.sum())


def bytes_on_the_wire(plan: RowPlan, rows: int) -> int:
    """Count the bytes of tokens and of what travels with them."""
    meta = plan.meta_slots * (plan.wide.itemsize + (4 if plan.dedup else 0))
    return rows * (plan.wire_bytes + meta)


@pytest.mark.parametrize("dedup", [False, True])
def test_the_rows_that_come_are_those_that_were_counted(dedup: bool) -> None:
    case = DispatchCase(8, 8, 4, (3, 2, 3, 0), hot_experts=32, masked=0.2, dtype="float32")
    plan = plan_for(case, dedup=dedup)
    found = run_on_threads(count_stored, 4, plan.heap_bytes, plan, case)
    assert sum(meant for _, meant, _ in found) == sum(came for _, _, came in found)
    routes = [case.routing(w).expert_TK for w in range(4)]
    want = [rows_away(expert_TK, w, 4, 8, dedup) for w, expert_TK in enumerate(routes)]
    assert [away for away, _, _ in found] == want


def rows_away(expert_TK: Tensor, rank: int, world_size: int, e: int, dedup: bool) -> int:
    """Count the rows that leave a rank, token by token."""
    away = 0
    for experts in expert_TK.tolist():
        ranks = [expert // e for expert in experts if expert >= 0]
        away += sum(d != rank for d in (set(ranks) if dedup else ranks))
    return away


def test_with_dedup_at_most_seven_tenths_of_the_bytes_are_on_the_wire() -> None:
    case = DispatchCase(8, 8, 2048, (500,) * 8, hot_experts=64, dtype="bfloat16")
    sent = {}
    for dedup in (False, True):  # K = 8, E = 64, 8 ranks
        rows = sum(rows_away(case.routing(w).expert_TK, w, 8, 8, dedup) for w in range(8))
        sent[dedup] = bytes_on_the_wire(plan_for(case, dedup=dedup), rows)
    assert sent[True] <= 0.70 * sent[False]


def in_any_order(heap: Any, plan: RowPlan, case: DispatchCase, seed: int) -> Trip:
    chance = random.Random(seed * 100 + heap.rank)
    with Channel(plan, heap, deadline=60) as channel:
        channel.pace = lambda *_: time.sleep(chance.random() * 4e-4)
        return travel(RowwiseDispatcher.on(channel), case)


def test_any_order_of_arrival_gives_the_same_bits() -> None:
    case = DispatchCase(1, 2, 2, (1, 1, 1), hot_experts=3, dtype="bfloat16")
    plan = plan_for(case)
    first: list[Trip] = []
    for seed in range(min(100, settings().max_examples)):  # a hundred at night
        trips = run_on_threads(in_any_order, 3, plan.heap_bytes, plan, case, seed)
        first = first or trips
        for one, other in zip(first, trips, strict=True):
            for name in Trip._fields[1:]:
                assert torch.equal(getattr(one, name), getattr(other, name)), (seed, name)
