"""What everything that a run writes must say about it."""

from moe_train.config import RoutingConfig


def labels(config: RoutingConfig) -> list[str]:
    """Return what makes the figures of a run no figures of a model, or not comparable.

    Examples:
        >>> labels(RoutingConfig()), labels(RoutingConfig(forced="uniform"))
        ([], ['forced routing: uniform'])
    """
    found = []
    if config.forced != "none":
        found.append(f"forced routing: {config.forced}")
    if config.balance and config.balance_over == "microbatch":
        found.append("balance loss per microbatch: depends on how the batch is split")
    return found
