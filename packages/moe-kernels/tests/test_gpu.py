"""The same laws on a GPU: kernels, operators and gradients beside the float64 reference.

Bounds are relative to the largest value of the reference. Products sum in float32. float32 rounds
once a product: 1e-5 per sum, 1e-4 through the three of an MLP's backward. bfloat16 keeps 8 bits,
so each of at most four roundings (pre-activation, activation, gradients) costs 2**-9 of a value;
their sum over a row of unit-scale values stays below 2e-2 of the largest.
"""

import pytest
import torch
from moe_kernels import (
    backend,
    expert_mlp,
    group_rows,
    grouped_mlp,
    grouped_mm,
    grouped_mm_dw,
    route,
    scratch,
)
from moe_kernels.mlp.reference import expert_mlp_reference, grouped_mlp_reference

pytestmark = pytest.mark.gpu

BOUND = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}
SHAPES = {  # rows of each expert, rows past the end, D, F
    "ragged": ([0, 5, 0, 7, 0, 0, 3, 0], 9, 80, 48),
    "odd": ([1, 31, 32, 33, 0, 63], 1, 48, 16),
    "one expert": ([77], 51, 64, 64),
    "many rows": ([300, 0, 1000, 129, 5, 512], 54, 256, 384),
    "128 experts": ([(7 * e) % 23 * (e % 3 > 0) for e in range(128)], 13, 128, 96),
    "no rows": ([0, 0], 4, 16, 16),
}


def randn(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, device="cuda") * scale).to(dtype)


def assert_near(got, want, bound: float) -> None:
    for index, (g, w) in enumerate(zip(got, want, strict=True)):
        assert g.shape == w.shape
        scale = w.abs().max().item() if w.numel() else 0.0
        error = (g.double() - w).abs().max().item() if w.numel() else 0.0
        assert error <= bound * scale, f"result {index}: error {error:.3g} of {scale:.3g}"


def gradients(function, floats, ids, dy):
    leaves = [t.detach().clone().requires_grad_() for t in floats]
    y = function(*leaves, ids)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def offsets_of(counts: list[int]) -> torch.Tensor:
    return torch.tensor([0, *counts], device="cuda").cumsum(0).int()


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def test_the_kernels_are_what_runs() -> None:
    assert backend().name == "triton"


@pytest.mark.parametrize("dtype", list(BOUND), ids=str)
@pytest.mark.parametrize(("counts", "tail", "D", "F"), SHAPES.values(), ids=SHAPES)
def test_grouped_mm_and_its_gradients_are_those_of_float64(counts, tail, D, F, dtype) -> None:
    N, valid = sum(counts) + tail, sum(counts)
    x_ND, w_EFD = randn(N, D, dtype=dtype), randn(len(counts), F, D, dtype=dtype)
    dy_NF, offsets_E1 = randn(N, F, dtype=dtype), offsets_of(counts)
    want = gradients(
        grouped_mm, (x_ND.double(), w_EFD.double()), offsets_E1, dy_NF.double()
    )  # float64 takes the reference on every device
    x_ND[valid:], dy_NF[valid:] = torch.nan, torch.inf
    y_NF, dx_ND, dw_EFD = gradients(grouped_mm, (x_ND, w_EFD), offsets_E1, dy_NF)
    assert_near((y_NF, dx_ND, dw_EFD), want, BOUND[dtype] / 2)
    assert (y_NF[valid:] == 0).all()
    assert (dx_ND[valid:] == 0).all()
    for count, dw_FD in zip(counts, dw_EFD, strict=True):
        assert bool((dw_FD == 0).all()) == (count == 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("counts", "tail", "D", "F"), SHAPES.values(), ids=SHAPES)
