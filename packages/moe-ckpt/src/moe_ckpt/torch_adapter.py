"""Torch tensors and torch.distributed for checkpoints. The only module that imports torch."""

import numpy as np
import torch
import torch.distributed as dist

from moe_ckpt.comm import Alone, Communicator
from moe_ckpt.errors import ShardError


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


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.cpu().numpy().tobytes()
