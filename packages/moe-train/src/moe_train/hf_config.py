"""Between the settings of a run and the ``config.json`` of Hugging Face, where both can say it.

Four families have a layout: what a model has beside grouped attention and softmax routing decides
which, by its normalisation of queries and keys.

==============  ======================================================================
qwen3_moe       each head normalised by itself
olmoe           all heads of a token normalised together
mixtral         not normalised; the weights of a token's experts sum to one
deepseek_v3     latent attention, sigmoid scores, shared experts
==============  ======================================================================

What a family cannot say is refused with the setting and the reason, in either direction.
"""

from collections.abc import Mapping
from typing import Any

from moe_train.config import ModelConfig, RoutingConfig, RunConfig
from moe_train.errors import RunError

FAMILIES = ("qwen3_moe", "olmoe", "mixtral", "deepseek_v3")
_NORMS = {"head": "qwen3_moe", "together": "olmoe", "none": "mixtral"}


def to_hf(config: RunConfig) -> dict[str, Any]:
    """Return the ``config.json`` of a run's model.

    Raises:
        RunError: If no family has such a model. The message names the setting and the reason.
    """
    model, routing = config.model, config.routing
    _refuse_everywhere(model)
    common = {
        "vocab_size": model.vocab_size,
        "hidden_size": model.dim,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_experts_per_tok": model.top_k,
        "rms_norm_eps": model.norm_eps,
        "rope_theta": model.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta},
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": model.tie_embeddings,
        "max_position_embeddings": config.data.sequence_length,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if model.attention == "latent":
        return {**common, **_deepseek(model, routing)}
    return {**common, **_grouped(model, routing)}


def _refuse(setting: str, value: object, reason: str) -> RunError:
    return RunError(f"{setting}={value} has no place in a Hugging Face layout: {reason}")


def _refuse_everywhere(model: ModelConfig) -> None:
    """Refuse what no family has."""
    for name, plain, what in (
        ("latent_dim", 0, "no family has experts of a width of their own"),
        ("activation", "swiglu", "the experts of these families are SwiGLU"),
        ("shared_gate", False, "no family here has a gate before its shared expert"),
        ("window", 0, "windows of these families are not exported"),
    ):
        value = getattr(model, name)
        if value != plain:
            raise _refuse(f"model.{name}", value, what)


def _grouped(model: ModelConfig, routing: RoutingConfig) -> dict[str, Any]:
    family = _NORMS[model.qk_norm]
    if model.shared_dim:
        raise _refuse(
            "model.shared_dim", model.shared_dim,
            "families with grouped attention have no shared expert; train with 0",
        )  # fmt: skip
    if routing.score != "softmax":
        raise _refuse("routing.score", routing.score, f"the router of {family} is softmax")
    for name in ("num_groups", "scale"):
        if getattr(routing, name) != 1:
            raise _refuse(f"routing.{name}", getattr(routing, name), f"{family} has none")
    if routing.bias:
        raise _refuse("routing.bias", routing.bias, f"the router of {family} has no bias")
    if model.rope_pairs != "halves":
        raise _refuse("model.rope_pairs", model.rope_pairs, f"{family} rotates halves")
    found = {
        "model_type": family,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_width,
        "intermediate_size": model.expert_dim,
    }
    if family == "qwen3_moe":
        return {
            **found,
            "num_experts": model.num_experts,
            "moe_intermediate_size": model.expert_dim,
            "intermediate_size": model.dense_dim or model.expert_dim,
            "mlp_only_layers": list(range(model.num_dense_layers)),
            "decoder_sparse_step": 1,
            "norm_topk_prob": routing.renormalize,
        }
    if model.num_dense_layers:
        raise _refuse("model.num_dense_layers", model.num_dense_layers, f"{family} has none")
    if family == "olmoe":
        if model.head_width * model.num_heads != model.dim:
            raise _refuse("model.head_dim", model.head_dim, "heads of olmoe are dim / num_heads")
        del found["head_dim"]
        return {**found, "num_experts": model.num_experts, "norm_topk_prob": routing.renormalize}
    if not routing.renormalize:
        raise _refuse("routing.renormalize", False, "the weights of mixtral sum to one")
    return {**found, "num_local_experts": model.num_experts}


def _deepseek(model: ModelConfig, routing: RoutingConfig) -> dict[str, Any]:
    if routing.score != "sigmoid":
        raise _refuse("routing.score", routing.score, "the router of deepseek_v3 is sigmoid")
    if not model.shared_dim or model.shared_dim % model.expert_dim:
        raise _refuse(
            "model.shared_dim", model.shared_dim,
            f"shared experts of deepseek_v3 are one or more of expert_dim {model.expert_dim}",
        )  # fmt: skip
    return {
        "model_type": "deepseek_v3",
        "num_key_value_heads": model.num_heads,
        "q_lora_rank": model.q_rank or None,
        "kv_lora_rank": model.kv_rank,
        "qk_nope_head_dim": model.head_width,
        "qk_rope_head_dim": model.rope_head_dim,
        "v_head_dim": model.value_width,
        "rope_interleave": model.rope_pairs == "neighbours",
        "intermediate_size": model.dense_dim or model.expert_dim,
        "first_k_dense_replace": model.num_dense_layers,
        "moe_layer_freq": 1,
        "moe_intermediate_size": model.expert_dim,
        "n_routed_experts": model.num_experts,
        "n_shared_experts": model.shared_dim // model.expert_dim,
        "n_group": routing.num_groups,
        "topk_group": routing.top_groups,
        "routed_scaling_factor": routing.scale,
        "norm_topk_prob": routing.renormalize,
    }


