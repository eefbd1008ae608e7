"""The next batches, made ahead by a thread, so that a step waits for none.

What is made ahead is a guess: that the next request will follow on the last one. It is the same
function of the same arguments either way, so a wrong guess (after a load, a rewind, another batch
size) costs time and changes nothing.
"""

import threading
import weakref
from collections import deque
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from moe_train.data.batch import Batch
from moe_train.data.order import rank_share
from moe_train.data.sequences import SequenceSource


class Request(NamedTuple):
    """Which batch is wanted.

    Attributes:
        source: Of the sequences.
        first: Position of the first sequence of all ranks, the cursor of the run.
        number: Sequences of all ranks.
        seed: Decides the order.
        rank: Which part of them is wanted...
        size: ...of how many.
    """

    source: SequenceSource
    first: int
    number: int
    seed: int
    rank: int
    size: int

    def numbers(self) -> NDArray[np.int64]:
        """Return which sequences they are."""
        numbers = self.source.order(self.first, self.number, self.seed)
        return rank_share(numbers, self.rank, self.size)

    def num_tokens(self) -> int:
        """Return the real tokens of the sequences of all ranks, without reading them."""
        return self.source.num_tokens(self.source.order(self.first, self.number, self.seed))

    def batch(self) -> Batch:
        """Make the batch, on the host."""
        return self.source.batch(self.numbers())

    def following(self) -> "Request":
        """Return the request after this one, if nothing changes."""
        return self._replace(first=self.first + self.number)


class Prefetcher:
    """Gives batches, and has a thread make those that will be asked for next.

    The thread ends with this object, at the latest when the interpreter does. What goes wrong in
    it is raised where its batch is asked for.

    Args:
        device: Where batches go. For a GPU they are pinned first, and copied without waiting.
        depth: Batches made ahead; 0 for no thread.
    """

    def __init__(self, device: torch.device, depth: int):
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self.device, self.depth = device, depth
        self._worker: _Worker | None = None
        self._finalizer: weakref.finalize | None = None

    def get(self, request: Request) -> Batch:
        """Return the batch of a request, on the device."""
        if not self.depth:
            return self._on_device(request.batch())
        if self._worker is None or not self._worker.makes(request):
            self.close()
            self._worker = _Worker(request, self.depth, self.device)
            self._finalizer = weakref.finalize(self, self._worker.end)
            self._worker.start()
        made = self._worker.take()
        if isinstance(made, BaseException):
            self.close()
            raise made
        return self._on_device(made)

    def close(self) -> None:
        """End the thread, and wait for it."""
        if self._finalizer is not None:
            self._finalizer()
        self._worker = self._finalizer = None

    def _on_device(self, batch: Batch) -> Batch:
        return batch if self.device.type == "cpu" else batch.to(self.device)


class _Worker(threading.Thread):
    """Makes the batches of a request and those that follow it, at most ``depth`` ahead."""

    def __init__(self, request: Request, depth: int, device: torch.device):
        super().__init__(name="moe-train prefetch", daemon=True)
        self._next, self._expected = request, request
        self._depth, self._device = depth, device
        self._made: deque[Batch | BaseException] = deque()
        self._changed = threading.Condition()
        self._ended = False

    def run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self._give(error)

    def _work(self) -> None:
        cuda = self._device.type == "cuda"
        if cuda:
            # Pinning asks for the context of the current device, which a thread begins anew.
            torch.cuda.set_device(self._device)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._ended or len(self._made) < self._depth)
                if self._ended:
                    return
            batch = self._next.batch()
            self._give(batch.pinned() if cuda else batch)
            self._next = self._next.following()

    def _give(self, made: Batch | BaseException) -> None:
        with self._changed:
            self._made.append(made)
            self._changed.notify_all()

    def makes(self, request: Request) -> bool:
        """Tell whether the batch that comes next is the one of this request."""
        return request == self._expected

    def take(self) -> Batch | BaseException:
        """Return what comes next, once it is made."""
        with self._changed:
            self._changed.wait_for(lambda: self._made)
            made = self._made.popleft()
            self._changed.notify_all()
        self._expected = self._expected.following()
        return made

    def end(self) -> None:
        """Let the thread end, and wait for it."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        if self is not threading.current_thread():
            self.join(timeout=60)
