"""Parameters with learning rates of their own, and masters that are written from outside."""

import math

import pytest
import torch
from moe_parallel import AdamWConfig, Mesh, ParamSpec, ShardedAdamW, plan_mesh
from torch.nn import Parameter

SCALES = (1.0, 0.25, 3.0, 0.0)
CONFIG = AdamWConfig(lr=0.1, weight_decay=0.3, max_norm=math.inf)


def make(dtype=torch.float64, rule="adamw") -> list[Parameter]:
    generator = torch.Generator().manual_seed(0)
    shape = (8, 16) if rule == "muon" else (130,)
    return [Parameter(torch.randn(shape, generator=generator).to(dtype)) for _ in SCALES]


def specs_of(parameters, scales, rule="adamw") -> list[ParamSpec]:
    return [
        ParamSpec(f"p{i}", p, is_expert=False, weight_decay=True, rule=rule, lr_scale=scale)
        for i, (p, scale) in enumerate(zip(parameters, scales, strict=True))
    ]


def train(optimizer: ShardedAdamW, parameters: list[Parameter], lr: float | None = None) -> None:
    for step in range(3):
        for i, parameter in enumerate(parameters):
            parameter.grad = (
                torch.cos(torch.arange(parameter.numel()) + 7.0 * i + step)
                .to(parameter.dtype)
                .view_as(parameter)
            )
        optimizer.step(lr)


def test_a_scaled_rate_is_that_of_a_parameter_group_of_torch() -> None:
    ours, theirs = make(), make()
    optimizer = ShardedAdamW(specs_of(ours, SCALES), Mesh.create(plan_mesh(1)), CONFIG, 1)
    groups = [{"params": [p], "lr": 0.1 * s} for p, s in zip(theirs, SCALES, strict=True)]
    torchs = torch.optim.AdamW(groups, betas=CONFIG.betas, eps=CONFIG.eps, weight_decay=0.3)
    for step in range(3):
        for parameters in (ours, theirs):
            for i, p in enumerate(parameters):
                p.grad = torch.cos(torch.arange(130.0, dtype=torch.float64) + 7 * i + step)
        optimizer.step()
        torchs.step()
    for got, want in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rule", ["adamw", "muon"])
def test_a_scaled_rate_is_that_rate_given_to_step(rule) -> None:
    for scale in (0.5, 2.0):
        scaled, plain = make(rule=rule), make(rule=rule)
        for parameters, own, lr in ((scaled, scale, 0.1), (plain, 1.0, 0.1 * scale)):
            specs = specs_of(parameters, [own] * 4, rule)
            train(ShardedAdamW(specs, Mesh.create(plan_mesh(1)), CONFIG, 1), parameters, lr)
        assert all(torch.equal(a, b) for a, b in zip(scaled, plain, strict=True))
        assert not torch.equal(scaled[0], make(rule=rule)[0])


@pytest.mark.parametrize("scale", [-1.0, math.nan, math.inf])
def test_a_rate_that_is_none_is_refused(scale) -> None:
    specs = specs_of(make(), [scale, 1, 1, 1])
    with pytest.raises(ValueError, match=r"p0 has lr_scale=.*; it must be finite, 0 or more"):
        ShardedAdamW(specs, Mesh.create(plan_mesh(1)), CONFIG, 1)


def swap(group, dtype) -> tuple[list, list, list]:
    """Write other values into the masters and back, and return the parameters of each moment."""
    parameters = make(dtype)
    mesh = Mesh.create(plan_mesh(2), group=group)
    optimizer = ShardedAdamW(specs_of(parameters, [1] * 4), mesh, CONFIG, 1)
    train(optimizer, parameters)
    masters = [s.data for s in optimizer.shards() if s.kind == "master"]
    kept = [m.clone() for m in masters]
    moments = [[p.tolist() for p in parameters]]
    for values in ([torch.full_like(m, 0.5) for m in masters], kept):
        optimizer.synchronize()
        torch._foreach_copy_(masters, values)
        optimizer.share()
        moments.append([p.tolist() for p in parameters])
    return tuple(moments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shared_masters_are_the_parameters_of_every_rank(pool, dtype) -> None:
    results = pool.run(swap, 2, dtype)
    assert results[0] == results[1]
    before, between, after = results[0]
    assert before == after != between
    assert {x for values in between for x in values} == {0.5}
