"""Runs that hang, drift apart or are slow say who, where and what."""

import dataclasses
import functools
import threading
import time

import pytest
import torch
import torch.distributed as dist
from moe_parallel import (
    AdamWConfig,
    Heartbeat,
    Mesh,
    MeshError,
    MismatchError,
    OwnershipError,
    ParamSpec,
    Shard,
    ShardedAdamW,
    StragglerMonitor,
    check_mesh,
    check_ownership,
    find_desync,
    plan_mesh,
)
from torch.nn import Parameter

create_mesh = functools.cache(Mesh.create)


def hang(group, late):
    """Let one rank sleep before a collective; return the reports of the others."""
    mesh = create_mesh(plan_mesh(3), group=group)
    reports = []
    with Heartbeat(
        mesh, shared_store(), interval=0.05, stall_after=0.5, on_stall=reports.append
    ) as heartbeat:
        heartbeat.at(7, "attention" if mesh.rank == late else "all-reduce")
        if mesh.rank == late:
            time.sleep(1.5)
        dist.all_reduce(torch.ones(1), group=group)
        heartbeat.at(8, "rest")
        time.sleep(0.2)
    return reports


def shared_store():
    store = dist.distributed_c10d._get_default_store()
    return dist.PrefixStore("test_diagnostics", store.clone() if hasattr(store, "clone") else store)


def test_a_stall_is_reported_once_with_where_everybody_is_and_stacks(pool) -> None:
    for rank, reports in enumerate(pool.run(hang, 3, 1)):
        (report,) = reports
        what = "attention" if rank == 1 else "all-reduce"
        assert report.startswith(f"rank {rank} has been at step 7, {what} for ")
        lines = [line.partition(" s: ") for line in report.splitlines()[1:3]]
        places = {place.rpartition(",")[0]: ranks for place, _, ranks in lines}
        assert places == {"step 7, all-reduce": "ranks 0, 2", "step 7, attention": "rank 1"}
        assert "time.sleep(1.5)" in report if rank == 1 else "dist.all_reduce" in report


def test_a_rank_that_never_spoke_shows() -> None:
    mesh = dataclasses.replace(Mesh.create(plan_mesh(1)), plan=plan_mesh(2))
    heartbeat = Heartbeat(mesh, dist.HashStore(), interval=60)
    heartbeat.at(1, "load")
    heartbeat.watch("F0.3")
    assert heartbeat.table().splitlines() == [
        "step 1, F0.3, 0 s: rank 0",
        "no sign of life: rank 1",
    ]


def test_the_thread_ends_with_the_context() -> None:
    before = threading.active_count()
    with Heartbeat(Mesh.create(plan_mesh(1)), interval=30):
        assert threading.active_count() == before + 1
    assert threading.active_count() == before


@pytest.mark.parametrize(
    ("world", "changes", "message"),
    [
        (2, {}, "a heartbeat of 2 ranks needs a store"),
        (1, {"interval": 9.0, "stall_after": 3.0}, "at most stall_after=3.0, got 9.0"),
        (1, {"interval": 0.0}, "must be positive"),
    ],
)
def test_a_heartbeat_checks_its_arguments(world, changes, message) -> None:
    mesh = dataclasses.replace(Mesh.create(plan_mesh(1)), plan=plan_mesh(world))
    with pytest.raises(ValueError, match=message):
        Heartbeat(mesh, **changes)


def measure(group, times, pp):
    mesh = create_mesh(plan_mesh(4, pp=pp), group=group)
    monitor = StragglerMonitor(mesh, every=2, ratio=1.2, windows=2)
    reports = [monitor.record(seconds) for seconds in times[mesh.rank]]
    return [None if r is None else (r.slow, r.seconds, str(r)) for r in reports]


def test_a_straggler_is_slow_in_several_windows_in_a_row(pool) -> None:
    # Rank 2 is slow in the first two windows, rank 0 in the last alone.
    times = [[1, 1, 1, 1, 3, 3], [1] * 6, [1.5, 1.3, 1.3, 1.7, 1, 1], [1] * 6]
    results = pool.run(measure, 4, times, 1)
    assert all(result == results[0] for result in results)
    quiet, (first, *_), still, (second, seconds, text), so_far, (third, *_) = results[0]
    assert (quiet, still, so_far) == (None, None, None)
    assert (first, second, third) == ({}, {2: pytest.approx(1.5)}, {})
    assert seconds == (1, 1, pytest.approx(1.5), 1)
    assert text == "stragglers: rank 2 1.50 times the median of 1 s a step"


