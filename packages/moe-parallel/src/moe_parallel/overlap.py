"""When the gradients of a bucket are complete, and the order in which buckets are reduced."""

import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import Parameter

from moe_parallel.bucket import Bucket


class Launcher:
    """Begins reductions in one fixed order, each as soon as its bucket and all before it are ready.

    All ranks of a group must begin the same sums in the same order: two of the same size that
    are swapped on one rank give wrong numbers and no error. So the order is not that in which
    gradients happen to be complete, which may differ from rank to rank, but that of the parameters
    from the last to the first, in which a backward completes them.

    Args:
        buckets: In the order of reduction.
        labels: What each is called in the hash, the same on all ranks of its group.

    Attributes:
        hash: A rolling hash of what has been begun, in what order: 16 bits.
        history: What has been begun in this step, as (label, elements).
    """

    def __init__(self, buckets: Sequence[Bucket], labels: Sequence[str]):
        self._buckets, self._labels = list(buckets), list(labels)
        self._owner = {id(p): bucket for bucket in buckets for p in bucket.parameters}
        self.hash = 0
        self.history: list[tuple[str, int]] = []
        self.restart()

    def restart(self) -> None:
        """Begin the next step: nothing is ready."""
        self._missing = {id(b): {id(p) for p in b.parameters} for b in self._buckets}
        self._next = 0
        self.history = []

    def ready(self, parameters: Iterable[Parameter]) -> None:
        """Take note that these gradients are complete, and begin what can begin."""
        for parameter in parameters:
            bucket = self._owner.get(id(parameter))
            if bucket is not None:
                self._missing[id(bucket)].discard(id(parameter))
        while self._next < len(self._buckets) and not self._missing[id(self._buckets[self._next])]:
            self._launch()

    def flush(self) -> None:
        """Begin everything that has not begun."""
        while self._next < len(self._buckets):
            self._launch()

    def _launch(self) -> None:
        bucket, label = self._buckets[self._next], self._labels[self._next]
        self._next += 1
        size = bucket.parameter_P.numel()
        # Before the sum begins, so that a rank that waits in it can still be asked.
        self.history.append((label, size))
        self.hash = zlib.crc32(f"{self.hash} {label} {size}".encode()) & 0xFFFF
        bucket.start_reduce()
        if bucket.transient and self._next > 2:
            # At most two sums under way, so that the memory of the one before can go.
            self._buckets[self._next - 3].wait_reduce()


class Blocks:
    """Marks at the inputs of blocks tell when backward has passed them.

    A mark is the first thing that a block's forward does, so its backward runs when all gradients
    of the block are there, those of parameters that got none included. (A hook on each parameter
    would wait forever for one that gets no gradient, and hold up everything behind it.) A block
    whose input needs no gradient has no mark.

    Args:
        blocks: Modules, in the order of the forward.
        before: Called with a block's parameters before its forward.
        on_backward: Called with a block's number whenever a backward has passed it.
    """

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        before: Callable[[Sequence[Parameter]], None],
        on_backward: Callable[[int], None],
    ):
        self._parameters = [list(block.parameters()) for block in blocks]
        self._users = Counter(id(p) for own in self._parameters for p in own)
        self._before, self._on_backward = before, on_backward
        self._left: Counter[int] = Counter(self._users)
        self._passed: set[int] = set()
        for index, block in enumerate(blocks):
            block.register_forward_pre_hook(self._hook(index), with_kwargs=True)

    def restart(self) -> None:
        """Begin the next step: backward has passed no block."""
        self._left = Counter(self._users)
        self._passed = set()

    def known(self) -> set[int]:
        """Return the identities of the parameters of all blocks."""
        return set(self._users)

    def parameters(self, index: int) -> list[Parameter]:
        """Return the parameters of a block."""
        return self._parameters[index]

    def finish(self, index: int) -> list[Parameter]:
        """Take note that backward is done with a block; return what no other block is to add to."""
        if index in self._passed:
            return []
        self._passed.add(index)
        self._left.subtract(id(p) for p in self._parameters[index])
        return [p for p in self._parameters[index] if self._left[id(p)] == 0]

    def _hook(self, index: int) -> Callable[..., Any]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            self._before(self._parameters[index])
            return _mark_first(args, kwargs, lambda: self._on_backward(index))

        return hook


def _mark_first(
    args: tuple[Any, ...], kwargs: dict[str, Any], callback: Callable[[], None]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Put a mark on the first argument that needs a gradient.

    One is enough: autograd runs what it can in the reverse order of the forward, and everything
    else in the block came after the mark.
    """
    if torch.is_grad_enabled():
        for place, value in [*enumerate(args), *kwargs.items()]:
            if isinstance(value, Tensor) and value.requires_grad:
                marked = _Mark.apply(value, callback)
                if isinstance(place, str):
                    return args, {**kwargs, place: marked}
                return (*args[:place], marked, *args[place + 1 :]), kwargs
    return args, kwargs


class _Mark(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, callback: Callable[[], None]) -> Tensor:
        ctx.callback = callback
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.callback()
        return grads[0], None
