"""Shards of numpy arrays."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np


@dataclass(frozen=True, eq=False)
class ArrayShard:
    """The plainest shard.

    Attributes:
        name: Of the tensor.
        kind: Of its values.
        global_shape: Of the whole tensor.
        flat_start: First element.
        flat_stop: One past the last.
        data: 1-D, on the memory of the array it was cut from.
    """

    name: str
    kind: str
    global_shape: tuple[int, ...]
    flat_start: int
    flat_stop: int
    data: np.ndarray


def cut(arrays: Mapping[tuple[str, str], np.ndarray], rank: int, size: int) -> list[ArrayShard]:
    """Return what one of ``size`` ranks holds if each array is cut into equal runs of elements.

    Args:
        arrays: By name and kind.
        rank: Whose shards.
        size: Number of ranks.

    Examples:
        >>> arrays = {("w", "master"): np.arange(6.0).reshape(2, 3)}
        >>> [cut(arrays, rank, 2)[0].data.tolist() for rank in range(2)]
        [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    """
    shards = []
    for (name, kind), array in arrays.items():
        start, stop = array.size * rank // size, array.size * (rank + 1) // size
        flat = array.reshape(-1)[start:stop]
        shards.append(ArrayShard(name, kind, array.shape, start, stop, flat))
    return shards


def blank(shards: Sequence[ArrayShard]) -> list[ArrayShard]:
    """Return the same shards on new memory full of a value that no test saves."""
    return [replace(shard, data=np.full_like(shard.data, -123.25)) for shard in shards]