def test_ranks_are_compared_within_their_stage(pool) -> None:
    times = [[1] * 4, [1] * 4, [3] * 4, [3] * 4]  # the second stage has more to do
    for result in pool.run(measure, 4, times, 2):
        assert [r[0] for r in result if r] == [{}, {}]


def test_a_monitor_checks_its_arguments() -> None:
    with pytest.raises(ValueError, match="ratio above 1, got every=1, windows=1, ratio=1"):
        StragglerMonitor(Mesh.create(plan_mesh(1)), every=1, windows=1, ratio=1)


def desync(group, lists):
    mesh = create_mesh(plan_mesh(len(lists)), group=group)
    return find_desync(lists[mesh.rank], mesh)


def test_the_first_difference_is_named(pool) -> None:
    lists = [[("a", 64), ("b", 64)], [("a", 64), ("c", 32)], [("a", 64)]]
    assert pool.run(desync, 3, lists) == 3 * [
        "ranks differ in reduction 1 of the step:\n  - rank 0: b, 64 elements\n"
        "  - rank 1: c, 32 elements\n  - rank 2: nothing"
    ]
    assert pool.run(desync, 2, [lists[0], lists[0]]) == [None, None]


def check(group, fault):
    mesh = create_mesh(plan_mesh(4, pp=2, ep=2), group=group)
    if fault == "group":
        # The experts' group is taken for the stage's: a sum over the wrong ranks.
        mesh = dataclasses.replace(mesh, edp_group=mesh.dp_group)
    try:
        check_mesh(mesh, f"digest {mesh.rank if fault == 'digest' else ''}")
    except (MeshError, MismatchError) as error:
        return str(error)
    return None


def test_the_start_up_check_finds_wrong_groups_and_configurations(pool) -> None:
    assert pool.run(check, 4, None) == [None] * 4
    for rank, message in enumerate(pool.run(check, 4, "group")):
        stage = [0, 1] if rank < 2 else [2, 3]
        assert message == (f"the edp group of rank {rank} has ranks {stage}, planned were [{rank}]")
    for message in pool.run(check, 4, "digest"):
        assert message.startswith("the configuration differs between ranks")


def own(group, case):
    pp, ep = (1, 2) if case == "experts" else (2, 1)
    mesh = create_mesh(plan_mesh(2, pp=pp, ep=ep, num_experts=4), group=group)
    experts = Parameter(torch.zeros(4 // ep, 3))
    specs = [ParamSpec("experts", experts, True, True)]
    if case != "experts":
        name = "w" if case == "twice" else f"w{mesh.rank}"
        specs = [ParamSpec(name, Parameter(torch.zeros(5)), False, True)]
    optimizer = ShardedAdamW(specs, mesh, AdamWConfig(lr=0.1), 4)
    shards = optimizer.shards()
    if case == "missing" and mesh.rank == 1:
        shards = [s for s in shards if s.kind != "exp_avg"]
        shards.append(Shard(name="w1", kind="exp_avg", global_shape=(5,), flat_start=1,
                            flat_stop=4, data=torch.zeros(3)))  # fmt: skip
    if case == "shape" and mesh.rank == 1:
        shards.append(Shard(name="w0", kind="master", global_shape=(9,), flat_start=5,
                            flat_stop=9, data=torch.zeros(4)))  # fmt: skip
    try:
        check_ownership(shards, mesh)
    except OwnershipError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("case", "errors"),
    [
        ("experts", None),
        ("apart", None),
        ("twice", [f"w {kind}: elements 0 to 4 are owned by ranks 0 and 1"
                   for kind in ("master", "exp_avg", "exp_avg_sq")]),
        ("missing", ["w1 exp_avg: elements 0 to 0 are owned by nobody",
                     "w1 exp_avg: elements 4 to 4 are owned by nobody"]),
        ("shape", ["w0 master has different shapes: (5,) on rank 0, (9,) on rank 1"]),
    ],
)  # fmt: skip
def test_state_is_owned_exactly_once_or_the_error_says_what_is_not(pool, case, errors) -> None:
    for message in pool.run(own, 2, case):
        if errors is None:
            assert message is None
        else:
            listed = "".join(f"\n  - {error}" for error in errors)
            assert message == "state is not owned exactly once:" + listed
