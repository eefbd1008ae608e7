"""Pick the memory that the ranks of a group can share, and say why."""

import importlib.util
import platform
from typing import Literal

import torch
import torch.distributed as dist

from moe_dispatch.heaps.cuda_peer import CudaPeerHeap
from moe_dispatch.heaps.host import HostHeap
from moe_dispatch.heaps.meeting import TIMEOUT, GroupMeeting
from moe_dispatch.heaps.nvshmem import NvshmemHeap
from moe_dispatch.heaps.protocol import SymmetricHeap
from moe_dispatch.heaps.threads import open_threads

Kind = Literal["threads", "host", "cuda_peer", "nvshmem"]
KINDS: tuple[Kind, ...] = ("threads", "host", "cuda_peer", "nvshmem")


def open_heap(
    num_bytes: int,
    group: dist.ProcessGroup | None = None,
    *,
    device: str | torch.device | None = None,
    kind: Kind | None = None,
    timeout: float = TIMEOUT,
) -> SymmetricHeap:
    """Open memory that all ranks of a group can store to. Collective, zeroed.

    The choice, which all ranks make alike: without a group or in a group of one, memory of this
    process. On CPUs, shared memory of the machine. On GPUs of one machine that can map each
    other's memory, CUDA IPC. Else NVSHMEM. ``heap.kind`` and ``heap.reason`` tell it.

    Args:
        num_bytes: Of each rank; ``RowPlan.heap_bytes`` for the row-wise protocol.
        group: The ranks.
        device: Of this rank. Without it, the current GPU if there is one, else the CPU.
        kind: One of ``KINDS``, to leave no choice.
        timeout: Seconds that a rank waits for the others here.

    Raises:
        ValueError: If the ranks differ in what they ask for, or the kind is unknown.
        RuntimeError: If no kind of memory reaches all ranks, with the reason for each.

    Examples:
        >>> heap = open_heap(4096, device="cpu")
        >>> heap.kind, heap.reason
        ('threads', 'one rank shares memory with nobody')
    """
    if kind is not None and kind not in KINDS:
        raise ValueError(f"kind must be one of {list(KINDS)}, got {kind!r}")
    found = _device(device)
    world_size = 1 if group is None else dist.get_world_size(group)
    if group is None or (world_size == 1 and kind in {None, "threads"}):
        if kind not in {None, "threads"}:
            raise ValueError(f"kind {kind!r} needs a group")
        return open_threads(1, num_bytes, found, "one rank shares memory with nobody")[0]
    if kind == "threads":
        raise ValueError(f"kind 'threads' is for one process, the group has {world_size}")
    meeting = GroupMeeting(group, timeout)
    reason = "asked for"
    if kind is None:
        kind, reason = _choose(meeting, found)
    if kind == "host":
        return HostHeap(meeting, num_bytes, reason)
    if kind == "cuda_peer":
        return CudaPeerHeap(meeting, num_bytes, found, reason)
    return NvshmemHeap(group, num_bytes, found, reason)


def has_nvshmem() -> bool:
    """Tell whether nvshmem4py is installed, without importing it."""
    try:
        return importlib.util.find_spec("nvshmem") is not None
    except ImportError:  # an import hook may refuse instead of finding nothing
        return False


def _device(device: str | torch.device | None) -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    found = torch.device(device)
    if found.type == "cuda" and found.index is None:
        found = torch.device("cuda", torch.cuda.current_device())
    return found


def _choose(meeting: GroupMeeting, device: torch.device) -> tuple[Kind, str]:
    """Return the same kind on every rank, and why."""
    lib = has_nvshmem()
    bus = _bus(device) if device.type == "cuda" else ""
    told = meeting.gather("\n".join([_machine(), device.type, bus, str(int(lib))]).encode())
    machines, types, buses, libs = zip(*(data.decode().split("\n") for data in told), strict=True)
    if len(set(types)) > 1:
        found = ", ".join(f"rank {rank} is on {one}" for rank, one in enumerate(types))
        raise ValueError(f"ranks must all be on CPUs or all on GPUs: {found}")
    one_machine = len(set(machines)) == 1
    if device.type == "cpu":
        if one_machine:
            return "host", "all ranks are on the CPU of one machine"
        raise RuntimeError(
            f"no memory is shared by CPUs of {len(set(machines))} machines; "
            "AllToAllDispatcher works on any group"
        )
    hidden = _hidden(device, buses) if one_machine else []
    refusals = [data.decode() for data in meeting.gather(", ".join(hidden).encode())]
    blocked = "; ".join(f"rank {rank}: {why}" for rank, why in enumerate(refusals) if why)
    if one_machine and not blocked:
        return "cuda_peer", "all GPUs are on one machine and map each other's memory"
    why = blocked or f"the ranks are on {len(set(machines))} machines"
    if "0" not in libs:
        return "nvshmem", why
    lacking = ", ".join(str(rank) for rank, there in enumerate(libs) if there == "0")
    raise RuntimeError(
        f"cuda_peer: {why}. nvshmem: nvshmem4py is not installed on rank {lacking}. "
        "AllToAllDispatcher works on any group; `moe-dispatch doctor` says more"
    )


def _machine() -> str:
    """Name this machine, so that two containers of one name are not taken for one."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{platform.node()} {file.read().strip()}"
    except OSError:
        return platform.node()


def _bus(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


def _hidden(device: torch.device, buses: tuple[str, ...]) -> list[str]:
    """Return the GPUs whose memory this one cannot map, of those that this process sees."""
    seen = {_bus(torch.device("cuda", i)): i for i in range(torch.cuda.device_count())}
    hidden = []
    for bus in dict.fromkeys(buses):
        there = seen.get(bus)
        if there is None or there == device.index:  # CUDA IPC maps what is not visible, too
            continue
        if not torch.cuda.can_device_access_peer(device, there):
            hidden.append(f"cannot map GPU {bus}")
    return hidden
