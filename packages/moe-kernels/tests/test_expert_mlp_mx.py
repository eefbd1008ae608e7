"""The expert MLP in MXFP8: as good as rounding once and multiplying exactly, and no copy stale."""

from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_kernels import (
    MXTensor,
    expert_mlp,
    group_rows,
    grouped_mlp,
    quantize,
    quantize_weight,
    route,
    scratch,
)
from moe_kernels.backend import interpreted
from moe_kernels.mlp.reference import expert_mlp_reference
from moe_kernels.mxmlp.reference import expert_mlp_mx_reference
from moe_kernels.testing import randn, routings, seeds
from torch import Tensor

RECIPES = ("mx32", "mx128", "mxrow")
NAMES = ("y", "dx", "dw_gate_up", "dw_down", "dweight")
IMPLEMENTATIONS = pytest.mark.parametrize("kernel", [False, True], ids=["torch", "kernel"])


def weights_of(E: int, D: int, F: int, seed: int, dtype=torch.float32) -> tuple[Tensor, Tensor]:
    w_gate_up_EGD = (randn(E, 2 * F, D, seed=seed) / D**0.5).to(dtype)
    return w_gate_up_EGD, (randn(E, D, F, seed=seed + 1) / F**0.5).to(dtype)


def gradients(function, floats, expert_TK, dy_TD, kernel: bool = False, **options) -> list[Tensor]:
    leaves = [t.detach().clone().requires_grad_() for t in floats]
    with interpreted() if kernel else nullcontext():
        y_TD = function(*leaves, expert_TK, **options)
        return [y_TD.detach(), *torch.autograd.grad(y_TD, leaves, dy_TD)]


def case(T, D, F, E, K, seed=0, dtype=torch.float32):
    routing = route(randn(T, E, seed=seed), K)
    floats = (randn(T, D, seed=seed + 1, dtype=dtype), *weights_of(E, D, F, seed + 2, dtype))
    return (*floats, routing.weight_TK), routing.expert_TK, randn(T, D, seed=seed + 5, dtype=dtype)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    ("dtype", "kernel"),
    [(torch.float32, False), (torch.bfloat16, False), (torch.float16, True)],
    ids=["float32", "bfloat16", "kernel, float16"],
)
def test_errors_are_those_of_rounding_once_and_multiplying_exactly(recipe, dtype, kernel) -> None:
    floats, expert_TK, dy_TD = case(T=48, D=160, F=96, E=5, K=2, dtype=dtype)
    expert_TK[3, 0] = -1
    wide = [t.double() for t in floats]
    truth = gradients(expert_mlp_reference, wide, expert_TK, dy_TD.double())
    oracle = expert_mlp_mx_reference(*floats, expert_TK, dy_TD, recipe)
    got = gradients(expert_mlp, floats, expert_TK, dy_TD, kernel, recipe=recipe)
    for name, g, o, t in zip(NAMES, got, oracle, truth, strict=True):
        floor = (o - t).norm()
        assert 0.01 < floor / t.norm() < 0.2, name  # rounding to float8 shows
        assert (g.double() - t).norm() <= 1.05 * floor, name
        if dtype == torch.float32:  # nothing else is rounded
            assert (g.double() - o).norm() <= 0.02 * floor, name


@settings(max_examples=4)
@given(
    st.integers(1, 5).flatmap(lambda E: st.tuples(st.just(E), routings(E))),
    st.sampled_from(RECIPES),
    seeds,
)
def test_kernels_do_what_torch_does_for_any_routing(case, recipe, seed) -> None:
    (E, expert_TK), T = case, case[1].shape[0]
    D, F = 32 * (1 + seed % 5), 32 * (1 + seed % 3)
    floats = (
        randn(T, D, seed=seed), *weights_of(E, D, F, seed + 1), randn(*expert_TK.shape, seed=seed)
    )  # fmt: skip
    dy_TD = randn(T, D, seed=seed + 4)
    want = gradients(expert_mlp, floats, expert_TK, dy_TD, recipe=recipe)
    got = gradients(expert_mlp, floats, expert_TK, dy_TD, kernel=True, recipe=recipe)
    for name, g, w in zip(NAMES, got, want, strict=True):
        # A sum in another order may round an activation to its other neighbour: 2**-4 of one value.
        assert (g - w).norm() <= 0.01 * w.norm() + 1e-6, name
    empty = (torch.bincount(expert_TK[expert_TK >= 0], minlength=E) == 0).nonzero()[:, 0]
    assert (got[2][empty] == 0).all()
    assert (got[3][empty] == 0).all()


