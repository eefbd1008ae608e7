"""What a user may do between steps either works or is refused by name; nothing is kept silently."""

import pytest
import torch
from moe_parallel import (
    AdamWConfig,
    Gradients,
    Mesh,
    ParamSpec,
    Pipeline,
    ScheduleError,
    ShardedAdamW,
    plan_mesh,
    split_linears,
)
from torch import nn

ALONE = Mesh.create(plan_mesh(1))


def optimizer_of(model, **changes):
    specs = [ParamSpec(n, p, False, True) for n, p in model.named_parameters()]
    return ShardedAdamW(specs, ALONE, AdamWConfig(lr=0.1), 1, **changes)


@pytest.mark.parametrize("forget", [lambda o: o.zero_grad(), lambda o: o.loaded(0)])
def test_forgotten_gradients_have_no_part_in_the_next_step(forget) -> None:
    model = nn.Linear(2, 1)
    model.bias.requires_grad_(False)
    optimizer = optimizer_of(model)
    model.bias.requires_grad_(True)
    model(torch.ones(1, 2)).sum().backward()
    forget(optimizer)
    assert all(p.grad is None for p in model.parameters())
    assert optimizer.step().grad_norm.item() == 0


@pytest.mark.parametrize(
    "call",
    [
        lambda optimizer, model: optimizer.step(),
        lambda optimizer, model: optimizer.accumulate(),
        lambda optimizer, model: optimizer.accumulate(model.parameters()),
    ],
)
def test_a_parameter_that_was_moved_to_other_memory_is_refused_by_name(call) -> None:
    model = nn.Linear(2, 1)
    optimizer = optimizer_of(model)
    model.to(torch.float64).to(torch.float32)
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(RuntimeError, match="weight was moved out of the optimizer's buffer"):
        call(optimizer, model)


def test_a_frozen_parameter_that_was_moved_is_refused_too() -> None:
    model = nn.Linear(2, 1)
    model.bias.requires_grad_(False)
    optimizer = optimizer_of(model)
    model.bias.data = model.bias.data.clone()
    with pytest.raises(RuntimeError, match="bias was moved out of the optimizer's buffer"):
        optimizer.step()


def test_a_parameter_that_was_replaced_is_refused_where_it_is_named() -> None:
    for make in (optimizer_of, lambda model: Gradients(dict(model.named_parameters()))):
        model = nn.Linear(2, 1)
        target = make(model)
        model.load_state_dict({n: v.clone() for n, v in model.state_dict().items()}, assign=True)
        model(torch.ones(1, 2)).sum().backward()
        with pytest.raises(RuntimeError, match=r"a parameter of shape \(1, 2\) has a gradient but"):
            target.accumulate(model.parameters())


class Last(nn.Linear):
    """A pipeline of one stage."""

    def forward(self, x, micro):
        return super().forward(micro if x is None else x).square().sum()


def test_a_pipeline_refuses_parameters_whose_gradients_nobody_takes() -> None:
    stage = Last(2, 1)
    target = Gradients({"weight": stage.weight})
    with pytest.raises(ScheduleError, match=r"^bias of stage 0: not among the parameters"):
        Pipeline({0: stage}, ALONE, target)
    stage.bias.requires_grad_(False)
    Pipeline({0: stage}, ALONE, target).step(torch.ones(1, 3, 2))
    assert target.main_grads["weight"].all()


def test_gradients_refuse_one_tensor_under_two_names() -> None:
    weight = nn.Parameter(torch.ones(2))
    with pytest.raises(ValueError, match="'a' and 'b' are one tensor: name it once"):
        Gradients({"a": weight, "b": weight})


def test_two_parameters_in_one_memory_are_refused_by_name() -> None:
    flat = torch.arange(12.0)
    for first, second in ((flat[:6], flat[5:9]), (flat, flat.view(3, 4).T), (flat[::2], flat[:3])):
        pair = nn.ParameterList([first, second])
        with pytest.raises(ValueError, match=r"'[01]' and '[01]' share memory"):
            optimizer_of(pair)


def test_parameters_side_by_side_in_one_memory_keep_their_values() -> None:
    flat = torch.arange(12.0)
    parts = [flat[:4], flat[4::2], flat[5::2], flat[:0]]
    want = [part.clone() for part in parts]
    model = nn.ParameterList(parts)
    optimizer_of(model)
    assert all(torch.equal(*pair) for pair in zip(model, want, strict=True))


@pytest.mark.parametrize("later", [optimizer_of, lambda m: Gradients(dict(m.named_parameters()))])
def test_a_new_target_gets_the_gradients_that_an_old_one_had_sinks_for(later) -> None:
    model = split_linears(nn.Sequential(nn.Linear(2, 1, bias=False)))
    old = Gradients(dict(model.named_parameters()))
    old.attach_sinks()
    later(model)
    model(torch.ones(1, 2)).sum().backward()
    assert model[0].weight.grad.tolist() == [[1, 1]]
    assert not old.main_grads["0.weight"].any()


def test_values_loaded_late_into_bfloat16_last_if_they_go_through_the_shards() -> None:
    model = nn.Linear(2, 1, bias=False).bfloat16()
    optimizer = optimizer_of(model)
    for shard in optimizer.shards():
        shard.data.fill_(7 if shard.kind == "master" else 0)
    optimizer.loaded(0)
    assert model.weight.tolist() == [[7, 7]]
    optimizer.step(lr=0.0)
    assert model.weight.tolist() == [[7, 7]]
