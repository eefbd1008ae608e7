"""Virtual ranks as threads of this process."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from moe_dispatch.heaps import SymmetricHeap, open_threads


def run_on_threads(
    program: Callable[..., Any],
    world_size: int,
    num_bytes: int,
    *args: Any,
    device: str | torch.device = "cpu",
    timeout: float = 60.0,
    prepare: Callable[[], None] | None = None,
) -> list[Any]:
    """Run ``program(heap, *args)`` on virtual ranks and return what they return.

    On a GPU each rank has a stream of its own.

    Args:
        program: Gets the heap of its rank first.
        world_size: W.
        num_bytes: Of each heap.
        args: Passed on.
        device: Of the heaps.
        timeout: Seconds that a rank waits for another on the host.
        prepare: Called on each rank's stream before any program starts, one rank at a time.

    Raises:
        Exception: The first error of any rank, with those of the others as notes.
    """
    heaps = open_threads(world_size, num_bytes, device, timeout=timeout)
    results: list[Any] = [None] * world_size
    errors: list[tuple[int, BaseException]] = []

    turn = threading.Lock()

    def start(heap: SymmetricHeap) -> Any:
        if prepare is not None:
            with turn:
                prepare()
            heap.host_barrier()
        return program(heap, *args)

    def run(rank: int, heap: SymmetricHeap) -> None:
        try:
            if heap.local.is_cuda:
                with torch.cuda.device(heap.local.device), torch.cuda.stream(torch.cuda.Stream()):
                    results[rank] = start(heap)
            else:
                results[rank] = start(heap)
        except BaseException as error:
            errors.append((rank, error))

    threads = [threading.Thread(target=run, args=pair, daemon=True) for pair in enumerate(heaps)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    raise_first(errors)
    return results


def raise_first(errors: Sequence[tuple[int, BaseException]]) -> None:
    """Raise the first of several errors, with the others as notes."""
    if not errors:
        return
    rank, first = errors[0]
    first.add_note(f"on rank {rank}")
    for other, error in errors[1:]:
        first.add_note(f"rank {other}: {type(error).__name__}: {error}")
    raise first
