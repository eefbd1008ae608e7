import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_kernels import grouped_mlp
from moe_kernels.mlp.reference import grouped_mlp_reference
from moe_kernels.testing import randn, row_counts, seeds

# Error of outputs and gradients of unit scale, beside the float64 reference.
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-11, torch.bfloat16: 5e-2, torch.float16: 8e-3}


def problem(counts, D, F, seed, dtype=torch.float64, tail=0):
    x_RD = randn(sum(counts) + tail, D, seed=seed, dtype=dtype)
    w_gate_up_EGD = randn(len(counts), 2 * F, D, seed=seed + 1, dtype=dtype) / D**0.5
    w_down_EDF = randn(len(counts), D, F, seed=seed + 2, dtype=dtype) / F**0.5
    return x_RD, w_gate_up_EGD, w_down_EDF, torch.tensor([0, *counts]).cumsum(0).int()


def gradients(function, x_RD, w_gate_up_EGD, w_down_EDF, offsets_E1, dy_RD):
    leaves = [t.detach().clone().requires_grad_() for t in (x_RD, w_gate_up_EGD, w_down_EDF)]
    y_RD = function(*leaves, offsets_E1)
    return [y_RD.detach(), *torch.autograd.grad(y_RD, leaves, dy_RD)]


@given(
    row_counts(max_rows=40),
    st.tuples(st.integers(1, 24), st.integers(1, 24)),
    st.sampled_from(list(TOLERANCE)),
    st.sampled_from([0, 1, 20]),
    seeds,
)
def test_output_and_gradients_are_those_of_float64(counts, shape, dtype, tail, seed) -> None:
    args = problem(counts, *shape, seed, dtype, tail)
    dy_RD = randn(*args[0].shape, seed=seed + 3, dtype=dtype)
    got = gradients(grouped_mlp, *args, dy_RD)
    wide = [t.double() if t.is_floating_point() else t for t in args]
    want = gradients(grouped_mlp_reference, *wide, dy_RD.double())
    for name, g, w in zip(("y", "dx", "dw_gate_up", "dw_down"), got, want, strict=True):
        bound = TOLERANCE[dtype]
        scale = max(1.0, w.abs().max().item()) if w.numel() else 1.0
        torch.testing.assert_close(
            g.double(), w, rtol=bound, atol=bound * scale, msg=lambda m, name=name: f"{name}: {m}"
        )


@pytest.mark.parametrize("counts", [[5], [2, 0], [1, 2, 2]])
def test_gradients_are_numerical_derivatives(counts) -> None:
    x_RD, *weights, offsets_E1 = problem(counts, 3, 2, seed=0, tail=1)
    leaves = [t.requires_grad_() for t in (x_RD, *weights)]
    assert torch.autograd.gradcheck(lambda *args: grouped_mlp(*args, offsets_E1), leaves)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])  # the loop, the grouped path
@pytest.mark.parametrize("poisonous", [torch.nan, torch.inf])
def test_rows_past_the_last_offset_are_never_read(poison, dtype, poisonous) -> None:
    x_RD, w_gate_up, w_down, offsets_E1 = problem([30, 0, 47], 8, 6, 0, dtype, tail=51)
    dy_RD = randn(*x_RD.shape, seed=9, dtype=dtype)
    want = gradients(grouped_mlp, x_RD[:77], w_gate_up, w_down, offsets_E1, dy_RD[:77])
    x_RD[77:] = dy_RD[77:] = poisonous
    with poison():
        y_RD, dx_RD, *dw = gradients(grouped_mlp, x_RD, w_gate_up, w_down, offsets_E1, dy_RD)
    assert (y_RD[77:] == 0).all()
    assert (dx_RD[77:] == 0).all()
    torch.testing.assert_close([y_RD[:77], dx_RD[:77], *dw], want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_without_rows_get_zero_gradient_whatever_memory_held(poison, dtype) -> None:
    counts = [0, 5, 0, 7, 0, 0, 3, 0]
    args = problem(counts, 8, 6, 0, dtype)
    with poison():
        _, _, *dws = gradients(grouped_mlp, *args, randn(15, 8, seed=9, dtype=dtype))
    for dw in dws:
        assert dw.isfinite().all()
        for count, dw_expert in zip(counts, dw, strict=True):
            assert bool((dw_expert == 0).all()) == (count == 0)


@settings(max_examples=5)
@given(seeds)
def test_what_is_saved_for_backward_is_the_rows_the_weights_and_the_pre_activation(seed) -> None:
    args = problem([3, 4], 8, 6, seed, torch.float32)
    saved: list[torch.Tensor] = []
    leaves = [t.requires_grad_() if t.is_floating_point() else t for t in args]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        grouped_mlp(*leaves)
    assert sorted(tuple(t.shape) for t in saved) == sorted(
        [*(tuple(t.shape) for t in args), (7, 12)]
    )


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # opcheck reads it off its own views
def test_operator_passes_opcheck() -> None:
    x_RD, *weights, offsets_E1 = problem([3, 0, 2], 4, 3, 0, torch.float32, tail=2)
    leaves = [t.requires_grad_() for t in (x_RD, *weights)]
    torch.library.opcheck(torch.ops.moe_kernels.grouped_mlp.default, (*leaves, offsets_E1, True))
    plain = [t.detach() for t in leaves]
    torch.library.opcheck(
        torch.ops.moe_kernels.grouped_mlp_backward.default,
        (randn(7, 4, seed=5), *plain, offsets_E1, randn(7, 6, seed=6), True),
    )


@pytest.mark.parametrize(
    ("gate_up", "down", "message"),
    [
        ((2, 7, 4), (2, 4, 3), r"G must be 2\*F: w_gate_up_EGD has 7 rows.*F=3"),
        ((2, 6, 4), (3, 4, 3), "w_gate_up_EGD holds 2 experts, w_down_EDF holds 3"),
        ((2, 6, 5), (2, 4, 3), "x_RD has 4 columns, w_gate_up_EGD has 5.*w_down_EDF has 4"),
        ((2, 6), (2, 4, 3), r"w_gate_up_EGD with 3 axes.*\(2, 6\)"),
    ],
)
def test_errors_name_both_values_and_the_rule(gate_up, down, message) -> None:
    offsets_E1 = torch.zeros(3).int()
    with pytest.raises(ValueError, match=message):
        grouped_mlp(torch.zeros(5, 4), torch.zeros(gate_up), torch.zeros(down), offsets_E1)
