"""The formula of FLOPs is what torch counts of the model's own products, and no more."""

import pytest
import torch
from moe_dispatch import LocalDispatcher
from moe_train import experts
from moe_train.config import ModelConfig, RoutingConfig
from moe_train.data import Batch
from moe_train.flops import (
    attention_flops,
    forward_flops,
    train_flops_per_token,
    visible_pairs,
)
from moe_train.model import Transformer
from moe_train.sight import Sight
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

S = 24
BASE = {
    "vocab_size": 40, "dim": 16, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2,
    "num_experts": 4, "expert_dim": 12, "shared_dim": 20,
}  # fmt: skip
KINDS = {
    "grouped": {},
    "wide heads": {"head_dim": 10, "shared_gate": True},
    "window": {"window": 5, "full_every": 2},
    "tied": {"tie_embeddings": True, "shared_dim": 0},
    "dense first": {"num_dense_layers": 1, "dense_dim": 28},
    "latent attention": {"attention": "latent", "kv_rank": 6, "rope_head_dim": 2, "q_rank": 10},
    "latent values": {
        "attention": "latent", "kv_rank": 6, "rope_head_dim": 2, "value_head_dim": 3
    },
    "latent experts": {"latent_dim": 8, "top_k": 3},
    "no gate": {"activation": "relu2"},
}  # fmt: skip


def plain_experts(x_TD, gate_up, down, weight_TK, expert_TK, *, activation):
    """Compute experts one by one, with products that torch counts."""
    y_TD = torch.zeros_like(x_TD)
    for e in range(len(gate_up)):
        token, k = (expert_TK == e).nonzero(as_tuple=True)
        h = experts.ACTIVATIONS[activation](x_TD[token] @ gate_up[e].T)
        y_TD = y_TD.index_add(0, token, h @ down[e].T * weight_TK[token, k, None])
    return y_TD


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("train", [False, True])
def test_flops_are_those_that_torch_counts(kind, train, monkeypatch) -> None:
    monkeypatch.setattr(experts, "expert_mlp", plain_experts)
    config = ModelConfig(**BASE | KINDS[kind])
    model = Transformer(config, RoutingConfig(), LocalDispatcher(4), seed=0, dtype=torch.float32)
    torch.nn.init.normal_(model.head_weight)
    tokens = torch.randint(40, (3, S + 1), generator=torch.Generator().manual_seed(1))
    batch = Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    bias_LE = torch.zeros(len(config.moe_layers), 4)
    counter = FlopCounterMode(display=False)
    # torch computes, and so counts, all pairs of a row where tokens see only those before them.
    with counter, sdpa_kernel(SDPBackend.MATH), torch.set_grad_enabled(train):
        loss = model.sums(batch, bias_LE).cross_entropy
        if train:
            loss.backward()
    seen = sum(visible_pairs(S, config.window_of(i)) for i in range(config.num_layers))
    unseen = config.num_layers * S * S - seen
    per_token = train_flops_per_token(config, S) if train else forward_flops(config, S)
    surplus = (3 if train else 1) * attention_flops(config) * unseen
    assert counter.get_total_flops() == pytest.approx(3 * (S * per_token + surplus), rel=1e-12)


@pytest.mark.parametrize("window", [0, 1, 3, 24, 99])
def test_pairs_are_those_that_the_mask_shows(window) -> None:
    mask = Sight((1, S), torch.device("cpu")).mask(window)
    assert visible_pairs(S, window) == mask.sum()


def test_experts_that_rest_and_recomputation_count_nothing() -> None:
    few, many = (ModelConfig(**BASE | {"num_experts": n, "num_layers": 1}) for n in (4, 8))
    router = 2 * 4 * 16  # all that more experts cost
    assert forward_flops(many, S) - forward_flops(few, S) == router
