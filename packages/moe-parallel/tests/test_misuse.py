"""What a user may do between steps either works or is refused by name; nothing is kept silently."""

import pytest
import torch
from moe_parallel import AdamWConfig, Mesh, ParamSpec, ShardedAdamW, plan_mesh
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
