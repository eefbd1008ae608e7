"""The distance loss is a distance, and the usual balance loss is not."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_kernels import (
    balance_loss,
    count_experts,
    distance_loss,
    route,
    unevenness,
)
from moe_kernels.testing import randn, routings, seeds

problems = st.integers(1, 9).flatmap(lambda E: st.tuples(st.just(E), routings(E, masked=False)))


def loss_by_hand(expert_TK: torch.Tensor, num_experts: int) -> float:
    flat = expert_TK.flatten().tolist()
    total = len(flat)
    deviations = [flat.count(e) / total - 1 / num_experts for e in range(num_experts)]
    return len(expert_TK) * num_experts * sum(d * d for d in deviations)


@given(problems, seeds)
def test_the_loss_is_zero_exactly_for_even_loads_and_bounded_by_the_worst(case, seed) -> None:
    E, expert_TK = case
    T, K = expert_TK.shape
    score_TE = randn(T, E, seed=seed, dtype=torch.float64).softmax(dim=1)
    loss = distance_loss(score_TE, expert_TK).item()
    counts = count_experts(expert_TK, E).tolist()
    assert (loss == 0) == (len(set(counts)) == 1 or T == 0)
    assert 0 <= loss <= T * (E / K - 1) * (1 + 1e-12)
    if T:
        assert loss == pytest.approx(loss_by_hand(expert_TK, E), abs=1e-12)


@pytest.mark.parametrize(("E", "K"), [(2, 1), (8, 2), (7, 3), (4, 4)])
def test_the_bound_is_reached_when_k_experts_get_everything(E, K) -> None:
    expert_TK = torch.arange(K).expand(10, K)
    loss = distance_loss(torch.full((10, E), 1 / E), expert_TK)
    assert loss.item() == pytest.approx(10 * (E / K - 1), abs=1e-5)


def test_a_load_by_hand_costs_what_it_costs_by_hand() -> None:
    # E = 2, K = 1, loads 3/4 and 1/4: 4 tokens * 2 * (1/16 + 1/16) = 1, whatever the scores.
    ids_TK = torch.tensor([[0], [0], [0], [1]])
    for p in (0.5, 0.9):
        score_TE = torch.tensor([[p, 1 - p]]).expand(4, 2)
        assert distance_loss(score_TE, ids_TK).item() == 1.0
    # The first two tokens as one sequence are 2 * 2 * (1/4 + 1/4) = 2, the others are even.
    assert distance_loss(score_TE, ids_TK, tokens_per_sequence=2).item() == 2.0
    # A load from elsewhere counts for all tokens: 4 * 2 * 2 * 0.3^2.
    load_E = torch.tensor([0.2, 0.8])
    got = distance_loss(score_TE, ids_TK, tokens_per_sequence=2, load_E=load_E)
    assert got.item() == pytest.approx(1.44)


def scores_of_a_gerrymandered_router() -> tuple[torch.Tensor, torch.Tensor]:
    """Return 10 tokens of which 9 barely choose expert 0 and one surely expert 1."""
    score_TE = torch.tensor([[0.51, 0.49]] * 9 + [[0.0, 1.0]], dtype=torch.float64)
    return score_TE, score_TE.argmax(dim=1, keepdim=True)


def test_the_usual_loss_calls_a_router_better_than_even_that_sends_nine_of_ten_to_one() -> None:
    score_TE, ids_TK = scores_of_a_gerrymandered_router()
    # P = (0.459, 0.541): 10 * (1 + 2 * (0.4 * -0.041 + -0.4 * 0.041)).
    assert balance_loss(score_TE, ids_TK).item() == pytest.approx(10 * (1 - 0.0656))
    assert distance_loss(score_TE, ids_TK).item() == pytest.approx(10 * 2 * 2 * 0.4**2)


@given(seeds, st.floats(0.5, 2), st.integers(2, 8).flatmap(lambda E: st.tuples(
    st.just(E), st.integers(1, E - 1))))  # fmt: skip
@settings(max_examples=5)
def test_following_the_gradient_makes_loads_even(seed, skew, sizes) -> None:
    E, K = sizes
    logits_TE = randn(120, E, seed=seed, dtype=torch.float64)
    logits_TE = logits_TE + skew * randn(E, seed=seed + 1, dtype=torch.float64)

    def distance(logits_TE) -> float:
        return unevenness(*counted(logits_TE, K)).distance.item()

    before = distance(logits_TE)
    for _ in range(150):
        leaf = logits_TE.clone().requires_grad_()
        routing = route(leaf, K)
        (grad_TE,) = torch.autograd.grad(distance_loss(routing.score_TE, routing.expert_TK), leaf)
        logits_TE = logits_TE - 2 * grad_TE
    assert distance(logits_TE) <= 0.04 + 0.4 * before


def counted(logits_TE: torch.Tensor, K: int) -> tuple[torch.Tensor, torch.Tensor]:
    routing = route(logits_TE, K)
    return count_experts(routing.expert_TK, logits_TE.shape[1]), routing.score_TE.sum(dim=0)


@given(seeds)
def test_with_two_experts_every_token_is_pushed_from_the_busier_to_the_other(seed) -> None:
    logits_TE = (randn(9, 2, seed=seed, dtype=torch.float64)).requires_grad_()
    routing = route(logits_TE, 1)
    loss = distance_loss(routing.score_TE, routing.expert_TK)
    (grad_TE,) = torch.autograd.grad(loss, logits_TE, retain_graph=True)
    busier = int(count_experts(routing.expert_TK, 2).argmax())  # of 9 tokens never a tie
    assert (grad_TE[:, busier] > 0).all()
    assert (grad_TE[:, 1 - busier] < 0).all()
    usual = balance_loss(routing.score_TE, routing.expert_TK)
    (usual_TE,) = torch.autograd.grad(usual, logits_TE)
    if routing.expert_TK.unique().numel() == 2:
        torch.testing.assert_close(grad_TE, 2 * usual_TE)


def test_scores_that_no_choice_hangs_on_have_nearly_no_gradient() -> None:
    # Expert 0 is too busy. Token 3 has expert 0 as a distant third: the usual loss moves it, and
    # nothing changes; the distance loss moves those whose choice is close.
    logits_TE = torch.tensor(
        [[0.1, 0.0, -9.0]] * 3 + [[1.0, 9.0, 8.9]], dtype=torch.float64
    ).requires_grad_()
    routing = route(logits_TE, 1)
    assert routing.expert_TK.flatten().tolist() == [0, 0, 0, 1]
    (grad_TE,) = torch.autograd.grad(distance_loss(routing.score_TE, routing.expert_TK), logits_TE)
    assert abs(grad_TE[3, 0]) < 1e-2 * grad_TE[0, 0]
    assert grad_TE[0, 0] > 0 > grad_TE[3, 2]  # the expert with none is raised where it is close


@settings(max_examples=5)
@given(seeds, st.integers(1, 4))
def test_the_gradient_is_that_of_the_soft_counts(seed, K) -> None:
    E, T = 5, 6
    logits_TE = randn(T, E, seed=seed, dtype=torch.float64).requires_grad_()
    routing = route(logits_TE, K)
    loss = distance_loss(routing.score_TE, routing.expert_TK, tokens_per_sequence=3)
    (grad_TE,) = torch.autograd.grad(loss, logits_TE)
    weighted = torch.zeros((), dtype=torch.float64)
    for t in range(T):
        chosen = routing.expert_TK[t].tolist()
        count_E = count_experts(routing.expert_TK[t // 3 * 3 : t // 3 * 3 + 3], E)
        for e in range(E):
            others = [f for f in range(E) if (f in chosen) != (e in chosen)]
            if e in chosen:
                rival = max(logits_TE[t, f] for f in others)
            else:
                rival = min(logits_TE[t, f] for f in others)
            deviation = count_E[e].item() / (3 * K) - 1 / E
            weighted = weighted + 2 * E / K * deviation * (logits_TE[t, e] - rival).sigmoid()
    (want_TE,) = torch.autograd.grad(weighted, logits_TE)
    torch.testing.assert_close(grad_TE, want_TE)


@given(seeds, st.sampled_from([1, 2]))
def test_padding_changes_neither_value_nor_gradient(seed, K) -> None:
    real_TE = randn(6, 4, seed=seed, dtype=torch.float64)
    padded_TE = torch.cat([real_TE, randn(2, 4, seed=seed + 1).double()])
    padded_TE = torch.cat([padded_TE, torch.full((1, 4), torch.nan).double()])
    mask_T = torch.tensor([True] * 6 + [False] * 2 + [True])

    def run(logits_TE: torch.Tensor, mask_T: torch.Tensor | None):
        logits_TE = logits_TE.clone().requires_grad_()
        routing = route(logits_TE, K, mask_T=mask_T)
        loss = distance_loss(routing.score_TE, routing.expert_TK, mask_T=mask_T)
        return loss.detach(), torch.autograd.grad(loss, logits_TE)[0]

    want, want_TE = run(real_TE, None)
    got, got_TE = run(padded_TE, mask_T)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(got_TE[:6], want_TE)
    assert (got_TE[6:] == 0).all()


@pytest.mark.parametrize("loss", [balance_loss, distance_loss])
@given(st.integers(0, 12), seeds)
def test_with_a_load_from_elsewhere_tokens_can_be_divided_anyhow(loss, cut, seed) -> None:
    logits_TE = randn(12, 4, seed=seed, dtype=torch.float64).requires_grad_()
    load_E = randn(4, seed=seed + 1, dtype=torch.float64).softmax(dim=0)

    def part(logits_TE: torch.Tensor) -> torch.Tensor:
        routing = route(logits_TE, 2)
        return loss(routing.score_TE, routing.expert_TK, load_E=load_E)

    whole, parts = part(logits_TE), part(logits_TE[:cut]) + part(logits_TE[cut:])
    torch.testing.assert_close(parts, whole)
    torch.testing.assert_close(
        torch.autograd.grad(parts, logits_TE)[0], torch.autograd.grad(whole, logits_TE)[0]
    )


@pytest.mark.parametrize("loss", [balance_loss, distance_loss])
def test_an_even_load_from_elsewhere_pushes_nothing(loss) -> None:
    logits_TE = randn(12, 4, seed=0, dtype=torch.float64).requires_grad_()
    routing = route(logits_TE, 2)
    even_E = torch.full((4,), 0.25, dtype=torch.float64)
    value = loss(routing.score_TE, routing.expert_TK, load_E=even_E)
    assert value.item() == pytest.approx(12 if loss is balance_loss else 0, abs=1e-12)
    assert torch.autograd.grad(value, logits_TE)[0].abs().max() < 1e-15


def test_scores_that_underflow_have_a_finite_gradient() -> None:
    logits_TE = torch.tensor([[0.0, -200.0, -300.0, -400.0]] * 3, requires_grad=True)
    for K in (1, 2, 4):
        routing = route(logits_TE, K)
        loss = distance_loss(routing.score_TE, routing.expert_TK)
        (grad_TE,) = torch.autograd.grad(loss, logits_TE)
        assert grad_TE.isfinite().all()


@given(problems, seeds)
def test_unevenness_is_what_the_losses_say_of_the_whole_batch(case, seed) -> None:
    E, expert_TK = case
    T = len(expert_TK)
    score_TE = randn(T, E, seed=seed, dtype=torch.float64).softmax(dim=1)
    got = unevenness(count_experts(expert_TK, E), score_TE.sum(dim=0))
    if T == 0:
        assert [x.item() for x in got] == [0, 0, 0, 0]
        return
    assert got.distance.item() * T == pytest.approx(
        distance_loss(score_TE, expert_TK).item(), abs=1e-9
    )
    usual = balance_loss(score_TE, expert_TK).item()
    assert (1 + got.score.item()) * T == pytest.approx(usual, abs=1e-9)
    assert got.score.item() ** 2 <= got.distance.item() * got.spread.item() + 1e-12
    f = [expert_TK.flatten().tolist().count(e) / expert_TK.numel() for e in range(E)]
    entropy = -sum(x * math.log(x) for x in f if x)
    assert got.entropy_deficit.item() == pytest.approx(math.log(E) - entropy, abs=1e-12)


def test_errors_name_both_values_and_the_rule() -> None:
    with pytest.raises(ValueError, match="tokens_per_sequence must divide T: got 3 for T=4"):
        distance_loss(torch.ones(4, 2), torch.zeros(4, 1).long(), tokens_per_sequence=3)
    for loss in (balance_loss, distance_loss):
        with pytest.raises(ValueError, match=r"load_E has shape \(3,\), E is 2"):
            loss(torch.ones(4, 2), torch.zeros(4, 1).long(), load_E=torch.ones(3))
        with pytest.raises(TypeError, match=r"load_E must be float32 or float64, got torch\.int64"):
            loss(torch.ones(4, 2), torch.zeros(4, 1).long(), load_E=torch.ones(2).long())
    with pytest.raises(ValueError, match=r"count_E has shape \(2,\), share_E \(3,\)"):
        unevenness(torch.zeros(2).long(), torch.zeros(3))
