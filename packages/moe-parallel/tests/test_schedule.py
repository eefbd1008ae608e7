"""Schedules are complete, end, idle as little as promised and keep no more than promised."""

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from moe_parallel.schedule import (
    EQUAL_COST,
    Op,
    Schedule,
    ScheduleError,
    interleaved,
    make_schedule,
    one_f_one_b,
    simulate,
    zbv,
)


@st.composite
def schedules(draw):
    ranks = draw(st.integers(1, 9))
    name = draw(st.sampled_from(["1f1b", "interleaved", "zbv"]))
    micros = draw(st.integers(1, 20))
    if name == "interleaved":
        micros = ranks * draw(st.integers(1, 4))
    return make_schedule(name, ranks, micros, chunks=draw(st.integers(1, 4)))


def random_cost(seed):
    """Return durations that depend on kind and stage: stages are never even in practice."""

    def cost(op):
        return random.Random(f"{seed} {op.kind} {op.stage}").uniform(0.1, 3.0)

    return cost


@given(schedules(), st.integers(0, 100), st.floats(0, 2))
def test_no_schedule_deadlocks_whatever_stages_cost(schedule, seed, latency) -> None:
    """Every dependency is met in time, and no rank does two things at once."""
    cost = random_cost(seed)
    result = simulate(schedule, cost, latency=latency)
    end = {op: start + cost(op) for op, start in result.start.items()}
    assert set(end) == {op for ops in schedule.ops for op in ops}
    gradient = {(op.stage, op.micro): at for op, at in end.items() if op.kind in "BI"}
    for rank, ops in enumerate(schedule.ops):
        for earlier, later in itertools.pairwise(ops):
            assert result.start[later] >= end[earlier]
        for op in ops:
            if op.kind == "F" and op.stage > 0:
                travel = latency * (schedule.rank_of_stage[op.stage - 1] != rank)
                assert result.start[op] >= end[Op("F", op.stage - 1, op.micro)] + travel
            if op.kind in "BI":
                assert result.start[op] >= end[Op("F", op.stage, op.micro)]
                if op.stage + 1 < schedule.num_stages:
                    travel = latency * (schedule.rank_of_stage[op.stage + 1] != rank)
                    assert result.start[op] >= gradient[op.stage + 1, op.micro] + travel
            if op.kind == "W":
                assert result.start[op] >= gradient[op.stage, op.micro]
        assert result.busy[rank] == pytest.approx(sum(cost(op) for op in ops))
    assert result.makespan == max(end.values())


@given(schedules())
def test_microbatches_of_a_stage_keep_their_order(schedule) -> None:
    """So that sums over microbatches are the sums of one process, to the bit."""
    for rank, ops in enumerate(schedule.ops):
        for stage in schedule.stages_of(rank):
            for kinds in ("F", "BI", "BW"):
                micros = [op.micro for op in ops if op.stage == stage and op.kind in kinds]
                assert micros == list(range(schedule.num_micro))


@given(schedules())
def test_what_is_sent_is_what_another_rank_needs(schedule) -> None:
    needed = {
        (schedule.rank_of_stage[op.stage + step], schedule.rank_of_stage[op.stage], op)
        for ops in schedule.ops
        for op in ops
        for step in ([-1] if op.kind == "F" else [1] if op.kind in "BI" else [])
        if 0 <= op.stage + step < schedule.num_stages
        and schedule.rank_of_stage[op.stage + step] != schedule.rank_of_stage[op.stage]
    }
    sent = [(r, to, op) for r in range(schedule.num_ranks) for to, op in schedule.sends(r)]
    assert len(sent) == len(set(sent))
    assert set(sent) == needed


@given(schedules(), st.integers(0, 100))
def test_the_forward_alone_does_not_deadlock_either(schedule, seed) -> None:
    alone = schedule.forward_only()
    assert sum(map(len, alone.ops)) == schedule.num_stages * schedule.num_micro
    simulate(alone, random_cost(seed))


@given(st.integers(1, 12), st.integers(1, 40))
def test_1f1b_idles_by_the_closed_form_and_keeps_one_microbatch_a_rank_ahead(P, M) -> None:
    result = simulate(one_f_one_b(P, M))
    assert result.bubble == pytest.approx((P - 1) / (M + P - 1))
    assert result.peak_live == tuple(min(M, P - r) for r in range(P))


