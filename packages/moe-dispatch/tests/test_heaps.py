"""Symmetric memory: every rank sees what another stores, and all of it is given back."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from moe_dispatch import open_heap
from moe_dispatch.heaps import GroupMeeting, HostHeap, SymmetricHeap, open_threads
from moe_dispatch.testing import run_on_threads
from rank_pool import RankPool


def message_of(call: Callable[[], object]) -> str:
    try:
        call()
    except (ValueError, RuntimeError, TimeoutError) as error:
        return str(error)
    return "no error"


def store_at_peers(heap: SymmetricHeap) -> list[int]:
    """Store this rank's number into the memory of every rank, by its address."""
    for rank, base in enumerate(heap.bases_W.tolist()):
        torch_view(base, heap)[heap.rank] = 10 * (heap.rank + 1) + rank
    heap.host_barrier()
    seen = heap.local[: heap.world_size].tolist()
    heap.host_barrier()
    heap.close()
    heap.close()  # a second time does nothing
    return seen


def torch_view(address: int, heap: SymmetricHeap) -> Any:
    import ctypes

    return (ctypes.c_uint8 * heap.local.numel()).from_address(address)


def in_processes(group: dist.ProcessGroup) -> tuple[str, str, list[int]]:
    heap = open_heap(64, group, device="cpu")
    return heap.kind, heap.reason, store_at_peers(heap)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_processes_see_what_peers_store(pool: RankPool, world_size: int) -> None:
    for rank, (kind, reason, seen) in enumerate(pool.run(in_processes, world_size)):
        assert kind == "host"
        assert reason == "all ranks are on the CPU of one machine"
        assert seen == [10 * (source + 1) + rank for source in range(world_size)]


def test_threads_see_what_peers_store() -> None:
    for rank, seen in enumerate(run_on_threads(store_at_peers, 3, 64)):
        assert seen == [10 * (source + 1) + rank for source in range(3)]


def open_and_close(group: dist.ProcessGroup, times: int) -> tuple[set[str], int, int]:
    """Open several at a time, again and again.

    Returns:
        Names of this process's heaps that are still there, how many there were, and mappings.
    """
    before, names = mappings(), set()
    for turn in range(times):
        heaps = [HostHeap(GroupMeeting(group), 4096 + 64 * turn) for _ in range(3)]
        names |= {line.split()[5] for line in mappings() if line not in before}
        for heap in heaps:
            heap.local.fill_(7)
            heap.close()
        del heaps, heap
    dist.barrier(group)
    return (
        {name for name in names if Path(name).exists()},
        len(names),
        len(mappings()) - len(before),
    )


def mappings() -> list[str]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in lines if "moe-dispatch-" in line]


def test_heaps_leave_nothing_behind(pool: RankPool) -> None:
    for left, names, mapped in pool.run(open_and_close, 2, 10):
        assert not left
        assert names == 10 * 3 * 2
        assert mapped == 0


def ask_for_different_sizes(group: dist.ProcessGroup) -> str:
    size = 64 * (dist.get_rank(group) + 1)
    message = message_of(lambda: open_heap(size, group, device="cpu"))
    open_heap(64, group, device="cpu").close()  # they are still in step
    return message


def test_ranks_that_open_different_sizes_are_all_refused(pool: RankPool) -> None:
    assert (
        pool.run(ask_for_different_sizes, 2)
        == [
            "ranks must open the same thing in the same order: "
            "rank 0 has open host: 64, rank 1 has open host: 128"
        ]
        * 2
    )


def open_in_another_order(group: dist.ProcessGroup) -> str:
    heap = open_heap(64, group, device="cpu")
    if dist.get_rank(group):
        return message_of(heap.close)
    return message_of(lambda: HostHeap(GroupMeeting(group), 64))


def test_a_rank_that_opens_while_another_closes_is_found_out(pool: RankPool) -> None:
    assert (
        pool.run(open_in_another_order, 2)
        == [
            "ranks must open the same thing in the same order: "
            "rank 0 has open host: 64, rank 1 has close host: 64"
        ]
        * 2
    )


def wait_alone(group: dist.ProcessGroup) -> str:
    """Rank 1 never comes. A group of its own, as the ranks lose step."""
    other = dist.new_group([0, 1])
    if dist.get_rank(group):
        return ""
    return message_of(lambda: open_heap(64, other, device="cpu", timeout=1.0))


def test_who_does_not_come_is_named(pool: RankPool) -> None:
    said = pool.run(wait_alone, 4)[0]
    pool.stop()  # the ranks do not agree any more on how often they have met
    assert said == "rank 0 waited 1 s on the host for rank 1"


def refuse_kinds(group: dist.ProcessGroup) -> list[str]:
    return [
        message_of(lambda: open_heap(64, group, device="cpu", kind="threads")),
        message_of(lambda: open_heap(64, group, device="cpu", kind="shm")),  # type: ignore[arg-type]
        message_of(lambda: open_heap(64, device="cpu", kind="host")),
    ]


def test_kinds_that_cannot_be_are_refused(pool: RankPool) -> None:
    assert pool.run(refuse_kinds, 2)[0] == [
        "kind 'threads' is for one process, the group has 2",
        "kind must be one of ['threads', 'host', 'cuda_peer', 'nvshmem'], got 'shm'",
        "kind 'host' needs a group",
    ]


def test_threads_of_one_process_have_memory_of_their_own() -> None:
    one, other = open_threads(2, 32)
    one.local.fill_(1)
    assert not other.local.any()


def test_importing_needs_no_nvshmem_no_gpu_and_no_triton() -> None:
    program = (
        "import sys, torch\n"
        "class Refuse:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in {'nvshmem', 'cuda', 'triton'}:\n"
        "            raise ImportError(name)\n"
        "sys.meta_path.insert(0, Refuse())\n"
        "import moe_dispatch, moe_dispatch.heaps, moe_dispatch.doctor\n"
        "print(moe_dispatch.open_heap(64, device='cpu').kind)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.stdout.strip() == "threads", run.stderr[-2000:]
