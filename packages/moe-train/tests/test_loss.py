"""The loss in pieces is the loss, and the logits of all tokens never exist."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from moe_parallel import AdamWConfig, Mesh, ParamSpec, ShardedAdamW, plan_mesh
from moe_train.data import IGNORED
from moe_train.loss import cross_entropy_sum
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

D, V = 6, 11


def problem(tokens: int, seed: int, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    h = torch.randn(tokens, D, generator=g).to(dtype).requires_grad_()
    w = torch.randn(V, D, generator=g).to(dtype).requires_grad_()
    targets = torch.randint(V, (tokens,), generator=g)
    targets[torch.rand(tokens, generator=g) < 0.3] = IGNORED
    return h, w, targets


def plain(h, w, targets):
    wide = torch.promote_types(h.dtype, torch.float32)
    logits = F.linear(h, w).to(wide)
    return F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")


@given(tokens=st.integers(0, 9), chunk=st.integers(1, 5), seed=st.integers(0, 99))
def test_any_chunk_gives_the_loss_and_the_gradients_of_the_plain_one(tokens, chunk, seed) -> None:
    h, w, targets = problem(tokens, seed)
    got = cross_entropy_sum(h, w, targets, chunk_elements=chunk * V)
    want = plain(h, w, targets)
    torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-13)
    grads = torch.autograd.grad(got * 0.3, (h, w)), torch.autograd.grad(want * 0.3, (h, w))
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("trained", [(True, False), (False, True), (False, False)])
def test_frozen_heads_and_frozen_bodies_get_no_gradient_and_cost_the_other_none(trained) -> None:
    h, w, targets = problem(7, 3)
    wants = [torch.autograd.grad(plain(h, w, targets), x)[0] for x in (h, w)]
    leaves = [x.detach().requires_grad_(t) for x, t in zip((h, w), trained, strict=True)]
    loss = cross_entropy_sum(*leaves, targets, chunk_elements=2 * V)
    assert loss.requires_grad == any(trained)
    if any(trained):
        loss.backward()
    for leaf, want, train in zip(leaves, wants, trained, strict=True):
        assert (leaf.grad is None) != train
        if train:
            torch.testing.assert_close(leaf.grad, want)


def test_the_gradient_of_a_bfloat16_head_is_summed_in_float32() -> None:
    """Added to a bfloat16 sum, small terms after a large one would be lost."""
    tokens = 600
    h = torch.ones(tokens, D, dtype=torch.bfloat16)
    w = torch.zeros(V, D, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.zeros(tokens, dtype=torch.int64)
    cross_entropy_sum(h, w, targets, chunk_elements=V).backward()
    share = torch.tensor(1 / V, dtype=torch.bfloat16).item()  # of each word, rounded once
    want = torch.full((D,), tokens * share).bfloat16()
    assert torch.equal(w.grad[1], want)


def test_the_scale_of_a_bfloat16_gradient_is_not_rounded() -> None:
    h, w, targets = problem(40, 5, torch.bfloat16)
    exact_h, exact_w = (x.detach().double().requires_grad_() for x in (h, w))
    scale = 1 / 1003
    (cross_entropy_sum(h, w, targets) * scale).backward()
    (plain(exact_h, exact_w, targets) * scale).backward()
    ratio = (h.grad.double() * exact_h.grad).sum() / exact_h.grad.square().sum()
    assert ratio.item() == pytest.approx(1, abs=1e-3)  # 1/1003 in bfloat16 is off by 2e-3


class Largest(TorchDispatchMode):
    """Remembers the elements of the largest tensor that any operation returned."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        found = [
            x.untyped_storage().nbytes() for x in tree_leaves(out) if isinstance(x, torch.Tensor)
        ]
        self.elements = max(self.elements, *found, 0)
        return out


def test_no_tensor_is_larger_than_a_chunk_of_logits_or_the_head() -> None:
    tokens, words, chunk = 64, 50, 8
    h = torch.randn(tokens, D, requires_grad=True)
    w = torch.randn(words, D, requires_grad=True)
    targets = torch.randint(words, (tokens,))
    with Largest() as largest:
        cross_entropy_sum(h, w, targets, chunk_elements=chunk * words).backward()
    assert largest.elements == 4 * max(chunk * words, words * D, tokens * D)
    with Largest() as whole:
        plain(h, w, targets).backward()
    assert whole.elements == 4 * tokens * words


def test_a_sink_gets_the_gradient_unrounded_and_adds_up() -> None:
    h, w, targets = problem(9, 2, torch.bfloat16)
    head = torch.nn.Parameter(w.detach().clone())
    spec = ParamSpec("head", head, is_expert=False, weight_decay=False)
    mesh = Mesh.create(plan_mesh(1))
    optimizer = ShardedAdamW([spec], mesh, AdamWConfig(lr=0.1), num_experts=1)
    optimizer.attach_sinks()
    taken = []
    original = head.dw_sink
    head.dw_sink = lambda run: (taken.append(run), original(run))
    for _ in range(2):
        cross_entropy_sum(h, head, targets, chunk_elements=3 * V).backward()
    assert head.grad is None
    out = torch.ones(V, D)
    taken[0](out, True)
    taken[1](out, True)
    wide = torch.zeros(V, D)
    taken[0](wide, False)
    torch.testing.assert_close(out, 1 + 2 * wide)
    want = torch.autograd.grad(plain(h.float(), w.float(), targets), w)[0]
    torch.testing.assert_close(wide, want.float(), rtol=0.05, atol=0.05)
