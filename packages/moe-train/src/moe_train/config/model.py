"""The shape of the transformer."""

from dataclasses import dataclass

from moe_train.config.rules import require, require_no_less_than_zero, require_positive


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """The shape of the transformer.

    Attributes:
        vocab_size: V. 256 for bytes.
        dim: D, width of the residual stream.
        num_layers: Transformer blocks, each of attention and experts.
        num_heads: Query heads; a head is ``dim / num_heads`` wide, an even number.
        num_kv_heads: Key and value heads, each shared by ``num_heads / num_kv_heads`` query heads.
        num_experts: E, experts of each block.
        top_k: K, experts that each token visits.
        expert_dim: F, hidden width of one expert.
        shared_dim: Hidden width of the expert that every token visits; 0 for none.
        qk_norm: Normalise queries and keys of each head before they are rotated.
        rope_theta: Base of the rotary wavelengths.
        norm_eps: Added to the mean square in RMSNorm.
    """

    vocab_size: int = 256
    dim: int = 128
    num_layers: int = 3
    num_heads: int = 4
    num_kv_heads: int = 2
    num_experts: int = 8
    top_k: int = 2
    expert_dim: int = 128
    shared_dim: int = 128
    qk_norm: bool = True
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        require_positive(
            vocab_size=self.vocab_size, dim=self.dim, num_layers=self.num_layers,
            num_heads=self.num_heads, num_kv_heads=self.num_kv_heads,
            num_experts=self.num_experts, expert_dim=self.expert_dim,
            rope_theta=self.rope_theta, norm_eps=self.norm_eps,
        )  # fmt: skip
        require(
            self.dim % (2 * self.num_heads) == 0,
            f"dim must be an even multiple of num_heads, got {self.dim} and {self.num_heads}",
        )
        require(
            self.num_heads % self.num_kv_heads == 0,
            f"num_kv_heads ({self.num_kv_heads}) must divide num_heads ({self.num_heads})",
        )
        require(
            1 <= self.top_k <= self.num_experts,
            f"top_k must be in 1..num_experts ({self.num_experts}), got {self.top_k}",
        )
        require_no_less_than_zero(shared_dim=self.shared_dim)
