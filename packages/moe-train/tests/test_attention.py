"""Attention is the formula of its documentation: in windows, in documents, out of latents."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from moe_dispatch import LocalDispatcher
from moe_train.attention import make_attention
from moe_train.config import ModelConfig, RoutingConfig
from moe_train.data import Batch
from moe_train.model import Transformer
from moe_train.parts import run_steps
from moe_train.rotary import rotate, rotations
from moe_train.sight import Sight, attend, sight_of

CPU = torch.device("cpu")
LATENT = {"attention": "latent", "kv_rank": 6, "rope_head_dim": 4, "value_head_dim": 3}


def test_positions_of_a_bfloat16_model_have_the_angles_of_float32() -> None:
    wide = rotations(5000, 8, 10_000.0, torch.zeros(1))
    assert torch.equal(rotations(5000, 8, 10_000.0, torch.zeros(1, dtype=torch.bfloat16)), wide)
    # In bfloat16 the slowest of these pairs has one cosine for dozens of neighbouring positions.
    assert wide.unique(dim=0).shape[0] == 5000


def draw_documents(data, rows: int, length: int) -> torch.Tensor:
    steps = data.draw(st.lists(st.booleans(), min_size=rows * length, max_size=rows * length))
    steps_BS = torch.tensor(steps).view(rows, length).int()
    steps_BS[:, 0] = 0
    return steps_BS.cumsum(1).int()


@given(data=st.data(), window=st.sampled_from([0, 1, 2, 5, 7, 50]), packed=st.booleans())
def test_a_token_sees_its_document_back_to_the_edge_of_its_window(data, window, packed) -> None:
    B, S, H, C = 2, 7, 4, 6
    documents = draw_documents(data, B, S) if packed else None
    g = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    q, k, v = (torch.randn(B, h, S, C, generator=g, dtype=torch.float64) for h in (H, 2, 2))
    got = attend(q, k, v, Sight((B, S), CPU, documents), window)
    for b in range(B):
        for s in range(S):
            seen = [
                t for t in range(s + 1)
                if (documents is None or documents[b, t] == documents[b, s])
                and (not window or s - t < window)
            ]  # fmt: skip
            for h in range(H):
                p = torch.softmax(k[b, h // 2, seen] @ q[b, h, s] / math.sqrt(C), 0)
                torch.testing.assert_close(got[b, h, s], p @ v[b, h // 2, seen])


@given(data=st.data())
def test_starts_are_where_documents_begin_in_all_rows_end_to_end(data) -> None:
    documents = draw_documents(data, 3, 5)
    starts, last = [], None
    for at, pair in enumerate((b, int(d)) for b in range(3) for d in documents[b]):
        if pair != last:
            starts.append(at)
        last = pair
    sight = Sight((3, 5), CPU, documents, len(starts))
    assert sight.starts().tolist() == [*starts, 15]
    assert Sight((3, 5), CPU).starts().tolist() == [0, 5, 10, 15]


@pytest.mark.parametrize("kind", [{}, LATENT, {"window": 3, "full_every": 2}])
def test_packed_documents_are_what_they_are_apart(kind) -> None:
    config = ModelConfig(
        vocab_size=13, dim=16, num_layers=2, num_experts=4, expert_dim=6, shared_dim=0, **kind
    )
    model = Transformer(config, RoutingConfig(), LocalDispatcher(4), seed=1, dtype=torch.float64)
    tokens = torch.randint(13, (1, 12), generator=torch.Generator().manual_seed(0))
    bounds, bias_LE = [0, 5, 6, 12], torch.zeros(2, 4, dtype=torch.float64)
    document = torch.tensor([[0] * 5 + [1] + [2] * 6], dtype=torch.int32)
    batch = Batch(tokens, tokens, document_BS=document, documents_B=np.array([3]))
    with torch.no_grad():
        packed, _ = model.hidden(tokens, bias_LE, sight=sight_of(batch))
        mixed, _ = model.hidden(tokens, bias_LE)
        for start, stop in pairwise(bounds):
            apart, _ = model.hidden(tokens[:, start:stop], bias_LE)
            torch.testing.assert_close(packed[:, start:stop], apart, rtol=1e-9, atol=1e-9)
    assert (packed - mixed)[:, 5:].abs().max() > 1e-3


@pytest.mark.parametrize("q_rank", [0, 5])
def test_latent_attention_is_its_formula(q_rank) -> None:
    config = ModelConfig(dim=16, num_heads=2, head_dim=5, q_rank=q_rank, **LATENT)
    layer = make_attention("x", config, 0, torch.float64, 0)
    with torch.no_grad():
        for p in layer.parameters():
            p.mul_(torch.linspace(0.5, 1.5, p.shape[-1]))
    S, (H, C, R, V) = 6, (2, 5, 4, 3)
    x = torch.randn(1, S, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    rotation = rotations(S, R, config.rope_theta, x)
    with torch.no_grad():
        steps = layer.steps(lambda value: value, rotation, Sight((1, S), CPU))
        got = run_steps(steps, x, recomputed=False)[0]

    def normed(value, weight):
        return value / (value.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight

    x = x[0]
    q = normed(x @ layer.q_a.T, layer.q_a_norm) @ layer.q_b.T if q_rank else x @ layer.q.T
    latent, shared = (x @ layer.kv_a.T).split([6, R], 1)
    both = normed(latent, layer.kv_a_norm) @ layer.kv_b.T
    heads = []
    for h in range(H):
        plain, turned = q[:, h * (C + R) : (h + 1) * (C + R)].split([C, R], 1)
        key, value = both[:, h * (C + V) : (h + 1) * (C + V)].split([C, V], 1)
        scores = plain @ key.T + rotate(turned, rotation) @ rotate(shared, rotation).T
        future = torch.ones(S, S).triu(1).bool()
        p = (scores / math.sqrt(C + R)).masked_fill(future, -math.inf).softmax(1)
        heads.append(p @ value)
    want = torch.cat(heads, 1) @ layer.o.T
    torch.testing.assert_close(got, want.detach(), rtol=1e-9, atol=1e-10)


@pytest.mark.gpu
@pytest.mark.parametrize(("window", "packed"), [(0, True), (9, False), (9, True)])
@pytest.mark.parametrize("kv_heads", [1, 4])
def test_flash_attention_says_what_the_mask_says(window, packed, kv_heads) -> None:
    B, S, H, C = 2, 200, 4, 64
    documents = torch.arange(S, device="cuda").div(37, rounding_mode="floor").int().expand(B, S)
    documents = documents.contiguous() if packed else None
    q, k, v = (
        torch.randn(B, h, S, C, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for h in (H, kv_heads, kv_heads)
    )
    fast = Sight((B, S), q.device, documents, B * 6 if packed else None)
    got = attend(q, k, v, fast, window)
    wide = [x.detach().float().requires_grad_() for x in (q, k, v)]
    want = attend(*wide, Sight((B, S), q.device, documents), window)
    torch.testing.assert_close(got.float(), want, rtol=2e-2, atol=2e-2)
    dy = torch.randn_like(want)
    grads = torch.autograd.grad(got, (q, k, v), dy.bfloat16())
    for a, b in zip(grads, torch.autograd.grad(want, wide, dy), strict=True):
        torch.testing.assert_close(a.float(), b, rtol=5e-2, atol=5e-2)