def test_grouped_mlp_and_its_gradients_are_those_of_float64(counts, tail, D, F, dtype) -> None:
    E, R, valid = len(counts), sum(counts) + tail, sum(counts)
    x_RD, dy_RD = randn(R, D, dtype=dtype), randn(R, D, dtype=dtype)
    weights = (
        randn(E, 2 * F, D, dtype=dtype, scale=D**-0.5),
        randn(E, D, F, dtype=dtype, scale=F**-0.5),
    )
    offsets_E1, floats = offsets_of(counts), (x_RD, *weights)
    wide = [t.double() for t in floats]
    want = gradients(grouped_mlp_reference, wide, offsets_E1, dy_RD.double())
    x_RD[valid:], dy_RD[valid:] = torch.nan, torch.inf
    got = gradients(grouped_mlp, floats, offsets_E1, dy_RD)
    assert_near(got, want, BOUND[dtype])
    assert (got[1][valid:] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("T", "D", "F", "E", "K"),
    [(64, 48, 32, 4, 2), (333, 128, 96, 128, 8), (5, 64, 64, 16, 1), (40, 48, 16, 3, 3)],
)
def test_expert_mlp_and_its_gradients_are_those_of_float64(T, D, F, E, K, dtype) -> None:
    mask_T = torch.rand(T, device="cuda") < 0.9
    routing = route(randn(T, E, dtype=torch.float32), K, renormalize=True, mask_T=mask_T)
    floats = (
        randn(T, D, dtype=dtype),
        randn(E, 2 * F, D, dtype=dtype, scale=D**-0.5),
        randn(E, D, F, dtype=dtype, scale=F**-0.5),
        routing.weight_TK,
    )
    dy_TD = randn(T, D, dtype=dtype)
    got = gradients(expert_mlp, floats, routing.expert_TK, dy_TD)
    wide = [t.double() for t in floats]
    want = gradients(expert_mlp_reference, wide, routing.expert_TK, dy_TD.double())
    # A masked route has a weight in the reference only through its expert id, which is none.
    assert_near(got, want, BOUND[dtype])
    again = gradients(expert_mlp, floats, routing.expert_TK, dy_TD)
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))


def test_routing_on_the_gpu_is_routing_on_the_cpu() -> None:
    logits_TE = randn(500, 64, dtype=torch.float32)
    logits_TE[7, 3], logits_TE[8] = torch.nan, 0.0
    there, here = route(logits_TE, 8), route(logits_TE.cpu(), 8)
    assert torch.equal(there.expert_TK.cpu(), here.expert_TK)
    assert there.num_bad.item() == here.num_bad.item() == 1
    torch.testing.assert_close(there.weight_TK.cpu(), here.weight_TK)
    groups = zip(group_rows(there.expert_TK, 64), group_rows(here.expert_TK, 64), strict=True)
    assert all(torch.equal(a.cpu(), b) for a, b in groups)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_the_host_never_waits_for_the_device() -> None:
    logits_TE = randn(64, 8, dtype=torch.float32).requires_grad_()
    x_TD = randn(64, 32, dtype=torch.bfloat16).requires_grad_()
    weights = [randn(8, 32, 32, dtype=torch.bfloat16), randn(8, 32, 16, dtype=torch.bfloat16)]

    def step() -> None:
        routing = route(logits_TE, 2)
        expert_mlp(x_TD, *weights, *routing[:2]).sum().backward()

    step()  # compiles
    try:
        torch.cuda.set_sync_debug_mode("error")
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert logits_TE.grad is not None
    assert logits_TE.grad.isfinite().all()


def test_rows_past_two_to_the_31st_element_are_found() -> None:
    D, stride = 64, 2**30
    x_ND = torch.empty(2 * stride + D, device="cuda", dtype=torch.bfloat16)
    x_ND = x_ND.as_strided((3, D), (stride, 1))
    x_ND.copy_(randn(3, D, dtype=torch.bfloat16))
    w_EFD, offsets_E1 = randn(1, 32, D, dtype=torch.bfloat16), offsets_of([3])
    want = x_ND.double() @ w_EFD[0].double().T
    assert_near([grouped_mm(x_ND, w_EFD, offsets_E1)], [want], BOUND[torch.bfloat16] / 2)


