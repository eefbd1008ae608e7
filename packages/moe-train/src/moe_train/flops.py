"""FLOPs of the model: what its mathematics asks for, and nothing that an implementation adds.

A multiply-add counts as two. Of attention only pairs of tokens of which one sees the other count,
of experts only those that a token visits; the lookup of embeddings, norms, rotations and
activations count nothing, and neither does what is computed again. Over these FLOPs the rate of a
run is its model FLOP utilisation (MFU), and no setting raises it without making the run faster.
"""

from moe_train.config import ModelConfig
from moe_train.sizes import parts


def forward_flops(config: ModelConfig, sequence_length: int) -> float:
    """Return the FLOPs of one token's forward, the mean over a row that is one document.

    Args:
        config: The shape.
        sequence_length: S, tokens of a row.

    Examples:
        >>> forward_flops(ModelConfig(), 128) / 1e6
        1.3504
    """
    products = 2 * sum(part.in_products for part in parts(config))
    pairs = sum(
        visible_pairs(sequence_length, config.window_of(layer))
        for layer in range(config.num_layers)
    )
    return products + attention_flops(config) * pairs / sequence_length


def train_flops_per_token(config: ModelConfig, sequence_length: int) -> float:
    """Return the FLOPs of one token's forward and backward: backward is two products for one."""
    return 3 * forward_flops(config, sequence_length)


def attention_flops(config: ModelConfig) -> int:
    """Return the forward FLOPs of one layer's attention for a pair of tokens: score and sum."""
    scored = config.head_width + (config.rope_head_dim if config.attention == "latent" else 0)
    return 2 * config.num_heads * (scored + config.value_width)


def visible_pairs(sequence_length: int, window: int) -> int:
    """Return for how many pairs of tokens of a row the first sees the second.

    Args:
        sequence_length: S.
        window: Tokens that a token sees, itself included; 0 for all before it.

    Examples:
        >>> visible_pairs(4, 0), visible_pairs(4, 2)
        (10, 7)
    """
    width = min(window or sequence_length, sequence_length)
    return width * (width + 1) // 2 + (sequence_length - width) * width
