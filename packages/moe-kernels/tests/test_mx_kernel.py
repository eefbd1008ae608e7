"""The kernels of MXFP8, run by Triton's interpreter: the reference's bytes, bit by bit."""

from contextlib import nullcontext

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
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
from moe_kernels.backend import interpreted
from moe_kernels.mxfp8 import rows_kernel
from moe_kernels.testing import randn, row_counts, seeds

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here")

OPS = torch.ops.moe_kernels
N10 = [1, 31, 32, 33, 0, 63]
recipes = st.sampled_from(["mx32", "mx128", "mxrow"])
rules = st.sampled_from(["rceil", "floor"])
dtypes = st.sampled_from([torch.float32, torch.float16])
widths = st.sampled_from([32, 96, 160, 256])


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch) -> None:
    monkeypatch.setattr(scratch, "POISON", True)


def hostile(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return values of all sizes, with zeros of both signs, subnormals, NaN and infinities."""
    x = randn(*shape, seed=seed)
    exponent = torch.randint(-30, 30, shape[:-1], generator=torch.Generator().manual_seed(seed))
    x = torch.ldexp(x, exponent[..., None].float())
    flat, specials = x.view(-1), [torch.nan, -torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1e-44]
    places = torch.randperm(flat.numel(), generator=torch.Generator().manual_seed(seed + 1))
    for special, place in zip(specials * 2, places.tolist(), strict=False):
        flat[place] = special
    return x.to(dtype)


def offsets_of(counts: list[int]) -> torch.Tensor:
    return torch.tensor([0, *counts]).cumsum(0).int()


def assert_same(got: MXTensor, want: MXTensor) -> None:
    assert torch.equal(got.scale_NB, want.scale_NB)
    assert torch.equal(got.data_ND.view(torch.uint8), want.data_ND.view(torch.uint8))
    assert got.data_ND.is_contiguous()
    assert got.scale_NB.is_contiguous()


@given(st.integers(0, 70), widths, recipes, rules, dtypes, seeds)
def test_rows_are_those_of_the_reference(rows, width, recipe, rule, dtype, seed) -> None:
    x_ND = hostile(rows, width, seed=seed, dtype=dtype)
    with interpreted():
        got = quantize(x_ND, recipe=recipe, rounding=rule)
    assert_same(got, quantize(x_ND, recipe=recipe, rounding=rule))


@pytest.mark.parametrize("recipe", ["mx32", "mx128", "mxrow"])
def test_any_number_of_axes_and_any_strides_are_taken(recipe) -> None:
    x = hostile(2, 3, 5, 64, seed=0)
    views = (x, x[..., 1:4, :], x.transpose(0, 2), x[0, 0, 0], x[..., 0:0, :], x[..., 0:0])
    for view in (*views, x.transpose(-1, -2).contiguous().transpose(-1, -2)):
        with interpreted():
            got = quantize(view, recipe=recipe)
        assert_same(got, quantize(view, recipe=recipe))
        assert got.data_ND.shape == view.shape


def test_rows_that_no_program_holds_are_read_twice(monkeypatch) -> None:
    monkeypatch.setattr(rows_kernel, "MAX_ROW", 64)
    x_ND, h_NG = hostile(67, 160, seed=0), randn(5, 320, seed=1)
    with interpreted():
        got, act = quantize(x_ND, recipe="mxrow"), quantize_swiglu(h_NG, recipe="mxrow")
    assert_same(got, quantize(x_ND, recipe="mxrow"))
    assert (dequantize(act) - dequantize(quantize_swiglu(h_NG, recipe="mxrow"))).abs().max() < 0.1


@settings(max_examples=12)
@given(
    row_counts(max_rows=70, max_experts=3),
    st.sampled_from([0, 150]),
    st.sampled_from([32, 96]),
    recipes,
    rules,
    dtypes,
    seeds,
)
@example(N10, 7, 96, "mx32", "rceil", torch.float32, 0)
@example([0, 0], 300, 64, "mxrow", "rceil", torch.float32, 0)
def test_groups_of_columns_and_their_rows_are_those_of_the_reference(
    counts, tail, width, recipe, rule, dtype, seed
) -> None:
    x_ND = hostile(sum(counts) + tail, width, seed=seed, dtype=dtype)
    how = {"recipe": recipe, "rounding": rule, "offsets_E1": offsets_of(counts)}
    with interpreted():
        columns, both = quantize_columns(x_ND, **how), quantize_both(x_ND, **how)
    assert_same(columns, quantize_columns(x_ND, **how))
    assert_same(both[1], columns)
    assert_same(both[0], quantize_both(x_ND, **how)[0])


@settings(max_examples=8)
@given(st.sampled_from([(1, 32, 33), (2, 160, 32), (2, 1, 32, 96)]), recipes, rules, seeds)
def test_columns_of_experts_are_those_of_the_reference(shape, recipe, rule, seed) -> None:
    w_EFD = hostile(*shape, seed=seed)
    with interpreted():
        got = quantize_columns(w_EFD, recipe=recipe, rounding=rule)
    assert_same(got, quantize_columns(w_EFD, recipe=recipe, rounding=rule))
    if shape[-1] % 32 == 0:
        with interpreted():
            rows, columns = quantize_both(w_EFD, recipe=recipe, rounding=rule)
        assert_same(columns, got)
        assert_same(rows, quantize(w_EFD, recipe=recipe, rounding=rule))


@given(st.integers(1, 9), st.integers(1, 3), widths, recipes, rules, dtypes, seeds)
def test_weighted_rows_are_those_of_the_reference(
    tokens, top_k, width, recipe, rule, dtype, seed
) -> None:
    x_TD = hostile(tokens, width, seed=seed, dtype=dtype)
    weight_TK = randn(tokens, top_k, seed=seed + 1)
    slots_N = torch.randperm(tokens * top_k, generator=torch.Generator().manual_seed(seed)).int()
    slots_N[len(slots_N) // 2 :: 3] = -1
    with interpreted():
        got = quantize_routed(x_TD, slots_N, weight_TK, recipe=recipe, rounding=rule)
    assert_same(got, quantize_routed(x_TD, slots_N, weight_TK, recipe=recipe, rounding=rule))


@pytest.mark.filterwarnings("ignore:overflow encountered")  # numpy says so, in the interpreter
@given(st.integers(0, 5), widths, dtypes, seeds)
def test_every_byte_of_every_scale_is_multiplied_as_by_the_reference(
    rows, width, dtype, seed
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = MXTensor(
        torch.randint(256, (rows, width), generator=generator).byte().view(torch.float8_e4m3fn),
        torch.randint(256, (rows, width // 32), generator=generator).byte(),
    )
    x.scale_NB.view(-1)[:4] = torch.tensor([0, 1, 254, 255]).byte()[: x.scale_NB.numel()]
    with interpreted():
        got = dequantize(x, dtype=dtype)
    assert torch.equal(got.nan_to_num(1.0), dequantize(x, dtype=dtype).nan_to_num(1.0))
    assert torch.equal(got.isnan(), dequantize(x).isnan())


def test_without_tokens_rows_of_no_route_are_zero() -> None:
    slots_N = torch.full((3,), -1, dtype=torch.int32)
    for run in (interpreted, torch.no_grad):
        with run():
            rows = quantize_routed(torch.zeros(0, 32), slots_N, torch.zeros(0, 2))
        assert (rows.data_ND.view(torch.uint8) == 0).all()
        assert (rows.scale_NB == 127).all()


def assert_rounded_once(got: MXTensor, exact: torch.Tensor) -> None:
    """Hold the bytes to those of ``exact``, but where it may lie on either side of a step."""
    scale = torch.exp2(got.scale_NB.double() - 127).repeat_interleave(32, -1)
    error = (dequantize(got).double() - exact).abs()
    assert (error <= torch.maximum(exact.abs() / 16, scale / 1024) * (1 + 1e-5)).all()


@given(row_counts(max_rows=20, max_experts=3), st.sampled_from([0, 3]), recipes, dtypes, seeds)
def test_an_activation_is_rounded_once(counts, tail, recipe, dtype, seed) -> None:
    rows = sum(counts)
    h_NG = (3 * randn(rows + tail, 256, seed=seed)).to(dtype)
    h_NG[rows:] = torch.nan
    gate, up = h_NG.double().chunk(2, dim=1)
    exact = torch.nan_to_num(gate / (1 + torch.exp(-gate)) * up)
    for run in (interpreted, torch.no_grad):
        with run():
            got = quantize_swiglu(h_NG, recipe=recipe, offsets_E1=offsets_of(counts))
        assert_rounded_once(got, exact)
        assert (got.data_ND[rows:].view(torch.uint8) == 0).all()
        assert (got.scale_NB[rows:] == 127).all()


@settings(max_examples=12)
@given(
    row_counts(max_rows=12, max_experts=3),
    st.sampled_from([0, 3]),
    recipes,
    st.booleans(),
    dtypes,
    seeds,
)
def test_the_gradient_of_an_activation_is_quantized_from_float32(
    counts, tail, recipe, weighted, dtype, seed
) -> None:
    rows = sum(counts)
    h_NG, dact_NF = (randn(rows + tail, F, seed=seed + F).to(dtype) for F in (256, 128))
    weight_TK = randn(rows + tail, 1, seed=seed).abs() if weighted else None
    leaf, weight = h_NG[:rows].double().requires_grad_(), torch.ones(rows, 1).double()
    if weight_TK is not None:
        weight = weight_TK[:rows].double()
    gate, up = leaf.chunk(2, dim=1)
    act = gate / (1 + torch.exp(-gate)) * up
    (exact,) = torch.autograd.grad(act * weight, leaf, dact_NF[:rows].double())
    h_NG[rows:], dact_NF[rows:] = torch.nan, torch.nan
    slots_N = torch.arange(rows + tail).int() if weighted else None
    bound = {torch.float32: 1e-5, torch.float16: 1e-3}[dtype]
    for run in (interpreted, torch.no_grad):
        with run():
            got = quantize_dswiglu(
                dact_NF, h_NG, offsets_of(counts), weight_TK=weight_TK, slot_of_row_N=slots_N,
                recipe=recipe,
            )  # fmt: skip
        assert_rounded_once(MXTensor(got.dh.data_ND[:rows], got.dh.scale_NB[:rows]), exact)
        torch.testing.assert_close(got.dh_NG[:rows].double(), exact, rtol=bound, atol=bound)
        torch.testing.assert_close(got.act_NF[:rows].double(), act * weight, rtol=bound, atol=bound)
        assert (got.dweight_N is None) == (not weighted)
        if got.dweight_N is not None:
            want_N = (act * dact_NF[:rows]).sum(1)
            torch.testing.assert_close(got.dweight_N[:rows].double(), want_N, rtol=1e-4, atol=1e-4)
            assert (got.dweight_N[rows:] == 0).all()
        for part in (got.dh.data_ND.view(torch.uint8), got.dh_NG, got.act_NF):
            assert (part[rows:] == 0).all()


def calls() -> dict[str, tuple]:
    """Return arguments of every operator."""
    x_ND, offsets_E1 = randn(70, 64, seed=0), offsets_of([3, 0, 66])
    weight_TK, slots_N = randn(70, 1, seed=1), torch.arange(70).int()
    how = ("mx32", "rceil")
    return {
        "mx_quantize": (x_ND, *how),
        "mx_dequantize": (*quantize(x_ND), torch.bfloat16),
        "mx_quantize_columns": (x_ND, *how, offsets_E1),
        "mx_quantize_both": (randn(2, 32, 64, seed=2), "mxrow", "floor", None),
        "mx_quantize_swiglu": (x_ND, *how, offsets_E1),
        "mx_quantize_routed": (x_ND, slots_N, weight_TK, *how),
        "mx_quantize_dswiglu": (x_ND[:, :32], x_ND, offsets_E1, weight_TK, slots_N, *how),
    }


@pytest.mark.parametrize("name", calls())
@pytest.mark.parametrize("kernel", [True, False])
def test_operators_keep_what_they_promise(name, kernel) -> None:
    operator = getattr(OPS, name).default
    tests = ["test_faketensor", "test_autograd_registration"]
    if name != "mx_dequantize":  # the check of schemas cannot compare float8 arguments
        tests.append("test_schema")
    with interpreted() if kernel else nullcontext():
        torch.library.opcheck(operator, calls()[name], test_utils=tests)


def test_a_gradient_through_rounding_is_an_error() -> None:
    x_ND = randn(2, 32, seed=0).requires_grad_()
    with pytest.raises(RuntimeError, match="mx_quantize has no derivative"):
        quantize(x_ND).data_ND.float().sum().backward()