def from_hf(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a model that a ``config.json`` describes, as nested plain values.

    Raises:
        RunError: If the trainer has no such model. The message names the setting and the reason.
    """
    family = hf.get("model_type")
    if family not in FAMILIES:
        raise RunError(f"model_type {family!r} is not known; there are {', '.join(FAMILIES)}")
    _check(hf, family)
    try:
        model, routing = _deepseek_model(hf) if family == "deepseek_v3" else _plain(hf, family)
        model |= {
            "vocab_size": hf["vocab_size"],
            "dim": hf["hidden_size"],
            "num_layers": hf["num_hidden_layers"],
            "num_heads": hf["num_attention_heads"],
            "top_k": hf["num_experts_per_tok"],
            "norm_eps": float(hf.get("rms_norm_eps", 1e-6)),
            "rope_theta": _theta(hf),
            "tie_embeddings": bool(hf.get("tie_word_embeddings", False)),
        }
    except KeyError as error:
        raise RunError(f"the config.json of a {family} model has no {error}") from error
    return {"model": model, "routing": routing}


def _theta(hf: Mapping[str, Any]) -> float:
    # transformers keeps it in one place or the other, depending on its version.
    found = (hf.get("rope_parameters") or {}).get("rope_theta", hf.get("rope_theta"))
    return 10_000.0 if found is None else float(found)


def _check(hf: Mapping[str, Any], family: str) -> None:
    """Refuse what a family can say and the trainer cannot do."""
    rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    for name, value, plain in (
        ("hidden_act", hf.get("hidden_act", "silu"), "silu"),
        ("attention_bias", bool(hf.get("attention_bias")), False),
        ("rope_type", kind, "default"),
        ("clip_qkv", hf.get("clip_qkv"), None),
        ("decoder_sparse_step", hf.get("decoder_sparse_step", 1), 1),
        ("moe_layer_freq", hf.get("moe_layer_freq", 1), 1),
        ("sliding_window", _window(hf), None),
    ):
        if value != plain:
            raise RunError(f"{name} of this {family} model is {value!r}; only {plain!r} is known")


def _window(hf: Mapping[str, Any]) -> int | None:
    return hf.get("sliding_window") if hf.get("use_sliding_window", True) else None


def _plain(hf: Mapping[str, Any], family: str) -> tuple[dict[str, Any], dict[str, Any]]:
    dense = list(hf.get("mlp_only_layers") or ())
    if dense != list(range(len(dense))):
        raise RunError(f"mlp_only_layers {dense}: only the first layers can be dense")
    qwen = family == "qwen3_moe"
    key = "num_experts" if "num_experts" in hf else "num_local_experts"
    heads, dim = hf["num_attention_heads"], hf["hidden_size"]
    head = hf.get("head_dim") or dim // heads
    model = {
        "num_kv_heads": hf.get("num_key_value_heads") or heads,
        "head_dim": 0 if head * heads == dim else head,
        "qk_norm": {name: norm for norm, name in _NORMS.items()}[family],
        "num_experts": hf[key],
        "expert_dim": hf["moe_intermediate_size" if qwen else "intermediate_size"],
        "shared_dim": 0,
        "num_dense_layers": len(dense),
        "dense_dim": hf["intermediate_size"] if dense else 0,
    }
    renormalize = family == "mixtral" or bool(hf.get("norm_topk_prob", False))
    return model, {"score": "softmax", "renormalize": renormalize, "bias": False}


def _deepseek_model(hf: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    dense = hf["first_k_dense_replace"]
    model = {
        "attention": "latent",
        "q_rank": hf.get("q_lora_rank") or 0,
        "kv_rank": hf["kv_lora_rank"],
        "head_dim": hf["qk_nope_head_dim"],
        "rope_head_dim": hf["qk_rope_head_dim"],
        "value_head_dim": hf["v_head_dim"],
        "rope_pairs": "neighbours" if hf.get("rope_interleave", True) else "halves",
        "num_experts": hf["n_routed_experts"],
        "expert_dim": hf["moe_intermediate_size"],
        "shared_dim": hf["moe_intermediate_size"] * (hf.get("n_shared_experts") or 0),
        "num_dense_layers": dense,
        "dense_dim": hf["intermediate_size"] if dense else 0,
    }
    renormalize = bool(hf.get("norm_topk_prob", True))
    return model, {
        "score": "sigmoid",
        "renormalize": renormalize,
        "bias": True,
        "num_groups": hf.get("n_group") or 1,
        "top_groups": hf.get("topk_group") or 1,
        "scale": float(hf.get("routed_scaling_factor", 1.0)),
    }
