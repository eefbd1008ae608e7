"""What a family of Hugging Face can say comes back as it was; what it cannot say is refused."""

import json
from dataclasses import replace

import pytest
from moe_train.cli import command
from moe_train.config import ModelConfig, RoutingConfig, RunConfig
from moe_train.errors import RunError
from moe_train.hf_config import from_hf, to_hf
from moe_train.load_config import from_dict
from runs import refused, run

PLAIN = ModelConfig(shared_dim=0)
LATENT = ModelConfig(
    attention="latent", q_rank=24, kv_rank=16, head_dim=16, rope_head_dim=8, value_head_dim=24,
    rope_pairs="neighbours", num_dense_layers=1, dense_dim=48, shared_dim=256, num_kv_heads=2,
)  # fmt: skip
MODELS = {
    "qwen3_moe": (replace(PLAIN, num_dense_layers=1, dense_dim=64, head_dim=64), RoutingConfig()),
    "olmoe": (replace(PLAIN, qk_norm="together"), RoutingConfig(renormalize=False)),
    "mixtral": (replace(PLAIN, qk_norm="none", tie_embeddings=True), RoutingConfig()),
    "deepseek_v3": (
        LATENT, RoutingConfig(score="sigmoid", bias=True, num_groups=4, top_groups=2, scale=2.5)
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", MODELS)
def test_a_model_comes_back_as_it_was(family) -> None:
    model, routing = MODELS[family]
    hf = json.loads(json.dumps(to_hf(RunConfig(model=model, routing=routing))))
    assert hf["model_type"] == family
    again = from_dict(RunConfig, from_hf(hf))
    assert again.routing == routing
    # Latent attention has as many key heads as query heads and does not read the number.
    assert again.model == replace(model, num_kv_heads=again.model.num_kv_heads)
    if family != "deepseek_v3":
        assert again.model.num_kv_heads == model.num_kv_heads


@pytest.mark.parametrize(
    ("model", "routing", "named"),
    [
        ({"shared_dim": 128}, {}, "model.shared_dim=128"),
        ({"window": 8}, {}, "model.window=8"),
        ({"latent_dim": 8}, {}, "model.latent_dim=8"),
        ({"activation": "relu2"}, {}, "model.activation=relu2"),
        ({"rope_pairs": "neighbours"}, {}, "model.rope_pairs=neighbours"),
        ({}, {"score": "sigmoid"}, "routing.score=sigmoid"),
        ({}, {"bias": True}, "routing.bias=True"),
        ({}, {"scale": 2.0}, "routing.scale=2.0"),
        ({}, {"num_groups": 2, "top_groups": 1}, "routing.num_groups=2"),
        ({"qk_norm": "none"}, {"renormalize": False}, "routing.renormalize=False"),
        ({"qk_norm": "together", "head_dim": 64}, {}, "model.head_dim=64"),
        (
            {"qk_norm": "none", "num_dense_layers": 1, "dense_dim": 8}, {},
            "model.num_dense_layers=1",
        ),
    ],
)  # fmt: skip
def test_what_no_family_has_is_refused_by_name(model, routing, named) -> None:
    config = RunConfig(model=replace(PLAIN, **model), routing=RoutingConfig(**routing))
    with pytest.raises(RunError, match=named):
        to_hf(config)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"score": "softmax"}, "routing.score=softmax"),
        ({"shared_dim": 0}, "model.shared_dim=0"),
        ({"shared_dim": 100}, "model.shared_dim=100"),
    ],
)
def test_latent_attention_needs_what_its_family_has(changes, named) -> None:
    model, routing = MODELS["deepseek_v3"]
    for section in ("score",):
        if section in changes:
            routing = replace(routing, score=changes["score"])
    if "shared_dim" in changes:
        model = replace(model, shared_dim=changes["shared_dim"])
    with pytest.raises(RunError, match=named):
        to_hf(RunConfig(model=model, routing=routing))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "llama"}, "model_type 'llama'"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "attention_bias"),
        ({"rope_scaling": {"type": "yarn"}, "rope_parameters": None}, "rope_type"),
        ({"clip_qkv": 8.0}, "clip_qkv"),
        ({"sliding_window": 64}, "sliding_window"),
        ({"mlp_only_layers": [1]}, "mlp_only_layers"),
        ({"hidden_size": None}, "hidden_size"),
    ],
)
def test_what_the_trainer_has_not_is_refused_by_name(changes, named) -> None:
    model, routing = MODELS["qwen3_moe"]
    hf = to_hf(RunConfig(model=model, routing=routing)) | changes
    hf = {name: value for name, value in hf.items() if value is not None}
    with pytest.raises(RunError, match=named):
        from_hf(hf)


@pytest.mark.usefixtures("alone")
def test_commands_refuse_before_any_work(tmp_path, text_folder, capsys) -> None:
    run(tmp_path / "a", text_folder)
    capsys.readouterr()
    code = command(["export", str(tmp_path / "a"), str(tmp_path / "out")])
    refused(capsys, code, "model.shared_dim=8 has no place")
    assert not (tmp_path / "out").exists()
    refused(capsys, command(["import", str(tmp_path)]), "is no model")
    (tmp_path / "config.json").write_text("{")
    refused(capsys, command(["import", str(tmp_path)]), "is not JSON")
    model, routing = MODELS["olmoe"]
    hf = to_hf(RunConfig(model=model, routing=routing))
    (tmp_path / "config.json").write_text(json.dumps(hf))
    words = ["import", str(tmp_path), "--run-dir", str(tmp_path / "b"), "--data.path"]
    words.append(str(text_folder))
    refused(capsys, command([*words, "--model.dim", "64"]), "model.dim is of the imported model")
    refused(capsys, command([*words, "--routing.top-groups", "1"]), "top_groups is of the imported")
    refused(capsys, command(words), "model.safetensors")
    assert not (tmp_path / "b" / "checkpoints").exists()
    refused(capsys, command([*words, "--run-dir", str(tmp_path / "a")]), "is of another model")
