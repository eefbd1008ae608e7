"""The same laws of MXFP8 on a GPU: the bytes of the reference, on this machine's CPU."""

import pytest
import torch
from moe_kernels import (
    MXTensor,
    dequantize,
    quantize,
    quantize_both,
    quantize_columns,
    quantize_dswiglu,
    quantize_routed,
    quantize_swiglu,
    scratch,
)

pytestmark = pytest.mark.gpu

RECIPES = ("mx32", "mx128", "mxrow")
N10 = [1, 31, 32, 33, 0, 63]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def hostile(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Return values of all sizes on the GPU, with zeros, subnormals, NaN and infinities."""
    x = torch.randn(*shape, device="cuda")
    x *= torch.exp2(torch.randint(-40, 40, shape[:-1], device="cuda")[..., None].float())
    for special in (torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1e-44):
        x.view(-1)[torch.randint(x.numel(), (max(1, x.numel() // 500),), device="cuda")] = special
    return x.to(dtype)


def assert_same(got: MXTensor, want: MXTensor) -> None:
    assert torch.equal(got.scale_NB.cpu(), want.scale_NB)
    assert torch.equal(got.data_ND.cpu().view(torch.uint8), want.data_ND.view(torch.uint8))


def offsets_of(counts: list[int]) -> torch.Tensor:
    return torch.tensor([0, *counts], device="cuda").cumsum(0).int()


@pytest.fixture(autouse=True)
def seeded(monkeypatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(scratch, "POISON", True)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rounding", ["rceil", "floor"])
def test_bytes_are_those_of_the_reference(recipe, dtype, rounding) -> None:
    how = {"recipe": recipe, "rounding": rounding}
    for shape in ((513, 2560), (1, 96), (3, 20000 // 32 * 32), (0, 64)):
        x_ND = hostile(*shape, dtype=dtype) if shape[0] else torch.zeros(shape, device="cuda")
        assert_same(quantize(x_ND, **how), quantize(x_ND.cpu(), **how))
    for counts, tail in ((N10, 9), ([300, 0, 129, 5], 200), ([0, 0], 300)):
        x_ND, offsets_E1 = hostile(sum(counts) + tail, 320, dtype=dtype), offsets_of(counts)
        want = quantize_both(x_ND.cpu(), **how, offsets_E1=offsets_E1.cpu())
        for got, expected in zip(
            quantize_both(x_ND, **how, offsets_E1=offsets_E1), want, strict=True
        ):
            assert_same(got, expected)
        assert_same(quantize_columns(x_ND, **how, offsets_E1=offsets_E1), want[1])
    w_EFD = hostile(3, 416, 96, dtype=dtype)
    for got, expected in zip(
        quantize_both(w_EFD, **how), quantize_both(w_EFD.cpu(), **how), strict=True
    ):
        assert_same(got, expected)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_weighted_rows_are_those_of_the_reference(recipe, dtype) -> None:
    x_TD, weight_TK = hostile(200, 1024, dtype=dtype), torch.randn(200, 3, device="cuda")
    slots_N = torch.randperm(600, device="cuda").int()
    slots_N[::7] = -1
    got = quantize_routed(x_TD, slots_N, weight_TK, recipe=recipe)
    assert_same(got, quantize_routed(x_TD.cpu(), slots_N.cpu(), weight_TK.cpu(), recipe=recipe))


def assert_rounded_once(got: MXTensor, exact: torch.Tensor) -> None:
    scale = torch.exp2(got.scale_NB.double() - 127).repeat_interleave(32, -1)
    error = (dequantize(got).double() - exact).abs()
    assert (error <= torch.maximum(exact.abs() / 16, scale / 1024) * (1 + 1e-5)).all()


@pytest.mark.parametrize("recipe", RECIPES)
def test_swiglu_and_its_gradient_are_rounded_once(recipe) -> None:
    N, tail, F = 500, 12, 1536
    h_NG = torch.randn(N + tail, 2 * F, device="cuda").mul_(4).bfloat16()
    dact_NF = torch.randn(N + tail, F, device="cuda").bfloat16()
    weight_TK = torch.rand(N + tail, 1, device="cuda")
    leaf = h_NG[:N].double().requires_grad_()
    gate, up = leaf.chunk(2, dim=1)
    act = gate * torch.sigmoid(gate) * up
    weighted = act * weight_TK[:N].double()
    (exact,) = torch.autograd.grad(weighted, leaf, dact_NF[:N].double())
    h_NG[N:], dact_NF[N:] = torch.nan, torch.nan
    offsets_E1 = offsets_of([N])
    got = quantize_swiglu(h_NG, recipe=recipe, offsets_E1=offsets_E1)
    assert_rounded_once(MXTensor(*(part[:N] for part in got)), act.detach())
    assert (got.data_ND[N:].view(torch.uint8) == 0).all()
    slots_N = torch.arange(N + tail, device="cuda").int()
    grad = quantize_dswiglu(
        dact_NF, h_NG, offsets_E1, weight_TK=weight_TK, slot_of_row_N=slots_N, recipe=recipe
    )
    assert_rounded_once(MXTensor(*(part[:N] for part in grad.dh)), exact)
    torch.testing.assert_close(grad.dh_NG[:N].double(), exact, rtol=2**-8, atol=1e-5)
    torch.testing.assert_close(grad.act_NF[:N].double(), weighted.detach(), rtol=2**-8, atol=1e-5)
    assert grad.dweight_N is not None
    want_N = (act * dact_NF[:N].double()).sum(1)
    torch.testing.assert_close(grad.dweight_N[:N].double(), want_N, rtol=1e-4, atol=1e-3)


def test_rows_past_two_to_the_31st_element_are_found() -> None:
    if torch.cuda.get_device_properties(0).total_memory < 30 * 2**30:
        pytest.skip("needs 30 GiB of device memory")
    N, D = 2**20 + 128, 2048
    x_ND = torch.zeros(N, D, device="cuda", dtype=torch.bfloat16)
    x_ND[-128:] = torch.randn(128, D, device="cuda")
    rows, columns = quantize_both(x_ND)
    want_rows, want_columns = quantize_both(x_ND[-128:].cpu())
    assert_same(MXTensor(*(part[-128:] for part in rows)), want_rows)
    tail = (columns.data_ND[:, -128:], columns.scale_NB[:, -4:])
    assert_same(MXTensor(*(part.contiguous() for part in tail)), want_columns)
    assert_same(MXTensor(*(part[-128:] for part in quantize(x_ND))), want_rows)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_the_host_never_waits_for_the_device() -> None:
    x_ND, offsets_E1 = torch.randn(300, 256, device="cuda"), offsets_of([100, 0, 180])
    weight_TK, slots_N = torch.rand(300, 1, device="cuda"), torch.arange(300, device="cuda").int()

    def step() -> None:
        for recipe in RECIPES:
            quantize_both(x_ND, recipe=recipe, offsets_E1=offsets_E1)
            quantize_swiglu(x_ND, recipe=recipe, offsets_E1=offsets_E1)
            quantize_routed(x_ND, slots_N, weight_TK, recipe=recipe)

    step()  # compiles
    try:
        torch.cuda.set_sync_debug_mode("error")
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
