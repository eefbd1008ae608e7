"""Presets are the published sizes, and arithmetic finds as many parameters as a model has."""

import pytest
import torch
from moe_dispatch import LocalDispatcher
from moe_train.config import ModelConfig, RoutingConfig, RunConfig
from moe_train.load_config import from_dict, preset_names, read_preset_tree
from moe_train.model import Transformer
from moe_train.parameters import param_specs
from moe_train.sizes import count_parameters

PUBLISHED = [  # billions: total, active, as their authors print them
    ("olmoe-1b-7b", 6.92, 1.28),
    ("qwen3-30b-a3b", 30.5, 3.35),  # 3.3 in print, where 3.353 is cut and not rounded
    ("deepseek-v3", 671, 37.5),  # 37 in print, likewise
    ("3b-active-8", 4.6, 3.2),
    ("3b-active-128", 47.0, 3.2),
    ("1.2t-a58b", 1200, 58.36),
]
KINDS = {
    "tied": {"tie_embeddings": True},
    "latent experts": {"latent_dim": 32, "activation": "relu2", "shared_gate": True},
    "dense first": {"num_dense_layers": 1, "dense_dim": 48, "shared_dim": 0},
    "latent attention": {"attention": "latent", "kv_rank": 24, "rope_head_dim": 8},
    "latent queries": {
        "attention": "latent", "kv_rank": 24, "rope_head_dim": 8, "q_rank": 12,
        "value_head_dim": 20,
    },
    "wide heads": {"head_dim": 48, "qk_norm": "together"},
    "no norm": {"qk_norm": "none"},
}  # fmt: skip


def on_meta(run: RunConfig) -> Transformer:
    with torch.device("meta"):
        dispatcher = LocalDispatcher(run.model.num_experts)
        return Transformer(run.model, run.routing, dispatcher, seed=0, dtype=torch.bfloat16)


def check_count(run: RunConfig) -> None:
    sizes = {name: p.numel() for name, p in on_meta(run).named_parameters()}
    resting = 1 - run.model.top_k / run.model.num_experts
    resting *= sum(n for name, n in sizes.items() if name.endswith((".moe.gate_up", ".moe.down")))
    found = count_parameters(run.model)
    assert found == (sum(sizes.values()), sum(sizes.values()) - resting)


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_has_as_many_parameters_as_arithmetic_says(name) -> None:
    check_count(from_dict(RunConfig, read_preset_tree(name)))


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_of_model_has_as_many_parameters_as_arithmetic_says(kind) -> None:
    check_count(RunConfig(model=ModelConfig(**KINDS[kind])))


@pytest.mark.parametrize(("name", "total", "active"), PUBLISHED)
def test_presets_have_the_published_sizes(name, total, active) -> None:
    found = count_parameters(from_dict(RunConfig, read_preset_tree(name)).model)
    assert found.total / 1e9 == pytest.approx(total, rel=0.01)
    assert found.active / 1e9 == pytest.approx(active, rel=0.01)


def test_the_smaller_family_keeps_half_a_billion_active() -> None:
    for experts in (8, 32, 64):
        found = count_parameters(
            from_dict(RunConfig, read_preset_tree(f"500m-active-{experts}")).model
        )
        assert found.active / 1e9 == pytest.approx(0.5, rel=0.01)
        assert found.total < 4.5e9


def test_tiny_is_the_default_shape() -> None:
    assert from_dict(RunConfig, read_preset_tree("tiny")) == RunConfig()


@pytest.mark.parametrize("kind", KINDS)
def test_of_every_kind_matrices_decay_but_routers_and_vectors_do_not(kind) -> None:
    model = on_meta(RunConfig(model=ModelConfig(**KINDS[kind])))
    for spec in param_specs(model):
        last = spec.name.rpartition(".")[2]
        assert spec.weight_decay == (spec.parameter.ndim > 1 and last != "router"), spec.name
        assert spec.is_expert == spec.name.endswith((".moe.gate_up", ".moe.down")), spec.name
        assert spec.is_expert == (spec.parameter.ndim == 3), spec.name


def test_weights_of_a_layer_depend_on_their_names_alone() -> None:
    whole = ModelConfig(num_layers=3, latent_dim=16, num_dense_layers=1, dense_dim=8)
    model = Transformer(whole, RoutingConfig(), LocalDispatcher(8), seed=1, dtype=torch.float32)
    values = {name: p for name, p in model.named_parameters() if p.ndim > 1 and p.any()}
    matrices = list(values.values())
    for i, one in enumerate(matrices):  # two with one generator would begin alike
        for other in matrices[:i]:
            a, b = one.flatten()[:4], other.flatten()[:4]
            assert not torch.allclose(a / a[0], b / b[0])


@pytest.mark.parametrize("width", [32, 128])
def test_tied_training_starts_near_the_loss_of_guessing(width) -> None:
    config = ModelConfig(dim=width, tie_embeddings=True)
    model = Transformer(config, RoutingConfig(), LocalDispatcher(8), seed=0, dtype=torch.float32)
    tokens = torch.randint(256, (4, 65), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits, _ = model(tokens[:, :-1], torch.zeros(3, 8))
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    assert loss.item() == pytest.approx(5.545, abs=0.25)
