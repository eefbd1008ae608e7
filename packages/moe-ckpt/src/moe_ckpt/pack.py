"""Small tensors share arrays: which, and where each stands, follows from names and shapes alone.

A file for each tensor would make ten thousand small ones ten thousand files. So tensors below
``PACKED_BYTES`` stand one after the other, in order of name and kind, in packs of one chunk.
"""

import hashlib
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from moe_ckpt.shard import DTYPES

PACKED_BYTES = 256 << 10
"""A tensor of fewer bytes stands in a pack."""
PACK_BYTES = 4 << 20
"""A pack of more bytes is never made."""
PACKS = "packs"


class Member(NamedTuple):
    """A tensor in a pack.

    Attributes:
        name: Of the tensor.
        kind: Of its values.
        shape: Of the whole tensor.
        start: Its first element in the pack.
        stop: One past its last.
        digest: SHA-256 of its values, little-endian; empty before the save.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    start: int
    stop: int
    digest: str = ""


def is_packed(shape: tuple[int, ...], dtype: str) -> bool:
    """Return whether a tensor stands in a pack."""
    return math.prod(shape) * np.dtype(dtype).itemsize < PACKED_BYTES


def groups(tensors: Sequence[tuple[str, int]]) -> Iterator[tuple[str, list[int]]]:
    """Share tensors out to packs, each of one dtype.

    Args:
        tensors: Dtype and number of elements of each, in order of name and kind.

    Yields:
        For each pack its dtype and which tensors it holds, as indices.

    Examples:
        >>> list(groups([("float32", 6), ("float64", 1), ("float32", 0)]))
        [('float32', [0, 2]), ('float64', [1])]
    """
    for dtype in DTYPES:
        most, used = PACK_BYTES // np.dtype(dtype).itemsize, 0
        group: list[int] = []
        for at, (of, size) in enumerate(tensors):
            if of != dtype:
                continue
            if group and used + size > most:
                yield dtype, group
                group, used = [], 0
            group.append(at)
            used += size
        if group:
            yield dtype, group


def digests(members: Sequence[Member], values: np.ndarray) -> list[str]:
    """Return the digest of each member of a pack.

    Args:
        members: Of the pack.
        values: All of its elements.
    """
    little = values.astype(values.dtype.newbyteorder("<"), copy=False)
    data = little.view(np.uint8).data
    width = values.itemsize
    return [hashlib.sha256(data[m.start * width : m.stop * width]).hexdigest() for m in members]


def labels(members: Sequence[Member]) -> list[str]:
    """Return ``name/kind`` of each member."""
    return [f"{member.name}/{member.kind}" for member in members]
