"""Torch tensors and torch.distributed for checkpoints. The only module that imports torch."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from moe_ckpt.comm import Alone, Communicator
from moe_ckpt.errors import HostMemoryError, ShardError
from moe_ckpt.shard import Shard, View, view_of
from moe_ckpt.snapshot import Snapshot, check_limit, place


def as_numpy(tensor: torch.Tensor) -> np.ndarray:
    """Return the memory of a CPU tensor as a numpy array, without a copy.

    Args:
        tensor: float32 or float64. It may require grad.

    Raises:
        ShardError: If it is on another device, is not contiguous or has another dtype.
    """
    if tensor.device.type != "cpu":
        raise ShardError(f"the tensor is on device {tensor.device}, copy it to host memory first")
    if tensor.dtype not in (torch.float32, torch.float64):
        raise ShardError(f"the tensor is {tensor.dtype}, a checkpoint holds float32 or float64")
    if not tensor.is_contiguous():
        raise ShardError(f"the tensor has strides {tensor.stride()}, it must be contiguous")
    return tensor.detach().numpy()


@dataclass(frozen=True)
class _Copied:
    name: str
    kind: str
    global_shape: tuple[int, ...]
    flat_start: int
    flat_stop: int
    data: Any


class TorchCommunicator:
    """The ranks of a process group. Bytes travel as uint8 tensors.

    With NCCL they travel through the current CUDA device, with every other backend through host
    memory.

    Args:
        group: By default all ranks.
    """

    def __init__(self, group: dist.ProcessGroup | None = None):
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        nccl = dist.get_backend(group) == "nccl"
        self.device = torch.device("cuda", torch.cuda.current_device() if nccl else 0)
        if not nccl:
            self.device = torch.device("cpu")

    def all_gather(self, payload: bytes) -> list[bytes]:
        """Return the payload of each rank, in order of rank."""
        lengths = self._lengths(len(payload))
        padded = torch.zeros(max(1, *lengths), dtype=torch.uint8, device=self.device)
        padded[: len(payload)] = self._tensor(payload)
        gathered = [torch.empty_like(padded) for _ in lengths]
        dist.all_gather(gathered, padded, group=self.group)
        return [_bytes(t[:n]) for t, n in zip(gathered, lengths, strict=True)]

    def exchange(self, payloads: list[bytes]) -> list[bytes]:
        """Send ``payloads[r]`` to rank r and return what each rank sent here."""
        if len(payloads) != self.size:
            raise ValueError(f"{len(payloads)} payloads for {self.size} ranks")
        sent = [len(payload) for payload in payloads]
        outgoing = torch.tensor(sent, dtype=torch.int64, device=self.device)
        incoming = torch.empty_like(outgoing)
        dist.all_to_all_single(incoming, outgoing, group=self.group)
        received = incoming.tolist()
        source = self._tensor(b"".join(payloads))
        target = torch.empty(sum(received), dtype=torch.uint8, device=self.device)
        dist.all_to_all_single(target, source, received, sent, group=self.group)
        return [_bytes(part) for part in target.split(received)]

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self._lengths(0)

    def _lengths(self, length: int) -> list[int]:
        mine = torch.tensor([length], dtype=torch.int64, device=self.device)
        lengths = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(lengths, mine, group=self.group)
        return [int(n) for n in lengths]

    def _tensor(self, payload: bytes) -> torch.Tensor:
        if not payload:
            return torch.empty(0, dtype=torch.uint8, device=self.device)
        return torch.frombuffer(bytearray(payload), dtype=torch.uint8).to(self.device)


def communicator(group: dist.ProcessGroup | None = None) -> Communicator:
    """Return the ranks of a group, or this process alone where torch.distributed is not in use."""
    if group is None and not (dist.is_available() and dist.is_initialized()):
        return Alone()
    return TorchCommunicator(group)


def background_communicator(
    group: dist.ProcessGroup | None = None, timeout: timedelta = timedelta(minutes=30)
) -> Communicator:
    """Make a communicator over the ranks of a group that a thread can have for itself.

    It has its own gloo group, so what the thread says never mixes with what training says, and
    nothing of it touches a GPU. A collective call of the ranks of ``group``, which, as for every
    new group of torch, must have made the same groups before.

    Args:
        group: By default all ranks.
        timeout: After which a rank that waits for another one gives up, which raises.

    Returns:
        ``Alone()`` where torch.distributed is not in use.
    """
    if group is None and not (dist.is_available() and dist.is_initialized()):
        return Alone()
    part = group is not None and dist.get_world_size(group) < dist.get_world_size()
    ranks = dist.get_process_group_ranks(group) if part else None
    own: Any = dist.new_group(
        ranks, timeout=timeout, backend="gloo", use_local_synchronization=part
    )
    return TorchCommunicator(own)


class PinnedArena:
    """Page-locked memory for snapshots of shards on GPUs, which copy into it by themselves.

    ``hold`` queues the copies on the current stream of each device and returns; work that is
    queued on that stream later, such as the next optimizer step, runs after them. Shards in host
    memory are copied at once. Cost: the bytes of the shards over the link of the device, once.

    The memory is registered with CUDA and not taken from torch's allocator, which would round up
    to a power of two and keep it for ever. Without a CUDA device it is ordinary memory.

    Args:
        limit: Bytes it may take; by default any number.
    """

    def __init__(self, limit: int | None = None):
        self.limit = limit
        self._memory = torch.empty(0, dtype=torch.uint8)

    @property
    def nbytes(self) -> int:
        """Return the bytes it has taken."""
        return self._memory.numel()

    def hold(self, shards: Iterable[Shard]) -> Snapshot:
        """Queue copies of the shards.

        Raises:
            ShardError: If a shard cannot be saved.
            HostMemoryError: If ``limit`` is less than the shards need, or the system refuses.
        """
        shards = list(shards)
        sources = [_tensor_of(shard) for shard in shards]
        offsets, total = place([source.nbytes for source in sources])
        self.reserve(total)
        copies = [
            self._memory[at : at + source.nbytes].view(source.dtype)
            for source, at in zip(sources, offsets, strict=True)
        ]
        views = [_view(s, copy) for s, copy in zip(shards, copies, strict=True)]
        for source, copy in zip(sources, copies, strict=True):
            copy.copy_(source, non_blocking=True)
        events = []
        for device in {source.device for source in sources if source.device.type == "cuda"}:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(device))
            events.append(event)

        def ready() -> None:
            for event in events:
                event.synchronize()

        return Snapshot(views, ready)

    def reserve(self, nbytes: int) -> None:
        """Allocate and lock, unless it has as much already. Seconds for many GB, once."""
        check_limit(nbytes, self.limit)
        if nbytes <= self.nbytes:
            return
        self.close()  # before the new one is made: never two at a time
        memory = torch.empty(nbytes, dtype=torch.uint8)
        if torch.cuda.is_available():
            portable = 1  # locked for every device of this process
            code = _cudart().cudaHostRegister(memory.data_ptr(), nbytes, portable)
            if int(code) != 0:
                raise HostMemoryError(
                    f"{nbytes} bytes of host memory cannot be page-locked: {code}", nbytes=nbytes
                )
        self._memory = memory

    def close(self) -> None:
        """Unlock and free the memory. No copy into it may be under way."""
        if self.nbytes and torch.cuda.is_available():
            _cudart().cudaHostUnregister(self._memory.data_ptr())
        self._memory = torch.empty(0, dtype=torch.uint8)


def _cudart() -> Any:
    return torch.cuda.cudart()


def _tensor_of(shard: Shard) -> torch.Tensor:
    if not isinstance(shard.data, torch.Tensor):
        return torch.from_numpy(view_of(shard).data)
    tensor, label = shard.data.detach(), f"{shard.name}/{shard.kind}"
    if tensor.dtype not in (torch.float32, torch.float64):
        raise ShardError(f"{label}: data is {tensor.dtype}, a checkpoint holds float32 or float64")
    if not tensor.is_contiguous():
        raise ShardError(f"{label}: data has strides {tensor.stride()}, it must be contiguous")
    return tensor


def _view(shard: Shard, copy: torch.Tensor) -> View:
    """Check all of a shard but its values, which are still on their way to ``copy``."""
    interval = shard.flat_start, shard.flat_stop
    if shard.data.ndim != 1:
        raise ShardError(f"{shard.name}/{shard.kind}: data has {shard.data.ndim} axes, not one")
    return view_of(_Copied(shard.name, shard.kind, shard.global_shape, *interval, copy.numpy()))


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.cpu().numpy().tobytes()