def test_weights_past_two_to_the_31st_element_are_found() -> None:
    D, F, stride = 64, 32, 2**30
    w_EFD = torch.empty(2 * stride + F * D, device="cuda", dtype=torch.bfloat16)
    w_EFD = w_EFD.as_strided((3, F, D), (stride, D, 1))
    w_EFD.copy_(randn(3, F, D, dtype=torch.bfloat16))
    x_ND, offsets_E1 = randn(3, D, dtype=torch.bfloat16), offsets_of([1, 1, 1])
    want = torch.einsum("nd,nfd->nf", x_ND.double(), w_EFD.double())
    assert_near([grouped_mm(x_ND, w_EFD, offsets_E1)], [want], BOUND[torch.bfloat16] / 2)


def test_a_weight_gradient_of_more_than_two_to_the_31st_elements_is_right_at_its_ends() -> None:
    E, F, D = 9, 16384, 16384  # 2.4e9 elements
    x_ND, dy_NF = randn(40, D, dtype=torch.bfloat16), randn(40, F, dtype=torch.bfloat16)
    dw_EFD = grouped_mm_dw(x_ND, dy_NF, offsets_of([20, *[0] * (E - 2), 20]))
    for e, rows in ((0, slice(0, 20)), (E - 1, slice(20, 40))):
        want = dy_NF[rows, -64:].double().T @ x_ND[rows, -64:].double()
        assert_near([dw_EFD[e, -64:, -64:]], [want], BOUND[torch.bfloat16] / 2)
    assert (dw_EFD[4, -1] == 0).all()


def layer_of(T: int, D: int, F: int, E: int, dtype: torch.dtype):
    """Tokens, router, expert weights and a gradient."""
    leaves = [
        randn(T, D, dtype=dtype), randn(E, D, dtype=torch.float32, scale=D**-0.5),
        randn(E, 2 * F, D, dtype=dtype, scale=D**-0.5), randn(E, D, F, dtype=dtype, scale=F**-0.5),
    ]  # fmt: skip
    return [t.requires_grad_() for t in leaves], randn(T, D, dtype=dtype)


def routed_layer(x_TD, w_router_ED, w_gate_up, w_down, top_k: int = 4):
    routing = route(x_TD.float() @ w_router_ED.T, top_k, renormalize=True)
    return expert_mlp(x_TD, w_gate_up, w_down, *routing[:2])


def test_a_whole_layer_replays_from_a_cuda_graph_on_other_tokens() -> None:
    leaves, dy_TD = layer_of(300, 128, 64, 16, torch.bfloat16)

    def step():
        return torch.autograd.grad(routed_layer(*leaves), leaves, dy_TD)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for skew in (0.0, 5.0):  # all tokens alike: the same few experts get every row
        with torch.no_grad():
            leaves[0].copy_(randn(300, 128, dtype=torch.bfloat16) + skew)
        graph.replay()
        for got, want in zip(captured, step(), strict=True):
            assert torch.equal(got, want)


def test_poison_changes_no_bit(monkeypatch) -> None:
    leaves, dy_TD = layer_of(300, 128, 64, 16, torch.bfloat16)
    want = torch.autograd.grad(routed_layer(*leaves), leaves, dy_TD)
    monkeypatch.setattr(scratch, "POISON", True)
    got = torch.autograd.grad(routed_layer(*leaves), leaves, dy_TD)
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


def test_inductor_compiles_a_layer_whole_and_at_most_twice_over_20_routings() -> None:
    torch._dynamo.reset()
    compilations = torch._dynamo.utils.counters["stats"]
    compiled = torch.compile(routed_layer, fullgraph=True)
    leaves, dy_TD = layer_of(96, 64, 32, 8, torch.bfloat16)
    before = compilations["unique_graphs"]
    for seed in range(20):
        torch.manual_seed(seed)
        with torch.no_grad():
            leaves[0].copy_(randn(96, 64, dtype=torch.bfloat16) + seed % 3)
        got = torch.autograd.grad(compiled(*leaves), leaves, dy_TD)
        want = torch.autograd.grad(routed_layer(*leaves), leaves, dy_TD)
        assert_near(got, [w.double() for w in want], BOUND[torch.bfloat16])
    assert compilations["unique_graphs"] - before <= 2


