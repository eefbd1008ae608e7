"""A copy of what a rank holds, in host memory that is used again for every save."""

import mmap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import numpy as np

from moe_ckpt.errors import HostMemoryError
from moe_ckpt.shard import Shard, View, view_of

ALIGNMENT = 64
"""Bytes; a line of the processor's cache, and enough for every dtype."""


class Snapshot(NamedTuple):
    """What ``HostBuffer.hold`` copied.

    Attributes:
        views: Of the copies, in order of the shards.
        ready: Returns when the copies are complete. Only then may the views be read.
    """

    views: list[View]
    ready: Callable[[], None]


class HostBuffer(Protocol):
    """Memory that holds one snapshot at a time."""

    def hold(self, shards: Iterable[Shard]) -> Snapshot:
        """Copy the shards. What the last call returned is overwritten.

        Whatever the caller does to the shards after this returns does not change the snapshot.
        """
        ...

    def reserve(self, nbytes: int) -> None:
        """Allocate for a snapshot of that many bytes, so that the first one costs no more."""
        ...

    def close(self) -> None:
        """Free the memory."""
        ...


class HostArena:
    """Ordinary memory for snapshots of shards that are in host memory.

    It grows to the largest snapshot it was asked for and is then used again.

    Args:
        limit: Bytes it may take; by default any number.

    Attributes:
        nbytes: Bytes it has taken.
    """

    def __init__(self, limit: int | None = None):
        self.limit = limit
        self._memory: mmap.mmap | None = None

    @property
    def nbytes(self) -> int:
        """Return the bytes it has taken."""
        return 0 if self._memory is None else len(self._memory)

    def hold(self, shards: Iterable[Shard]) -> Snapshot:
        """Copy the shards.

        Raises:
            ShardError: If a shard cannot be saved.
            HostMemoryError: If ``limit`` is less than the shards need.
        """
        sources = [view_of(shard) for shard in shards]
        offsets, total = place([view.data.nbytes for view in sources])
        self.reserve(total)
        views = []
        for source, offset in zip(sources, offsets, strict=True):
            copy = np.empty(0, source.data.dtype)
            if self._memory is not None and source.data.size:
                copy = np.frombuffer(self._memory, copy.dtype, source.data.size, offset)
                np.copyto(copy, source.data)
            views.append(replace(source, data=copy))
        return Snapshot(views, _nothing)

    def reserve(self, nbytes: int) -> None:
        """Allocate, unless it has as much already."""
        check_limit(nbytes, self.limit)
        if nbytes > self.nbytes:
            self._memory = None  # before the new one is made: never two at a time
            # Pages of its own, that go back to the system when the last view of them does.
            self._memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def close(self) -> None:
        """Free the memory, once nothing views it any more."""
        self._memory = None


def place(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Return where to put blocks of these sizes, and how many bytes that takes.

    Examples:
        >>> place([4, 100, 0, 8])
        ([0, 64, 192, 192], 256)
    """
    offsets, total = [], 0
    for size in sizes:
        offsets.append(total)
        total += -(-size // ALIGNMENT) * ALIGNMENT
    return offsets, total


def check_limit(nbytes: int, limit: int | None) -> None:
    """Raise if a snapshot may not be as large as it has to be.

    Raises:
        HostMemoryError: Naming both.
    """
    if limit is not None and nbytes > limit:
        raise HostMemoryError(
            f"a snapshot takes {nbytes} bytes of host memory and {limit} are allowed: allow as "
            "many, or save without a snapshot by moe_ckpt.save",
            nbytes=nbytes,
            limit=limit,
        )


def _nothing(*_: Any) -> None:
    """Wait for nothing."""
