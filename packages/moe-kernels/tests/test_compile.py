"""The operators under torch.compile: one graph, and few compilations over many routings."""

from contextlib import nullcontext

import pytest
import torch
from moe_kernels import WeightCache, expert_mlp, grouped_mlp, route
from moe_kernels.backend import interpreted
from moe_kernels.testing import randn
from torch._dynamo.testing import CompileCounterWithBackend

E, D, F, K = 4, 16, 16, 2


def layer(x_TD, w_router_ED, w_gate_up, w_down):
    routing = route(x_TD @ w_router_ED.T, K, renormalize=True)
    return expert_mlp(x_TD, w_gate_up, w_down, routing.weight_TK, routing.expert_TK)


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("kernel", [False, True], ids=["torch", "kernel"])
def test_a_layer_compiles_whole_and_at_most_twice_over_20_routings(kernel: bool) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    weights = [
        randn(E, D, seed=0), randn(E, 2 * F, D, seed=1) / D**0.5, randn(E, D, F, seed=2) / F**0.5
    ]  # fmt: skip

    def gradients(function, x_TD):
        leaves = [t.clone().requires_grad_() for t in (x_TD, *weights)]
        return torch.autograd.grad(function(*leaves).square().sum(), leaves)

    for seed in range(20):
        x_TD = randn(6, D, seed=10 + seed)
        if seed % 3 == 0:  # all rows to the same experts
            x_TD = x_TD[:1].expand(6, D).contiguous()
        want = gradients(layer, x_TD)
        with interpreted() if kernel else nullcontext():
            got = gradients(compiled, x_TD)
        for g, w in zip(got, want, strict=True):
            torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-4)
    assert counter.frame_count <= 2


def test_token_counts_that_vary_compile_at_most_twice() -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    weights = [randn(E, D, seed=0), randn(E, 2 * F, D, seed=1), randn(E, D, F, seed=2)]
    for T in (12, 7, 30, 9, 64):
        x_TD = randn(T, D, seed=T)
        torch.testing.assert_close(compiled(x_TD, *weights), layer(x_TD, *weights))
    assert counter.frame_count <= 2


def test_grouped_mlp_compiles_whole_for_any_counts() -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(grouped_mlp, fullgraph=True, backend=counter)
    x_RD, w_gate_up, w_down = (
        randn(40, D, seed=0),
        randn(3, 2 * F, D, seed=1),
        randn(3, D, F, seed=2),
    )
    for seed in range(20):
        ends = torch.randint(0, 41, (3,), generator=torch.Generator().manual_seed(seed))
        offsets_E1 = torch.cat([torch.zeros(1), ends.sort().values]).int()
        args = (x_RD, w_gate_up, w_down, offsets_E1)
        torch.testing.assert_close(compiled(*args), grouped_mlp(*args))
    assert counter.frame_count == 1


@pytest.mark.parametrize("kernel", [False, True], ids=["torch", "kernel"])
def test_a_layer_in_mxfp8_compiles_whole_over_routings_and_changes_of_its_weights(kernel) -> None:
    D, F = 32, 32
    counter = CompileCounterWithBackend("aot_eager")

    def layer(x_TD, w_router_ED, w_gate_up, w_down, quantized):
        routing = route(x_TD @ w_router_ED.T, K, renormalize=True)
        routed = (routing.weight_TK, routing.expert_TK)
        return expert_mlp(x_TD, w_gate_up, w_down, *routed, recipe="mx128", quantized=quantized)

    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    cache = WeightCache(recipe="mx128")
    cache.hold()
    leaves = [
        randn(E, D, seed=0), randn(E, 2 * F, D, seed=1) / D**0.5, randn(E, D, F, seed=2) / F**0.5
    ]  # fmt: skip
    leaves = [leaf.requires_grad_() for leaf in leaves]
    for seed in range(3):
        x_TD = randn(6, D, seed=10 + seed)
        quantized = cache.get(*leaves[1:])
        want = torch.autograd.grad(layer(x_TD, *leaves, quantized).square().sum(), leaves)
        with interpreted() if kernel else nullcontext():
            got = torch.autograd.grad(compiled(x_TD, *leaves, quantized).square().sum(), leaves)
        for g, w in zip(got, want, strict=True):
            assert (g - w).norm() <= 1e-2 * w.norm()
        with torch.no_grad():
            leaves[1].mul_(1.1)
    assert counter.frame_count <= 2
