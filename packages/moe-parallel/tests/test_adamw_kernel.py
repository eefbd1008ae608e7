"""The Triton kernels, in the interpreter, beside the plain reference."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from moe_parallel import AdamWConfig, Mesh, ParamSpec, ShardedAdamW, plan_mesh
from moe_parallel.adamw.dispatch import find_kernel, interpreted
from moe_parallel.adamw.reference import adamw_reference
from moe_parallel.norm import sum_of_squares
from torch.nn import Parameter

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("kernels are compiled here, see test_gpu.py", allow_module_level=True)

ALONE = Mesh.create(plan_mesh(1))


@given(
    st.lists(st.tuples(st.integers(0, 3000), st.sampled_from([True, False, 0.3])), min_size=1,
             max_size=4),
    st.integers(0, 1000),
    st.integers(1, 3),
    st.sampled_from([math.inf, 1.0]),
)  # fmt: skip
def test_the_kernel_is_the_reference_and_torch(drawn, seed, steps, max_norm) -> None:
    """Of any size, with a weight decay of its own for each parameter."""
    config = AdamWConfig(lr=0.01, betas=(0.9, 0.99), max_norm=max_norm, weight_decay=0.2)
    results = []
    for kernel in (True, False):
        generator = torch.Generator().manual_seed(seed)
        specs = [
            ParamSpec(f"p{i}", Parameter(torch.randn(n, generator=generator)), False, decay)
            for i, (n, decay) in enumerate(drawn)
        ]
        optimizer = ShardedAdamW(specs, ALONE, config, 1)
        references = [
            [spec.parameter.detach().double(), *torch.zeros(2, n).double()]
            for spec, (n, _) in zip(specs, drawn, strict=True)
        ]
        for step in range(1, steps + 1):
            grads = [torch.randn(n, generator=generator) for n, _ in drawn]
            norm = math.sqrt(sum(g.double().square().sum().item() for g in grads))
            for spec, grad in zip(specs, grads, strict=True):
                spec.parameter.grad = grad.clone()
            if kernel:
                with interpreted():
                    stats = optimizer.step()
            else:
                stats = optimizer.step()
            assert stats.grad_norm.item() == pytest.approx(norm, rel=1e-12)
            for (_, decay), grad, state in zip(drawn, grads, references, strict=True):
                rate = 0.2 * decay if isinstance(decay, bool) else decay
                adamw_reference(
                    state[0], grad.double(), state[1], state[2],
                    torch.full_like(state[0], rate), step=step,
                    coef=min(1.0, max_norm / (norm + 1e-6)), lr=0.01, config=config,
                )  # fmt: skip
        for spec, state in zip(specs, references, strict=True):
            shards = [s.data for s in optimizer.shards() if s.name == spec.name]
            for got, want in zip(shards, state, strict=False):
                torch.testing.assert_close(got.double(), want, rtol=2e-6, atol=2e-7)
        results.append([s.data.clone() for s in optimizer.shards()])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-6, atol=2e-7)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_skipped_step_touches_nothing(bad) -> None:
    spec = ParamSpec("w", Parameter(torch.randn(300).bfloat16()), False, True)
    optimizer = ShardedAdamW([spec], ALONE, AdamWConfig(lr=0.1), 1)
    with interpreted():
        spec.parameter.grad = torch.ones(300).bfloat16()
        optimizer.step()
        before = [s.data.clone() for s in optimizer.shards()]
        parameter = spec.parameter.detach().clone()
        spec.parameter.grad = torch.full((300,), bad).bfloat16()
        assert optimizer.step().skipped
    assert all(map(torch.equal, before, [s.data for s in optimizer.shards()]))
    assert torch.equal(spec.parameter, parameter)
    assert optimizer.step_count == 1


@given(st.integers(1, 20_000), st.integers(0, 100))
def test_the_sum_of_squares_is_that_of_float64(size, seed) -> None:
    x_N = torch.randn(size, generator=torch.Generator().manual_seed(seed)) * 1e20
    with interpreted():
        got = sum_of_squares(x_N)
    assert got.dtype == torch.float64
    assert got.item() == pytest.approx(x_N.double().square().sum().item(), rel=1e-12)


def test_kernels_are_for_float32_on_a_gpu() -> None:
    assert find_kernel(torch.ones(1)) is None
    with interpreted():
        assert find_kernel(torch.ones(1)) is not None
        assert find_kernel(torch.ones(1, dtype=torch.float64)) is None
