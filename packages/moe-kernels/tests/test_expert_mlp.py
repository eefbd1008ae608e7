from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_kernels import Routing, expert_mlp, route, scratch
from moe_kernels.backend import interpreted
from moe_kernels.mlp.reference import expert_mlp_reference, ffn_reference
from moe_kernels.mlp.rows import combine
from moe_kernels.mlp.swiglu import swiglu, swiglu_grad
from moe_kernels.routing.tiles import group_rows_and_tiles
from moe_kernels.testing import randn, routings, seeds

# Error of outputs and gradients of unit scale, beside the float64 reference.
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-11, torch.bfloat16: 5e-2, torch.float16: 8e-3}
IMPLEMENTATIONS = pytest.mark.parametrize(
    ("dtype", "kernel"),
    [(torch.float32, False), (torch.bfloat16, False), (torch.float16, True), (torch.float32, True)],
    ids=["loop", "grouped", "kernel, float16", "kernel, float32"],
)
NAMES = ("y", "dx", "dw_gate_up", "dw_down", "dweight")


def weights_of(E, D, F, seed, dtype=torch.float64):
    w_gate_up_EGD = randn(E, 2 * F, D, seed=seed, dtype=dtype) / D**0.5
    return w_gate_up_EGD, randn(E, D, F, seed=seed + 1, dtype=dtype) / F**0.5


def gradients(function, *args, kernel: bool = False, **options):
    *floats, expert_TK, dy_TD = args
    leaves = [t.detach().clone().requires_grad_() for t in floats]
    with interpreted() if kernel else nullcontext():
        y_TD = function(*leaves, expert_TK, **options)
        return [y_TD.detach(), *torch.autograd.grad(y_TD, leaves, dy_TD)]


def assert_close(got, want, dtype) -> None:
    for name, g, w in zip(NAMES, got, want, strict=True):
        bound = TOLERANCE[dtype]
        scale = max(1.0, w.abs().max().item()) if w.numel() else 1.0
        torch.testing.assert_close(
            g.double(), w, rtol=bound, atol=bound * scale, msg=lambda m, name=name: f"{name}: {m}"
        )


@given(
    st.integers(1, 7).flatmap(lambda E: st.tuples(st.just(E), routings(E))),
    st.tuples(st.integers(1, 20), st.integers(1, 20)),
    st.sampled_from(list(TOLERANCE)),
    seeds,
)
def test_output_and_gradients_are_those_of_float64(case, shape, dtype, seed) -> None:
    (E, expert_TK), (D, F) = case, shape
    wide = torch.promote_types(dtype, torch.float32)
    T = expert_TK.shape[0]
    x_TD, dy_TD = randn(T, D, seed=seed, dtype=dtype), randn(T, D, seed=seed + 1, dtype=dtype)
    weight_TK = randn(*expert_TK.shape, seed=seed + 2, dtype=wide)
    floats = (x_TD, *weights_of(E, D, F, seed + 3, dtype), weight_TK)
    got = gradients(expert_mlp, *floats, expert_TK, dy_TD)
    want = gradients(expert_mlp_reference, *(t.double() for t in floats), expert_TK, dy_TD.double())
    assert_close(got, want, dtype)


@settings(max_examples=12)
@given(
    st.integers(1, 7).flatmap(lambda E: st.tuples(st.just(E), routings(E))),
    st.tuples(st.sampled_from([16, 48, 80]), st.sampled_from([16, 48])),
    st.sampled_from([torch.float16, torch.float32]),
    seeds,
)
def test_kernels_agree_with_float64(case, shape, dtype, seed) -> None:
    (E, expert_TK), (D, F) = case, shape
    T = expert_TK.shape[0]
    x_TD, dy_TD = randn(T, D, seed=seed, dtype=dtype), randn(T, D, seed=seed + 1, dtype=dtype)
    weight_TK = randn(*expert_TK.shape, seed=seed + 2)
    floats = (x_TD, *weights_of(E, D, F, seed + 3, dtype), weight_TK)
    got = gradients(expert_mlp, *floats, expert_TK, dy_TD, kernel=True)
    want = gradients(expert_mlp_reference, *(t.double() for t in floats), expert_TK, dy_TD.double())
    assert_close(got, want, dtype)


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_gradients_of_tokens_weights_and_routing_are_numerical_derivatives(top_k) -> None:
    expert_TK = route(randn(4, 3, seed=0), top_k).expert_TK
    expert_TK[1, 0] = -1
    floats = (randn(4, 3, seed=1, dtype=torch.float64), *weights_of(3, 3, 2, seed=2))
    weight_TK = randn(4, top_k, seed=4, dtype=torch.float64)
    leaves = [t.requires_grad_() for t in (*floats, weight_TK)]
    assert torch.autograd.gradcheck(lambda *args: expert_mlp(*args, expert_TK), leaves)


