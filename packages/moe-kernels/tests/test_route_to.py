"""Routing to given experts is routing, but for the choice."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from moe_kernels import route, route_to
from moe_kernels.testing import randn, seeds


def outputs(routing) -> list[torch.Tensor]:
    return [routing.weight_TK, routing.expert_TK, routing.score_TE, routing.num_bad]


@given(
    st.sampled_from(["softmax", "sigmoid"]), st.booleans(), st.integers(1, 6), st.booleans(), seeds
)
def test_replaying_what_was_chosen_gives_every_bit_back(
    score, renormalize, K, padded, seed
) -> None:
    logits_TE = randn(7, 6, seed=seed)
    logits_TE[2, 1] = torch.nan
    mask_T = torch.arange(7) < 5 if padded else None
    options = {"score": score, "renormalize": renormalize, "scale": 2.5, "mask_T": mask_T}
    results = []
    for given_ids in (False, True):
        leaf = logits_TE.clone().requires_grad_()
        routing = route(leaf, K, **options)
        if given_ids:
            # What was recorded of the bad row is -1, so it does not count as bad again.
            routing = route_to(leaf, routing.expert_TK, **options)
        loss = (routing.weight_TK * randn(7, K, seed=seed + 1)).sum()
        loss = loss + (routing.score_TE * randn(7, 6, seed=seed + 2)).sum()
        results.append([*outputs(routing)[:3], *torch.autograd.grad(loss, leaf)])
    for want, got in zip(*results, strict=True):
        assert torch.equal(want, got)


@given(st.sampled_from(["softmax", "sigmoid"]), st.booleans(), seeds)
def test_weights_and_gradients_are_those_of_the_given_experts(score, renormalize, seed) -> None:
    ids_TK = torch.stack([torch.randperm(5)[:2] for _ in range(4)])
    logits_TE = randn(4, 5, seed=seed, dtype=torch.float64).requires_grad_()
    routing = route_to(logits_TE, ids_TK, score=score, renormalize=renormalize, scale=0.5)
    plain_TE = logits_TE.softmax(1) if score == "softmax" else logits_TE.sigmoid()
    want_TK = plain_TE.gather(1, ids_TK)
    want_TK = 0.5 * (want_TK / want_TK.sum(1, keepdim=True) if renormalize else want_TK)
    torch.testing.assert_close(routing.weight_TK, want_TK)
    assert torch.equal(routing.expert_TK, ids_TK.int())
    weights = randn(4, 2, seed=seed + 1, dtype=torch.float64)
    torch.testing.assert_close(
        torch.autograd.grad((routing.weight_TK * weights).sum(), logits_TE, retain_graph=True)[0],
        torch.autograd.grad((want_TK * weights).sum(), logits_TE)[0],
    )


def test_rows_that_cannot_be_routed_are_masked_and_only_bad_ones_counted() -> None:
    logits_TE = torch.zeros(5, 3)
    logits_TE[1, 0], logits_TE[2, 1] = torch.nan, -torch.inf
    ids_TK = torch.tensor([[0, 1], [1, 2], [0, 1], [2, -1], [0, 2]])
    mask_T = torch.tensor([True, True, True, True, False])
    routing = route_to(logits_TE, ids_TK, mask_T=mask_T)
    assert routing.expert_TK.tolist() == [[0, 1], [-1, -1], [-1, -1], [-1, -1], [-1, -1]]
    assert routing.num_bad.item() == 2  # the NaN, and the expert that must never be chosen
    assert (routing.weight_TK[1:] == 0).all()
    assert (routing.score_TE[1:] == 0).all()


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # opcheck reads it off its own views
def test_the_operator_passes_opcheck() -> None:
    logits_TE, ids_TK = randn(4, 5, seed=0).requires_grad_(), torch.tensor([[0, 1]] * 4)
    op = torch.ops.moe_kernels.route_to.default
    for score, renormalize in (("softmax", True), ("sigmoid", False)):
        torch.library.opcheck(op, (logits_TE, ids_TK, score, renormalize, 1.0, None))


def test_errors_name_both_values_and_the_rule() -> None:
    logits_TE = torch.zeros(2, 3)
    with pytest.raises(ValueError, match="logits_TE has 2 rows, expert_TK has 1"):
        route_to(logits_TE, torch.zeros(1, 1).long())
    with pytest.raises(ValueError, match=r"must hold -1 \(masked\) or 0..2, got 0..3"):
        route_to(logits_TE, torch.tensor([[0], [3]]))
    with pytest.raises(ValueError, match=r"K must be in 1..E: expert_TK has 4 columns, E is 3"):
        route_to(logits_TE, torch.zeros(2, 4).long())
    with pytest.raises(TypeError, match="expert_TK must be int32 or int64"):
        route_to(logits_TE, torch.zeros(2, 1))
