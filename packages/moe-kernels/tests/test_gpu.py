"""The same laws on a GPU: kernels, operators and gradients beside the float64 reference.

Bounds are relative to the largest value of the reference. Products sum in float32. float32 rounds
once a product: 1e-5 per sum, 1e-4 through the three of an MLP's backward. bfloat16 keeps 8 bits,
so each of at most four roundings (pre-activation, activation, gradients) costs 2**-9 of a value;
their sum over a row of unit-scale values stays below 2e-2 of the largest.
"""

import pytest
import torch
from moe_kernels import backend, expert_mlp, group_rows, grouped_mlp, grouped_mm, route
from moe_kernels.mlp.reference import expert_mlp_reference, grouped_mlp_reference

pytestmark = pytest.mark.gpu

BOUND = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}
SHAPES = {  # rows of each expert, rows past the end, D, F
    "ragged": ([0, 5, 0, 7, 0, 0, 3, 0], 9, 72, 40),
    "odd": ([1, 31, 32, 33, 0, 63], 1, 33, 17),
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
    [(64, 48, 24, 4, 2), (333, 128, 96, 128, 8), (5, 64, 64, 16, 1), (40, 33, 17, 3, 3)],
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
