"""POSIX shared memory of the processes of one machine: the CPU's heap."""

import os
import secrets
from pathlib import Path

import torch

from moe_dispatch.heaps.meeting import Meeting, agree

SHARED = Path("/dev/shm")


class HostHeap:
    """A file in memory for each rank, mapped by all, without a name as soon as all have it.

    A rank that dies leaves nothing behind: the memory goes with the last process that maps it.

    Args:
        meeting: The ranks, all on one machine.
        num_bytes: Of each rank.
        reason: Why it is this kind.

    Attributes:
        kind: ``"host"``.
        reason: Why it is this kind.
        rank: This rank.
        world_size: W.
        local: uint8.
        bases_W: int64, address of the block of each rank in this process.

    Raises:
        ValueError: On every rank, if they ask for different sizes.
        OSError: If there is not enough shared memory.
    """

    kind = "host"

    def __init__(self, meeting: Meeting, num_bytes: int, reason: str = "asked for"):
        agree(meeting, "open host", str(num_bytes))
        self.rank, self.world_size, self.reason = meeting.rank, meeting.world_size, reason
        self._meeting = meeting
        tag = meeting.gather(secrets.token_hex(8).encode())[0].decode()
        paths = [SHARED / f"moe-dispatch-{tag}-{rank}" for rank in range(self.world_size)]
        mine = paths[self.rank]
        try:
            with mine.open("xb") as file:
                os.posix_fallocate(file.fileno(), 0, num_bytes)  # or a later store would be fatal
            meeting.gather(b"made")
            self._blocks = [
                torch.from_file(str(path), shared=True, size=num_bytes, dtype=torch.uint8)
                for path in paths
            ]
            meeting.gather(b"mapped")
        finally:
            mine.unlink(missing_ok=True)
        self.local = self._blocks[self.rank]
        self.bases_W = torch.tensor([block.data_ptr() for block in self._blocks])

    def host_gather(self, data: bytes) -> list[bytes]:
        """Tell every rank something and hear what they tell."""
        return self._meeting.gather(data)

    def host_barrier(self) -> None:
        """Wait until every rank is here."""
        self._meeting.gather(b"")

    def close(self) -> None:
        """Unmap the memory, once every rank is here. Tensors of it keep what they map alive."""
        if self._blocks:
            agree(self._meeting, "close host", str(self.local.numel()))
            self.local = self.local.new_empty(0)
            self._blocks = []
