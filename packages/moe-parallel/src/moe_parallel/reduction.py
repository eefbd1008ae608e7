"""Sums over the ranks of a group, each rank getting its slice."""

from typing import Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

Wire = Literal["float32", "bfloat16"]


class Reduction(Protocol):
    """A sum that is on its way."""

    def wait(self) -> Tensor:
        """Return this rank's slice of the sum (on a GPU: let the stream wait, not the host)."""
        ...


def reduce_scatter(
    grad_P: Tensor, group: dist.ProcessGroup | None, world_size: int, wire: Wire
) -> Reduction:
    """Begin to sum ``grad_P`` over a group.

    Over the wire go ``(W - 1) / W`` times 4 bytes an element in float32, and 2 in bfloat16. There
    each rank rounds what it sends once, and the owner of a slice adds in float32: the error of a
    sum stays that of one rounding, whatever the number of ranks. (A ring of bfloat16 would round
    at every rank.) float64 gradients are sent as they are.

    Args:
        grad_P: Gradients, P elements, P a multiple of ``world_size``. Not to be changed until
            the sum has been waited for.
        group: The ranks.
        world_size: How many they are.
        wire: What is sent of float32 gradients.
    """
    if world_size == 1:
        return _Done(grad_P)
    if wire == "bfloat16" and grad_P.dtype == torch.float32:
        return _Exchange(grad_P, group, world_size)
    return _Scatter(grad_P, group, world_size)


class _Done:
    def __init__(self, grad_S: Tensor):
        self._grad_S = grad_S

    def wait(self) -> Tensor:
        return self._grad_S


class _Scatter:
    def __init__(self, grad_P: Tensor, group: dist.ProcessGroup | None, world_size: int):
        self._grad_S = grad_P.new_empty(grad_P.numel() // world_size)
        self._work = dist.reduce_scatter_tensor(self._grad_S, grad_P, group=group, async_op=True)

    def wait(self) -> Tensor:
        if self._work is not None:
            self._work.wait()
        return self._grad_S


class _Exchange:
    def __init__(self, grad_P: Tensor, group: dist.ProcessGroup | None, world_size: int):
        sent_P = grad_P.bfloat16()
        self._parts_WS = torch.empty_like(sent_P).view(world_size, -1)
        # As bytes: a copy needs no arithmetic, and not every backend has every dtype.
        self._sent = sent_P.view(torch.uint8)
        self._work = dist.all_to_all_single(
            self._parts_WS.view(-1).view(torch.uint8), self._sent, group=group, async_op=True
        )

    def wait(self) -> Tensor:
        if self._work is not None:
            self._work.wait()
        return self._parts_WS.sum(0, dtype=torch.float32)