@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_identical_experts_with_weights_that_sum_to_one_are_the_dense_network(top_k) -> None:
    x_TD, (w_gate_up_EGD, w_down_EDF) = randn(50, 16, seed=0), weights_of(1, 16, 24, 1, torch.float)
    routing = route(randn(50, 4, seed=3), top_k, renormalize=True)
    experts = w_gate_up_EGD.expand(4, -1, -1), w_down_EDF.expand(4, -1, -1)
    y_TD = expert_mlp(x_TD, *experts, routing.weight_TK, routing.expert_TK)
    dense_TD = ffn_reference(x_TD, w_gate_up_EGD[0], w_down_EDF[0])
    torch.testing.assert_close(y_TD, dense_TD, rtol=1e-5, atol=1e-5)


@IMPLEMENTATIONS
def test_a_gradient_that_is_one_expanded_number_counts_as_written_out(dtype, kernel) -> None:
    routing = routed(6, 4, 2, dtype)
    args = (randn(6, 16, seed=3, dtype=dtype), *weights_of(4, 16, 32, 1, dtype), *routing[:2])
    one = torch.ones((), dtype=dtype)
    got = gradients(expert_mlp, *args, one.expand(6, 16), kernel=kernel)
    want = gradients(expert_mlp, *args, one.expand(6, 16).contiguous(), kernel=kernel)
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


@given(seeds)
def test_permuting_tokens_permutes_outputs(seed) -> None:
    logits_TE, x_TD = randn(30, 5, seed=seed), randn(30, 8, seed=seed + 1)
    weights = weights_of(5, 8, 6, seed + 2, torch.float32)
    order_T = torch.randperm(30, generator=torch.Generator().manual_seed(seed))

    def layer(x_TD: torch.Tensor, logits_TE: torch.Tensor) -> torch.Tensor:
        routing = route(logits_TE, 2)
        return expert_mlp(x_TD, *weights, routing.weight_TK, routing.expert_TK)

    want = layer(x_TD, logits_TE)[order_T]
    torch.testing.assert_close(layer(x_TD[order_T], logits_TE[order_T]), want)


def routed(T: int, E: int, top_k: int, dtype: torch.dtype) -> Routing:
    wide = torch.promote_types(dtype, torch.float32)
    return route(randn(T, E, seed=0, dtype=wide), top_k)


@IMPLEMENTATIONS
def test_one_optimizer_step_changes_every_expert_with_rows_and_no_other(dtype, kernel) -> None:
    routing = routed(6, 16, 2, dtype)
    used = set(routing.expert_TK.flatten().tolist())
    leaves = [t.requires_grad_() for t in weights_of(16, 16, 16, 1, dtype)]
    before = [t.detach().clone() for t in leaves]
    optimizer = torch.optim.SGD(leaves, lr=1.0)
    with interpreted() if kernel else nullcontext():
        y_TD = expert_mlp(randn(6, 16, seed=3, dtype=dtype), *leaves, *routing[:2])
        assert y_TD.requires_grad
        y_TD.float().square().sum().backward()
    optimizer.step()
    assert 0 < len(used) < 16
    for old, new in zip(before, leaves, strict=True):
        for e in range(16):
            assert torch.equal(old[e], new[e]) == (e not in used)


@IMPLEMENTATIONS
def test_results_do_not_depend_on_what_memory_held(poison, monkeypatch, dtype, kernel) -> None:
    routing = routed(6, 16, 2, dtype)
    routing.expert_TK[2, 1] = routing.expert_TK[5, 0] = -1
    x_TD, dy_TD = randn(6, 16, seed=3, dtype=dtype), randn(6, 16, seed=4, dtype=dtype)
    args = (x_TD, *weights_of(16, 16, 32, 1, dtype), *routing[:2], dy_TD)
    want = gradients(expert_mlp, *args, kernel=kernel)
    monkeypatch.setattr(scratch, "POISON", True)
    with poison():
        got = gradients(expert_mlp, *args, kernel=kernel)
    for g, w in zip(got, want, strict=True):
        assert torch.equal(g, w)


