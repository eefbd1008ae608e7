"""What one rank alone gets wrong is raised on all ranks; none is left waiting."""

import functools

import torch
import torch.distributed as dist
from moe_parallel import (
    AdamWConfig,
    Mesh,
    MeshError,
    MismatchError,
    ParamSpec,
    ShardedAdamW,
    check_ownership,
    plan_mesh,
)
from torch import nn

create_mesh = functools.cache(Mesh.create)


def plans_that_differ(group):
    plan = plan_mesh(4, ep=2 if dist.get_rank() < 2 else 4)
    try:
        Mesh.create(plan, group=group)
    except MismatchError as error:
        return str(error)
    return None


def test_plans_that_differ_are_named_on_every_rank_before_groups_are_made(pool) -> None:
    for message in pool.run(plans_that_differ, 4):
        assert message.startswith("the plan of the mesh differs between ranks:")
        assert f"{plan_mesh(4, ep=2)!r}' on ranks 0, 1" in message
        assert f"{plan_mesh(4, ep=4)!r}' on ranks 2, 3" in message


def one_wrong_rank(group):
    own = dist.get_rank(group)
    try:
        Mesh.create(plan_mesh(2), 7 if own else own, group=group)
    except MeshError as error:
        return str(error)
    return None


def test_a_wrong_number_of_one_rank_is_raised_on_all(pool) -> None:
    own = "rank=7 was given, but this process is rank 1"
    assert pool.run(one_wrong_rank, 2) == [f"rank 1 raised: {own}", own]


def make(mesh, model, prefix="", **changes):
    specs = [ParamSpec(prefix + n, p, False, False, **changes) for n, p in model.named_parameters()]
    return ShardedAdamW(specs, mesh, AdamWConfig(lr=0.1), 1)


def one_bad_parameter(group):
    mesh = create_mesh(plan_mesh(2), group=group)
    try:
        make(mesh, nn.Linear(2, 2, dtype=torch.float16 if mesh.rank else torch.float32))
    except ValueError as error:
        return str(error)
    return None


def test_a_parameter_that_one_rank_refuses_is_refused_on_all(pool) -> None:
    own = "weight is torch.float16; it must be float32, float64 or bfloat16"
    assert pool.run(one_bad_parameter, 2) == [f"rank 1 raised: {own}", own]


def train_with_an_empty_stage(group):
    mesh = create_mesh(plan_mesh(2, pp=2), group=group)
    model = nn.Linear(2, 1, bias=False) if mesh.pp_rank else nn.Identity()
    optimizer = make(mesh, model)
    for parameter in model.parameters():
        parameter.grad = torch.tensor([[3.0, 4.0]])
    stats = optimizer.step()
    check_ownership(optimizer.shards(), mesh)
    return stats.grad_norm.item(), stats.skipped.item(), optimizer.step_count


def test_a_stage_may_have_no_parameters(pool) -> None:
    assert pool.run(train_with_an_empty_stage, 2) == [(5, False, 1)] * 2


def shared_by_one_side(group):
    mesh = create_mesh(plan_mesh(2, pp=2), group=group)
    try:
        make(mesh, nn.Linear(2, 2, bias=False), shared_by=(0, 1) if mesh.pp_rank else None)
    except MismatchError as error:
        return str(error)
    return None


def test_a_copy_that_one_stage_does_not_name_is_refused_on_all(pool) -> None:
    for message in pool.run(shared_by_one_side, 2):
        assert message.startswith("parameters are shared by stages (0, 1), but ranks [0]")
