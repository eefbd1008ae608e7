import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_kernels import route
from moe_kernels.testing import randn, seeds

INF, NAN = torch.inf, torch.nan


def scores_of(logits_TE: torch.Tensor, score: str) -> torch.Tensor:
    wide = logits_TE.double()
    return wide.softmax(1) if score == "softmax" else wide.sigmoid()


def choose(key_E: list[float], top_k: int, num_groups: int, top_groups: int) -> list[int]:
    """Choose in plain Python: by key, then by id; first groups, then experts."""
    size = len(key_E) // num_groups
    groups = [range(g * size, (g + 1) * size) for g in range(num_groups)]
    value = [sum(sorted((key_E[e] for e in group), reverse=True)[:2]) for group in groups]
    best = sorted(range(num_groups), key=lambda g: (-value[g], g))[:top_groups]
    experts = [e for g in best for e in groups[g]]
    return sorted(experts, key=lambda e: (-key_E[e], e))[:top_k]


@st.composite
def problems(draw):
    num_groups = draw(st.sampled_from([1, 1, 2, 4]))
    size = draw(st.integers(1, 5))
    top_groups = draw(st.integers(1, num_groups))
    top_k = draw(st.integers(1, top_groups * size))
    return {
        "num_groups": num_groups,
        "top_groups": top_groups,
        "top_k": top_k,
        "E": num_groups * size,
        "T": draw(st.integers(0, 6)),
        "score": draw(st.sampled_from(["softmax", "sigmoid"])),
        "renormalize": draw(st.booleans()),
        "biased": draw(st.booleans()),
        "scale": draw(st.sampled_from([1.0, 2.5])),
        "seed": draw(seeds),
    }


@given(problems())
def test_choice_and_weights_are_those_of_plain_python(p) -> None:
    logits_TE = randn(p["T"], p["E"], seed=p["seed"], dtype=torch.float64)
    bias_E = randn(p["E"], seed=p["seed"] + 1, dtype=torch.float64) if p["biased"] else None
    score_TE = scores_of(logits_TE, p["score"])
    key_TE = score_TE if bias_E is None else score_TE + bias_E
    keys = ("score", "renormalize", "num_groups", "top_groups", "scale")
    got = route(logits_TE, p["top_k"], bias_E=bias_E, **{key: p[key] for key in keys})
    want = [choose(key, p["top_k"], p["num_groups"], p["top_groups"]) for key in key_TE.tolist()]
    ids_TK = torch.tensor(want, dtype=torch.int64).view(p["T"], p["top_k"])
    weight_TK = score_TE.gather(1, ids_TK)
    if p["renormalize"]:
        weight_TK = weight_TK / weight_TK.sum(1, keepdim=True)
    assert torch.equal(got.expert_TK, ids_TK.int())
    torch.testing.assert_close(got.weight_TK, weight_TK * p["scale"])
    torch.testing.assert_close(got.score_TE, score_TE)
    assert got.num_bad == 0


@pytest.mark.parametrize("top_k", [1, 2, 3, 8, 11, 16, 24])
def test_any_k_up_to_e_works_and_equal_experts_are_taken_in_order_of_their_ids(top_k) -> None:
    routing = route(torch.zeros(5, 24), top_k)
    assert torch.equal(routing.expert_TK, torch.arange(top_k, dtype=torch.int32).expand(5, -1))


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_scores_that_differ_in_the_12th_bit_keep_their_order(score) -> None:
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    logits_TE = (1.0 + order * 2.0**-12)[None]
    want = order.argsort(descending=True)[None].int()
    assert torch.equal(route(logits_TE, 64, score=score).expert_TK, want)


def test_saturated_scores_are_still_chosen_by_their_logits() -> None:
    logits_TE = torch.tensor([[200.0, 300.0, 100.0]])
    assert route(logits_TE, 2, score="sigmoid").expert_TK.tolist() == [[1, 0]]
    weight_TK = route(-logits_TE, 2, score="sigmoid", renormalize=True).weight_TK
    torch.testing.assert_close(weight_TK, torch.tensor([[1.0, 0.0]]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int64])
def test_logits_of_another_dtype_are_refused_with_the_rule(dtype) -> None:
    with pytest.raises(TypeError, match=f"logits_TE must be float32 or float64, got {dtype}"):
        route(torch.zeros(2, 4).to(dtype), 1)
    with pytest.raises(TypeError, match="bias_E must be float32 or float64"):
        route(torch.zeros(2, 4), 1, bias_E=torch.zeros(4).to(dtype))


BAD_ROWS = {
    "one NaN": ([NAN, 0, 0, 0], 1),
    "all NaN": ([NAN] * 4, 1),
    "+inf": ([INF, 0, 0, 0], 1),
    "all -inf": ([-INF] * 4, 1),
    "fewer than k": ([-INF, -INF, 1.0, -INF], 1),
    "one -inf": ([3.0, -INF, 1.0, 2.0], 0),
}


