"""Save in the background: training waits for the snapshot only."""

import json
import logging
import threading
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any, Self

from moe_ckpt.comm import Alone, Communicator, Together
from moe_ckpt.manifest import state_bytes
from moe_ckpt.objects import ObjectPath, Place, as_place
from moe_ckpt.shard import Shard
from moe_ckpt.snapshot import HostArena, HostBuffer, Snapshot
from moe_ckpt.threads import Standby
from moe_ckpt.writer import Call, save_views

logger = logging.getLogger(__name__)


class AsyncSaver:
    """Saves to one root in the background, one checkpoint at a time.

    ``save`` copies the shards into host memory that is used again for every save, and returns; a
    thread writes and commits. What the caller does to the shards after ``save`` has returned does
    not change the checkpoint. Nothing of a call is kept for the next one, so shards may move.

    A save that fails raises at the next call of ``check``, ``wait``, ``save`` or ``close``,
    whichever comes first, on every rank. Call ``check`` after every step: it costs nothing. A
    process that ends waits for the save that is running.

    Host memory: one snapshot, which is the bytes of the shards of this rank, and what ``save``
    takes: at most 64 MiB in the hands of tensorstore, and as much again each way for parts of
    chunks that travel between ranks.

    Args:
        root: As for ``moe_ckpt.save``.
        comm: The ranks that save together, **used by nothing else**: the thread speaks through it
            while the caller trains. ``torch_adapter.background_communicator`` makes one.
        buffer: Memory for the snapshot; by default ordinary memory, for shards that are in host
            memory. ``torch_adapter.PinnedArena`` takes shards that are on a GPU.
        keep: As for ``moe_ckpt.save``.
        overwrite: As for ``moe_ckpt.save``.

    Examples:
        >>> import tempfile
        >>> import numpy as np
        >>> from moe_ckpt import open_checkpoint
        >>> from moe_ckpt.testing import ArrayShard
        >>> w = ArrayShard("w", "master", (3,), 0, 3, np.ones(3, np.float32))
        >>> with AsyncSaver(tempfile.mkdtemp()) as saver:
        ...     saver.save([w], step=1, state={})
        ...     w.data[:] = 7  # training goes on
        ...     path = saver.wait()
        >>> open_checkpoint(path).read("w").tolist()
        [1.0, 1.0, 1.0]
    """

    def __init__(
        self,
        root: str | Place,
        *,
        comm: Communicator | None = None,
        buffer: HostBuffer | None = None,
        keep: int | None = 2,
        overwrite: bool = False,
    ):
        self.root, self.comm = as_place(root), comm or Alone()
        self.buffer: HostBuffer = HostArena() if buffer is None else buffer
        self.keep, self.overwrite = keep, overwrite
        self._thread: threading.Thread | None = None
        self._standby: Standby | None = None
        self._error: BaseException | None = None
        self._path: Place | None = None

    @property
    def busy(self) -> bool:
        """Whether a save is running, so that ``save`` would wait for it."""
        return self._thread is not None and self._thread.is_alive()

    def save(self, shards: Iterable[Shard], *, step: int, state: Mapping[str, Any]) -> None:
        """Begin to save. Every rank calls it with its own shards and the same other arguments.

        It first waits for the save before it, then for the copy into host memory. With shards on
        a GPU it does not wait for the copy: work that is queued on the current stream afterwards
        runs after it.

        Args:
            shards: As for ``moe_ckpt.save``.
            step: As for ``moe_ckpt.save``.
            state: As for ``moe_ckpt.save``. It is copied too.

        Raises:
            ShardError: If a shard cannot be saved; the other ranks are told, by their next call.
            HostMemoryError: If the buffer may not hold the shards, likewise.
            StateError: If the state is not JSON, likewise.
            CheckpointError: If the save before this one failed; this one has then not begun.
        """
        self.wait()
        self._path, snapshot, call, error = None, None, None, None
        try:
            frozen = json.loads(state_bytes(state))
            snapshot = self.buffer.hold(shards)
            call = Call(snapshot.views, step, frozen, self.keep, self.overwrite)
            call.check()
        except BaseException as caught:
            error = caught
        # After a failure too: the thread tells the other ranks, which would wait for this one.
        if error is None or self.comm.size > 1:
            self._start(step, snapshot, call, error)
        if error is not None:
            raise error

    def check(self) -> None:
        """Raise what made the last save fail, if it has; never wait."""
        if not self.busy:
            self.wait()

    def wait(self) -> Place | None:
        """Wait for the save that is running, if any.

        Returns:
            The checkpoint that the last ``save`` made, or None if there was none.

        Raises:
            CheckpointError: What made it fail. It is raised once.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error
        return self._path

    def close(self) -> None:
        """Wait for the save that is running and free the host memory."""
        try:
            self.wait()
        finally:
            self.buffer.close()
            if self._standby is not None:
                self._standby = None
                Standby.dismiss()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
            return
        try:
            self.close()
        except Exception as failure:  # the error that is on its way says more
            error.add_note(f"the save in the background failed too: {failure}")

    def _start(
        self,
        step: int,
        snapshot: Snapshot | None,
        call: Call | None,
        error: BaseException | None,
    ) -> None:
        # Not a daemon: a program that comes to its end has its last checkpoint. What the save needs
        # beside it has to be there by then; files need nothing, an object store a lease.
        if self._standby is None and isinstance(self.root, ObjectPath):
            self._standby = Standby()
        self._thread = threading.Thread(
            target=self._run, args=(step, snapshot, call, error), name=f"save of step {step}"
        )
        self._thread.start()

    def _run(
        self,
        step: int,
        snapshot: Snapshot | None,
        call: Call | None,
        error: BaseException | None,
    ) -> None:
        together = Together(self.comm)
        together.error = error
        try:
            if snapshot is not None:
                together.attempt(snapshot.ready)
            self._path = save_views(together, self.root, call)
        except BaseException as failure:
            if error is not None:  # raised by ``save`` already
                return
            logger.error("the save of step %s in the background failed: %s", step, failure)
            failure.add_note(f"in the background, from the save of step {step}")
            self._error = failure
