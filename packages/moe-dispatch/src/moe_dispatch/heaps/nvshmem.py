"""Symmetric memory of NVSHMEM, for ranks on several machines. Needs ``nvshmem4py`` and a GPU.

NVSHMEM starts once in a process, over all ranks of the job, and its memory is allocated by all of
them together, whatever group uses it. So every rank of the job opens the same heaps in the same
order, each for the group that it is in. Errors inside NVSHMEM's C code end the process without
an exception: ``moe_dispatch.doctor`` tries it in a child process first.

Multicast (NVLS) and managed memory are not used.
"""

import importlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_dispatch.doctor.versions import check_versions
from moe_dispatch.heaps.meeting import GroupMeeting, Meeting, agree

_started: list[Any] = []


def start_nvshmem(everyone: Meeting, device: torch.device) -> Any:
    """Start NVSHMEM over all ranks of the job, or return it if it runs. Collective.

    Args:
        everyone: All ranks of the job.
        device: The GPU of this rank.

    Returns:
        ``nvshmem.core``.

    Raises:
        ImportError: If nvshmem4py is not installed.
        RuntimeError: If host and device libraries of NVSHMEM do not fit together.
    """
    if _started:
        return _started[0]
    check_versions()
    nv = importlib.import_module("nvshmem.core")  # optional, and slow
    torch.cuda.set_device(device)
    torch.zeros(1, device=device)
    own = importlib.import_module("cuda.core").Device(device.index or 0)
    own.set_current()
    uid = nv.get_unique_id(empty=everyone.rank != 0)  # the root's listener starts here
    told = uid._data.view("int8").tobytes() if everyone.rank == 0 else b""
    raw = everyone.gather(told)[0]
    if everyone.rank != 0:
        uid._data.view("int8")[:] = list(memoryview(raw).cast("b"))
    nv.init(
        device=own,
        uid=uid,
        rank=everyone.rank,
        nranks=everyone.world_size,
        initializer_method="uid",
    )
    _started.append(nv)
    return nv


def stop_nvshmem() -> None:
    """End NVSHMEM in this process. Collective over all ranks of the job; close heaps before."""
    if _started:
        _started.pop().finalize()


class NvshmemHeap:
    """A symmetric tensor of NVSHMEM.

    Args:
        group: The ranks that use it.
        num_bytes: Of each rank.
        device: The GPU of this rank.
        reason: Why it is this kind.
        direct: Whether peers that can be mapped are; otherwise all go through NVSHMEM calls,
            which is how peers on other machines are reached.

    Attributes:
        kind: ``"nvshmem"``.
        reason: Why it is this kind.
        rank: This rank.
        world_size: W.
        local: uint8, zeroed.
        bases_W: int64 on ``device``; 0 for peers that are reached by NVSHMEM calls.
        pes_W: int32 on ``device``; the number that NVSHMEM gives to each rank.

    Raises:
        ValueError: On every rank of the job, if they ask for different sizes.
        ImportError: If nvshmem4py is not installed.
    """

    kind = "nvshmem"

    def __init__(
        self,
        group: dist.ProcessGroup,
        num_bytes: int,
        device: torch.device,
        reason: str = "asked for",
        direct: bool = True,
    ):
        world = dist.group.WORLD
        assert world is not None, "a group is part of a world"
        self._everyone, self._meeting = GroupMeeting(world), GroupMeeting(group)
        agree(self._everyone, "open nvshmem", str(num_bytes))
        self.rank, self.world_size = self._meeting.rank, self._meeting.world_size
        self.device, self.reason = torch.device(device), reason
        self.nv = start_nvshmem(self._everyone, self.device)
        self._block = self.nv.tensor((num_bytes,), dtype=torch.uint8)
        self.local: Tensor = self._block.zero_()
        torch.cuda.current_stream(self.device).synchronize()
        pes = dist.get_process_group_ranks(group)
        self._peers: list[Tensor] = []
        addresses = [self._address(rank, pe, direct) for rank, pe in enumerate(pes)]
        self.bases_W = torch.tensor(addresses, device=self.device)
        self.pes_W = torch.tensor(pes, dtype=torch.int32, device=self.device)
        self._everyone.gather(b"mapped")

    def _address(self, rank: int, pe: int, direct: bool) -> int:
        if rank == self.rank:  # asking NVSHMEM for it would keep the memory from being freed
            return self._block.data_ptr()
        if not direct:
            return 0
        try:
            peer = self.nv.get_peer_tensor(self._block, pe)
        except self.nv.NvshmemError:  # it cannot be mapped: it is on another machine
            return 0
        self._peers.append(peer)
        return peer.data_ptr()

    def host_gather(self, data: bytes) -> list[bytes]:
        """Tell every rank something and hear what they tell."""
        return self._meeting.gather(data)

    def host_barrier(self) -> None:
        """Wait for every rank of the group, and for the work of this rank's stream."""
        torch.cuda.current_stream(self.device).synchronize()
        self._meeting.gather(b"")

    def close(self) -> None:
        """Free the memory on every rank. Collective over all ranks of the job."""
        if self._block is None:
            return
        torch.cuda.synchronize(self.device)
        agree(self._everyone, "close nvshmem", str(self._block.numel()))
        self.local = torch.empty(0, dtype=torch.uint8, device=self.device)
        block, self._block = self._block, None
        for peer in self._peers:
            self.nv.free_tensor(peer)
        self._peers = []
        self.nv.free_tensor(block)
