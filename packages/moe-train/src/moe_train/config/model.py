"""The shape of the transformer."""

from dataclasses import dataclass
from typing import Literal

from moe_train.config.rules import require, require_no_less_than_zero, require_positive


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """The shape of the transformer.

    Attributes:
        vocab_size: V. 256 for bytes.
        dim: D, width of the residual stream.
        num_layers: Transformer blocks, each of attention and experts.
        tie_embeddings: Whether the matrix that reads tokens also predicts them.
        attention: ``grouped`` shares each key and value head among query heads; ``latent`` makes
            keys and values of all heads from one short vector a token, as DeepSeek-V3 does.
        num_heads: Query heads.
        num_kv_heads: Key and value heads, each shared by ``num_heads / num_kv_heads`` query heads.
            Latent attention has as many as query heads, and does not read this.
        head_dim: Width of a head, an even number; 0 for ``dim / num_heads``. In latent attention
            the part of queries and keys that is not rotated.
        q_rank: Latent attention: width of the vector that queries are made from; 0 to make them
            from the stream.
        kv_rank: Latent attention: width of the vector that keys and values are made from.
        rope_head_dim: Latent attention: the rotated part of queries and keys, an even number;
            that of keys is one for all heads.
        value_head_dim: Latent attention: width of a value head; 0 for ``head_dim``.
        qk_norm: Normalise queries and keys before they are rotated: each ``head`` by itself, as
            Qwen3 does, or all of a token's heads together, as OLMoE does. Latent attention
            normalises the two short vectors instead, and does not read this.
        rope_theta: Base of the rotary wavelengths.
        rope_pairs: Which channels are rotated together: the two ``halves`` of a head, or
            ``neighbours``, as in the weights of DeepSeek-V3.
        window: Tokens that a token sees, itself included; 0 for all before it.
        full_every: With a window, every such layer sees all: 4 for the fourth, the eighth and so
            on; 0 for none.
        num_dense_layers: First layers that have one dense network in place of experts.
        dense_dim: Hidden width of these.
        num_experts: E, experts of each block.
        top_k: K, experts that each token visits.
        expert_dim: F, hidden width of one expert.
        activation: Of experts: ``swiglu``; ``clamped_swiglu``, that of gpt-oss; ``relu2``, the
            square of the positive part, without a gate. Dense networks and shared experts are
            SwiGLU.
        latent_dim: Width that experts read and write, between one matrix down and one up that
            they share; 0 for that of the stream.
        shared_dim: Hidden width of the expert that every token visits; 0 for none.
        shared_gate: Whether each token weighs that expert with a sigmoid of its own.
        norm_eps: Added to the mean square in RMSNorm.
    """

    vocab_size: int = 256
    dim: int = 128
    num_layers: int = 3
    tie_embeddings: bool = False
    attention: Literal["grouped", "latent"] = "grouped"
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 0
    q_rank: int = 0
    kv_rank: int = 0
    rope_head_dim: int = 0
    value_head_dim: int = 0
    qk_norm: Literal["none", "head", "together"] = "head"
    rope_theta: float = 10_000.0
    rope_pairs: Literal["halves", "neighbours"] = "halves"
    window: int = 0
    full_every: int = 0
    num_dense_layers: int = 0
    dense_dim: int = 0
    num_experts: int = 8
    top_k: int = 2
    expert_dim: int = 128
    activation: Literal["swiglu", "clamped_swiglu", "relu2"] = "swiglu"
    latent_dim: int = 0
    shared_dim: int = 128
    shared_gate: bool = False
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        require_positive(
            vocab_size=self.vocab_size, dim=self.dim, num_layers=self.num_layers,
            num_heads=self.num_heads, num_kv_heads=self.num_kv_heads,
            num_experts=self.num_experts, expert_dim=self.expert_dim,
            rope_theta=self.rope_theta, norm_eps=self.norm_eps,
        )  # fmt: skip
        require_no_less_than_zero(
            head_dim=self.head_dim, q_rank=self.q_rank, kv_rank=self.kv_rank,
            rope_head_dim=self.rope_head_dim, value_head_dim=self.value_head_dim,
            window=self.window, full_every=self.full_every,
            num_dense_layers=self.num_dense_layers, dense_dim=self.dense_dim,
            latent_dim=self.latent_dim, shared_dim=self.shared_dim,
        )  # fmt: skip
        self._check_heads()
        self._check_layers()

    @property
    def head_width(self) -> int:
        """C, width of a head; in latent attention without its rotated part."""
        return self.head_dim or self.dim // self.num_heads

    @property
    def value_width(self) -> int:
        """Width of a value head."""
        latent = self.attention == "latent"
        return (self.value_head_dim if latent else 0) or self.head_width

    @property
    def rotated_width(self) -> int:
        """Channels of a head that are rotated."""
        return self.rope_head_dim if self.attention == "latent" else self.head_width

    @property
    def moe_layers(self) -> range:
        """Numbers of the layers that have experts."""
        return range(self.num_dense_layers, self.num_layers)

    def window_of(self, layer: int) -> int:
        """Return how many tokens a token of this layer sees; 0 for all before it."""
        full = self.full_every and (layer + 1) % self.full_every == 0
        return 0 if full else self.window

    def _check_heads(self) -> None:
        if not self.head_dim:
            require(
                self.dim % (2 * self.num_heads) == 0,
                f"dim must be an even multiple of num_heads, got {self.dim} and "
                f"{self.num_heads}; or set head_dim",
            )
        if self.attention == "grouped":
            require(
                self.num_heads % self.num_kv_heads == 0,
                f"num_kv_heads ({self.num_kv_heads}) must divide num_heads ({self.num_heads})",
            )
            require(self.head_dim % 2 == 0, f"head_dim must be even, got {self.head_dim}")
        else:
            require(self.kv_rank > 0, "attention 'latent' needs kv_rank, got 0")
            require(
                self.rope_head_dim > 0 and self.rope_head_dim % 2 == 0,
                f"attention 'latent' needs an even rope_head_dim, got {self.rope_head_dim}",
            )
        for name in ("q_rank", "kv_rank", "rope_head_dim", "value_head_dim"):
            value = getattr(self, name)
            require(
                self.attention == "latent" or not value,
                f"{name}={value} belongs to attention 'latent', and attention is 'grouped'",
            )

    def _check_layers(self) -> None:
        require(
            not self.full_every or self.window > 0,
            f"full_every={self.full_every} needs a window, and window is 0: all layers see all",
        )
        require(
            self.num_dense_layers < self.num_layers,
            f"num_dense_layers ({self.num_dense_layers}) must leave one of num_layers "
            f"({self.num_layers}) for experts",
        )
        require(
            bool(self.num_dense_layers) == bool(self.dense_dim),
            f"num_dense_layers and dense_dim go together, got {self.num_dense_layers} and "
            f"{self.dense_dim}",
        )
        require(
            1 <= self.top_k <= self.num_experts,
            f"top_k must be in 1..num_experts ({self.num_experts}), got {self.top_k}",
        )
        require(
            bool(self.shared_dim) or not self.shared_gate,
            "shared_gate needs a shared expert, and shared_dim is 0",
        )