@pytest.mark.parametrize(("row", "bad"), BAD_ROWS.values(), ids=BAD_ROWS)
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_a_row_that_is_not_finite_is_masked_counted_and_alone(
    row, bad, score, renormalize, biased
) -> None:
    good_TE = randn(3, 4, seed=0)
    bias_E = torch.tensor([0.0, 5.0, 0.0, 0.0]) if biased else None
    options = {"score": score, "renormalize": renormalize, "bias_E": bias_E}
    logits_TE = torch.cat([good_TE[:2], torch.tensor([row]), good_TE[2:]]).requires_grad_()
    alone_TE = good_TE.clone().requires_grad_()
    routing, alone = route(logits_TE, 2, **options), route(alone_TE, 2, **options)
    (routing.weight_TK.square().sum() + routing.score_TE.square().sum()).backward()
    (alone.weight_TK.square().sum() + alone.score_TE.square().sum()).backward()
    assert logits_TE.grad is not None
    others = [0, 1, 3]
    assert routing.num_bad == bad
    assert torch.equal(routing.expert_TK[others], alone.expert_TK)
    assert torch.equal(routing.weight_TK[others], alone.weight_TK)
    assert torch.equal(logits_TE.grad[others], alone_TE.grad)
    assert logits_TE.grad.isfinite().all()
    assert routing.weight_TK.isfinite().all()
    if bad:
        assert routing.expert_TK[2].tolist() == [-1, -1]
        assert routing.weight_TK[2].tolist() == [0, 0]
        assert (routing.score_TE[2] == 0).all()
        assert (logits_TE.grad[2] == 0).all()
    else:
        assert 1 not in routing.expert_TK[2].tolist()


def test_a_group_with_one_usable_expert_comes_before_a_group_with_none() -> None:
    logits_TE = torch.tensor([[-INF, -INF, -INF, 1.0]])
    routing = route(logits_TE, 1, num_groups=2, top_groups=1)
    assert routing.expert_TK.tolist() == [[3]]
    assert routing.num_bad == 0


def test_padding_is_masked_and_never_counted_as_bad() -> None:
    logits_TE = torch.cat([randn(3, 4, seed=0), torch.full((2, 4), NAN)]).requires_grad_()
    mask_T = torch.tensor([True, False, True, False, True])
    routing = route(logits_TE, 2, mask_T=mask_T)
    routing.weight_TK.sum().backward()
    assert routing.num_bad == 1
    assert (routing.expert_TK[[1, 3, 4]] == -1).all()
    assert (routing.expert_TK[[0, 2]] >= 0).all()
    assert logits_TE.grad is not None
    assert (logits_TE.grad[[1, 3, 4]] == 0).all()


@settings(max_examples=6)
@given(st.sampled_from(["softmax", "sigmoid"]), st.booleans(), seeds)
def test_weights_are_differentiable_and_the_bias_moves_only_the_choice(
    score, renormalize, seed
) -> None:
    logits_TE = randn(4, 6, seed=seed, dtype=torch.float64).requires_grad_()
    bias_E = (10 * randn(6, seed=seed + 1, dtype=torch.float64)).requires_grad_()

    def weights(logits_TE: torch.Tensor) -> torch.Tensor:
        return route(logits_TE, 3, score=score, renormalize=renormalize, bias_E=bias_E).weight_TK

    assert torch.autograd.gradcheck(weights, (logits_TE,))
    score_TE = scores_of(logits_TE, score)
    ids_TK = (score_TE + bias_E).argsort(1, descending=True)[:, :3]
    want_TK = score_TE.gather(1, ids_TK)
    if renormalize:
        want_TK = want_TK / want_TK.sum(1, keepdim=True)
    torch.testing.assert_close(weights(logits_TE), want_TK)
    assert torch.autograd.grad(weights(logits_TE).sum(), bias_E, allow_unused=True) == (None,)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": 0}, r"top_k must be in 1..E: got top_k=0 for E=4"),
        ({"top_k": 5}, r"top_k must be in 1..E: got top_k=5 for E=4"),
        ({"score": "tanh"}, "'softmax' or 'sigmoid', got 'tanh'"),
        ({"num_groups": 3}, "got num_groups=3 for E=4"),
        ({"num_groups": 2, "top_groups": 3}, "got top_groups=3 for num_groups=2"),
        ({"num_groups": 4, "top_groups": 1}, "got top_k=2 for 1 groups of 1"),
        ({"bias_E": torch.zeros(3)}, r"bias_E has shape \(3,\), E is 4"),
        ({"mask_T": torch.ones(3).bool()}, r"mask_T has shape \(3,\), T is 2"),
        ({"mask_T": torch.ones(2).bool().to("meta")}, "mask_T is on meta, logits_TE on cpu"),
        ({"bias_E": torch.zeros(4, device="meta")}, "bias_E is on meta, logits_TE on cpu"),
    ],
)
def test_errors_name_both_values_and_the_rule(options, message) -> None:
    with pytest.raises(ValueError, match=message):
        route(torch.zeros(2, 4), **{"top_k": 2, **options})
