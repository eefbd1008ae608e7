"""Virtual ranks that are threads of one process, on the CPU or on one GPU.

On a GPU each rank has a stream of its own, so that kernels of several ranks really run at once;
kernels of several processes would take turns. No memory is shared between processes, so it works
wherever torch does, and under ``compute-sanitizer``.
"""

import torch

from moe_dispatch.heaps.meeting import TIMEOUT, Crowd, ThreadMeeting, agree


def open_threads(
    world_size: int,
    num_bytes: int,
    device: str | torch.device = "cpu",
    reason: str = "asked for",
    timeout: float = TIMEOUT,
) -> "list[ThreadHeap]":
    """Return a heap for each of ``world_size`` virtual ranks. Zeroed.

    Args:
        world_size: W.
        num_bytes: Of each rank.
        device: Of all of them.
        reason: Why it is this kind.
        timeout: Seconds that a rank waits for the others in ``host_gather``.

    Examples:
        >>> one, other = open_threads(2, num_bytes=16)
        >>> one.bases_W.tolist() == [one.local.data_ptr(), other.local.data_ptr()]
        True
    """
    crowd = Crowd(world_size, timeout)
    blocks = [torch.zeros(num_bytes, dtype=torch.uint8, device=device) for _ in range(world_size)]
    bases_W = torch.tensor([block.data_ptr() for block in blocks], device=device)
    if bases_W.is_cuda:
        torch.cuda.synchronize(bases_W.device)  # other streams will use them
    meetings = [ThreadMeeting(rank, crowd) for rank in range(world_size)]
    return [
        ThreadHeap(meeting, block, bases_W, reason)
        for meeting, block in zip(meetings, blocks, strict=True)
    ]


class ThreadHeap:
    """The heap of one virtual rank; ``open_threads`` makes them.

    Attributes:
        kind: ``"threads"``.
        reason: Why it is this kind.
        rank: This rank.
        world_size: W.
        local: uint8.
        bases_W: int64, address of the block of each rank.
    """

    kind = "threads"

    def __init__(
        self, meeting: ThreadMeeting, local: torch.Tensor, bases_W: torch.Tensor, reason: str
    ):
        self.rank, self.world_size = meeting.rank, meeting.world_size
        self.local, self.bases_W, self.reason = local, bases_W, reason
        self._meeting = meeting

    def host_gather(self, data: bytes) -> list[bytes]:
        """Tell every rank something and hear what they tell."""
        return self._meeting.gather(data)

    def host_barrier(self) -> None:
        """Wait for every rank, and for the work of this rank's own stream."""
        if self.local.is_cuda:  # the stream only: kernels of other ranks may be waiting for us
            torch.cuda.current_stream(self.local.device).synchronize()
        self._meeting.gather(b"")

    def close(self) -> None:
        """Let go of the memory, once every rank is here."""
        if self.local.numel():
            self.host_barrier()
            agree(self._meeting, "close threads", str(self.local.numel()))
            self.local = self.local.new_empty(0)
