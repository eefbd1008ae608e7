"""Quantised weights are never those of other weights, as far as their owner can help it."""

import pytest
import torch
from moe_kernels import StaleWeightError, WeightCache, dequantize, expert_mlp, quantize_weight
from moe_kernels.testing import randn


def held(recipe: str) -> WeightCache:
    cache = WeightCache(recipe=recipe)
    cache.hold()
    return cache


def weight(seed: int = 0) -> torch.nn.Parameter:
    return torch.nn.Parameter(randn(2, 64, 32, seed=seed))


def is_of(cache: WeightCache, w: torch.Tensor) -> bool:
    have, want = cache.get(w)[0], quantize_weight(w, recipe=cache.recipe)
    pairs = zip((*have.rows, *have.columns), (*want.rows, *want.columns), strict=True)
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)


def step(w: torch.nn.Parameter, optimizer: type[torch.optim.Optimizer], **options) -> None:
    w.grad = torch.ones_like(w)
    optimizer([w], lr=0.5, **options).step()


def load(w: torch.nn.Parameter) -> None:
    torch.nn.ParameterList([w]).load_state_dict({"0": randn(2, 64, 32, seed=9)})


def reassign(w: torch.nn.Parameter) -> None:
    w.data = randn(2, 64, 32, seed=9)


def write_a_view(w: torch.nn.Parameter) -> None:
    with torch.no_grad():
        w.view(-1)[7] = 100.0


SEEN = {
    "sgd": lambda w: step(w, torch.optim.SGD),
    "adamw": lambda w: step(w, torch.optim.AdamW, foreach=False),
    "foreach": lambda w: step(w, torch.optim.AdamW, foreach=True),
    "load_state_dict": load,
    "another tensor under .data": reassign,
    "a view": write_a_view,
}


@pytest.mark.parametrize("change", list(SEEN.values()), ids=list(SEEN))
def test_changes_that_torch_records_are_quantised_anew(change) -> None:
    cache, w = held("mx128"), weight()
    first = cache.get(w)
    assert cache.get(w) is first
    change(w)
    assert is_of(cache, w)
    assert not torch.equal(dequantize(cache.get(w)[0].rows), dequantize(first[0].rows))


def through_data(w: torch.nn.Parameter) -> None:
    w.data.mul_(2)


def flat_bucket(w: torch.nn.Parameter) -> None:
    w.data.untyped_storage().copy_((w.data * 2).untyped_storage())


UNSEEN = {
    "fused": lambda w: step(w, torch.optim.AdamW, fused=True),
    ".data": through_data,
    "storage": flat_bucket,
}


@pytest.mark.parametrize("change", list(UNSEEN.values()), ids=list(UNSEEN))
def test_changes_that_torch_does_not_record_reach_who_promised_nothing(change) -> None:
    cache, w = WeightCache(recipe="mx32"), weight()
    cache.get(w)
    change(w)
    assert is_of(cache, w)
    cache.verify(w)


@pytest.mark.parametrize("change", list(UNSEEN.values()), ids=list(UNSEEN))
def test_a_broken_promise_is_found_by_verify_and_kept_by_invalidate(change) -> None:
    cache, w = held("mx32"), weight()
    cache.get(w)
    cache.verify(w)
    change(w)
    with pytest.raises(StaleWeightError, match=r"weight 0 of 1, shape \(2, 64, 32\), has changed"):
        cache.verify(w)
    cache.invalidate()
    assert is_of(cache, w)
    cache.verify(w)


@pytest.mark.parametrize("fused", [False, True])
def test_a_watched_optimizer_leaves_nothing_stale(fused) -> None:
    cache, w = WeightCache(recipe="mxrow"), weight()
    optimizer = torch.optim.AdamW([w], lr=0.5, fused=fused)
    cache.watch(optimizer)
    first = cache.get(w)
    assert cache.get(w) is first
    w.grad = torch.ones_like(w)
    optimizer.step()
    assert is_of(cache, w)
    assert cache.get(w) is not first


def test_other_weights_of_the_same_shape_are_not_mistaken() -> None:
    cache, first, second = held("mx32"), weight(0), weight(1)
    cache.get(first)
    assert is_of(cache, second)
    # A freed weight's memory may come back: the cache holds on to what it was made from.
    where = {first.data_ptr()}
    cache.get(first)
    del first
    assert all(weight(seed).data_ptr() not in where for seed in range(20))


def test_tensors_that_count_no_versions_are_never_reused() -> None:
    cache = held("mx32")
    with torch.inference_mode():
        w = torch.ones(32, 32)
        cache.get(w)
        w.mul_(3)
        assert is_of(cache, w)


def test_a_backward_that_runs_late_keeps_the_weights_of_its_forward() -> None:
    E, D, F = 2, 32, 32
    w_gate_up, w_down = randn(E, 2 * F, D, seed=0), randn(E, D, F, seed=1)
    x_TD = randn(6, D, seed=2).requires_grad_()
    routed = torch.ones(6, 1), torch.tensor([[0], [1]] * 3).int()
    cache = held("mx32")

    def forward():
        quantized = cache.get(w_gate_up, w_down)
        return expert_mlp(x_TD, w_gate_up, w_down, *routed, recipe="mx32", quantized=quantized)

    (want,) = torch.autograd.grad(forward().sum(), x_TD)
    late = forward().sum()
    w_gate_up.mul_(2)
    assert not torch.equal(forward().sum(), late)
    (got,) = torch.autograd.grad(late, x_TD)
    assert torch.equal(got, want)


def test_an_unknown_recipe_is_refused_when_the_cache_is_made() -> None:
    with pytest.raises(ValueError, match="mx64"):
        WeightCache(recipe="mx64")