@IMPLEMENTATIONS
@pytest.mark.parametrize("recipe", RECIPES)
def test_odd_counts_of_grouped_rows_give_each_row_its_own_expert(recipe, kernel) -> None:
    counts, D, F = [1, 31, 32, 33, 0, 63], 64, 32
    weights, N = weights_of(len(counts), D, F, seed=0), sum(counts)
    x_RD, dy_RD = randn(N + 4, D, seed=5), randn(N + 4, D, seed=6)
    x_RD[N:] = torch.nan
    expert_T1 = torch.repeat_interleave(torch.arange(6), torch.tensor(counts))[:, None].int()
    one_T1 = torch.ones(N, 1)
    want = gradients(
        expert_mlp, (x_RD[:N], *weights, one_T1), expert_T1, dy_RD[:N], recipe=recipe
    )  # fmt: skip
    offsets_E1 = torch.tensor([0, *counts]).cumsum(0).int()
    got = gradients(grouped_mlp, (x_RD, *weights), offsets_E1, dy_RD, kernel, recipe=recipe)
    for g, w in zip(got, want[:4], strict=True):
        assert (g[: len(w)] - w).norm() <= 0.01 * w.norm()
        assert (g[len(w) :] == 0).all()


@IMPLEMENTATIONS
def test_rows_from_the_wire_are_not_rounded_again_and_carry_their_gradient(kernel) -> None:
    floats, expert_TK, dy_TD = case(T=20, D=64, F=32, E=3, K=2)
    x_TD, *others = floats
    want = gradients(expert_mlp, floats, expert_TK, dy_TD, kernel, recipe="mxrow")
    wire = quantize(x_TD, recipe="mxrow")

    def layer(zero, *rest):
        carrier_TD = zero.expand(x_TD.shape)
        return expert_mlp(wire, *rest, recipe="mxrow", carrier_TD=carrier_TD)

    got = gradients(layer, (torch.zeros(1, 1), *others), expert_TK, dy_TD, kernel)
    assert torch.equal(got[0], want[0])
    torch.testing.assert_close(got[1], want[1].sum().view(1, 1), rtol=1e-4, atol=1e-4)
    assert all(torch.equal(g, w) for g, w in zip(got[2:], want[2:], strict=True))
    with interpreted() if kernel else nullcontext():
        offsets_E1 = torch.tensor([0, 8, 8, 20]).int()
        rows = [grouped_mlp(x, *others[:2], offsets_E1, recipe="mxrow") for x in (x_TD, wire)]
    assert torch.equal(*rows)


@IMPLEMENTATIONS
def test_a_snapshot_is_what_is_multiplied_forward_and_backward(kernel) -> None:
    floats, expert_TK, dy_TD = case(T=16, D=64, F=32, E=3, K=2)
    x_TD, w_gate_up, w_down, weight_TK = floats
    quantized = tuple(quantize_weight(w, recipe="mx128") for w in (w_gate_up, w_down))
    want = gradients(expert_mlp, floats, expert_TK, dy_TD, kernel, recipe="mx128")
    other = (x_TD, torch.zeros_like(w_gate_up), torch.zeros_like(w_down), weight_TK)
    got = gradients(
        expert_mlp, other, expert_TK, dy_TD, kernel, recipe="mx128", quantized=quantized
    )
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


def test_what_is_kept_for_backward_is_rows_in_mxfp8_and_the_preactivation() -> None:
    floats, expert_TK, _ = case(T=16, D=64, F=32, E=3, K=2)
    quantized = tuple(quantize_weight(w, recipe="mx32") for w in floats[1:3])
    leaves = [t.clone().requires_grad_() for t in floats]
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        expert_mlp(*leaves, expert_TK, recipe="mx32", quantized=quantized)
    mine = {t.data_ptr() for mx in quantized for t in (*mx.rows, *mx.columns)}
    fresh = [t for t in kept if t.data_ptr() not in mine and t.dtype != torch.int32]
    sizes = [(t.dtype, tuple(t.shape)) for t in fresh]
    assert (torch.float8_e4m3fn, (16, 64)) in sizes
    assert (torch.float32, (32, 64)) in sizes  # the pre-activation
    assert (torch.float32, (16, 64)) not in sizes  # the tokens


@IMPLEMENTATIONS
@pytest.mark.parametrize("frozen", ["experts", "everything else"])
def test_frozen_tensors_cost_and_change_nothing(frozen, kernel) -> None:
    floats, expert_TK, dy_TD = case(T=12, D=32, F=32, E=3, K=1)
    want = gradients(expert_mlp, floats, expert_TK, dy_TD, kernel, recipe="mx32")
    asks = [(name in ("dw_gate_up", "dw_down")) == (frozen != "experts") for name in NAMES[1:]]
    leaves = [t.clone().requires_grad_(ask) for t, ask in zip(floats, asks, strict=True)]
    with interpreted() if kernel else nullcontext():
        y_TD = expert_mlp(*leaves, expert_TK, recipe="mx32")
        asked = [leaf for leaf in leaves if leaf.requires_grad]
        got = torch.autograd.grad(y_TD, asked, dy_TD)
    assert torch.equal(y_TD, want[0])
    wanted = [w for w, ask in zip(want[1:], asks, strict=True) if ask]
    assert all(torch.equal(g, w) for g, w in zip(got, wanted, strict=True))


