"""The model is the transformer that its documentation names, and routers keep their precision."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from moe_dispatch import LocalDispatcher
from moe_train.config import ModelConfig, RoutingConfig
from moe_train.data import IGNORED, Batch
from moe_train.initial import normal_experts
from moe_train.model import Transformer

SMALL = ModelConfig(
    vocab_size=11, dim=16, num_layers=2, num_heads=4, num_kv_heads=2, num_experts=5, top_k=2,
    expert_dim=6, shared_dim=7,
)  # fmt: skip
S = 9


def make(config: ModelConfig = SMALL, dtype=torch.float64, recompute="none", **routing):
    model = Transformer(
        config, RoutingConfig(**routing), LocalDispatcher(config.num_experts),
        seed=3, dtype=dtype, recompute=recompute,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        model.head_weight.copy_(torch.randn(model.head_weight.shape, generator=generator))
    return model


def make_batch(sequences: int = 3, seed: int = 0) -> Batch:
    tokens = torch.randint(11, (sequences, S + 1), generator=torch.Generator().manual_seed(seed))
    return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def bias_of(config: ModelConfig = SMALL, dtype=torch.float64) -> torch.Tensor:
    return torch.zeros(config.num_layers, config.num_experts, dtype=dtype)


def plain_norm(x, weight):
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def plain_rotate(x_SC):
    """Rotate each pair as a complex number, position by position."""
    half = x_SC.shape[1] // 2
    turned = torch.empty_like(x_SC)
    for s in range(x_SC.shape[0]):
        for i in range(half):
            z = complex(x_SC[s, i], x_SC[s, i + half])
            angle = s * 10_000.0 ** (-2 * i / x_SC.shape[1])
            z *= complex(math.cos(angle), math.sin(angle))
            turned[s, i], turned[s, i + half] = z.real, z.imag
    return turned


def plain_attention(layer, x_SD, config):
    head_dim, share = config.dim // config.num_heads, config.num_heads // config.num_kv_heads
    heads = []
    for h in range(config.num_heads):
        mine, kv = slice(h * head_dim, (h + 1) * head_dim), h // share
        shared = slice(kv * head_dim, (kv + 1) * head_dim)
        q = plain_rotate(plain_norm(x_SD @ layer.q[mine].T, layer.q_norm))
        k = plain_rotate(plain_norm(x_SD @ layer.k[shared].T, layer.k_norm))
        scores = q @ k.T / head_dim**0.5
        future = torch.ones_like(scores).triu(1).bool()
        heads.append(scores.masked_fill(future, -math.inf).softmax(-1) @ (x_SD @ layer.v[shared].T))
    return torch.cat(heads, 1) @ layer.o.T


def plain_swiglu(x_D, gate_up, down):
    gate, up = (gate_up @ x_D).chunk(2)
    return down @ (gate * torch.sigmoid(gate) * up)


def plain_moe(layer, x_SD, config):
    rows = []
    for x_D in x_SD:
        p_E = (layer.router @ x_D).softmax(0)
        chosen = sorted(range(config.num_experts), key=lambda e: -p_E[e])[: config.top_k]
        weights = p_E[chosen] / p_E[chosen].sum()
        y = plain_swiglu(x_D, layer.shared_gate_up, layer.shared_down)
        for w, e in zip(weights, chosen, strict=True):
            y = y + w * plain_swiglu(x_D, layer.gate_up[e], layer.down[e])
        rows.append(y)
    return torch.stack(rows)


def plain_logits(model, tokens_S, config):
    x = model.embedding[tokens_S]
    for block in model.layers.values():
        x = x + plain_attention(block.attention, plain_norm(x, block.attention_norm), config)
        x = x + plain_moe(block.moe, plain_norm(x, block.moe_norm), config)
    return plain_norm(x, model.norm) @ model.head.T


@torch.no_grad()
def test_logits_are_those_of_a_plain_transformer() -> None:
    model, batch = make(), make_batch()
    got, _ = model(batch.inputs_BS, bias_of())
    for b in range(len(batch.inputs_BS)):
        want = plain_logits(model, batch.inputs_BS[b], SMALL)
        torch.testing.assert_close(got[b], want, rtol=1e-9, atol=1e-9)


@given(seed=st.integers(0, 99), changed=st.integers(1, S - 1))
def test_a_token_never_sees_later_tokens(seed, changed) -> None:
    model, batch = make(), make_batch(seed=seed)
    other = batch.inputs_BS.clone()
    other[:, changed:] = (other[:, changed:] + 1) % 11
    with torch.no_grad():
        before, _ = model(batch.inputs_BS, bias_of())
        after, _ = model(other, bias_of())
    # Other later tokens change how many rows an expert has, and so the rounding of its products.
    torch.testing.assert_close(before[:, :changed], after[:, :changed], rtol=1e-11, atol=1e-11)
    assert (before[:, changed:] - after[:, changed:]).abs().max() > 1e-3


def test_training_starts_at_the_loss_of_guessing() -> None:
    model = Transformer(SMALL, RoutingConfig(), LocalDispatcher(5), seed=0, dtype=torch.float64)
    batch = make_batch()
    sums = model.sums(batch, bias_of())
    assert sums.cross_entropy.item() / batch.num_tokens == pytest.approx(math.log(11), rel=1e-12)


def test_initial_experts_do_not_depend_on_which_rank_holds_them() -> None:
    arguments = {"std": 0.5, "seed": 1, "dtype": torch.float64}
    whole = normal_experts("x", range(6), 3, 2, **arguments)
    assert torch.equal(whole[4:6], normal_experts("x", range(4, 6), 3, 2, **arguments))
    assert not torch.equal(whole[0], whole[1])
    assert not torch.equal(whole, normal_experts("y", range(6), 3, 2, **arguments))


def sums_and_gradients(model, batch):
    sums = model.sums(batch, bias_of(dtype=model.layers["0"].moe.router.dtype))
    (sums.cross_entropy + 0.1 * sums.balance + 0.01 * sums.z).backward()
    return sums, [p.grad for p in model.parameters()]


@pytest.mark.parametrize("how", ["selective", "block"])
def test_recomputing_changes_no_count_no_loss_and_no_gradient(how) -> None:
    batch = make_batch()
    kept, kept_gradients = sums_and_gradients(make(), batch)
    again, again_gradients = sums_and_gradients(make(recompute=how), batch)
    for a, b in zip([*kept, *kept_gradients], [*again, *again_gradients], strict=True):
        assert torch.equal(a, b)
    assert kept.count_LE.sum(1).tolist() == [2 * batch.num_tokens] * SMALL.num_layers


@given(pads=st.integers(1, 6), score=st.sampled_from(["softmax", "sigmoid"]))
def test_padding_changes_no_loss_no_count_and_no_gradient(pads, score) -> None:
    batch = make_batch()
    inputs = F.pad(batch.inputs_BS, (0, pads), value=7)
    targets = F.pad(batch.targets_BS, (0, pads), value=IGNORED)
    plain, plain_gradients = sums_and_gradients(make(score=score), batch)
    padded, gradients = sums_and_gradients(make(score=score), Batch(inputs, targets, padded=True))
    for a, b in zip([*plain, *plain_gradients], [*padded, *gradients], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_reported_cross_entropy_holds_no_auxiliary_loss() -> None:
    model, batch = make(), make_batch()
    logits, _ = model(batch.inputs_BS, bias_of())
    want = F.cross_entropy(logits.flatten(0, 1), batch.targets_BS.flatten(), reduction="sum")
    sums = model.sums(batch, bias_of())
    torch.testing.assert_close(sums.cross_entropy, want, rtol=1e-13, atol=0)
    assert sums.balance > 0


def test_balance_loss_of_an_even_load_is_one_a_token_and_layer() -> None:
    model, batch = make(replace(SMALL, top_k=5)), make_batch()
    sums = model.sums(batch, bias_of())
    assert sums.balance.item() == pytest.approx(2 * batch.num_tokens, rel=1e-12)


def test_routers_stay_in_float32_in_a_bfloat16_model() -> None:
    model = make(dtype=torch.bfloat16)
    wide = {n for n, p in model.named_parameters() if p.dtype == torch.float32}
    assert wide == {"layers.0.moe.router", "layers.1.moe.router"}
    batch = make_batch()
    sums, gradients = sums_and_gradients(model, batch)
    exact, _ = sums_and_gradients(make(), batch)
    assert sums.cross_entropy.dtype == torch.float32
    # bfloat16 keeps 8 bits; the sum over tokens and two blocks stays within a few of them.
    assert sums.cross_entropy.item() == pytest.approx(exact.cross_entropy.item(), rel=0.03)
    assert all(g.isfinite().all() for g in gradients)
