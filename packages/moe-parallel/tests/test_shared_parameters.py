"""A parameter that several stages share: one sum, one owner of each element, one value."""

import functools
import math
import re

import pytest
import torch
from moe_parallel import (
    AdamWConfig,
    Mesh,
    MismatchError,
    ParamSpec,
    ShardedAdamW,
    check_ownership,
    plan_mesh,
)
from torch.nn import Parameter

create_mesh = functools.cache(Mesh.create)
SIZE = 300


def train(group, pp, world):
    mesh = create_mesh(plan_mesh(world, pp=pp), group=group)
    own = ParamSpec(f"own{mesh.pp_rank}", Parameter(torch.zeros(3)), False, False)
    own.parameter.grad = torch.full((3,), 1.0 / mesh.plan.dp)
    specs = [own]
    if mesh.pp_rank in (0, pp - 1):
        # Different values at the start: the owner's count.
        tied = Parameter(torch.full((SIZE,), float(mesh.rank)))
        tied.grad = torch.full((SIZE,), 1.0 + mesh.rank)
        specs.append(ParamSpec("tied", tied, False, True, shared_by=(0, pp - 1)))
    config = AdamWConfig(lr=0.1, betas=(0.0, 0.9), max_norm=math.inf)
    optimizer = ShardedAdamW(specs, mesh, config, 1)
    start = specs[-1].parameter.detach().clone()
    check_ownership(optimizer.shards(), mesh)
    stats = optimizer.step()
    moments = [
        s.data.clone() for s in optimizer.shards() if (s.name, s.kind) == ("tied", "exp_avg")
    ]
    return start, specs[-1].parameter.detach().clone(), stats.grad_norm.item(), moments


@pytest.mark.parametrize(("pp", "world"), [(2, 2), (2, 4), (3, 3), (4, 4)])
def test_gradients_of_all_copies_are_summed_and_each_element_counts_once(pool, pp, world) -> None:
    results = pool.run(train, world, pp, world)
    dp = world // pp
    holders = [r for r in range(world) if r // dp in (0, pp - 1)]
    total = sum(1.0 + rank for rank in holders)
    norm = math.sqrt(SIZE * total**2 + 3 * pp)
    first, *_ = (results[r] for r in holders)
    for rank in holders:
        start, value, _, _ = results[rank]
        assert torch.equal(start, first[0])
        assert torch.equal(value, first[1])
    assert all(result[2] == pytest.approx(norm, rel=1e-12) for result in results)
    moments = torch.cat([m for result in results for m in result[3]])
    assert torch.equal(moments, torch.full((SIZE,), total))


def disagree(group):
    mesh = create_mesh(plan_mesh(2, pp=2), group=group)
    parameter = Parameter(torch.zeros(4 + mesh.rank))
    spec = ParamSpec("tied", parameter, False, True, shared_by=(0, 1))
    try:
        ShardedAdamW([spec], mesh, AdamWConfig(lr=0.1), 1)
    except MismatchError as error:
        return str(error)
    return None


def test_copies_of_different_shapes_are_refused_on_both_ends(pool) -> None:
    for message in pool.run(disagree, 2):
        assert message.startswith("the list of parameters shared by stages (0, 1) differs")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"shared_by": (0,)},
            "w has shared_by=(0,); it must list at least 2 of the pipeline ranks",
        ),
        ({"shared_by": (0, 1)}, "it must list at least 2 of the pipeline ranks 0..0"),
        ({"weight_decay": -0.5}, "w has weight_decay=-0.5; it must be finite, 0 or more"),
        ({"weight_decay": math.inf}, "w has weight_decay=inf; it must be finite, 0 or more"),
        ({"rule": "sgd"}, "w has rule='sgd'; it must be 'adamw' or 'muon'"),
    ],
)
def test_impossible_treatments_are_refused_by_name(changes, message) -> None:
    options = {"is_expert": False, "weight_decay": True, **changes}
    spec = ParamSpec("w", Parameter(torch.zeros(3)), **options)
    with pytest.raises(ValueError, match=re.escape(message)):
        ShardedAdamW([spec], Mesh.create(plan_mesh(1)), AdamWConfig(lr=0.1), 1)
