"""A checkpoint that was imported computes what transformers computes, and what is exported too."""

import json
import math

import pytest
import torch
import torch.nn.functional as F
from moe_ckpt import export_hf, import_hf, open_checkpoint

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")

COMMON = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 64, "max_position_embeddings": 64, "initializer_range": 0.2,
    "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
# Square experts: F == D.
CONFIGS = {
    "olmoe": {"intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {
        "intermediate_size": 32, "moe_intermediate_size": 32, "num_experts": 4, "head_dim": 16,
        "num_experts_per_tok": 2, "mlp_only_layers": [0], "norm_topk_prob": True,
    },
    "mixtral": {"intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": {
        "intermediate_size": 32, "moe_intermediate_size": 32, "n_routed_experts": 8,
        "n_shared_experts": 2, "num_experts_per_tok": 3, "first_k_dense_replace": 1, "n_group": 4,
        "topk_group": 2, "q_lora_rank": 12, "kv_lora_rank": 8, "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4, "num_hidden_layers": 3,
    },
}  # fmt: skip


def tiny(family: str) -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **{**COMMON, **CONFIGS[family]})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "norm" in name:
                tensor.copy_(torch.rand_like(tensor) + 0.5)
            if "bias" in name:
                tensor.copy_(torch.rand_like(tensor) * 0.3)
    return model.eval()


