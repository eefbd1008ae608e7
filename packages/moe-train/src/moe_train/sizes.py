"""How many parameters a model has, by arithmetic alone."""

from collections.abc import Iterator
from typing import NamedTuple

from moe_kernels.mlp.unfused import GATED

from moe_train.config import ModelConfig


class Part(NamedTuple):
    """Parameters of one kind, summed over the layers.

    Attributes:
        name: What they are.
        total: How many there are.
        active: Those that the computation of one token uses.
        in_products: Of the active ones, those that a matrix product multiplies by.
    """

    name: str
    total: int
    active: int
    in_products: int


class Parameters(NamedTuple):
    """Parameters of a model.

    Attributes:
        total: All.
        active: Those that the computation of one token uses: all but the experts it does not
            visit. Both the matrix that reads tokens and the one that predicts them count whole.
    """

    total: int
    active: int


def count_parameters(config: ModelConfig) -> Parameters:
    """Count the parameters of a model without making it.

    Examples:
        >>> count_parameters(ModelConfig())
        Parameters(total=1544256, active=659520)
    """
    found = list(parts(config))
    return Parameters(sum(p.total for p in found), sum(p.active for p in found))


def parts(config: ModelConfig) -> Iterator[Part]:
    """Yield what the parameters of a model are, each once."""
    D, L, moe = config.dim, config.num_layers, len(config.moe_layers)
    vocabulary = config.vocab_size * D
    yield Part("embedding", vocabulary, vocabulary, 0)
    if not config.tie_embeddings:
        yield _whole("head", vocabulary)
    else:
        yield Part("head", 0, 0, vocabulary)
    matrices, vectors = _attention(config)
    yield _whole("attention", L * matrices)
    norms = L * (vectors + 2 * D) + D
    yield Part("norms", norms, norms, 0)
    yield _whole("dense", config.num_dense_layers * 3 * D * config.dense_dim)
    yield _whole("router", moe * config.num_experts * D)
    yield _whole("shared", moe * (3 * D * config.shared_dim + D * config.shared_gate))
    yield _whole("latent", moe * 2 * D * config.latent_dim)
    width = config.latent_dim or D
    expert = (3 if config.activation in GATED else 2) * width * config.expert_dim
    active = moe * config.top_k * expert
    yield Part("experts", moe * config.num_experts * expert, active, active)


def _whole(name: str, number: int) -> Part:
    return Part(name, number, number, number)


def _attention(config: ModelConfig) -> tuple[int, int]:
    """Return the elements of one layer's matrices and of its norms."""
    D, H, C = config.dim, config.num_heads, config.head_width
    if config.attention == "grouped":
        wide, narrow = H * C, config.num_kv_heads * C
        norms = {"none": 0, "head": 2 * C, "together": wide + narrow}[config.qk_norm]
        return 2 * D * wide + 2 * D * narrow, norms
    query, values = H * (C + config.rope_head_dim), H * config.value_width
    queries = config.q_rank * (D + query) if config.q_rank else D * query
    keys = D * (config.kv_rank + config.rope_head_dim) + config.kv_rank * (H * C + values)
    return queries + keys + values * D, config.q_rank + config.kv_rank
