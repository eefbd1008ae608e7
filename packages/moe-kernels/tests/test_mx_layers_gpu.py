"""MXFP8 products on a GPU: the laws of the CPU, and what only a GPU can show."""

import pytest
import torch
from moe_kernels import (
    WeightCache,
    dequantize,
    expert_mlp,
    mx_linear,
    quantize,
    route,
    scaled_grouped_mm,
    scratch,
)
from moe_kernels.mlp.reference import expert_mlp_reference
from moe_kernels.mxmlp.reference import expert_mlp_mx_reference

pytestmark = pytest.mark.gpu
NAMES = ("y", "dx", "dw_gate_up", "dw_down", "dweight")
RECIPES = pytest.mark.parametrize("recipe", ["mx32", "mx128", "mxrow"])
COUNTS = {"odd": [1, 31, 32, 33, 0, 63], "many": [300, 0, 1000, 129, 5, 512], "none": [0, 0, 0]}


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@RECIPES
@pytest.mark.parametrize("counts", list(COUNTS.values()), ids=list(COUNTS))
def test_products_are_exact_up_to_the_sums_of_the_tensor_cores(recipe, counts) -> None:
    N, D, F = sum(counts), 1056, 272
    x = quantize(torch.randn(N + 7, D, device="cuda"), recipe=recipe)
    w = quantize(torch.randn(len(counts), F, D, device="cuda"), recipe=recipe)
    offsets_E1 = torch.tensor([0, *counts], device="cuda").cumsum(0).int()
    got = scaled_grouped_mm(x, w, offsets_E1, recipe=recipe, out_dtype=torch.float32)
    x_ND, w_EFD = dequantize(x).double(), dequantize(w).double()
    parts = x_ND[:N].split(counts)
    want = torch.cat([part @ w_EFD[e].T for e, part in enumerate(parts)])
    error = (got[:N].double() - want).norm(dim=1) / want.norm(dim=1)
    # Float8 sums of Hopper keep about 14 bits: for all of D without promotion, D / 32 steps.
    bound = {"mx32": 2**-13, "mx128": 2**-12, "mxrow": 2**-8}[recipe]
    assert not N or error.max() < bound
    assert (got[N:] == 0).all()


@RECIPES
def test_errors_of_a_layer_are_those_of_rounding_once_and_multiplying_exactly(recipe) -> None:
    T, D, F, E, K = 2048, 1024, 512, 16, 4
    half = {"device": "cuda", "dtype": torch.bfloat16}
    routing = route(torch.randn(T, E, device="cuda"), K)
    floats = (
        torch.randn(T, D, **half), torch.randn(E, 2 * F, D, **half) / D**0.5,
        torch.randn(E, D, F, **half) / F**0.5, routing.weight_TK,
    )  # fmt: skip
    dy_TD = torch.randn(T, D, **half)

    def gradients(function, tensors, dy, **options):
        leaves = [t.detach().clone().requires_grad_() for t in tensors]
        y_TD = function(*leaves, routing.expert_TK, **options)
        return [y_TD.detach(), *torch.autograd.grad(y_TD, leaves, dy)]

    truth = gradients(expert_mlp_reference, [t.double() for t in floats], dy_TD.double())
    oracle = expert_mlp_mx_reference(*floats, routing.expert_TK, dy_TD, recipe)
    got = gradients(expert_mlp, floats, dy_TD, recipe=recipe)
    for name, g, o, t in zip(NAMES, got, oracle, truth, strict=True):
        assert (g.double() - t).norm() <= 1.05 * (o - t).norm(), name
    again = gradients(expert_mlp, floats, dy_TD, recipe=recipe)
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))


@RECIPES
def test_poison_changes_no_bit_and_a_nan_stays_in_its_token(recipe, monkeypatch) -> None:
    T, D, F, E, K = 300, 256, 128, 8, 2
    half = {"device": "cuda", "dtype": torch.bfloat16}
    routing = route(torch.randn(T, E, device="cuda"), K)
    args = (
        torch.randn(T, D, **half), torch.randn(E, 2 * F, D, **half), torch.randn(E, D, F, **half),
        *routing[:2],
    )  # fmt: skip
    want = expert_mlp(*args, recipe=recipe)
    monkeypatch.setattr(scratch, "POISON", True)
    assert torch.equal(expert_mlp(*args, recipe=recipe), want)
    args[0][7, 3] = torch.nan
    got = expert_mlp(*args, recipe=recipe)
    others = torch.arange(T, device="cuda") != 7
    assert got[7].isnan().all()
    assert torch.equal(got[others], want[others])


def test_a_layer_with_held_weights_is_captured_in_a_graph() -> None:
    T, D, F, E, K = 256, 256, 128, 8, 2
    half = {"device": "cuda", "dtype": torch.bfloat16}
    routing = route(torch.randn(T, E, device="cuda"), K)
    x_TD = torch.randn(T, D, **half)
    weights = torch.randn(E, 2 * F, D, **half), torch.randn(E, D, F, **half)
    cache = WeightCache(recipe="mxrow")
    cache.hold()

    def layer():
        return expert_mlp(
            x_TD, *weights, *routing[:2], recipe="mxrow", quantized=cache.get(*weights)
        )

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        layer()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y_TD = layer()
    x_TD.copy_(torch.randn_like(x_TD))
    graph.replay()
    assert torch.equal(y_TD, layer())


@RECIPES
def test_linear_is_the_grouped_product_of_one_group(recipe) -> None:
    x, w = (torch.randn(n, 512, device="cuda", dtype=torch.bfloat16) for n in (77, 96))
    got = mx_linear(x, w, recipe=recipe)
    want = (
        dequantize(quantize(x, recipe=recipe)) @ dequantize(quantize(w, recipe=recipe)).T
    ).float()
    torch.testing.assert_close(got.float(), want, rtol=2e-2, atol=0.2)
