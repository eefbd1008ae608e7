"""Memory of the GPUs of one machine, mapped into every process by CUDA IPC.

Several processes may also share one GPU. The calls go to the CUDA runtime that torch has loaded.
"""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from moe_dispatch.heaps.meeting import Meeting, agree

HANDLE_BYTES = 64
LAZY_PEER_ACCESS = 1
GRANULE = 2 << 20
"""Bytes. An allocation of whole granules is shared alone; smaller ones lie in one with others."""


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_char * HANDLE_BYTES)]


class Runtime:
    """The few calls of the CUDA runtime that torch does not offer.

    Raises:
        OSError: If there is no CUDA runtime.
    """

    def __init__(self) -> None:
        names = ["libcudart.so.13", "libcudart.so.12", "libcudart.so"]
        self._lib = _load_first(names)
        self._lib.cudaGetErrorString.restype = ctypes.c_char_p
        self._lib.cudaIpcOpenMemHandle.argtypes = [
            ctypes.POINTER(ctypes.c_void_p),
            _Handle,
            ctypes.c_uint,
        ]

    def malloc(self, num_bytes: int) -> int:
        """Return the address of new memory on the current device."""
        pointer = ctypes.c_void_p()
        self._call("cudaMalloc", ctypes.byref(pointer), ctypes.c_size_t(num_bytes))
        assert pointer.value is not None, "a successful allocation has an address"
        return pointer.value

    def export(self, address: int) -> bytes:
        """Return a handle by which another process can map an allocation."""
        handle = _Handle()
        self._call("cudaIpcGetMemHandle", ctypes.byref(handle), ctypes.c_void_p(address))
        return ctypes.string_at(ctypes.addressof(handle), HANDLE_BYTES)

    def map(self, raw: bytes) -> int:
        """Return where the memory of a handle from another process is mapped here."""
        handle, pointer = _Handle(), ctypes.c_void_p()
        ctypes.memmove(ctypes.addressof(handle), raw, HANDLE_BYTES)
        self._call("cudaIpcOpenMemHandle", ctypes.byref(pointer), handle, LAZY_PEER_ACCESS)
        assert pointer.value is not None, "a successful mapping has an address"
        return pointer.value

    def unmap(self, address: int) -> None:
        """End a mapping."""
        self._call("cudaIpcCloseMemHandle", ctypes.c_void_p(address))

    def free(self, address: int) -> None:
        """Free memory that nobody else maps any more."""
        self._call("cudaFree", ctypes.c_void_p(address))

    def _call(self, name: str, *args: object) -> None:
        code = getattr(self._lib, name)(*args)
        if code:
            text = self._lib.cudaGetErrorString(code).decode()
            raise RuntimeError(f"{name} failed with {code}: {text}")


class CudaPeerHeap:
    """An allocation on the current device of each rank, mapped by all ranks.

    Args:
        meeting: The ranks, all on one machine.
        num_bytes: Of each rank.
        device: The GPU of this rank.
        reason: Why it is this kind.

    Attributes:
        kind: ``"cuda_peer"``.
        reason: Why it is this kind.
        rank: This rank.
        world_size: W.
        local: uint8, zeroed.
        bases_W: int64 on ``device``.

    Raises:
        ValueError: On every rank, if they ask for different sizes.
        RuntimeError: Naming the CUDA call that failed, and the error.
    """

    kind = "cuda_peer"

    def __init__(
        self, meeting: Meeting, num_bytes: int, device: torch.device, reason: str = "asked for"
    ):
        agree(meeting, "open cuda_peer", str(num_bytes))
        self.rank, self.world_size, self.reason = meeting.rank, meeting.world_size, reason
        self._meeting, self._runtime = meeting, Runtime()
        self.device = torch.device(device)
        with torch.cuda.device(self.device):
            torch.zeros(1, device=self.device)  # makes the context
            size = (num_bytes + GRANULE - 1) // GRANULE * GRANULE
            self._mine = self._runtime.malloc(size)
            self.local = as_tensor(self._mine, num_bytes, self.device).zero_()
            torch.cuda.current_stream().synchronize()
            handles = meeting.gather(self._runtime.export(self._mine))
            self._addresses = [
                self._mine if rank == self.rank else self._runtime.map(handle)
                for rank, handle in enumerate(handles)
            ]
        self.bases_W = torch.tensor(self._addresses, device=self.device)
        meeting.gather(b"mapped")

    def host_gather(self, data: bytes) -> list[bytes]:
        """Tell every rank something and hear what they tell."""
        return self._meeting.gather(data)

    def host_barrier(self) -> None:
        """Wait for every rank, and for the work of this rank's stream."""
        torch.cuda.current_stream(self.device).synchronize()
        self._meeting.gather(b"")

    def close(self) -> None:
        """Free the memory on every rank: first all mappings, then what they mapped."""
        if not self._addresses:
            return
        agree(self._meeting, "close cuda_peer", str(self.local.numel()))
        torch.cuda.synchronize(self.device)
        self._meeting.gather(b"idle")
        with torch.cuda.device(self.device):
            for rank, address in enumerate(self._addresses):
                if rank != self.rank:
                    self._runtime.unmap(address)
            self._meeting.gather(b"unmapped")
            self.local = torch.empty(0, dtype=torch.uint8, device=self.device)
            self._runtime.free(self._mine)
        self._addresses = []


class _Memory:
    """Device memory, described the way that torch reads it."""

    def __init__(self, address: int, num_bytes: int):
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
            "strides": None,
        }


def as_tensor(address: int, num_bytes: int, device: torch.device) -> Tensor:
    """Return a tensor over device memory that torch does not own."""
    return torch.as_tensor(_Memory(address, num_bytes), device=device)


def _load_first(names: Sequence[str]) -> ctypes.CDLL:
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise OSError(f"none of {', '.join(names)} can be loaded")