@pytest.mark.filterwarnings("ignore:(invalid|overflow):RuntimeWarning")  # numpy, of infinities
@IMPLEMENTATIONS
def test_a_masked_route_adds_nothing_even_beside_infinite_rows(dtype, kernel) -> None:
    x_TD = randn(3, 16, seed=0, dtype=dtype)
    x_TD[0] = torch.inf  # token 0 owns row 0 and its output is not finite
    expert_TK = torch.tensor([[0, 1], [-1, 1], [-1, -1]], dtype=torch.int32)
    weight_TK = torch.ones(3, 2)
    weight_TK[1, 0], weight_TK[2] = torch.nan, torch.inf  # what a masked route's weight is, is moot
    weights = weights_of(2, 16, 16, 1, dtype)
    dy_TD = torch.ones(3, 16, dtype=dtype)
    y_TD, dx_TD, _, _, dweight_TK = gradients(
        expert_mlp, x_TD, *weights, weight_TK, expert_TK, dy_TD, kernel=kernel
    )
    want_D = ffn_reference(x_TD[1:2].float(), weights[0][1].float(), weights[1][1].float())[0]
    torch.testing.assert_close(y_TD[1].float(), want_D, rtol=5e-2, atol=5e-2)
    assert (y_TD[2] == 0).all()
    assert (dx_TD[2] == 0).all()
    assert (dweight_TK[expert_TK < 0] == 0).all()


@IMPLEMENTATIONS
def test_a_nan_token_surfaces_in_its_own_output_only(dtype, kernel) -> None:
    x_TD = randn(8, 16, seed=0, dtype=dtype)
    x_TD[3, 2] = torch.nan
    routing = route(randn(8, 4, seed=1), 2)
    with interpreted() if kernel else nullcontext():
        y_TD = expert_mlp(x_TD, *weights_of(4, 16, 16, 1, dtype), *routing[:2])
    assert y_TD.isnan().all(dim=1).tolist() == [t == 3 for t in range(8)]


@IMPLEMENTATIONS
def test_what_is_saved_for_backward_has_no_gathered_rows_and_no_activation(dtype, kernel) -> None:
    T, D, F, E, K = 7, 32, 16, 3, 2
    routing = route(randn(T, E, seed=0), K)
    leaves = [
        t.requires_grad_()
        for t in (randn(T, D, seed=1, dtype=dtype), *weights_of(E, D, F, 2, dtype))
    ]
    saved: list[tuple[int, ...]] = []
    hooks = torch.autograd.graph.saved_tensors_hooks(
        lambda t: saved.append(tuple(t.shape)) or t, lambda t: t
    )
    with hooks, interpreted() if kernel else nullcontext():
        expert_mlp(*leaves, *routing[:2])
    pre_activation = (T * K, 2 * F)
    tiles = [(E,), (1,)] if kernel else [(0,), (0,)]  # no expert has more rows than a tile
    routing_shapes = [(T, K), (E + 1,), (T * K,), (T, K), *tiles]
    inputs = [(T, D), (E, 2 * F, D), (E, D, F)]
    assert sorted(saved) == sorted([*inputs, pre_activation, *routing_shapes])


@IMPLEMENTATIONS
def test_frozen_experts_cost_no_weight_gradients_and_change_no_other(dtype, kernel) -> None:
    routing = routed(7, 3, 2, dtype)
    floats = (randn(7, 32, seed=1, dtype=dtype), *weights_of(3, 32, 16, 2, dtype), routing[0])
    dy_TD = randn(7, 32, seed=5, dtype=dtype)
    y, dx, _, _, dweight = gradients(expert_mlp, *floats, routing[1], dy_TD, kernel=kernel)
    x_TD, weight_TK = (floats[i].detach().clone().requires_grad_() for i in (0, 3))
    with interpreted() if kernel else nullcontext():
        got = expert_mlp(x_TD, *floats[1:3], weight_TK, routing[1])
        grads = torch.autograd.grad(got, (x_TD, weight_TK), dy_TD)
    for a, b in zip((got, *grads), (y, dx, dweight), strict=True):
        assert torch.equal(a, b)
    leaf = floats[1].requires_grad_()
    flat = [t for part in group_rows_and_tiles(routing[1], 3, 32) for t in part]
    backward = torch.ops.moe_kernels.expert_mlp_backward
    with interpreted() if kernel else nullcontext(), torch.no_grad():
        h_NG = randn(14, 32, seed=6, dtype=dtype)
        _, *dw, _ = backward(dy_TD, *floats[:1], leaf, *floats[2:], *flat, h_NG, False)
    assert [w.numel() for w in dw] == [0, 0]


