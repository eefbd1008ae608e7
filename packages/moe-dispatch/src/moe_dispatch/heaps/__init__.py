"""Memory that all ranks of a group can store to: one small protocol, four kinds."""

from moe_dispatch.heaps.choose import KINDS, Kind, open_heap
from moe_dispatch.heaps.cuda_peer import CudaPeerHeap
from moe_dispatch.heaps.host import HostHeap
from moe_dispatch.heaps.meeting import Crowd, GroupMeeting, Meeting, ThreadMeeting
from moe_dispatch.heaps.nvshmem import NvshmemHeap, stop_nvshmem
from moe_dispatch.heaps.protocol import SymmetricHeap
from moe_dispatch.heaps.threads import ThreadHeap, open_threads

__all__ = [
    "KINDS",
    "Crowd",
    "CudaPeerHeap",
    "GroupMeeting",
    "HostHeap",
    "Kind",
    "Meeting",
    "NvshmemHeap",
    "SymmetricHeap",
    "ThreadHeap",
    "ThreadMeeting",
    "open_heap",
    "open_threads",
    "stop_nvshmem",
]
