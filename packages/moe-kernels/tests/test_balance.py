import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_kernels import balance_loss, count_experts, route, update_bias, z_loss
from moe_kernels.testing import randn, routings, seeds


@given(st.integers(1, 9).flatmap(lambda E: st.tuples(st.just(E), routings(E))))
def test_counts_are_those_of_plain_python(case) -> None:
    num_experts, expert_TK = case
    flat = expert_TK.flatten().tolist()
    count_E = count_experts(expert_TK, num_experts)
    assert count_E.dtype == torch.int64
    assert count_E.tolist() == [flat.count(e) for e in range(num_experts)]


@pytest.mark.parametrize("num_experts", [4, 8, 64])
@pytest.mark.parametrize("tokens_per_sequence", [None, 64, 128])
@pytest.mark.parametrize("score", [1.0, 0.5])
def test_uniform_routing_costs_exactly_one_a_token(num_experts, tokens_per_sequence, score) -> None:
    T, K = 256, 2
    expert_TK = torch.arange(T * K).view(T, K) % num_experts
    score_TE = torch.full((T, num_experts), score / num_experts)
    loss = balance_loss(score_TE, expert_TK, tokens_per_sequence=tokens_per_sequence)
    assert loss.item() == T


def test_a_skewed_routing_costs_what_it_costs_by_hand() -> None:
    # E = 4, two tokens, both to expert 0. f = (1, 0, 0, 0), P = (0.6, 0.2, 0.1, 0.1):
    # 2 tokens * 4 experts * 0.6 = 4.8.
    score_TE = torch.tensor([[0.7, 0.1, 0.1, 0.1], [0.5, 0.3, 0.1, 0.1]], dtype=torch.float64)
    loss = balance_loss(score_TE, torch.tensor([[0], [0]]))
    torch.testing.assert_close(loss.item(), 4.8)
    # As two sequences: 4 * 0.7 + 4 * 0.5 = 4.8; with the second masked: 2.8.
    alone = balance_loss(score_TE, torch.tensor([[0], [0]]), tokens_per_sequence=1)
    torch.testing.assert_close(alone.item(), 4.8)
    masked = balance_loss(score_TE, torch.tensor([[0], [0]]), mask_T=torch.tensor([True, False]))
    torch.testing.assert_close(masked.item(), 2.8)


@given(st.sampled_from(["softmax", "sigmoid"]), st.integers(0, 4), seeds)
def test_sequences_can_be_computed_apart_and_added(score, sequences, seed) -> None:
    logits_TE = randn(sequences * 5, 6, seed=seed, dtype=torch.float64)
    routing = route(logits_TE, 2, score=score)
    whole = balance_loss(routing.score_TE, routing.expert_TK, tokens_per_sequence=5)
    parts = [
        balance_loss(routing.score_TE[s : s + 5], routing.expert_TK[s : s + 5])
        for s in range(0, sequences * 5, 5)
    ]
    torch.testing.assert_close(whole, sum(parts, torch.zeros(()).double()))


@given(seeds)
def test_padding_and_bad_rows_change_no_loss_no_count_and_no_gradient(seed) -> None:
    real_TE = randn(6, 4, seed=seed, dtype=torch.float64)
    pad_TE = torch.full((6, 4), torch.nan, dtype=torch.float64)
    pad_TE[:3] = randn(3, 4, seed=seed + 1, dtype=torch.float64)
    mask_T = torch.tensor([True] * 6 + [False] * 3 + [True] * 3)  # the last three are bad instead

    def run(logits_TE: torch.Tensor, mask_T: torch.Tensor | None):
        logits_TE = logits_TE.clone().requires_grad_()
        routing = route(logits_TE, 2, mask_T=mask_T)
        balance = balance_loss(routing.score_TE, routing.expert_TK, mask_T=mask_T)
        loss = balance + z_loss(logits_TE, mask_T=mask_T)
        (grad_TE,) = torch.autograd.grad(loss, logits_TE)
        return loss, grad_TE, count_experts(routing.expert_TK, 4)

    want, want_grad_TE, want_count_E = run(real_TE, None)
    loss, grad_TE, count_E = run(torch.cat([real_TE, pad_TE]), mask_T)
    torch.testing.assert_close(loss, want)
    torch.testing.assert_close(grad_TE[:6], want_grad_TE)
    assert (grad_TE[6:] == 0).all()
    assert torch.equal(count_E, want_count_E)


