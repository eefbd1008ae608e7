"""Tiny models of transformers, imported, say here what they say there; and go back unchanged."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from moe_ckpt import import_hf, open_checkpoint
from moe_ckpt.hf import export_hf
from moe_dispatch import LocalDispatcher
from moe_train.config import ModelConfig, RoutingConfig
from moe_train.model import Transformer

SIZES = {
    "vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "attn_implementation": "eager",
    "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
OURS = ModelConfig(
    vocab_size=40, dim=32, num_layers=2, num_heads=4, num_kv_heads=2, num_experts=8, shared_dim=0
)


def olmoe():
    there = transformers.OlmoeConfig(
        **SIZES, intermediate_size=24, num_experts=8, num_experts_per_tok=3, rms_norm_eps=1e-5,
        norm_topk_prob=False,
    )  # fmt: skip
    model = replace(OURS, expert_dim=24, top_k=3, qk_norm="together", norm_eps=1e-5)
    return transformers.OlmoeForCausalLM(there), model, RoutingConfig(renormalize=False)


def qwen3():
    there = transformers.Qwen3MoeConfig(
        **SIZES, head_dim=16, intermediate_size=40, moe_intermediate_size=24, num_experts=8,
        num_experts_per_tok=2, norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[0],
        rope_theta=1e6, tie_word_embeddings=True,
    )  # fmt: skip
    model = replace(
        OURS, expert_dim=24, head_dim=16, rope_theta=there.rope_parameters["rope_theta"],
        tie_embeddings=True, num_dense_layers=1, dense_dim=40,
    )  # fmt: skip
    return transformers.Qwen3MoeForCausalLM(there), model, RoutingConfig()


def deepseek(q_rank: int | None = 20):
    there = transformers.DeepseekV3Config(
        **SIZES | {"num_key_value_heads": 4}, q_lora_rank=q_rank, kv_lora_rank=12,
        qk_nope_head_dim=10, qk_rope_head_dim=6, v_head_dim=14, intermediate_size=40,
        moe_intermediate_size=24, n_routed_experts=8, num_experts_per_tok=3, n_shared_experts=2,
        first_k_dense_replace=1, n_group=4, topk_group=2, routed_scaling_factor=2.5,
    )  # fmt: skip
    model = replace(
        OURS, attention="latent", head_dim=10, rope_head_dim=6, value_head_dim=14, kv_rank=12,
        q_rank=q_rank or 0, rope_pairs="neighbours", num_dense_layers=1, dense_dim=40,
        expert_dim=24, top_k=3, shared_dim=48, rope_theta=there.rope_parameters["rope_theta"],
    )  # fmt: skip
    routing = RoutingConfig(score="sigmoid", num_groups=4, top_groups=2, scale=2.5, bias=True)
    return transformers.DeepseekV3ForCausalLM(there), model, routing


FAMILIES = {
    "olmoe": olmoe,
    "qwen3": qwen3,
    "deepseek": deepseek,
    "deepseek without a query rank": lambda: deepseek(None),
}


def randomised(model: torch.nn.Module) -> torch.nn.Module:
    """Give every parameter and bias values that matter, norms too."""
    generator = torch.Generator().manual_seed(0)
    tensors = [*model.parameters(), *(b for n, b in model.named_buffers() if "correction" in n)]
    with torch.no_grad():
        for tensor in tensors:
            noise = torch.randn(tensor.shape, generator=generator)
            tensor.copy_(1 + 0.3 * noise if tensor.ndim == 1 else 0.2 * noise)
    return model.float().eval()


def loaded(path: Path, config: ModelConfig, routing: RoutingConfig):
    """Return a model with the weights of a checkpoint, and the bias of its routers."""
    reader = open_checkpoint(path)
    model = Transformer(
        config, routing, LocalDispatcher(config.num_experts), seed=0, dtype=torch.float32
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(reader.read(name, "master")))
    masters = {a.name for a in reader.manifest.tensors if a.kind == "master"}
    assert masters == {name for name, _ in model.named_parameters()}
    bias_LE = torch.zeros(len(config.moe_layers), config.num_experts)
    if routing.bias:
        for row, layer in zip(bias_LE, config.moe_layers, strict=True):
            row.copy_(torch.from_numpy(reader.read(f"layers.{layer}.moe.router_bias", "buffer")))
    return model, bias_LE


@pytest.mark.parametrize("family", FAMILIES)
def test_imported_models_have_the_logits_and_the_loss_that_they_have_there(
    family, tmp_path
) -> None:
    there, config, routing = FAMILIES[family]()
    there = randomised(there)
    there.save_pretrained(tmp_path / "there")
    path = import_hf(tmp_path / "there", tmp_path / "run")
    here, bias_LE = loaded(path, config, routing)
    tokens = torch.randint(40, (3, 21), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        want = there(tokens).logits
        got, stats = here(tokens, bias_LE)
    torch.testing.assert_close(got, want, rtol=2e-4, atol=2e-5)
    assert want.std() > 0.05
    assert len(stats) == len(config.moe_layers)
    export_hf(path, tmp_path / "back", dtype="float32")
    kept = json.loads((tmp_path / "back" / "config.json").read_text())
    assert kept["model_type"] == there.config.model_type
    again = type(there).from_pretrained(tmp_path / "back", attn_implementation="eager")
    with torch.no_grad():
        assert torch.equal(again.float()(tokens).logits, want)