def torch_layer(x_TD, w_gate_up, w_down, weight_TK, expert_TK):
    """The layer from torch's grouped_mm, which rounds where ours does."""
    (E, _, F), K = w_down.shape, expert_TK.shape[1]
    order_N = expert_TK.view(-1).argsort(stable=True)
    ends_E = torch.bincount(expert_TK.view(-1), minlength=E).cumsum(0).int()
    product = torch.nn.functional.grouped_mm
    h_NG = product(x_TD[order_N // K], w_gate_up.mT, offs=ends_E)
    act_NF = torch.nn.functional.silu(h_NG[:, :F]) * h_NG[:, F:]
    y_ND = product(act_NF, w_down.mT, offs=ends_E)
    y_NKD = torch.empty_like(y_ND).index_copy(0, order_N, y_ND).view(*expert_TK.shape, -1)
    return (y_NKD.float() * weight_TK[..., None]).sum(1).to(x_TD.dtype)


def test_errors_are_at_most_a_tenth_larger_than_those_of_torch() -> None:
    T, D, F, E, K = 512, 512, 256, 8, 4
    expert_TK = torch.rand(T, E, device="cuda").topk(K).indices.int()
    floats = (
        randn(T, D, dtype=torch.bfloat16),
        randn(E, 2 * F, D, dtype=torch.bfloat16, scale=D**-0.5),
        randn(E, D, F, dtype=torch.bfloat16, scale=F**-0.5),
        torch.rand(T, K, device="cuda"),
    )
    dy_TD = randn(T, D, dtype=torch.bfloat16)
    wide = [t.double() for t in floats]
    want = gradients(expert_mlp_reference, wide, expert_TK, dy_TD.double())
    errors = [
        [((g.double() - w).norm() / w.norm()).item() for g, w in zip(got, want, strict=True)]
        for got in (
            gradients(layer, floats, expert_TK, dy_TD) for layer in (expert_mlp, torch_layer)
        )
    ]
    for name, ours, theirs in zip(
        ("y", "dx", "dw_gate_up", "dw_down", "dweight"), *errors, strict=True
    ):
        print(f"relative error of {name}: {ours:.3e}, torch {theirs:.3e}")  # noqa: T201
        assert ours <= 1.1 * theirs, name


def test_sizes_that_no_kernel_takes_are_named() -> None:
    x_ND, w_EFD = randn(4, 24, dtype=torch.bfloat16), randn(1, 32, 24, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="multiples of 16, got D=24, F=32"):
        grouped_mm(x_ND, w_EFD, offsets_of([4]))


@pytest.mark.parametrize("activation", ["relu2", "clamped_swiglu"])
def test_other_activations_with_biases_repeat_bit_for_bit(activation) -> None:
    T, D, F, E, K = 70, 64, 32, 4, 2
    G = F if activation == "relu2" else 2 * F
    routing = route(randn(T, E, dtype=torch.float32), K)
    floats = (
        randn(T, D, dtype=torch.bfloat16), randn(E, G, D, dtype=torch.bfloat16, scale=D**-0.5),
        randn(E, D, F, dtype=torch.bfloat16, scale=F**-0.5), routing.weight_TK,
        randn(E, G, dtype=torch.bfloat16), randn(E, D, dtype=torch.bfloat16),
    )  # fmt: skip

    def layer(x, w_up, w_down, weight, bias_up, bias_down, ids):
        biases = {"bias_gate_up_EG": bias_up, "bias_down_ED": bias_down}
        return expert_mlp(x, w_up, w_down, weight, ids, activation=activation, **biases)

    dy_TD = randn(T, D, dtype=torch.bfloat16)
    got = gradients(layer, floats, routing.expert_TK, dy_TD)
    again = gradients(layer, floats, routing.expert_TK, dy_TD)
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))
    want = gradients(layer, [t.double() for t in floats], routing.expert_TK, dy_TD.double())
    assert_near(got, want, BOUND[torch.bfloat16])
