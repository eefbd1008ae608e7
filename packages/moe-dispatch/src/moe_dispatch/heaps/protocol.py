"""What the row-wise protocol needs of memory that several ranks see."""

from typing import Protocol

from torch import Tensor


class SymmetricHeap(Protocol):
    """A block of bytes on every rank of a group, of one size, at an address that peers know.

    Opening and closing one is collective: all ranks of the group, in the same order. Between the
    two nothing here waits but ``host_barrier`` and ``host_gather``.

    Attributes:
        kind: ``"threads"``, ``"host"``, ``"cuda_peer"`` or ``"nvshmem"``.
        reason: Why it is this one, in words.
        rank: This rank, from 0.
        world_size: W.
        local: uint8, the block of this rank.
        bases_W: int64 on the device of ``local``. Where the block of each rank begins, as this
            rank may load and store it; 0 where it can reach it through NVSHMEM calls alone.
    """

    kind: str
    reason: str
    rank: int
    world_size: int
    local: Tensor
    bases_W: Tensor

    def host_gather(self, data: bytes) -> list[bytes]:
        """Tell every rank something and hear what they tell. The host waits, at most a minute."""
        ...

    def host_barrier(self) -> None:
        """Wait until every rank is here and its stream has done all that it was given."""
        ...

    def close(self) -> None:
        """Free the memory on every rank. Collective; a second call does nothing."""
        ...