@IMPLEMENTATIONS
def test_results_do_not_depend_on_what_memory_held(kernel, monkeypatch) -> None:
    floats, expert_TK, dy_TD = case(T=12, D=64, F=32, E=6, K=2)
    expert_TK[expert_TK == 4] = -1
    want = gradients(expert_mlp, floats, expert_TK, dy_TD, kernel, recipe="mx32")
    monkeypatch.setattr(scratch, "POISON", True)
    got = gradients(expert_mlp, floats, expert_TK, dy_TD, kernel, recipe="mx32")
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


def test_a_nan_in_one_token_stays_in_its_row() -> None:
    # On the GPU too (test_mx_gpu); the interpreter reads the NaN of float8 as the number 480.
    floats, expert_TK, _ = case(T=8, D=64, F=32, E=3, K=2)
    floats[0][2, 5] = torch.nan
    y_TD = expert_mlp(*floats, expert_TK, recipe="mx32")
    assert y_TD[2].isnan().all()
    assert y_TD.isfinite().all(dim=1).sum() == 7


def test_what_does_not_go_with_a_recipe_is_named() -> None:
    floats, expert_TK, _ = case(T=4, D=64, F=32, E=2, K=1)
    x_TD, w_gate_up, w_down, weight_TK = floats
    routed = (w_gate_up, w_down, weight_TK, expert_TK)
    quantized = tuple(quantize_weight(w, recipe="mx32", columns=False) for w in routed[:2])
    for message, options in (
        ("recipe must be named where there is quantized, got None", {"quantized": quantized}),
        ("recipe must be one of mx32, mx128, mxrow, got 'mx64'", {"recipe": "mx64"}),
        ("'mx32' goes with activation 'swiglu' and no biases, got 'swiglu' and bias_down_ED",
         {"recipe": "mx32", "bias_down_ED": torch.zeros(2, 64)}),
        (r"quantized\[0\] was quantised by 'mx32', not 'mxrow'",
         {"recipe": "mxrow", "quantized": quantized}),
        (r"quantised from \(2, 64, 64\), the weight is \(2, 64, 32\)",
         {"recipe": "mx32", "quantized": quantized[:1] * 2}),
        ("carrier goes with an MXTensor", {"recipe": "mx32", "carrier_TD": x_TD}),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            expert_mlp(x_TD, *routed, **options)
    with pytest.raises(ValueError, match="named where there is an MXTensor for x, got None"):
        expert_mlp(quantize(x_TD), *routed)
    with pytest.raises(ValueError, match=r"shape of the rows, \(4, 64\), got \(3, 64\)"):
        expert_mlp(quantize(x_TD), *routed, recipe="mx32", carrier_TD=x_TD[:3])
    with pytest.raises(ValueError, match=r"columns=False, and a gradient is asked for"):
        expert_mlp(x_TD.requires_grad_(), *routed, recipe="mx32", quantized=quantized)
    double = [t.double() for t in floats]
    with pytest.raises(TypeError, match=r"'mx32' takes bfloat16, float16 or float32, got .*64"):
        expert_mlp(*double, expert_TK, recipe="mx32")
    narrow = case(T=4, D=48, F=32, E=2, K=1)
    with pytest.raises(ValueError, match="'mx32' takes multiples of 32, got D=48, F=32"):
        expert_mlp(*narrow[0], narrow[1], recipe="mx32")
    x = MXTensor(*quantize(x_TD.detach()))
    x.scale_NB[0, 0] += 1
    with pytest.raises(ValueError, match="x is no 'mxrow' tensor"):
        expert_mlp(x, *routed, recipe="mxrow")


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # opcheck reads it off its own views
@IMPLEMENTATIONS
@pytest.mark.parametrize("grouped", [False, True], ids=["expert_mlp", "grouped_mlp"])
def test_the_operators_are_good_citizens(kernel, grouped) -> None:
    floats, expert_TK, _ = case(T=6, D=32, F=32, E=2, K=1)
    x_TD, *weights, weight_TK = floats
    quantized = [quantize_weight(w, recipe="mx32") for w in weights]
    bytes_of = [t for mx in quantized for t in mx.rows]
    bytes_of += [t for mx in quantized for t in mx.columns]
    tensors = (*quantize(x_TD), *bytes_of)
    groups = group_rows(expert_TK, 2)
    leaves = [t.clone().requires_grad_() for t in (x_TD, *weights)]
    if grouped:
        name, args = "grouped_mlp_mx", (*leaves, *tensors, groups.offsets_E1)
    else:
        name, args = "expert_mlp_mx", (*leaves, weight_TK.requires_grad_(), *tensors, *groups)
    with interpreted() if kernel else nullcontext():
        torch.library.opcheck(
            getattr(torch.ops.moe_kernels, name).default, (*args, "mx32", "rceil", True),
            # Torch cannot compare float8 tensors, which the check of the schema would do.
            test_utils=(
                "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"
            ),
        )  # fmt: skip