@IMPLEMENTATIONS
def test_a_gradient_of_a_gradient_is_an_error_and_never_silently_missing(dtype, kernel) -> None:
    routing = routed(5, 3, 2, dtype)
    floats = (randn(5, 16, seed=1, dtype=dtype), *weights_of(3, 16, 16, 2, dtype), routing[0])
    leaves = [t.detach().clone().requires_grad_() for t in floats]
    with interpreted() if kernel else nullcontext():
        y_TD = expert_mlp(*leaves, routing[1])
        (dx_TD,) = torch.autograd.grad(y_TD.sum(), leaves[0], create_graph=True)
        with pytest.raises(RuntimeError, match="expert_mlp_backward has no derivative"):
            torch.autograd.grad(dx_TD.square().sum(), leaves[1])


def test_autocast_rounds_nothing_inside() -> None:
    routing = routed(5, 3, 2, torch.float32)
    args = (randn(5, 16, seed=1), *weights_of(3, 16, 16, 2, torch.float32), *routing[:2])
    want = expert_mlp(*args)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(expert_mlp(*args), want)


@IMPLEMENTATIONS
def test_without_gradients_the_output_is_the_same_and_nothing_is_kept(dtype, kernel) -> None:
    routing = routed(7, 3, 2, dtype)
    args = (randn(7, 32, seed=1, dtype=dtype), *weights_of(3, 32, 16, 2, dtype), *routing[:2])
    leaves = [t.detach().clone().requires_grad_() for t in args[:3]]
    with interpreted() if kernel else nullcontext():
        want = expert_mlp(*leaves, *routing[:2])
        with torch.no_grad():
            assert torch.equal(expert_mlp(*leaves, *routing[:2]), want)
        assert torch.equal(expert_mlp(*args), want)
        rows = (*group_rows_and_tiles(routing.expert_TK, 3, 32),)
        flat = [t for part in rows for t in part]
        _, h_NG = torch.ops.moe_kernels.expert_mlp(*args[:4], *flat, False)
    assert h_NG.shape == (0, 32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_activation_of_half_precision_is_that_of_its_float32_value(dtype) -> None:
    h_NG, dact_NF = randn(9, 8, seed=0, dtype=dtype), randn(9, 4, seed=1, dtype=dtype)
    weight_N = randn(9, seed=2)
    assert torch.equal(swiglu(h_NG), swiglu(h_NG.float()))
    got = swiglu_grad(h_NG, dact_NF, weight_N)
    want = swiglu_grad(h_NG.float(), dact_NF.float(), weight_N)
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


@pytest.mark.parametrize("weight_TK", [None, torch.ones(1, 3)], ids=["backward", "forward"])
def test_bfloat16_rows_of_a_token_are_summed_in_float32(weight_TK) -> None:
    y_MD = torch.tensor([[256.0], [1.0], [1.0], [0.0]]).bfloat16()  # 256 + 1 rounds to 256
    y_TD = combine(y_MD, torch.tensor([[0, 1, 2]]), weight_TK, torch.float32)
    assert y_TD.item() == 258.0
    assert y_TD.dtype == torch.bfloat16


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # opcheck reads it off its own views
@pytest.mark.parametrize("kernel", [False, True], ids=["loop", "kernel"])
def test_operators_pass_opcheck(kernel) -> None:
    ops = torch.ops.moe_kernels
    routing = route(randn(5, 3, seed=0), 2)
    groups, tiles = group_rows_and_tiles(routing.expert_TK, 3, 32)
    floats = (randn(5, 16, seed=1), *weights_of(3, 16, 16, 2, torch.float32), routing.weight_TK)
    leaves, plain = [t.requires_grad_() for t in floats], [t.detach() for t in floats]
    h_NG, dy_TD = randn(10, 32, seed=6), randn(5, 16, seed=5)
    order = groups[1:]
    with interpreted() if kernel else nullcontext():
        for operator, args in (
            (ops.expert_mlp, (*leaves, *groups, *tiles, True)),
            (ops.expert_mlp, (*plain, *groups, *tiles, False)),
            (ops.expert_mlp_backward, (dy_TD, *plain, *groups, *tiles, h_NG, True)),
            (ops.expert_mlp_backward, (dy_TD, *plain, *groups, *tiles, h_NG, False)),
            (ops.expand_rows, (leaves[0], *order)),
            (ops.combine_rows, (randn(10, 16, seed=7).requires_grad_(), leaves[3], *order)),
        ):
            torch.library.opcheck(operator.default, args)


ACTIVATIONS = {
    "relu2": lambda h: torch.relu(h).square(),
    "clamped_swiglu": lambda h: clamped_swiglu(*h.chunk(2, dim=1)),
    "swiglu": swiglu,
}


def clamped_swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    gate = torch.minimum(gate, torch.tensor(7.0))
    return gate / (1 + torch.exp(-1.702 * gate)) * (up.clip(-7, 7) + 1)


@pytest.mark.parametrize("kernel", [False, True], ids=["torch", "kernel"])
@settings(max_examples=12)
@given(
    case=st.integers(1, 5).flatmap(lambda E: st.tuples(st.just(E), routings(E))),
    activation=st.sampled_from(list(ACTIVATIONS)),
    biased=st.booleans(),
    seed=seeds,
)
def test_other_activations_and_biases_agree_with_float64(
    case, activation, biased, seed, kernel
) -> None:
    (E, expert_TK), (D, F) = case, (32, 16)
    T, G = expert_TK.shape[0], F if activation == "relu2" else 2 * F
    w_up, w_down = 9 * randn(E, G, D, seed=seed) / D**0.5, randn(E, D, F, seed=seed + 1) / F**0.5
    x_TD, dy_TD = randn(T, D, seed=seed + 2), randn(T, D, seed=seed + 3)
    floats = [x_TD, w_up, w_down, randn(*expert_TK.shape, seed=seed + 4)]
    if biased:
        floats += [randn(E, G, seed=seed + 5), randn(E, D, seed=seed + 6)]

    def layer(x_TD, w_up, w_down, weight_TK, *rest):
        *biases, ids = rest
        names = dict(zip(("bias_gate_up_EG", "bias_down_ED"), biases, strict=False))
        return expert_mlp(x_TD, w_up, w_down, weight_TK, ids, activation=activation, **names)

    def reference(x_TD, w_up, w_down, weight_TK, *rest):
        *biases, ids = rest
        y_TD = torch.zeros_like(x_TD)
        for e in range(E):
            h_TG = x_TD @ w_up[e].T + (biases[0][e] if biases else 0)
            out_TD = ACTIVATIONS[activation](h_TG) @ w_down[e].T + (biases[1][e] if biases else 0)
            y_TD = y_TD + (weight_TK * (ids == e)).sum(1)[:, None] * out_TD
        return y_TD

    got = gradients(layer, *floats, expert_TK, dy_TD, kernel=kernel)
    want = gradients(reference, *(t.double() for t in floats), expert_TK, dy_TD.double())
    for g, w in zip(got, want, strict=True):
        scale = max(1.0, w.abs().max().item()) if w.numel() else 1.0
        torch.testing.assert_close(g.double(), w, rtol=1e-4, atol=1e-4 * scale)


def test_errors_name_both_values_and_the_rule() -> None:
    x_TD, (w_gate_up, w_down) = torch.zeros(3, 4), weights_of(2, 4, 3, 0, torch.float32)
    ids = torch.zeros(3, 1, dtype=torch.int32)
    with pytest.raises(TypeError, match=r"must be torch.float32 for x_TD in torch.float32, got"):
        expert_mlp(x_TD, w_gate_up, w_down, torch.zeros(3, 1).double(), ids)
    with pytest.raises(ValueError, match=r"weight_TK has shape \(3, 2\), expert_TK \(3, 1\)"):
        expert_mlp(x_TD, w_gate_up, w_down, torch.zeros(3, 2), ids)
    args = (x_TD, w_gate_up, w_down, torch.zeros(3, 1), ids)
    with pytest.raises(ValueError, match="one of swiglu, clamped_swiglu, relu2, got 'gelu'"):
        expert_mlp(*args, activation="gelu")
    with pytest.raises(ValueError, match=r"G must be F, as nothing gates: .* 6 rows .* has F=3"):
        expert_mlp(*args, activation="relu2")
    with pytest.raises(ValueError, match=r"bias_down_ED must have shape \(2, 4\), .* got \(2, 3\)"):
        expert_mlp(*args, bias_down_ED=torch.zeros(2, 3))
    with pytest.raises(ValueError, match=r"K must be at least 1, got weight_TK of shape \(3, 0\)"):
        expert_mlp(x_TD, w_gate_up, w_down, torch.zeros(3, 0), ids[:, :0])
    with pytest.raises(ValueError, match=r"must hold -1 \(masked\) or 0..1, got 2..2"):
        expert_mlp(x_TD, w_gate_up, w_down, torch.zeros(3, 1), ids + 2)
