"""What ranks tell each other before they begin something that all must begin."""

from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


class MismatchError(RuntimeError):
    """Ranks hold different values of something that must be the same."""


def tell_all(value: T, group: dist.ProcessGroup | None) -> list[T]:
    """Return what every rank of ``group`` passes, by rank. A collective call of the group."""
    told: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(told, value, group=group)
    return told


def require_same(values: dict[int, str], what: str) -> None:
    """Raise if values, by rank, differ; the error names each and the ranks that hold it."""
    holders: dict[str, list[int]] = {}
    for rank, value in values.items():
        holders.setdefault(value, []).append(rank)
    if len(holders) > 1:
        listed = "".join(
            f"\n  - {held!r} on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
            for held, ranks in holders.items()
        )
        raise MismatchError(f"{what} differs between ranks:{listed}")


def raise_together(
    error: ValueError | None,
    group: dist.ProcessGroup | None,
    kind: type[ValueError] = ValueError,
) -> None:
    """Raise on every rank of ``group`` if a rank has an error. A collective call of the group.

    An error of one rank alone would leave the others waiting in the next collective.

    Args:
        error: What this rank found; None if nothing.
        group: The ranks; None stands for this one alone.
        kind: What the other ranks raise.

    Raises:
        ValueError: ``error`` itself where there is one, elsewhere one that quotes the first.
    """
    told = [] if group is None else tell_all(None if error is None else str(error), group)
    if error is not None:
        raise error
    for rank, message in enumerate(told):
        if message is not None:
            raise kind(f"rank {rank} raised: {message}")
