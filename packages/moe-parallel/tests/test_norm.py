"""The gradient norm against values worked out by hand."""

import functools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from moe_parallel import AdamWConfig, Mesh, ParamSpec, ShardedAdamW, plan_mesh
from moe_parallel.norm import sum_of_squares
from torch.nn import Parameter

create_mesh = functools.cache(Mesh.create)
GRID = [
    (pp, ep, edp) for pp in (1, 2) for ep in (1, 2, 4) for edp in (1, 2, 4) if pp * ep * edp <= 4
]


def norm_of_known_gradients(group, pp, ep, edp, counting):
    """Return the norm where the summed gradients are known.

    The model has 120 elements: 24 dense ones in the first stage, 96 of 8 experts in the last,
    so with two stages one has no experts and the other nothing else. Each summed gradient
    element is 1, or, counting, its place 1..120.
    """
    mesh = create_mesh(plan_mesh(pp * ep * edp, pp=pp, ep=ep, num_experts=8), group=group)
    each = 8 // ep
    full = torch.arange(1.0, 121.0) if counting else torch.ones(120)
    dense, expert = full[:24].view(4, 6), full[24:].view(8, 4, 3)
    expert = expert[mesh.ep_rank * each : (mesh.ep_rank + 1) * each]
    specs = []
    if mesh.pp_rank == 0:
        specs.append(ParamSpec("dense", Parameter(torch.zeros(4, 6)), False, True))
        specs[-1].parameter.grad = dense / mesh.plan.dp
    if mesh.pp_rank == pp - 1:
        specs.append(ParamSpec("expert", Parameter(torch.zeros(each, 4, 3)), True, True))
        specs[-1].parameter.grad = expert / mesh.plan.edp
    optimizer = ShardedAdamW(specs, mesh, AdamWConfig(lr=0.1, max_norm=3.0), num_experts=8)
    stats = optimizer.step()
    return stats.grad_norm.item(), stats.clip_coef.item(), stats.skipped.item()


@pytest.mark.parametrize(("pp", "ep", "edp"), GRID)
@pytest.mark.parametrize("counting", [False, True])
def test_each_element_of_the_model_counts_once_on_every_grid(pool, pp, ep, edp, counting) -> None:
    results = pool.run(norm_of_known_gradients, pp * ep * edp, pp, ep, edp, counting)
    want = math.sqrt(120 * 121 * 241 / 6) if counting else math.sqrt(120)
    assert len(set(results)) == 1
    norm, coef, skipped = results[0]
    assert norm == pytest.approx(want, rel=1e-12)
    assert coef == pytest.approx(3.0 / (want + 1e-6), rel=1e-12)
    assert skipped is False


@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_the_sum_of_squares_is_that_of_float64(values, dtype) -> None:
    # fsum is exact; elements up to 3e38 would overflow in float32.
    want = math.fsum(value * value for value in values)
    got = sum_of_squares(torch.tensor(values, dtype=dtype))
    assert got.dtype == torch.float64
    assert got.item() == pytest.approx(want, rel=1e-14, abs=0)


@given(st.integers(1, 200_000), st.data(), st.sampled_from([math.nan, math.inf, -math.inf, None]))
def test_the_sum_is_finite_exactly_if_every_element_is(size, data, value) -> None:
    x_N = torch.full((size,), 3.0)
    if value is not None:
        x_N[data.draw(st.integers(0, size - 1))] = value
        assert not sum_of_squares(x_N).isfinite()
    else:
        assert sum_of_squares(x_N).item() == 9.0 * size