def logits_of(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(ids).logits


def norm(x, weight, config):
    return F.rms_norm(x, weight.shape, weight, config["rms_norm_eps"])


def turn(x_BHSC, config, paired=False):
    """Rotate pairs of channels: neighbours if ``paired``, else one of each half."""
    C, S = x_BHSC.shape[-1], x_BHSC.shape[-2]
    theta = config["rope_parameters"]["rope_theta"]
    angle = torch.arange(S)[:, None] * theta ** -(torch.arange(0, C, 2) / C)
    pairs = x_BHSC.unflatten(-1, (-1, 2)) if paired else x_BHSC.unflatten(-1, (2, -1)).mT
    a, b = pairs.unbind(-1)
    turned = torch.stack([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)
    return turned.flatten(-2) if paired else turned.mT.flatten(-2)


def heads(x, count):
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


def attention(x, w, config):
    H, K = config["num_attention_heads"], config["num_key_value_heads"]
    q, k, v = x @ w["q"].T, x @ w["k"].T, heads(x @ w["v"].T, K)
    if "q_norm" in w and w["q_norm"].numel() == q.shape[-1]:
        q, k = norm(q, w["q_norm"], config), norm(k, w["k_norm"], config)
    q, k = heads(q, H), heads(k, K)
    if "q_norm" in w and w["q_norm"].numel() == q.shape[-1]:
        q, k = norm(q, w["q_norm"], config), norm(k, w["k_norm"], config)
    q, k = turn(q, config), turn(k, config)
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return y.transpose(1, 2).flatten(2) @ w["o"].T


def latent_attention(x, w, config):
    H, plain, rope = (
        config[k] for k in ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim")
    )
    q = heads(norm(x @ w["q_a"].T, w["q_a_norm"], config) @ w["q_b"].T, H)
    latent, k_rope = (x @ w["kv_a"].T).split([config["kv_lora_rank"], rope], -1)
    kv = heads(norm(latent, w["kv_a_norm"], config) @ w["kv_b"].T, H)
    k, v = kv.split([plain, config["v_head_dim"]], -1)
    q, q_rope = q.split([plain, rope], -1)
    k_rope = turn(k_rope[:, None], config, paired=True).expand(-1, H, -1, -1)
    q = torch.cat([q, turn(q_rope, config, paired=True)], -1)
    y = F.scaled_dot_product_attention(q, torch.cat([k, k_rope], -1), v, is_causal=True)
    return y.transpose(1, 2).flatten(2) @ w["o"].T


def mlp(x, gate_up, down):
    gate, up = (x @ gate_up.T).chunk(2, -1)
    return (F.silu(gate) * up) @ down.T


def chosen(logits, w, config):
    """Return the weight of every expert for every token, zero where it was not chosen."""
    top = config["num_experts_per_tok"]
    if config["model_type"] != "deepseek_v3":
        score = logits.softmax(-1)
        weight, expert = score.topk(top)
        if config["model_type"] == "mixtral" or config.get("norm_topk_prob"):
            weight = weight / weight.sum(-1, keepdim=True)
        return torch.zeros_like(score).scatter(-1, expert, weight)
    score = logits.sigmoid()
    biased = score + w["router_bias"]
    groups = biased.unflatten(-1, (config["n_group"], -1))
    best = groups.topk(2).values.sum(-1).topk(config["topk_group"]).indices
    open_ = (
        torch.zeros(groups.shape[:-1]).scatter(-1, best, 1)[..., None].expand_as(groups).flatten(-2)
    )
    expert = biased.masked_fill(open_ == 0, 0.0).topk(top).indices
    weight = score.gather(-1, expert)
    weight = weight / weight.sum(-1, keepdim=True) * config["routed_scaling_factor"]
    return torch.zeros_like(score).scatter(-1, expert, weight)


def experts(x, w, config):
    weight = chosen(x @ w["router"].T, w, config)
    each = torch.stack([mlp(x, *pair) for pair in zip(w["gate_up"], w["down"], strict=True)], -2)
    y = (weight[..., None] * each).sum(-2)
    return y + mlp(x, w["shared_gate_up"], w["shared_down"]) if "shared_down" in w else y


def forward(weights, config, ids):
    """Compute the logits from the tensors of a checkpoint, under the names they have here."""

    def part(prefix):
        return {n.removeprefix(prefix): t for n, t in weights.items() if n.startswith(prefix)}

    attend = latent_attention if config["model_type"] == "deepseek_v3" else attention
    x = weights["embedding"][ids]
    for at in range(config["num_hidden_layers"]):
        layer = f"layers.{at}."
        normed = norm(x, weights[f"{layer}attention_norm"], config)
        x = x + attend(normed, part(f"{layer}attention."), config)
        normed = norm(x, weights[f"{layer}moe_norm"], config)
        if dense := part(f"{layer}mlp."):
            x = x + mlp(normed, dense["gate_up"], dense["down"])
        else:
            x = x + experts(normed, part(f"{layer}moe."), config)
    return norm(x, weights["norm"], config) @ weights["head"].T


def weights_of(path):
    reader = open_checkpoint(path)
    return {n: torch.from_numpy(reader.read(n, reader.kinds(n)[0])) for n in reader.names}


@pytest.fixture(scope="module", params=CONFIGS)
def case(request, tmp_path_factory):
    folder, model = tmp_path_factory.mktemp(request.param), tiny(request.param)
    model.save_pretrained(folder / "hf")
    ids = torch.randint(0, 64, (2, 17), generator=torch.Generator().manual_seed(1))
    path = import_hf(folder / "hf", folder / "run")
    return folder, path, ids, logits_of(model, ids)


def test_the_tensors_of_a_checkpoint_give_the_logits_of_transformers(case) -> None:
    folder, path, ids, want = case
    config = json.loads((folder / "hf" / "config.json").read_text())
    weights = weights_of(path)
    got = forward(weights, config, ids)
    assert want.std() > 0.3
    torch.testing.assert_close(got, want, rtol=2e-4, atol=2e-4)
    # The bound is far from what a wrong order would do.
    for change in (lambda t: torch.cat(t.chunk(2, -2)[::-1], -2), lambda t: t.flip(0)):
        swapped = {n: change(t) if "moe.gate_up" in n else t for n, t in weights.items()}
        assert (forward(swapped, config, ids) - want).abs().max() > 0.05
    turned = {n: t.mT if n.endswith("moe.down") else t for n, t in weights.items()}
    assert (forward(turned, config, ids) - want).abs().max() > 0.05


def test_transformers_loads_what_is_exported_and_gives_the_same_logits(case) -> None:
    folder, path, ids, want = case
    out = export_hf(path, folder / "out32", dtype="float32", file_bytes=30_000)
    assert len(list(out.glob("*.safetensors"))) > 2
    model = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    assert torch.equal(logits_of(model, ids), want)


def test_a_bfloat16_export_is_the_model_rounded_once(case) -> None:
    folder, path, ids, _ = case
    rounded = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "hf", dtype=torch.bfloat16
    ).eval()
    out = export_hf(path, folder / "out16")
    model = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16).eval()
    with torch.no_grad():  # some it keeps in float32, of what it finds in the file
        for parameter in rounded.parameters():
            parameter.copy_(parameter.bfloat16())
    for (name, got), want in zip(model.named_parameters(), rounded.parameters(), strict=True):
        assert torch.equal(got, want), name
    assert torch.equal(logits_of(model, ids), logits_of(rounded, ids))
    assert math.isfinite(float(logits_of(model, ids).sum()))
