"""Which Hugging Face tensor is which run of which tensor here, for each family of models.

A tensor of Hugging Face is a run of the flat elements of one of ours, never transposed: both keep
matrices as ``[out, in]``. What differs is how many there are. Here all experts of a layer are one
tensor ``[E, ...]``, and the gate and the up projection one, the gate first:

    layers.L.moe.gate_up  [E, 2F, D]    experts.0.gate_proj [F, D], experts.0.up_proj [F, D], ...
    layers.L.moe.down     [E, D, F]     experts.0.down_proj [D, F], ...

D is the width of the model, F that of an expert, E the number of experts, V the vocabulary.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from moe_ckpt.errors import LayoutError

Config = Mapping[str, Any]


class Entry(NamedTuple):
    """One tensor of Hugging Face.

    Attributes:
        source: Its name there.
        shape: Its shape there.
        name: Of the tensor here that it is a part of.
        kind: "master", or "buffer" for what no gradient trains.
        whole: Shape of that tensor.
        start: Its first flat element in there; its elements follow one another.
    """

    source: str
    shape: tuple[int, ...]
    name: str
    kind: str
    whole: tuple[int, ...]
    start: int

    @property
    def stop(self) -> int:
        """One past its last flat element."""
        return self.start + math.prod(self.shape)


class _Names(NamedTuple):
    """How a family calls the parts of its experts and where it keeps them."""

    moe: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


def entries(config: Config) -> list[Entry]:
    """Return every tensor that a model of this configuration has.

    Args:
        config: The contents of its ``config.json``.

    Raises:
        LayoutError: If the family is not known, or a setting is missing.

    Examples:
        >>> config = dict(model_type="mixtral", vocab_size=8, hidden_size=4, intermediate_size=3,
        ...     num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        ...     num_local_experts=2, tie_word_embeddings=True)
        >>> found = {e.source: e for e in entries(config)}
        >>> e = found["model.layers.0.block_sparse_moe.experts.1.w3.weight"]  # expert 1, up
        >>> e.shape, e.name, e.whole, e.start
        ((3, 4), 'layers.0.moe.gate_up', (2, 6, 4), 36)
    """
    family = config.get("model_type")
    if family not in FAMILIES:
        raise LayoutError(f"model_type must be one of {', '.join(FAMILIES)}, it is {family!r}")
    try:
        found = list(_model(config, FAMILIES[family]))
    except KeyError as error:
        raise LayoutError(f"config.json of a {family} model has no {error}") from error
    return found


def _model(config: Config, layer: Callable[[Config, int], Iterator[Entry]]) -> Iterator[Entry]:
    V, D = config["vocab_size"], config["hidden_size"]
    yield _same("model.embed_tokens.weight", "embedding", V, D)
    for at in range(config["num_hidden_layers"]):
        yield _same(f"model.layers.{at}.input_layernorm.weight", f"layers.{at}.attention_norm", D)
        yield _same(
            f"model.layers.{at}.post_attention_layernorm.weight", f"layers.{at}.moe_norm", D
        )
        yield from layer(config, at)
    yield _same("model.norm.weight", "norm", D)
    if not config.get("tie_word_embeddings", False):
        yield _same("lm_head.weight", "head", V, D)


def _mixtral(config: Config, at: int) -> Iterator[Entry]:
    yield from _grouped_attention(config, at)
    names = _Names("block_sparse_moe", "w1", "w3", "w2")
    yield from _experts(config, at, config["num_local_experts"], config["intermediate_size"], names)


def _olmoe(config: Config, at: int) -> Iterator[Entry]:
    yield from _grouped_attention(config, at)
    head = _head_dim(config)
    for which, heads in (("q", "num_attention_heads"), ("k", "num_key_value_heads")):
        # One norm over all heads together.
        yield _attention(at, f"{which}_norm", f"{which}_norm", config[heads] * head)
    yield from _experts(config, at, _count(config), config["intermediate_size"], _Names())


def _qwen3(config: Config, at: int) -> Iterator[Entry]:
    yield from _grouped_attention(config, at)
    for which in ("q_norm", "k_norm"):  # one norm for each head
        yield _attention(at, which, which, _head_dim(config))
    period = config.get("decoder_sparse_step", 1)
    if at in (config.get("mlp_only_layers") or ()) or (at + 1) % period or not _count(config):
        yield from _dense(config, at)
    else:
        yield from _experts(config, at, _count(config), config["moe_intermediate_size"], _Names())


def _deepseek_v3(config: Config, at: int) -> Iterator[Entry]:
    yield from _latent_attention(config, at)
    if at < config["first_k_dense_replace"] or at % config.get("moe_layer_freq", 1):
        yield from _dense(config, at)
        return
    E, F = config["n_routed_experts"], config["moe_intermediate_size"]
    yield from _experts(config, at, E, F, _Names())
    bias = f"model.layers.{at}.mlp.gate.e_score_correction_bias"
    yield Entry(bias, (E,), f"layers.{at}.moe.router_bias", "buffer", (E,), 0)
    if shared := config.get("n_shared_experts"):
        there, here = f"model.layers.{at}.mlp.shared_experts", f"layers.{at}.moe.shared_"
        yield from _mlp(there, here, config["hidden_size"], shared * F, _Names())


def _grouped_attention(config: Config, at: int) -> Iterator[Entry]:
    D, head = config["hidden_size"], _head_dim(config)
    wide = config["num_attention_heads"] * head
    narrow = config.get("num_key_value_heads", config["num_attention_heads"]) * head
    for which, rows, columns in (
        ("q", wide, D), ("k", narrow, D), ("v", narrow, D), ("o", D, wide),
    ):  # fmt: skip
        yield _attention(at, f"{which}_proj", which, rows, columns)
        if config.get("attention_bias", False):
            source = f"model.layers.{at}.self_attn.{which}_proj.bias"
            yield _same(source, f"layers.{at}.attention.{which}_bias", rows)


def _latent_attention(config: Config, at: int) -> Iterator[Entry]:
    if config.get("attention_bias", False):
        raise LayoutError("attention_bias of a deepseek_v3 model must be false, it is true")
    D, heads = config["hidden_size"], config["num_attention_heads"]
    rope, plain, value = (config[f"{k}_head_dim"] for k in ("qk_rope", "qk_nope", "v"))
    q, kv = config["q_lora_rank"], config["kv_lora_rank"]
    if q is None:
        yield _attention(at, "q_proj", "q", heads * (rope + plain), D)
    else:
        yield _attention(at, "q_a_proj", "q_a", q, D)
        yield _attention(at, "q_a_layernorm", "q_a_norm", q)
        yield _attention(at, "q_b_proj", "q_b", heads * (rope + plain), q)
    yield _attention(at, "kv_a_proj_with_mqa", "kv_a", kv + rope, D)
    yield _attention(at, "kv_a_layernorm", "kv_a_norm", kv)
    yield _attention(at, "kv_b_proj", "kv_b", heads * (plain + value), kv)
    yield _attention(at, "o_proj", "o", D, heads * value)


def _experts(config: Config, at: int, E: int, F: int, names: _Names) -> Iterator[Entry]:
    D, there, here = config["hidden_size"], f"model.layers.{at}.{names.moe}", f"layers.{at}.moe"
    yield _same(f"{there}.gate.weight", f"{here}.router", E, D)
    for expert in range(E):
        for entry in _mlp(f"{there}.experts.{expert}", f"{here}.", D, F, names):
            before = expert * math.prod(entry.whole)
            yield entry._replace(whole=(E, *entry.whole), start=before + entry.start)


def _dense(config: Config, at: int) -> Iterator[Entry]:
    there, here = f"model.layers.{at}.mlp", f"layers.{at}.mlp."
    return _mlp(there, here, config["hidden_size"], config["intermediate_size"], _Names())


def _mlp(there: str, here: str, D: int, F: int, names: _Names) -> Iterator[Entry]:
    both = (f"{here}gate_up", "master", (2 * F, D))
    yield Entry(f"{there}.{names.gate}.weight", (F, D), *both, 0)
    yield Entry(f"{there}.{names.up}.weight", (F, D), *both, F * D)
    yield _same(f"{there}.{names.down}.weight", f"{here}down", D, F)


def _attention(at: int, there: str, here: str, *shape: int) -> Entry:
    source = f"model.layers.{at}.self_attn.{there}.weight"
    return _same(source, f"layers.{at}.attention.{here}", *shape)


def _same(source: str, name: str, *shape: int) -> Entry:
    return Entry(source, shape, name, "master", shape, 0)


def _head_dim(config: Config) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def _count(config: Config) -> int:
    # transformers writes one or the other, depending on its version.
    key = "num_experts" if "num_experts" in config else "num_local_experts"
    return config[key]


FAMILIES = {
    "olmoe": _olmoe,
    "qwen3_moe": _qwen3,
    "mixtral": _mixtral,
    "deepseek_v3": _deepseek_v3,
}
"""By ``model_type``: what a layer has beside its two norms."""

ARCHITECTURES = {
    "olmoe": "OlmoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
}