@settings(max_examples=3)
@given(seeds)
def test_losses_have_numerical_derivatives(seed) -> None:
    logits_TE = randn(6, 4, seed=seed, dtype=torch.float64).requires_grad_()
    ids_TK = route(logits_TE, 2).expert_TK
    for score in (torch.softmax, lambda x, dim: x.sigmoid()):
        assert torch.autograd.gradcheck(
            lambda x, score=score: balance_loss(score(x, dim=1), ids_TK, tokens_per_sequence=3),
            (logits_TE,),
        )
    assert torch.autograd.gradcheck(z_loss, (logits_TE,))


@given(st.integers(0, 5), st.integers(1, 5), seeds)
def test_z_loss_is_the_sum_of_squared_logsumexp(T, E, seed) -> None:
    logits_TE = 5 * randn(T, E, seed=seed, dtype=torch.float64)
    want = logits_TE.exp().sum(1).log().square().sum()
    torch.testing.assert_close(z_loss(logits_TE), want)


def test_one_row_in_forty_thousand_decides_the_sign_of_the_bias() -> None:
    count_E = torch.tensor([40840, 40841])
    bias_E = update_bias(torch.zeros(2), count_E, 1e-3)
    assert bias_E.dtype == torch.float32
    assert bias_E.tolist() == [np.float32(1e-3), -np.float32(1e-3)]
    # Past 2**24, where float32 counts would be equal, and at equality.
    assert update_bias(torch.zeros(2), torch.tensor([2**40, 2**40 + 2]), 1.0).tolist() == [1, -1]
    assert update_bias(torch.ones(2), torch.tensor([7, 7]), 1.0).tolist() == [1, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_thousand_updates_equal_exact_arithmetic_of_the_same_width(dtype) -> None:
    rng = np.random.default_rng(0)
    bias_E, want_E = torch.zeros(8, dtype=dtype), [0.0] * 8
    as_float = np.float32 if dtype == torch.float32 else np.float64
    want_E = [as_float(0)] * 8
    for _ in range(1000):
        counts = rng.integers(0, 50000, size=8).tolist()
        bias_E = update_bias(bias_E, torch.tensor(counts), 1e-3)
        signs = [(sum(counts) > 8 * c) - (sum(counts) < 8 * c) for c in counts]
        want_E = [b + as_float(1e-3) * as_float(s) for b, s in zip(want_E, signs, strict=True)]
    assert bias_E.tolist() == [float(value) for value in want_E]


def test_control_state_of_another_dtype_is_refused() -> None:
    with pytest.raises(TypeError, match=r"bias_E must be float32 or float64, got torch.bfloat16"):
        update_bias(torch.zeros(2).bfloat16(), torch.zeros(2).long(), 1e-3)
    with pytest.raises(TypeError, match=r"count_E must be int64.*got torch.float32"):
        update_bias(torch.zeros(2), torch.zeros(2), 1e-3)
    with pytest.raises(TypeError, match=r"score_TE must be float32 or float64, got torch.bfloat16"):
        balance_loss(torch.zeros(2, 2).bfloat16(), torch.zeros(2, 1).long())


def test_errors_name_both_values_and_the_rule() -> None:
    with pytest.raises(ValueError, match="tokens_per_sequence must divide T: got 3 for T=4"):
        balance_loss(torch.ones(4, 2), torch.zeros(4, 1).long(), tokens_per_sequence=3)
    with pytest.raises(ValueError, match="score_TE has 4 rows, expert_TK has 5"):
        balance_loss(torch.ones(4, 2), torch.zeros(5, 1).long())
    with pytest.raises(ValueError, match=r"bias_E has shape \(2,\), count_E \(3,\)"):
        update_bias(torch.zeros(2), torch.zeros(3).long(), 1e-3)
    with pytest.raises(ValueError, match=r"must hold -1 \(masked\) or 0..2, got 0..3"):
        count_experts(torch.tensor([[0, 3]]), 3)
    mask_T = torch.ones(4, dtype=torch.bool, device="meta")
    with pytest.raises(ValueError, match="mask_T is on meta, score_TE on cpu"):
        balance_loss(torch.ones(4, 3), torch.zeros(4, 1).long(), mask_T=mask_T)
    with pytest.raises(ValueError, match=r"E must be at least 1, got logits_TE of shape \(3, 0\)"):
        z_loss(torch.zeros(3, 0))


def test_tokens_that_choose_nothing_cost_nothing() -> None:
    assert balance_loss(torch.rand(4, 3), torch.zeros(4, 0, dtype=torch.int32)) == 0
    assert z_loss(torch.zeros(0, 5)) == 0
