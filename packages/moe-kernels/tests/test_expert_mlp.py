import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from moe_kernels import Routing, expert_mlp, group_rows, route
from moe_kernels.mlp.reference import expert_mlp_reference, ffn_reference
from moe_kernels.mlp.rows import combine
from moe_kernels.mlp.swiglu import swiglu, swiglu_grad
from moe_kernels.testing import randn, routings, seeds

# Error of outputs and gradients of unit scale, beside the float64 reference.
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-11, torch.bfloat16: 5e-2, torch.float16: 8e-3}
NAMES = ("y", "dx", "dw_gate_up", "dw_down", "dweight")


def weights_of(E, D, F, seed, dtype=torch.float64):
    w_gate_up_EGD = randn(E, 2 * F, D, seed=seed, dtype=dtype) / D**0.5
    return w_gate_up_EGD, randn(E, D, F, seed=seed + 1, dtype=dtype) / F**0.5


def gradients(function, *args):
    *floats, expert_TK, dy_TD = args
    leaves = [t.detach().clone().requires_grad_() for t in floats]
    y_TD = function(*leaves, expert_TK)
    return [y_TD.detach(), *torch.autograd.grad(y_TD, leaves, dy_TD)]


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
    for name, g, w in zip(NAMES, got, want, strict=True):
        bound = TOLERANCE[dtype]
        scale = max(1.0, w.abs().max().item()) if w.numel() else 1.0
        torch.testing.assert_close(
            g.double(), w, rtol=bound, atol=bound * scale, msg=lambda m, name=name: f"{name}: {m}"
        )


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])  # the loop, the grouped path
def test_one_optimizer_step_changes_every_expert_with_rows_and_no_other(dtype) -> None:
    routing = routed(6, 16, 2, dtype)
    used = set(routing.expert_TK.flatten().tolist())
    leaves = [t.requires_grad_() for t in weights_of(16, 8, 6, 1, dtype)]
    before = [t.detach().clone() for t in leaves]
    optimizer = torch.optim.SGD(leaves, lr=1.0)
    y_TD = expert_mlp(randn(6, 8, seed=3, dtype=dtype), *leaves, *routing[:2])
    assert y_TD.requires_grad
    y_TD.float().square().sum().backward()
    optimizer.step()
    assert 0 < len(used) < 16
    for old, new in zip(before, leaves, strict=True):
        for e in range(16):
            assert torch.equal(old[e], new[e]) == (e not in used)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_do_not_depend_on_what_memory_held(poison, dtype) -> None:
    routing = routed(6, 16, 2, dtype)
    routing.expert_TK[2, 1] = routing.expert_TK[5, 0] = -1
    x_TD, dy_TD = randn(6, 8, seed=3, dtype=dtype), randn(6, 8, seed=4, dtype=dtype)
    args = (x_TD, *weights_of(16, 8, 6, 1, dtype), *routing[:2], dy_TD)
    want = gradients(expert_mlp, *args)
    with poison():
        got = gradients(expert_mlp, *args)
    for g, w in zip(got, want, strict=True):
        assert torch.equal(g, w)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_masked_route_adds_nothing_even_beside_infinite_rows(dtype) -> None:
    x_TD = randn(3, 8, seed=0, dtype=dtype)
    x_TD[0] = torch.inf  # token 0 owns row 0 and its output is not finite
    expert_TK = torch.tensor([[0, 1], [-1, 1], [-1, -1]], dtype=torch.int32)
    weight_TK = torch.ones(3, 2)
    weights = weights_of(2, 8, 6, 1, dtype)
    y_TD, dx_TD, _, _, dweight_TK = gradients(
        expert_mlp, x_TD, *weights, weight_TK, expert_TK, torch.ones(3, 8, dtype=dtype)
    )
    want_D = ffn_reference(x_TD[1:2].float(), weights[0][1].float(), weights[1][1].float())[0]
    torch.testing.assert_close(y_TD[1].float(), want_D, rtol=5e-2, atol=5e-2)
    assert (y_TD[2] == 0).all()
    assert (dx_TD[2] == 0).all()
    assert (dweight_TK[expert_TK < 0] == 0).all()


def test_a_nan_token_surfaces_in_its_own_output_only() -> None:
    x_TD = randn(8, 8, seed=0)
    x_TD[3, 2] = torch.nan
    routing = route(randn(8, 4, seed=1), 2)
    y_TD = expert_mlp(x_TD, *weights_of(4, 8, 6, 1, torch.float32), *routing[:2])
    assert y_TD.isnan().all(dim=1).tolist() == [t == 3 for t in range(8)]


def test_what_is_saved_for_backward_has_no_gathered_rows_and_no_activation() -> None:
    T, D, F, E, K = 7, 10, 6, 3, 2
    routing = route(randn(T, E, seed=0), K)
    leaves = [
        t.requires_grad_() for t in (randn(T, D, seed=1), *weights_of(E, D, F, 2, torch.float))
    ]
    saved: list[tuple[int, ...]] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: saved.append(tuple(t.shape)) or t, lambda t: t
    ):
        expert_mlp(*leaves, *routing[:2])
    pre_activation = (T * K + 1, 2 * F)
    routing_shapes = [(T, K), (E + 1,), (T * K,), (T, K)]
    inputs = [(T, D), (E, 2 * F, D), (E, D, F)]
    assert sorted(saved) == sorted([*inputs, pre_activation, *routing_shapes])


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
    y_MD = torch.tensor([[256.0], [1.0], [1.0]], dtype=torch.bfloat16)  # 256 + 1 rounds to 256
    y_TD = combine(y_MD, torch.tensor([[0, 1, 2]]), weight_TK, torch.float32)
    assert y_TD.item() == 258.0
    assert y_TD.dtype == torch.bfloat16


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # opcheck reads it off its own views
def test_operator_passes_opcheck() -> None:
    routing = route(randn(5, 3, seed=0), 2)
    groups = group_rows(routing.expert_TK, 3)
    floats = (randn(5, 4, seed=1), *weights_of(3, 4, 2, 2, torch.float32), routing.weight_TK)
    leaves = [t.requires_grad_() for t in floats]
    torch.library.opcheck(torch.ops.moe_kernels.expert_mlp.default, (*leaves, *groups))
    plain = [t.detach() for t in leaves]
    torch.library.opcheck(
        torch.ops.moe_kernels.expert_mlp_backward.default,
        (randn(5, 4, seed=5), *plain, *groups, randn(11, 4, seed=6)),
    )


def test_errors_name_both_values_and_the_rule() -> None:
    x_TD, (w_gate_up, w_down) = torch.zeros(3, 4), weights_of(2, 4, 3, 0, torch.float32)
    ids = torch.zeros(3, 1, dtype=torch.int32)
    with pytest.raises(TypeError, match=r"must be torch.float32 for x_TD in torch.float32, got"):
        expert_mlp(x_TD, w_gate_up, w_down, torch.zeros(3, 1).double(), ids)
    with pytest.raises(ValueError, match=r"weight_TK has shape \(3, 2\), expert_TK \(3, 1\)"):
        expert_mlp(x_TD, w_gate_up, w_down, torch.zeros(3, 2), ids)
    with pytest.raises(ValueError, match=r"K must be at least 1, got weight_TK of shape \(3, 0\)"):
        expert_mlp(x_TD, w_gate_up, w_down, torch.zeros(3, 0), ids[:, :0])
    with pytest.raises(ValueError, match=r"must hold -1 \(masked\) or 0..1, got 2..2"):
        expert_mlp(x_TD, w_gate_up, w_down, torch.zeros(3, 1), ids + 2)
