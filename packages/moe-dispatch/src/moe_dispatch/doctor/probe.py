"""Try one kind of memory, in a process that may die of it: ``python -m moe_dispatch.doctor.probe``.

NVSHMEM ends the process on errors in its C code, so it is never tried in the one that asks.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

from moe_dispatch.heaps import HostHeap, NvshmemHeap, ThreadMeeting, open_threads, stop_nvshmem
from moe_dispatch.heaps.choose import has_nvshmem
from moe_dispatch.heaps.cuda_peer import GRANULE, Runtime
from moe_dispatch.heaps.meeting import Crowd

TIMEOUT = 90.0


class Found(NamedTuple):
    """What a probe found.

    Attributes:
        works: Whether the memory can be used here.
        said: What was tried, or why it cannot.
    """

    works: bool
    said: str


def probe(kind: str, timeout: float = TIMEOUT) -> Found:
    """Try a kind of memory in a child process."""
    command = [sys.executable, "-m", "moe_dispatch.doctor.probe", kind]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        return Found(False, f"no answer within {timeout:.0f} s")
    lines = run.stdout.strip().splitlines()
    if run.returncode == 0 and lines:
        return Found(*json.loads(lines[-1]))
    last = [*lines, *run.stderr.strip().splitlines()][-1:] or ["it said nothing"]
    return Found(False, f"the process ended with {run.returncode}: {last[0][:300]}")


def try_threads() -> Found:
    heaps = open_threads(2, 64, "cuda" if torch.cuda.is_available() else "cpu")
    return Found(True, f"2 virtual ranks on {heaps[0].local.device}")


def try_host() -> Found:
    heap = HostHeap(ThreadMeeting(0, Crowd(1)), 1 << 20)
    heap.local.fill_(1)
    heap.close()
    return Found(True, "1 MiB in /dev/shm")


def try_cuda_peer() -> Found:
    if not torch.cuda.is_available():
        return Found(False, "torch sees no CUDA device")
    torch.zeros(1, device="cuda")
    runtime = Runtime()
    address = runtime.malloc(GRANULE)
    handle = runtime.export(address)
    runtime.free(address)
    count = torch.cuda.device_count()
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    blind = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
    if blind:
        return Found(False, f"GPU {blind[0][0]} cannot map memory of GPU {blind[0][1]}")
    return Found(True, f"a handle of {len(handle)} bytes, {count} GPUs that map each other")


def try_nvshmem() -> Found:
    if not torch.cuda.is_available():
        return Found(False, "torch sees no CUDA device")
    if not has_nvshmem():
        return Found(False, "nvshmem4py is not installed")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    group = dist.group.WORLD
    assert group is not None, "it was just made"
    heap = NvshmemHeap(group, 1 << 20, torch.device("cuda", 0))
    heap.local.fill_(1)
    heap.close()
    stop_nvshmem()
    return Found(True, "1 MiB with one PE")


PROBES: dict[str, Callable[[], Found]] = {
    "threads": try_threads,
    "host": try_host,
    "cuda_peer": try_cuda_peer,
    "nvshmem": try_nvshmem,
}


def main() -> None:
    """Try the kind that is named in the arguments, and print what was found."""
    try:
        found = PROBES[sys.argv[1]]()
    except (OSError, RuntimeError, ImportError, ValueError) as error:
        found = Found(False, str(error).splitlines()[0])
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