@given(st.integers(2, 8), st.integers(1, 5), st.integers(1, 4))
def test_interleaved_idles_by_the_closed_form(P, groups, chunks) -> None:
    M = P * groups
    result = simulate(interleaved(P, M, chunks))
    # In units of one stage's F: (P - 1) rounds of F and B are idle, M * chunks are not.
    assert result.bubble == pytest.approx((P - 1) / (M * chunks + P - 1))
    if M > P:
        assert max(result.peak_live) <= (chunks - 1) * P + 2 * (P - 1) + 1


@given(st.integers(1, 12), st.integers(0, 30))
def test_zbv_idles_by_the_closed_form_and_keeps_as_much_as_1f1b(P, more) -> None:
    M = 2 * P - 1 + more
    result = simulate(zbv(P, M))
    # F, I and W take 1 each, so a microbatch is 6 on a rank; P - 1 are idle.
    assert result.makespan * (1 - result.bubble) == pytest.approx(6 * M)
    assert result.makespan == 6 * M + P - 1
    assert max(result.peak_live) <= 2 * P  # stages; 1F1B's first rank keeps P of twice the size


@given(st.integers(1, 8), st.integers(1, 16))
def test_zbv_waits_no_more_than_1f1b_with_few_microbatches_too(P, M) -> None:
    half = {kind: time / 2 for kind, time in EQUAL_COST.items()}
    assert simulate(zbv(P, M), half).makespan <= simulate(one_f_one_b(P, M)).makespan


def test_bubbles_of_eight_ranks_and_32_microbatches() -> None:
    bubbles = {
        name: round(100 * simulate(make_schedule(name, 8, 32)).bubble, 1)
        for name in ("1f1b", "interleaved", "zbv")
    }
    assert bubbles == {"1f1b": 17.9, "interleaved": 9.9, "zbv": 3.5}


def test_latency_counts_between_ranks_only() -> None:
    assert simulate(one_f_one_b(2, 1), latency=10).makespan == 3 + 10 + 3 - 1 - 1 + 1 + 1 + 10
    v = zbv(1, 1)  # two stages of one rank
    assert simulate(v, latency=10).makespan == 6


def test_a_deadlock_names_ranks_and_operations() -> None:
    crossed = Schedule(
        name="crossed",
        num_micro=2,
        rank_of_stage=(0, 1),
        ops=(
            (Op("F", 0, 0), Op("B", 0, 0), Op("F", 0, 1), Op("B", 0, 1)),
            (Op("F", 1, 0), Op("F", 1, 1), Op("B", 1, 0), Op("B", 1, 1)),
        ),
    )
    with pytest.raises(ScheduleError, match=r"crossed: deadlock.*rank 0 at B0\.0, rank 1 at F1\.1"):
        simulate(crossed)


F0, B0 = Op("F", 0, 0), Op("B", 0, 0)


@pytest.mark.parametrize(
    ("ops", "ranks", "micros", "message"),
    [
        (((F0,), ()), (0,), 1, "every one of the 2 ranks needs a stage"),
        (((F0, F0, B0),), (0,), 1, "has operations FFB; it needs F and either B, or I and W"),
        (((F0, B0, Op("W", 0, 0)),), (0,), 1, "has operations FBW"),
        (((F0, B0),), (0,), 2, "microbatch 1 has operations none"),
        (((F0, B0, Op("F", 0, 7)),), (0,), 1, r"F0\.7 on rank 0 is outside of 1 stages, 1 micro"),
        (((F0, B0), (Op("F", 1, 0), Op("F", 0, 0))), (0, 1), 1, r"on rank 1, but stage 0 is on"),
        (((),), (0,), 0, "at least 1 microbatch, got 0"),
    ],
)
def test_an_incomplete_schedule_is_refused(ops, ranks, micros, message) -> None:
    with pytest.raises(ScheduleError, match=message):
        Schedule(name="mine", num_micro=micros, rank_of_stage=ranks, ops=ops)


def test_impossible_requests_name_what_would_do() -> None:
    with pytest.raises(ScheduleError, match=r"num_micro=7 is not a multiple of num_ranks=3.*6, 9"):
        interleaved(3, 7)
    with pytest.raises(ScheduleError, match="no schedule is called 'gpipe'; there are 1f1b"):
        make_schedule("gpipe", 2, 2)
